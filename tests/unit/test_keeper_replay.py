"""A log of records: what it leaves is what there was, after every record, and what is not whole is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vram.errors import ProtocolError, VramError, WaitTimeoutError
from vram.keeper import messages as m
from vram.keeper import recorded as kinds
from vram.keeper import records
from vram.keeper.accounts import Accounts, Quotas, Usage
from vram.keeper.catalogue import Catalogue
from vram.keeper.connection import Held
from vram.keeper.ordered import Ordered
from vram.keeper.publications import settle
from vram.keeper.record_log import RecordLog
from vram.keeper.recorded import RecordedCatalogue
from vram.keeper.records import (
    Claim,
    Effect,
    Evicted,
    Free,
    Lease,
    Move,
    Name,
    Publication,
    Session,
    Version,
    Waiter,
)  # fmt: skip
from vram.keeper.replay import Peer, Replay, renumber
from vram.keeper.salvage import Salvage
from vram.keeper.snapshot import Books, restore, save

pytestmark = pytest.mark.slow  # goes with the log of calls

KEEPER, ANN, BOB = 1, 2, 3
QUOTAS = Quotas(max_bytes=4000, max_entries=6, user_bytes=2500, user_entries=4, user_descriptors=40)
NAMES = ["a", "b", "c/d", "~bob/e"]


class Keeping:
    def __init__(self) -> None:
        self.next = 10
        self.kept: dict[int, int] = {}

    def keep(self, fds: Sequence[int]) -> int:
        first = self.next
        self.next += len(fds)
        self.kept.update({first + index: fd for index, fd in enumerate(fds)})
        return first

    def forget(self, fds: Sequence[int]) -> None:
        self.kept = {number: fd for number, fd in self.kept.items() if fd not in fds}


def _nothing(fds: list[int]) -> None:
    """The descriptors of these tests are numbers only."""


def _held(first: int, handles: int, nbytes: int) -> Held:
    return Held(list(range(first, first + handles)), nbytes, _nothing)


# What tells a record from others of its kind, where another record refers to it.
KEYS: dict[type, Any] = {
    Session: lambda one: one.id,
    Version: lambda one: (one.name, one.number),
    Lease: lambda one: one.id,
    Claim: lambda one: one.id,
    Waiter: lambda one: one.order,
    Publication: lambda one: one.id,
    Name: lambda one: one.name,
    Move: lambda one: one.lease.id,
}
# What need not be the same, and why.
FREE = {
    (Session, "place"): "where a listing of its leases goes on: a listing that is asked for again finds its place",
    (Version, "serial"): "tells what came since a look at all versions: of this process alone",
    (Publication, "body"): "is made from the request, which a log has",
    (Waiter, "order"): "its key",
    (Catalogue, "_ids"): "an iterator: what comes of it is in the log, and checked",
    (Catalogue, "latest"): "as `Version.serial`",
    (Catalogue, "_versions"): "by `Version.serial`; the versions are compared by their names",
    (Catalogue, "_stale_deadlines"): "when to sweep what nobody waits for; those that are awaited are compared",
    (Catalogue, "name_of"): "a replay is told by the log",
    (RecordedCatalogue, "log"): "what is compared with",
    (RecordedCatalogue, "keeping"): "as `log`",
    (RecordedCatalogue, "payload"): "as `log`",
    (RecordedCatalogue, "call"): "as `log`",
    (RecordedCatalogue, "_within"): "as `log`",
    (Accounts, "quotas"): "of the command line",
}
# Mappings in whose order something is decided, or somebody is told: all others may have any.
ORDERED = {
    (Catalogue, "_numbers"), (Catalogue, "claims"), (Catalogue, "_deadlines"), (Session, "claims"), (Session, "passed"),
    (Version, "watchers"), (Catalogue, "_waiters"), (Name, "older"), (Version, "leases"),
}  # fmt: skip


def everything(catalogue: Catalogue) -> dict[str, Any]:
    """All that a catalogue knows, attribute by attribute: also what is added to it later."""
    found: dict[str, Any] = {}

    def told(value: Any, is_ordered: bool = False) -> Any:
        kind = type(value)
        if kind in KEYS:
            key = KEYS[kind](value)
            if (kind.__name__, key) not in found:
                found[kind.__name__, key] = None  # it may be met again within itself
                found[kind.__name__, key] = fields(value, dataclasses.fields(value))
            return kind.__name__, key
        if dataclasses.is_dataclass(value):
            return fields(value, dataclasses.fields(value))
        if isinstance(value, Held):
            return value.fds[0], value.nbytes
        if isinstance(value, (bytes, memoryview, msgspec.Raw)):
            return bytes(value)
        if isinstance(value, (dict, Ordered, MutableMapping)):
            items = [(told(key), told(one)) for key, one in value.items()]
            return items if is_ordered else sorted(items, key=repr)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [told(one) for one in value]
        if isinstance(value, Accounts):
            return {name: told(one) for name, one in vars(value).items() if (Accounts, name) not in FREE}
        assert value is None or isinstance(value, (str, int, float, bool)), f"{kind.__name__}: compared how?"
        return value

    def fields(record: Any, its: Any) -> dict[str, Any]:
        kind = type(record)
        names = [one.name for one in its if (kind, one.name) not in FREE]
        return {name: told(getattr(record, name), (kind, name) in ORDERED) for name in names}

    top = {}
    for name, value in vars(catalogue).items():
        if (Catalogue, name) in FREE or (RecordedCatalogue, name) in FREE:
            continue
        if name == "_deadlines":
            value = [
                (when, due) for when, _, due in sorted(value, key=lambda one: one[:2]) if catalogue._is_awaited(due)
            ]
        top[name] = told(value, (Catalogue, name) in ORDERED)
    for version in catalogue.all_versions():
        told(version)
    return {"top": top, **{repr(key): value for key, value in found.items()}}


def assert_alike(replayed: Catalogue, live: Catalogue) -> None:
    found, wanted = everything(replayed), everything(live)
    differ = {key: (found.get(key), wanted.get(key)) for key in {*found, *wanted} if found.get(key) != wanted.get(key)}
    if "top" in differ:
        top = zip(found["top"].items(), wanted["top"].items(), strict=True)
        differ["top"] = [(one, other) for one, other in top if one != other]  # type: ignore[assignment]
    assert not differ


class Keeper:
    """Any calls of a catalogue, in the way of a service."""

    def __init__(self, log: RecordLog, seed: int, catalogue: Catalogue | None = None) -> None:
        self.random = random.Random(seed)
        self.log = log
        self.keeping = Keeping()
        made = catalogue or Catalogue(QUOTAS, keeper_uid=KEEPER, claim_timeout=5.0, name_of=self.name_of)
        self.books = RecordedCatalogue.of(made, log, self.keeping)
        self.now = 0.0
        self.calls = 0
        self.under_way: dict[int, tuple[Publication, m.Publish]] = {}
        self.sizes: dict[int, int] = {}
        # Each keeper hears of some kinds of calls more than of others, and of some never: much is there, or little.
        calls = ["release", "expire", "watch", "remove", "drop", "cancel", "leave", "update", "give_up", "page", "move"]
        self.names = ["attach", "claim"] * self.random.choice([4, 8]) + ["publish"] * 3 + ["go_on"] * 3
        self.names += self.random.sample(calls, self.random.randrange(len(calls) + 1))

    def name_of(self, uid: int) -> str:
        return "bob" if uid == BOB else ""

    def session(self) -> Session:
        there = list(self.books.sessions.values())
        return self.random.choice(there or [self.books.connect(ANN, 7, "label", "host")])

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Free):
                effect.token.drop()

    def step(self) -> None:
        self.now += self.random.random()
        self.calls += 1
        if not self.books.sessions or (len(self.books.sessions) < 8 and self.random.random() < 0.1):
            self.books.connect(self.random.choice([KEEPER, ANN, BOB]), 7, "label", "host")
            return
        with contextlib.suppress(VramError):  # it changed nothing, or what it changed is in the log
            getattr(self, self.random.choice(self.names))(self.session())

    def claim(self, session: Session) -> None:
        self.attach(session, claim=True)

    def attach(
        self, session: Session, purpose: str = "", *, name: str = "", claim: bool = False
    ) -> Lease | Claim | Waiter:
        pick = self.random.choice
        request = m.Attach(
            self.calls,
            name or pick(NAMES),
            version=0 if claim or name else pick([0, 0, 0, 1, 2, 9]),
            expect=None if name else pick([None, None, {"k": "1"}, {"k": "2"}]),
            wait=pick([0.0, 3.0, 30.0, None]),
            claim=claim,
            access=pick(["r", "r", "rw"]),
            owner=pick([None, None, ANN]),
            purpose=purpose,
        )
        self.ask(session, request)

    def ask(self, session: Session, request: m.Attach) -> None:
        self.books.payload = m.encode(request)
        return self.books.attach(
            session, request.name, self.now, call=request.call, version=request.version, access=request.access,
            expect=request.expect, wait=request.wait, claim=request.claim, owner=request.owner,
            purpose=request.purpose,
        )  # fmt: skip

    def publish(self, session: Session) -> None:
        pick = self.random.choice
        claims = list(session.claims.values())
        name = claims[0].name if claims else pick(NAMES)
        size, count, updatable = pick([10, 200, 900]), pick([1, 2]), pick([False, False, True])
        pieces = self.pieces() if pick([True, False]) else {}
        request = m.Publish(
            self.calls, name, [m.SegmentRow(size, 1)] * count, ["host"], meta=pick([{}, {"k": "1"}, {"k": "2" * 90}]),
            ttl=pick([None, 4.0]), claim=claims[0].id if claims else 0, updatable=updatable,
        )  # fmt: skip
        self.books.payload = m.encode(request)
        publication = self.books.begin(
            session, name, nbytes=size * count, handles=count, meta=request.meta, ttl=request.ttl, claim=request.claim,
            updatable=updatable, pieces=pieces, known=min(size * count, sum(pieces.values())),
        )  # fmt: skip
        self.under_way[publication.id] = publication, request
        if pick([True, True, False]):
            self.go_on(session)

    def pieces(self) -> dict[int, int]:
        """Memory of a few files, to one of which pages come now and then."""
        some = self.random.sample(range(4), self.random.choice([1, 2]))
        if self.random.random() < 0.3:
            self.sizes[some[0]] = self.sizes.get(some[0], 10) * 2
        return {file: self.sizes.setdefault(file, 10) for file in some}

    def move(self, session: Session) -> None:
        """Park what is awake, or wake what is parked."""
        own = [one for one, _ in self.books.current() if one.owner == session.uid]
        if not own:
            return
        one = self.random.choice(own)
        purpose = self.random.choice(["park", "wake", "wake" if one.parked else "park"])
        lease = self.attach(session, purpose, name=one.name)
        if not isinstance(lease, Lease) or not lease.purpose:
            return
        version = lease.version
        request = m.Publish(self.calls, version.name, [m.SegmentRow(version.nbytes, 1)], ["host"], lease=lease.id)
        self.books.payload = m.encode(request)
        publication = self.books.begin(session, version.name, nbytes=version.nbytes, handles=1, lease=lease.id)
        self.under_way[publication.id] = publication, request
        if self.random.random() < 0.7:
            self.commit(publication.id)

    def go_on(self, session: Session) -> None:
        if not self.under_way:
            return
        self.commit(self.random.choice(list(self.under_way)))

    def commit(self, number: int) -> None:
        publication, request = self.under_way.pop(number)
        if number not in publication.session.publications:
            return
        pieces = self.random.choice([{}, {self.random.randrange(3): 30}])
        self.books.arrived(publication, publication.nbytes + self.random.choice([0, 30]), pieces, 30 * len(pieces))
        token = _held(1000 * self.calls, publication.handles, publication.nbytes)
        self.books.call = request.call
        version, effects = self.books.commit(publication, token, self.now, nbytes=publication.nbytes)
        settle(version, request)
        self.carry_out(effects)

    def give_up(self, session: Session) -> None:
        for publication in list(session.publications.values()):
            self.books.abandon(publication)

    def release(self, session: Session) -> None:
        held = list(session.leases)
        self.carry_out(self.books.release_all(session, self.random.sample(held, min(len(held), 3)), self.now))

    def expire(self, session: Session) -> None:
        self.now += self.random.choice([0.0, 6.0])
        self.carry_out(self.books.expire(self.now))

    def watch(self, session: Session) -> None:
        self.books.watch(session, self.random.choice(NAMES), self.random.choice([1, 2, 3]))

    def remove(self, session: Session) -> None:
        revoke, force = self.random.choice([(False, False), (True, False), (True, True)])
        self.carry_out(self.books.remove(session, self.random.choice(NAMES), revoke=revoke, force=force, now=self.now))

    def drop(self, session: Session) -> None:
        for claim in list(session.claims):
            self.carry_out(self.books.drop_claim(session, claim, self.now))

    def cancel(self, session: Session) -> None:
        for call in list(session.waiters):
            self.books.cancel(session, call)

    def leave(self, session: Session) -> None:
        if self.random.random() < 0.4:
            self.carry_out(self.books.disconnect(session, self.now))

    def update(self, session: Session) -> None:
        for name, number in list(session.written):
            if self.random.random() < 0.7:
                self.books.update(session, name, number)
            if self.random.random() < 0.7:  # else it is under way until the next time, or until its publisher is gone
                self.books.updated(session, name, number, self.random.choice([2, 3]), whole=self.random.random() < 0.5)

    def page(self, session: Session) -> None:
        for lease in list(session.leases.values()):
            if lease.version.updates:
                page = _held(1000 * self.calls, 1, 16)
                self.carry_out(self.books.give_page(session, lease.id, page))
                return


class Follower:
    """A replay that reads each record when it is written."""

    def __init__(self, keeper: Keeper, catalogue: Catalogue | None = None) -> None:
        made = catalogue or Catalogue(QUOTAS, keeper_uid=KEEPER, claim_timeout=5.0)
        self.keeper = keeper
        self.replay = Replay(made, [], self.token)
        self.read = 0

    def token(self, first: int, handles: int, nbytes: int) -> Held:
        return _held(self.keeper.keeping.kept[first], handles, nbytes)

    def follow(self) -> None:
        for index, (kind, body) in enumerate(self.keeper.log.records()):
            if index >= self.read:
                self.replay.apply(kind, body)
                self.read = index + 1


@pytest.mark.parametrize("seed", range(12))
def test_after_every_record_the_books_are_those_of_the_keeper(seed: int) -> None:
    with closing(RecordLog.new(b"", 1)) as log:
        keeper = Keeper(log, seed)
        follower = Follower(keeper)
        for _ in range(160):
            keeper.step()
            follower.follow()
            assert_alike(follower.replay.catalogue, keeper.books)
        assert follower.read > 50
        assert log.nbytes > 1000


def test_what_came_of_calls_that_waited_is_known_and_who_is_to_be_ended() -> None:
    """The client that asked may not have heard it: it asks again, and is to get that and nothing more."""
    with closing(RecordLog.new(b"", 1)) as log:
        keeper = Keeper(log, 1)
        made, follower = keeper.books, Follower(keeper)
        maker, reader, root = (made.connect(uid, 7, "", "") for uid in (ANN, ANN, KEEPER))
        made.write(kinds.OPENED, 50)
        made.write(kinds.WELCOMED, 50, reader.id, 1, True)
        keeper.ask(maker, m.Attach(1, "claimed", claim=True))
        keeper.ask(reader, m.Attach(11, "published", wait=None))
        keeper.ask(reader, m.Attach(12, "never", wait=3.0))
        keeper.ask(reader, m.Attach(13, "claimed", wait=None, claim=True))
        request = m.Publish(2, "published", [m.SegmentRow(10, 1)], ["host"])
        made.payload = m.encode(request)
        publication = made.begin(maker, "published", nbytes=10, handles=1)
        version, effects = made.commit(publication, _held(1000, 1, 10), 1.0, nbytes=10)
        settle(version, request)
        keeper.carry_out(effects)
        keeper.carry_out(made.drop_claim(maker, *maker.claims, 2.0))
        keeper.carry_out(made.expire(4.0))
        follower.follow()
        peer = follower.replay.peers[50]
        ((lease, claim),) = zip(reader.leases, reader.claims, strict=True)
        assert isinstance(peer.results[11], Lease)
        assert peer.results[11].id == lease
        assert isinstance(peer.results[12], WaitTimeoutError)
        assert isinstance(peer.results[13], Claim)
        assert peer.results[13].id == claim
        assert peer.evicted is None
        keeper.carry_out(made.remove(root, "published", revoke=True, force=True, now=0.0))
        follower.follow()
        assert isinstance(peer.evicted, Evicted)


def begun_anew(keeper: Keeper, log: RecordLog) -> Follower:
    """Have a log begin with what there is; return who reads it."""
    tokens: list[Held] = []

    def number(held: Held) -> int:
        tokens.append(held)
        return len(tokens) - 1

    written = save(keeper.books, number)
    renumber(keeper.books, written.next_id)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(written), type=Books)
    copies = [_held(held.fds[0], len(held.fds), held.nbytes) for held in tokens]
    made, _ = restore(read, copies.__getitem__, QUOTAS, keeper_uid=KEEPER, nobody=65_534, claim_timeout=5.0)
    renumber(made, written.next_id)
    keeper.log = keeper.books.log = log
    follower = Follower(keeper, made)
    for number_, (_, request) in keeper.under_way.items():
        follower.replay.requests[number_] = m.encode(request)
    return follower


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), anew=st.sets(st.integers(1, 140), max_size=6))
def test_a_log_goes_on_from_books_that_were_written_down(seed: int, anew: set[int]) -> None:
    with contextlib.ExitStack() as logs:
        keeper = Keeper(logs.enter_context(closing(RecordLog.new(b"", 1))), seed)
        follower = Follower(keeper)
        for step in range(140):
            keeper.step()
            follower.follow()
            if step in anew:
                assert_alike(follower.replay.catalogue, keeper.books)
                follower = begun_anew(keeper, logs.enter_context(closing(RecordLog.new(b"", step))))
            if step % 10 == 9 or step in anew:
                assert_alike(follower.replay.catalogue, keeper.books)


def shown(catalogue: Catalogue) -> dict[str, Any]:
    """The entries: what anybody gets who attaches by name."""
    return {
        one.name: (
            one.number, one.owner, one.nbytes, one.handles, one.token.fds, one.parked, one.writable, one.meta,
            bytes(one.body), one.expires, dict(one.pieces),
        )
        for one, _ in catalogue.current()
    }  # fmt: skip


@settings(max_examples=120)
@given(seed=st.integers(0, 2**32), at=st.floats(0, 1), anew=st.integers(1, 119))
def test_a_record_that_does_not_fit_costs_no_entry(seed: int, at: float, anew: int) -> None:
    with closing(RecordLog.new(b"", 1)) as log, closing(RecordLog.new(b"", 2)) as second:
        keeper = Keeper(log, seed)
        for step in range(120):
            keeper.step()
            if step == anew:
                follower = begun_anew(keeper, second)
        records_ = list(second.records())
        where = int(at * len(records_))
        records_.insert(where, (kinds.CANCEL, msgspec.msgpack.encode((10**6, 1))))
        for kind, body in records_[:where]:
            follower.replay.apply(kind, body)
        with pytest.raises(ProtocolError, match="names session"):
            follower.replay.apply(*records_[where])
        salvage = Salvage(follower.replay)
        salvage.go_on(records_[where:])
        kept, live = salvage.catalogue, keeper.books
        expired = shown(kept).keys() - shown(live).keys()  # they will expire here as well: their memory is gone
        assert all(kept._names[name].current.expires is not None for name in expired)  # type: ignore[union-attr]
        assert {name: one for name, one in shown(kept).items() if name not in expired} == shown(live)
        assert [len(kept.sessions), len(kept.leases), len(kept.claims), kept.waiting] == [0, 0, 0, 0]
        assert len(kept.all_versions()) == kept.entries == kept.accounts.total.entries
        ahead = {name: (kept._last_number(name), live._last_number(name)) for name in NAMES}
        assert all(one >= other for one, other in ahead.values())


# What a row does not say, and where it comes from instead.
ELSEWHERE = {
    (Session, "leases"): "each version says its own", (Session, "publications"): "rows of their own",
    (Session, "waiters"): "rows of their own", (Session, "claims"): "rows of their own",
    (Session, "watches"): "VersionRow.watchers", (Session, "passed"): "Books.passed",
    (Session, "place"): FREE[Session, "place"],
    (Session, "written"): "VersionRow.writing",
    (Version, "notes"): "VersionRow.meta", (Version, "holders"): "counted",
    (Version, "serial"): FREE[Version, "serial"],
    (Version, "writer"): "VersionRow.writing", (Version, "move"): "VersionRow.moving",
    (Publication, "notes"): "PublicationRow.meta", (Publication, "body"): FREE[Publication, "body"],
    (Waiter, "expected"): "WaiterRow.expect",
    (Lease, "id"): "VersionRow.leases", (Lease, "session"): "VersionRow.leases", (Lease, "version"): "its row",
    (Lease, "access"): "VersionRow.leases", (Lease, "since"): "VersionRow.leases", (Lease, "page"): "VersionRow.pages",
    (Lease, "purpose"): "VersionRow.purposes", (Lease, "ended"): "VersionRow.ended",
    (Move, "lease"): "VersionRow.moving", (Move, "since"): "VersionRow.moving",
    (Move, "until"): "VersionRow.moving",
    (Name, "name"): "its versions'", (Name, "current"): "VersionRow.current", (Name, "older"): "VersionRow.current",
    (Name, "leases"): "counted", (Name, "held"): "counted",
    (Usage, "nbytes"): "counted", (Usage, "entries"): "counted", (Usage, "handles"): "counted",
    (Usage, "pieces"): "counted, and Books.sizes",
}  # fmt: skip


def _is_frozen(record: Any) -> bool:
    return bool(record.__dataclass_params__.frozen)


def test_the_books_that_are_written_down_have_each_field_of_each_record() -> None:
    """One that is forgotten is not there when a log has begun anew: what follows does not fit, and all is lost."""
    rows: Mapping[type, Any] = {
        Session: records.SessionRow, Version: records.VersionRow, Publication: records.PublicationRow,
        Waiter: records.WaiterRow, Claim: records.ClaimRow, Lease: None, Move: None, Name: None, Usage: None,
    }  # fmt: skip
    changing = {one for one in vars(records).values() if dataclasses.is_dataclass(one) and not _is_frozen(one)}
    assert changing | {Usage} == set(rows)
    for kind, row in rows.items():
        there = set() if row is None else set(row.__struct_fields__)
        missing = (
            {one.name for one in dataclasses.fields(kind)} - there - {name for of, name in ELSEWHERE if of is kind}
        )
        assert not missing, f"{kind.__name__}: {missing} of it is in no row"


def test_a_record_that_does_not_fit_the_books_is_refused() -> None:
    replay = Replay(Catalogue(QUOTAS, keeper_uid=KEEPER), [Peer(5)], _held)
    encode: Any = msgspec.msgpack.encode
    for kind, said in (
        (kinds.WATCH, (7, "a", 1)),
        (kinds.CONNECT, (99, ANN, 1, "", "")),
        (kinds.REMOVE, (1, "nothing", 0, 0.0, False, False, 0)),
        (kinds.CANCEL, ()),
        (250, (1,)),
    ):
        with pytest.raises(ProtocolError):
            replay.apply(kind, encode(said))
