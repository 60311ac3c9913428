"""A version's fields on their way: into the state of a takeover and back, and from rows into reports (S9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
import pytest
from msgspec import Raw

from vram.errors import ProtocolError
from vram.keeper import messages as m
from vram.keeper.accounts import Usage
from vram.keeper.catalogue import Catalogue
from vram.keeper.fields import record_from
from vram.keeper.limits import Quotas
from vram.keeper.records import Claim, Granted, Lease, Version, Waiter
from vram.keeper.reports import entry_info, holder_info, statistics_info, user_info, version_info
from vram.keeper.snapshot import Books, join_bodies, restore, save, split_bodies

pytestmark = pytest.mark.slow  # goes with takeover by a successor

KEEPER, ANN, BOB, NOBODY = 1000, 1001, 1002, 65_534

# Frozen: a keeper of last year hands over to one of today, and the other way round. Where a row grows at its end, what
# was written before stays here as well, to be read.
# Of a keeper that wrote no sizes of memory as they had been counted, nor what waiters were found to be.
WITHOUT_SIZES = (
    "9c110482a17702a4676f6e65019192a772656d6f76656401929601cd03e90ba3616e6ea3626f78909602cd03ea0ca3626f62a37475629093"
    "dc0020a17701c2cd03e9006403c381a16ba176c401c0cb3ff0000000000000c00ba3616e6ec291940402a27277cb40000000000000009102"
    "c2a3626f7805090000c2c29001c290c081cd03853c3ddc0020a4676f6e6501c2cd03e9016403c280c401c0cb4014000000000000c00ba361"
    "6e6ec391940902a172cb401800000000000090c3a3626f7805090000c2c29001c290c08000dc0020a17702c3cd03e9026403c280c401c0cb"
    "4008000000000000cb4059c000000000000ba3616e6ec291940702a172cb401000000000000090c2a3626f7805090000c2c29001c290c080"
    "0091dc00101001a468616c66070201c381a178a179cb4022000000000000000607c20081cd03860304929b0d0203a7636c61696d656400a2"
    "727781a161a162c3cb404d800000000000cd03eaa09b0f0204a17709a172c0c2c0c0a091930b01a7636c61696d656491950bcb4020000000"
    "000000cb4083000000000000009192cd03e9cb408300000000000091940263a67061737365640290"
)
GOLDEN = (
    "9d110482a17702a4676f6e65019192a772656d6f76656401929601cd03e90ba3616e6ea3626f78909602cd03ea0ca3626f62a37475629093"
    "dc0021a17701c2cd03e9006403c381a16ba176c401c0cb3ff0000000000000c00ba3616e6ec291940402a27277cb40000000000000009102"
    "c2a3626f7805090000c2c29001c290c081cd03853c3d90dc0021a4676f6e6501c2cd03e9016403c280c401c0cb4014000000000000c00ba3"
    "616e6ec391940902a172cb401800000000000090c3a3626f7805090000c2c29001c290c0800090dc0021a17702c3cd03e9026403c280c401"
    "c0cb4008000000000000cb4059c000000000000ba3616e6ec291940702a172cb401000000000000090c2a3626f7805090000c2c29001c290"
    "c080009091dc00101001a468616c66070201c381a178a179cb4022000000000000000607c20081cd03860304929d0d0203a7636c61696d65"
    "6400a2727781a161a162c3cb404d800000000000cd03eaa000c39d0f0204a17709a172c0c2c0c0a000c291930b01a7636c61696d65649195"
    "0bcb4020000000000000cb4083000000000000009192cd03e9cb408300000000000091940263a6706173736564029090"
)
# Of a keeper of before it looked for what versions share.
WITHOUT_PIECES = (
    "9c110482a17702a4676f6e65019192a772656d6f76656401929601cd03e90ba3616e6ea3626f78909602cd03ea0ca3626f62a37475629093"
    "dc001ea17701c2cd03e9006403c381a16ba176c401c0cb3ff0000000000000c00ba3616e6ec291940402a27277cb40000000000000009102"
    "c2a3626f7805090000c2c29001c290c0dc001ea4676f6e6501c2cd03e9016403c280c401c0cb4014000000000000c00ba3616e6ec3919409"
    "02a172cb401800000000000090c3a3626f7805090000c2c29001c290c0dc001ea17702c3cd03e9026403c280c401c0cb4008000000000000"
    "cb4059c000000000000ba3616e6ec291940702a172cb401000000000000090c2a3626f7805090000c2c29001c290c0919e1001a468616c66"
    "070201c381a178a179cb4022000000000000000607c200929b0d0203a7636c61696d656400a2727781a161a162c3cb404d800000000000cd"
    "03eaa09b0f0204a17709a172c0c2c0c0a091930b01a7636c61696d656491950bcb4020000000000000cb4083000000000000009192cd03e9"
    "cb408300000000000091940263a67061737365640290"
)
# Of a keeper of before entries could be parked.
WITHOUT_MOVES = (
    "9c110482a17702a4676f6e65019192a772656d6f76656401929601cd03e90ba3616e6ea3626f78909602cd03ea0ca3626f62a37475629093"
    "dc001aa17701c2cd03e9006403c381a16ba176c401c0cb3ff0000000000000c00ba3616e6ec291940402a27277cb40000000000000009102"
    "c2a3626f7805090000c2c290dc001aa4676f6e6501c2cd03e9016403c280c401c0cb4014000000000000c00ba3616e6ec391940902a172cb"
    "401800000000000090c3a3626f7805090000c2c290dc001aa17702c3cd03e9026403c280c401c0cb4008000000000000cb4059c000000000"
    "000ba3616e6ec291940702a172cb401000000000000090c2a3626f7805090000c2c290919d1001a468616c66070201c381a178a179cb4022"
    "000000000000000607c2929a0d0203a7636c61696d656400a2727781a161a162c3cb404d800000000000cd03ea9a0f0204a17709a172c0c2"
    "c0c091930b01a7636c61696d656491950bcb4020000000000000cb4083000000000000009192cd03e9cb408300000000000091940263a670"
    "61737365640290"
)
# Of a keeper of before anything was updated in place.
WITHOUT_UPDATES = (
    "9c110482a17702a4676f6e65019192a772656d6f76656401929501cd03e90ba3616e6ea3626f789502cd03ea0ca3626f62a374756293dc00"
    "15a17701c2cd03e9006403c381a16ba176c401c0cb3ff0000000000000c00ba3616e6ec291940402a27277cb40000000000000009102c2a3"
    "626f780509dc0015a4676f6e6501c2cd03e9016403c280c401c0cb4014000000000000c00ba3616e6ec391940902a172cb40180000000000"
    "0090c3a3626f780509dc0015a17702c3cd03e9026403c280c401c0cb4008000000000000cb4059c000000000000ba3616e6ec291940702a1"
    "72cb401000000000000090c2a3626f780509919c1001a468616c66070201c381a178a179cb4022000000000000000607929a0d0203a7636c"
    "61696d656400a2727781a161a162c3cb404d800000000000cd03ea9a0f0204a17709a172c0c2c0c091930b01a7636c61696d656491950bcb"
    "4020000000000000cb4083000000000000009192cd03e9cb408300000000000091940263a67061737365640290"
)
# Of a keeper of before what users said was counted.
WITHOUT_WORDS = (
    "9c110482a17702a4676f6e65019192a772656d6f76656401929501cd03e90ba3616e6ea3626f789502cd03ea0ca3626f62a374756293dc00"
    "14a17701c2cd03e9006403c381a16ba176c401c0cb3ff0000000000000c00ba3616e6ec291940402a27277cb40000000000000009102c2a3"
    "626f7805dc0014a4676f6e6501c2cd03e9016403c280c401c0cb4014000000000000c00ba3616e6ec391940902a172cb4018000000000000"
    "90c3a3626f7805dc0014a17702c3cd03e9026403c280c401c0cb4008000000000000cb4059c000000000000ba3616e6ec291940702a172cb"
    "401000000000000090c2a3626f7805919b1001a468616c66070201c381a178a179cb40220000000000000006929a0d0203a7636c61696d65"
    "6400a2727781a161a162c3cb404d800000000000cd03ea9a0f0204a17709a172c0c2c0c091930b01a7636c61696d656491950bcb40200000"
    "00000000cb4083000000000000009192cd03e9cb408300000000000091940263a67061737365640290"
)

# Of those who wait, by a keeper that serves them for the first time; and in which order versions came to it.
NO_NOTES = Raw(b"\x80")
FOUND_ANEW = {"may_make", "differs", "serial"}


@pytest.fixture
def books() -> Catalogue:
    """Everything that can be under way, no two fields of a record alike where that can be."""
    books = Catalogue(keeper_uid=KEEPER, nobody=NOBODY)
    ann, bob = books.connect(ANN, 11, "ann", "box"), books.connect(BOB, 12, "bob", "tub")

    def publish(name: str, token: str, now: float, **options: object) -> None:
        options = {"nbytes": 100, "handles": 3, "body": b"\xc0", "record": 5, "words": 9, **options}
        publication = books.begin(ann, name, **options)  # type: ignore[arg-type]
        books.commit(publication, token, now)

    publish("w", "t1", 1.0, meta={"k": "v"}, writable=True)
    assert isinstance(books.attach(bob, "w", 2.0, access="rw"), Lease)
    books.watch(bob, "w", 1)
    publish("w", "t2", 3.0, ttl=100.0)
    assert isinstance(books.attach(bob, "w", 4.0), Lease)
    publish("gone", "t3", 5.0)
    assert isinstance(books.attach(bob, "gone", 6.0), Lease)
    books.remove(ann, "gone", revoke=True)
    publish("removed", "t4", 7.0)
    books.remove(ann, "removed")
    assert isinstance(books.attach(ann, "claimed", 8.0, claim=True), Claim)
    waits = books.attach(bob, "claimed", 9.0, call=3, access="rw", claim=True, expect={"a": "b"}, wait=50.0, owner=BOB)
    assert isinstance(waits, Waiter)
    assert isinstance(books.attach(bob, "w", 9.0, call=4, version=9, wait=None), Waiter)
    books.begin(ann, "half", nbytes=7, handles=2, writable=True, meta={"x": "y"}, ttl=9.0, record=6, words=7)
    bob.passed[99] = ("passed", 2)
    books._floor = 4
    return books


def moved(books: Catalogue) -> tuple[bytes, Catalogue]:
    """Return the state as it is written, and the books that a successor makes of it."""
    tokens = [version.token for version in books.all_versions()]
    written = msgspec.msgpack.encode(save(books, tokens.index))
    read = msgspec.msgpack.decode(written, type=Books)
    return written, restore(read, tokens.__getitem__, Quotas(), keeper_uid=KEEPER, nobody=NOBODY)[0]


def test_s9_the_state_of_a_takeover_has_golden_bytes(books: Catalogue) -> None:
    version, half = books.all_versions()[0], next(iter(books.sessions[1].publications.values()))
    version.pieces, version.known = {901: 60}, 61
    half.pieces, half.known = {902: 3}, 4
    written, successor = moved(books)
    assert written.hex() == GOLDEN
    assert shown(successor) == shown(books)
    tokens = [version.token for version in books.all_versions()]
    older = msgspec.msgpack.decode(bytes.fromhex(WITHOUT_SIZES), type=Books)
    assert shown(restore(older, tokens.__getitem__, Quotas(), keeper_uid=KEEPER, nobody=NOBODY)[0]) == shown(books)
    ann = successor.accounts.of(ANN).pieces
    assert (ann, successor.accounts.total.pieces) == ({902: [1, 3]}, {901: [1, 60], 902: [1, 3]})


def test_s9_the_state_of_an_older_keeper_is_read(books: Catalogue) -> None:
    tokens = [version.token for version in books.all_versions()]
    for version in books.all_versions():
        version.words, version.publisher = len(bytes(version.body)), 0
    for publication in books.sessions[1].publications.values():
        publication.words = publication.record
    read = msgspec.msgpack.decode(bytes.fromhex(WITHOUT_WORDS), type=Books)
    assert shown(restore(read, tokens.__getitem__, Quotas(), keeper_uid=KEEPER, nobody=NOBODY)[0]) == shown(books)


@pytest.mark.parametrize(
    "written", [WITHOUT_UPDATES, WITHOUT_MOVES, WITHOUT_PIECES], ids=["updates", "moves", "pieces"]
)
def test_s9_the_state_of_a_keeper_of_before_these_is_read(books: Catalogue, written: str) -> None:
    tokens = [version.token for version in books.all_versions()]
    if written != WITHOUT_PIECES:
        for version in books.all_versions():
            version.publisher = 0
    read = msgspec.msgpack.decode(bytes.fromhex(written), type=Books)
    assert shown(restore(read, tokens.__getitem__, Quotas(), keeper_uid=KEEPER, nobody=NOBODY)[0]) == shown(books)


def test_updates_and_pages_are_there_after_a_takeover(books: Catalogue) -> None:
    """And what depends on them: who may go on, and what counts for whom."""

    class Page:
        nbytes = 4096

    ann, bob = books.sessions[1], books.sessions[2]
    versions = {}
    for name in ("idle", "busy", "torn"):
        half = books.begin(ann, name, nbytes=100, handles=2, body=b"\xc0", updatable=True)
        versions[name], _ = books.commit(half, name, 1.0)
    books.begin(ann, "more", nbytes=1, handles=1, updatable=True)
    for name in ("busy", "torn"):
        books.update(ann, name, versions[name].number)
    books.updated(ann, "torn", versions["torn"].number, 5, whole=False)
    lease = books.attach(bob, "busy", 2.0)
    assert isinstance(lease, Lease)
    books.give_page(bob, lease.id, Page())
    tokens: list[object] = []

    def number(token: object) -> int:
        tokens.append(token)
        return len(tokens) - 1

    read = msgspec.msgpack.decode(msgspec.msgpack.encode(save(books, number)), type=Books)
    successor, _ = restore(read, tokens.__getitem__, Quotas(), keeper_uid=KEEPER, nobody=NOBODY)
    assert shown(successor) == shown(books)
    used = [dataclasses.astuple(one) for one in (books.accounts.of(BOB), books.accounts.total)]
    assert [dataclasses.astuple(one) for one in (successor.accounts.of(BOB), successor.accounts.total)] == used
    paged = successor.pages(successor.sessions[1], "busy", versions["busy"].number, 0)
    assert [one.id for one in paged] == [lease.id]
    states = {one.name: (one.updates, one.updating, one.torn) for one in successor.all_versions() if one.updates}
    assert states == {"idle": (1, False, False), "busy": (1, True, False), "torn": (5, False, True)}
    successor.at_once(successor.disconnect(successor.sessions[1], 3.0), 3.0)
    assert {one.name: one.torn for one in successor.all_versions() if one.updates} == {
        "idle": False, "busy": True, "torn": True,
    }  # fmt: skip
    successor.at_once(successor.disconnect(successor.sessions[2], 3.0), 3.0)
    assert dataclasses.astuple(successor.accounts.of(BOB)) == dataclasses.astuple(Usage())


def test_what_is_parked_and_moves_is_there_after_a_takeover(books: Catalogue) -> None:
    ann = books.sessions[1]
    for name in ("parking", "parked", "waking"):
        half = books.begin(ann, name, nbytes=100, handles=2, body=b"\xc0")
        books.commit(half, name, 1.0)
        lease = books.attach(ann, name, 2.0, purpose="park")
        assert isinstance(lease, Lease)
        if name == "parking":
            books.begin(ann, name, nbytes=90, handles=2, lease=lease.id)
            continue
        books.commit(books.begin(ann, name, nbytes=90, handles=2, body=b"\xc0", lease=lease.id), f"{name} host", 3.0)
        books.release(ann, lease.id)
    waker = books.attach(ann, "waking", 4.0, purpose="wake")
    assert isinstance(waker, Lease)
    assert isinstance(books.attach(ann, "waking", 5.0, call=9, purpose="wake", wait=None), Waiter)
    _, successor = moved(books)
    assert shown(successor) == shown(books)
    used = [dataclasses.astuple(one) for one in (books.accounts.of(ANN), books.accounts.total)]
    assert [dataclasses.astuple(one) for one in (successor.accounts.of(ANN), successor.accounts.total)] == used
    ann = successor.sessions[1]
    (half,) = [one for one in ann.publications.values() if one.lease]
    version, _ = successor.commit(half, "parking host", 6.0)
    assert version.parked
    # The claim to wake is the predecessor's, and so is its end.
    effects = successor.at_once(successor.expire(4.0 + successor.claim_timeout - 0.1), 600.0)
    assert not [one for one in effects if isinstance(one, Granted)]
    effects = successor.at_once(successor.expire(4.0 + successor.claim_timeout), 604.0)
    assert [one.lease.purpose for one in effects if isinstance(one, Granted)] == ["wake"]


def test_every_field_of_a_record_is_there_after_a_takeover(books: Catalogue) -> None:
    """Whatever a record will have one day: who forgets it in the rows of a takeover loses it."""
    _, successor = moved(books)
    assert shown(books) == shown(successor)


def test_bodies_that_go_ahead_are_there_after_a_takeover_and_not_twice(books: Catalogue) -> None:
    tokens = [version.token for version in books.all_versions()]
    for version in books.all_versions():  # as the service keeps them: the meta is the end of the body
        version.settle(b"%b %d " % (version.name.encode(), version.number) + bytes(version.notes))
    late = next(version for version in books.all_versions() if version.name == "gone")
    early = [version for version in books.all_versions() if version is not late]
    head, rest = joined(early)
    assert head.hex() == "9294a17701090594a177020501"
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(save(books, tokens.index, early)), type=Books)
    assert [(row.body, row.meta) for row in read.versions if row.body] == [(bytes(late.body), Raw(late.notes))]
    assert all(row.meta == NO_NOTES for row in read.versions if not row.body)
    ahead = split_bodies(head, rest)
    successor, _ = restore(read, tokens.__getitem__, Quotas(), keeper_uid=KEEPER, nobody=NOBODY, bodies=ahead)
    assert shown(successor) == shown(books)


def test_s7_a_state_without_all_bodies_is_none(books: Catalogue) -> None:
    tokens = [version.token for version in books.all_versions()]
    one, *others = books.all_versions()
    ahead = split_bodies(*joined(others))
    with pytest.raises(ProtocolError, match=f"'{one.name}' version {one.number} came without its body"):
        restore(
            save(books, tokens.index, [one, *others]),
            tokens.__getitem__,
            Quotas(),
            keeper_uid=KEEPER,
            nobody=NOBODY,
            bodies=ahead,
        )


@pytest.mark.parametrize(
    ("head", "rest"),
    [
        (b"", b""),
        (b"\x91", b""),
        (b"\x91\x94\xa1\xff\x01\x02\x01", b"ab"),  # a name that is no UTF-8
        (msgspec.msgpack.encode([["w", 1, 2, 1]]), b"a"),
        (msgspec.msgpack.encode([["w", 1, 2, 1]]), b"abc"),
        (msgspec.msgpack.encode([["w", 1, 2, 3]]), b"ab"),
        (msgspec.msgpack.encode([["w", 1, -2, 1], ["w", 2, 4, 1]]), b"ab"),
    ],
)
def test_s7_bodies_that_are_not_what_is_said_of_them_are_refused(head: bytes, rest: bytes) -> None:
    with pytest.raises(ProtocolError, match="the running keeper"):
        split_bodies(head, memoryview(rest))


def joined(versions: list[Version]) -> tuple[bytes, memoryview]:
    head, bodies = join_bodies(versions)
    return head, memoryview(b"".join(bodies))


def shown(books: Catalogue) -> dict[str, list[dict[str, object]]]:
    """Return the records in words: each field, other records by their numbers."""
    sessions = list(books.sessions.values())
    return {
        "versions": [words(one) for one in sorted(books.all_versions(), key=lambda one: (one.name, one.number))],
        "sessions": [words(one) for one in sessions],
        "publications": [words(one) for session in sessions for one in session.publications.values()],
        "waiters": [words(one) for session in sessions for one in session.waiters.values()],
        "claims": [words(one) for one in books.claims.values()],
        "leases": [words(one) for _, one in sorted(books.leases.items())],
    }


def words(record: object) -> dict[str, object]:
    names = {field.name for field in dataclasses.fields(record)} - FOUND_ANEW  # type: ignore[arg-type]
    return {name: word(getattr(record, name)) for name in names}


def word(value: object) -> object:
    if hasattr(value, "id"):
        return value.id
    if hasattr(value, "number"):
        return value.number
    if dataclasses.is_dataclass(value):
        return words(value)
    if isinstance(value, (bytes, memoryview, msgspec.Raw)):
        return bytes(value)
    if isinstance(value, Mapping):
        return {key: word(each) for key, each in value.items()}
    return value


ENTRY = m.EntryRow("w", 7, 5, 90, 3, True, 4, 2, 1.5, 2.5, {"k": "v"}, 6, 80, 70, True)
VERSION = m.VersionRow(7, 5, True, True, 90, [60, 30], ["host"], 4, 1.5, 2.5, 11, "ann", {"k": "v"}, True, "box", True)
HOLDER = m.HolderRow(3, 7, 11, 5, "ann", "rw", 1.5, 90, "w", "box")
STATISTICS = m.KeeperStatistics(1, 11, 1.5, 2, 3, 4, 5, 6, 70, 8, 90, 10, 12, 33, [*range(50, 64)])
USER = m.UserRow(7, 90, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("row", "read"),
    [
        (ENTRY, entry_info(ENTRY)),
        (VERSION, version_info(VERSION, ())),
        (HOLDER, holder_info(HOLDER)),
        (STATISTICS, statistics_info(STATISTICS, 0)),
        (USER, user_info(USER)),
    ],
    ids=["entry", "version", "holder", "statistics", "user"],
)
def test_every_field_of_a_row_is_in_its_report(row: msgspec.Struct, read: object) -> None:
    said = {key: value for key, value in msgspec.structs.asdict(row).items() if key not in ("call", "quotas")}
    found = {key: getattr(read, key) for key in said}
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()} == said


def test_every_quantity_is_in_the_statistics_with_both_of_its_ceilings() -> None:
    """Each from its own fields: no two numbers alike."""
    found = {
        one.name: (one.used, one.most, one.most_per_user, one.option) for one in statistics_info(STATISTICS, 0).limits
    }
    assert found == {
        "bytes": (70, 50, 52, "--max-bytes"),
        "entries": (2, 51, 53, "--max-entries"),
        "versions": (3, 54, 55, "--max-versions"),
        "descriptors": (8, 56, 57, "--max-descriptors"),
        "leases": (4, 58, 59, "--max-leases"),
        "connections": (5, 60, 61, "--max-connections"),
        "queued_bytes": (33, 62, 63, "--max-queued-bytes"),
    }
    older = statistics_info(m.KeeperStatistics(1, 11, 1.5, 2, 3, 4, 5, 6, 70, 8, 90, 10, 12), 0).limits
    assert [(one.most, one.most_per_user) for one in older] == [
        (90, None), (10, None), (None, None), (12, None), (None, None), (None, None), (None, None),
    ]  # fmt: skip


def test_s9_quotas_have_golden_bytes_and_those_of_before_are_read() -> None:
    """The first four are what the version before hands over, and reads."""
    quotas = Quotas(1, 2, None, 4, *range(5, 15))
    assert msgspec.msgpack.encode(quotas).hex() == "9e0102c00405060708090a0b0c0d0e"
    before = msgspec.msgpack.decode(bytes.fromhex("940102c004"), type=Quotas)
    assert before == Quotas(1, 2, None, 4), "and what it does not say are the defaults"
    assert msgspec.msgpack.decode(bytes.fromhex("9401c0c0c0"), type=Quotas).user_entries is None, "none of its"


def test_a_record_from_another_says_which_field_nobody_has() -> None:
    assert record_from(m.Done, m.Part(5, 1, 2)) == m.Done(5)
    assert record_from(m.Done, m.Part(5, 1, 2), call=6) == m.Done(6)
    with pytest.raises(TypeError, match="call"):
        record_from(m.Done, m.Received(1))
    with pytest.raises(TypeError, match="wrong"):
        record_from(m.Done, m.Part(5, 1, 2), wrong=1)
