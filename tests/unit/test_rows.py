"""A version's fields on their way: into rows and back, and from rows into reports (S9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
import pytest
from tests.support.catalogues import attach, begin
from tests.support.restored import restored

from vram.info import StatisticsInfo
from vram.keeper import messages as m
from vram.keeper.catalogue import Catalogue
from vram.keeper.connection import Held
from vram.keeper.limits import Quotas, Usage
from vram.keeper.listing import statistics
from vram.keeper.records import Answered, Claim, Lease, Waiter, record_from
from vram.keeper.rows import LeaseRow, NameRow, Replayed, SessionRow, WatchRow, encode, everything, gone

KEEPER, ANN, BOB, NOBODY = 1000, 1001, 1002, 65_534


@pytest.fixture
def books() -> Catalogue:
    """Everything that can be under way, no two fields of a record alike where that can be."""
    books = Catalogue(keeper_uid=KEEPER)
    ann, bob = books.connect(ANN, 11, "ann", "box"), books.connect(BOB, 12, "bob", "tub")

    def publish(name: str, token: str, now: float, **options: object) -> None:
        options = {"nbytes": 100, "handles": 3, **options}
        publication = begin(books, ann, name, **options)  # type: ignore[arg-type]
        books.commit(publication, token, now)

    publish("w", "t1", 1.0, meta={"k": "v"}, writable=True)
    assert isinstance(attach(books, bob, "w", 2.0, access="rw"), Lease)
    books.watch(bob, "w", 1)
    publish("w", "t2", 3.0, ttl=100.0)
    assert isinstance(attach(books, bob, "w", 4.0), Lease)
    publish("gone", "t3", 5.0)
    assert isinstance(attach(books, bob, "gone", 6.0), Lease)
    books.remove(ann, "gone", revoke=True, now=0.0)
    publish("removed", "t4", 7.0)
    books.remove(ann, "removed", now=0.0)
    assert isinstance(attach(books, ann, "claimed", 8.0, claim=True), Claim)
    waits = attach(books, bob, "claimed", 9.0, call=3, access="rw", claim=True, expect={"a": "b"}, wait=50.0, owner=BOB)
    assert isinstance(waits, Waiter)
    assert isinstance(attach(books, bob, "w", 9.0, call=4, version=9, wait=None), Waiter)
    books.names.floor = 4
    return books


def test_updates_and_pages_are_there_after_a_restart(books: Catalogue) -> None:
    """And what depends on them: who may go on, and what counts for whom."""

    class Page:
        nbytes = 4096

    ann, bob = books.sessions[1], books.sessions[2]
    versions = {}
    for name in ("idle", "busy", "torn"):
        half = begin(books, ann, name, nbytes=100, handles=2, updatable=True)
        versions[name], _ = books.commit(half, name, 1.0)
    for name in ("busy", "torn"):
        books.update(ann, name, versions[name].number)
    books.updated(ann, "torn", versions["torn"].number, 5, whole=False)
    lease = attach(books, bob, "busy", 2.0)
    assert isinstance(lease, Lease)
    books.give_page(bob, lease.id, Page())
    successor = restored(books)
    assert shown(successor) == shown(books)
    used = [dataclasses.astuple(one) for one in (books.accounts.of(BOB), books.accounts.total)]
    assert [dataclasses.astuple(one) for one in (successor.accounts.of(BOB), successor.accounts.total)] == used
    paged = successor.pages(successor.sessions[1], "busy", versions["busy"].number, 0)
    assert [one.id for one in paged] == [lease.id]
    states = {one.name: (one.updates, one.updating, one.torn) for one in successor.versions.values() if one.updates}
    assert states == {"idle": (1, False, False), "busy": (1, True, False), "torn": (5, False, True)}
    successor.disconnect(successor.sessions[1], 3.0)
    assert {one.name: one.torn for one in successor.versions.values() if one.updates} == {
        "idle": False, "busy": True, "torn": True,
    }  # fmt: skip
    successor.disconnect(successor.sessions[2], 3.0)
    assert dataclasses.astuple(successor.accounts.of(BOB)) == dataclasses.astuple(Usage())


def test_what_is_parked_and_moves_is_there_after_a_restart(books: Catalogue) -> None:
    ann = books.sessions[1]
    for name in ("parking", "parked", "waking"):
        half = begin(books, ann, name, nbytes=100, handles=2)
        books.commit(half, name, 1.0)
        lease = attach(books, ann, name, 2.0, purpose="park")
        assert isinstance(lease, Lease)
        if name == "parking":
            continue
        books.commit(begin(books, ann, name, nbytes=90, handles=2, lease=lease.id), f"{name} host", 3.0)
        books.release(ann, lease.id, 0.0)
    waker = attach(books, ann, "waking", 4.0, purpose="wake")
    assert isinstance(waker, Lease)
    assert isinstance(attach(books, ann, "waking", 5.0, call=9, purpose="wake", wait=None), Waiter)
    successor = restored(books)
    assert shown(successor) == shown(books)
    used = [dataclasses.astuple(one) for one in (books.accounts.of(ANN), books.accounts.total)]
    assert [dataclasses.astuple(one) for one in (successor.accounts.of(ANN), successor.accounts.total)] == used
    effects = successor.release(successor.sessions[ann.id], waker.id, 5.0)  # the next in line wakes it
    assert [one.result.purpose for one in effects if isinstance(one, Answered)] == ["wake"]


def test_who_waited_first_is_served_first_after_a_restart(books: Catalogue) -> None:
    ann, bob = books.sessions[1], books.sessions[2]
    for call, session in enumerate([bob, ann, bob, ann], start=50):
        assert isinstance(attach(books, session, "late", 9.0, call=call, wait=None), Waiter)
    successor = restored(books)
    again = successor.sessions[1]
    half = begin(successor, again, "late", nbytes=1, handles=1)
    _, effects = successor.commit(half, "late", 10.0)
    assert [one.call for one in effects if isinstance(one, Answered)] == [50, 51, 52, 53]


def test_every_field_of_a_record_is_there_after_a_restart(books: Catalogue) -> None:
    """Whatever a record will have one day: a row that forgets it loses it."""
    successor = restored(books)
    assert shown(books) == shown(successor)


def shown(books: Catalogue) -> dict[str, list[dict[str, object]]]:
    """Return the records in words: each field, other records by their numbers."""
    sessions = list(books.sessions.values())
    return {
        "versions": [words(one) for one in sorted(books.versions.values(), key=lambda one: (one.name, one.number))],
        "sessions": [words(one) for one in sessions],
        "waiters": [words(one) for session in sessions for one in session.waiters.values()],
        "claims": [words(one) for one in books.waiting.claims.values()],
        "leases": [words(one) for _, one in sorted(books.leases.items())],
    }


def words(record: object) -> dict[str, object]:
    return {name: word(getattr(record, name)) for name in type(record).__match_args__}  # type: ignore[attr-defined]


def word(value: object) -> object:
    if hasattr(value, "id"):
        return value.id
    if hasattr(value, "number"):
        return value.number
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
        return words(value)
    if isinstance(value, (bytes, memoryview, msgspec.Raw)):
        return bytes(value)
    if isinstance(value, Mapping):
        return {key: word(each) for key, each in value.items()}
    return value


def test_every_quantity_is_in_the_statistics_with_both_of_its_ceilings(books: Catalogue) -> None:
    """Each from its own fields: no two numbers alike."""
    books.accounts.quotas = Quotas(*range(50, 58))
    page = statistics(books, m.Statistics(1), pid=1, uptime=1.5, connections=9, lost_rows=7)
    (info,) = m.decode_rows(page.rows, StatisticsInfo)
    assert {one.name: (one.used, one.most, one.most_per_user, one.option) for one in info.limits} == {
        "bytes": (books.accounts.total.nbytes, 50, 52, "--max-bytes"),
        "entries": (books.names.entries, 51, 53, "--max-entries"),
        "descriptors": (books.accounts.total.handles, 54, 55, "--max-descriptors"),
        "connections": (9, 56, 57, "--max-connections"),
    }
    assert info.lost_rows == 7


def test_a_record_from_another_says_which_field_nobody_has() -> None:
    assert record_from(m.Done, m.Part(5, 1, 2)) == m.Done(5)
    assert record_from(m.Done, m.Part(5, 1, 2), call=6) == m.Done(6)
    with pytest.raises(TypeError, match="call"):
        record_from(m.Done, m.PageRow(1, 2, 3))
    with pytest.raises(TypeError, match="wrong"):
        record_from(m.Done, m.Part(5, 1, 2), wrong=1)


# -- rows -------------------------------------------------------------------------------------------------------------
def test_the_last_row_of_a_key_counts_until_it_is_gone() -> None:
    rows = [NameRow("a", 1), NameRow("b", 2), NameRow("a", 3), SessionRow(1, 0, 0, "x")]
    replayed = Replayed([encode(rows), encode([gone(NameRow, "b"), gone(SessionRow, 1)])])
    assert (replayed.of(NameRow), replayed.of(SessionRow), replayed.bad) == ([NameRow("a", 3)], [], 0)
    assert replayed.next_id == 2, "numbers that were given out are not used again"


def test_a_row_that_cannot_be_read_costs_that_row() -> None:
    bad = [["no row"], [2, "no number"], [99, 1], [2], 7]
    replayed = Replayed([encode([SessionRow(1, 0, 0, "x"), *bad]), b"\xc1", encode([NameRow("a", 3)])])
    assert (len(replayed.of(SessionRow)), len(replayed.of(NameRow)), replayed.bad) == (1, 1, 6)


def test_a_row_that_names_what_is_not_there_costs_that_row() -> None:
    books = Catalogue()
    replayed = Replayed([encode([SessionRow(1, 0, 0, "x"), LeaseRow(5, 1, 9, "r", 0.0), WatchRow(2, 9)])])
    replayed.restore(books, lambda *_: None)
    assert (list(books.sessions), books.leases, replayed.bad) == ([1], {}, 2)
    assert books.connect(0).id == 6


def test_the_memory_of_a_version_whose_last_lease_was_lost_is_closed() -> None:
    """Nobody would ever give it back."""
    books, disposed = Catalogue(), []
    ann = books.connect(ANN)
    for number in range(2):
        publication = begin(books, ann, "w", nbytes=1, handles=1)
        books.commit(publication, Held([70 + number], 1, lambda fds, _: disposed.append(fds)), 1.0)
        assert isinstance(attach(books, ann, "w", 2.0), Lease)
    rows = [row for row in everything(books, lambda held: held.fds[0]) if not isinstance(row, LeaseRow)]
    made = Catalogue()
    Replayed([encode(rows)]).restore(
        made, lambda first, _, nbytes: Held([first], nbytes, lambda fds, _: disposed.append(fds))
    )
    assert ([one.number for one in made.versions.values()], disposed) == ([2], [[70]])
    assert made.accounts.total.nbytes == 1
