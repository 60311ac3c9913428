"""A log of records: what it leaves is what there was, after every record, and what is not whole is refused."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec
import pytest

from vram.errors import ProtocolError, VramError, WaitTimeoutError
from vram.keeper import catalogue as module
from vram.keeper import messages as m
from vram.keeper import recorded as kinds
from vram.keeper.accounts import Quotas
from vram.keeper.catalogue import Catalogue
from vram.keeper.connection import Held
from vram.keeper.publications import settle
from vram.keeper.record_log import RecordLog
from vram.keeper.recorded import RecordedCatalogue
from vram.keeper.records import Claim, Effect, Evicted, Free, Lease, Publication, Serve, Session
from vram.keeper.replay import Peer, Replay, renumber
from vram.keeper.snapshot import Books, restore, save

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


def _nothing(fds: list[int], nbytes: int, uid: int) -> None:
    """The descriptors of these tests are numbers only."""


def _held(first: int, handles: int, nbytes: int, owner: int) -> Held:
    return Held(list(range(first, first + handles)), nbytes, owner, _nothing)


def books(catalogue: Catalogue) -> bytes:
    """All that a takeover would move, with the first descriptor of each token."""
    return msgspec.msgpack.encode(save(catalogue, lambda held: held.fds[0]))


class Keeper:
    """Any calls of a catalogue, in the way of a service."""

    def __init__(self, log: RecordLog, seed: int, catalogue: Catalogue | None = None) -> None:
        self.random = random.Random(seed)
        self.log = log
        self.keeping = Keeping()
        made = catalogue or Catalogue(QUOTAS, keeper_uid=KEEPER, claim_timeout=5.0, why_not=self.why_not)
        self.books = RecordedCatalogue.of(made, log, self.keeping)
        self.now = 0.0
        self.calls = 0
        self.under_way: dict[int, tuple[Publication, m.Publish]] = {}
        self.serving: list[str] = []

    def why_not(self, uid: int, user: str) -> str | None:
        return "" if uid == BOB else self.random.choice(["it is bob", None])

    def session(self) -> Session:
        return self.random.choice(list(self.books.sessions.values()))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Serve):
                self.serving.append(effect.name)
            elif isinstance(effect, Free):
                effect.token.drop()

    def step(self) -> None:
        self.now += self.random.random()
        self.calls += 1
        if not self.books.sessions or self.random.random() < 0.05:
            self.books.connect(self.random.choice([KEEPER, ANN, BOB]), 7, "label", "host")
            return
        names = ["attach"] * 4 + ["publish"] * 3 + ["go_on"] * 3
        names += ["release", "expire", "watch", "remove", "drop", "cancel", "leave", "update", "give_up", "page"]
        with contextlib.suppress(VramError):  # it changed nothing, or what it changed is in the log
            getattr(self, self.random.choice(names))(self.session())

    def attach(self, session: Session) -> None:
        pick = self.random.choice
        request = m.Attach(
            self.calls,
            pick(NAMES),
            version=pick([0, 0, 0, 1, 2, 9]),
            expect=pick([None, None, {"k": "1"}]),
            wait=pick([0.0, 3.0, None]),
            claim=pick([True, False]),
            access=pick(["r", "r", "rw"]),
            owner=pick([None, None, ANN]),
            purpose=pick(["", "", "", "park", "wake"]),
        )
        self.ask(session, request)

    def ask(self, session: Session, request: m.Attach) -> None:
        self.books.payload = m.encode(request)
        self.books.attach(
            session, request.name, self.now, call=request.call, version=request.version, access=request.access,
            expect=request.expect, wait=request.wait, claim=request.claim, owner=request.owner,
            purpose=request.purpose,
        )  # fmt: skip

    def publish(self, session: Session) -> None:
        pick = self.random.choice
        claims = list(session.claims.values())
        name = claims[0].name if claims else pick(NAMES)
        size, count, updatable = pick([10, 200, 900]), pick([1, 2]), pick([False, False, True])
        request = m.Publish(
            self.calls, name, [m.SegmentRow(size, 1)] * count, ["host"], meta=pick([{}, {"k": "1"}, {"k": "2" * 90}]),
            ttl=pick([None, 4.0]), claim=claims[0].id if claims else 0, updatable=updatable,
        )  # fmt: skip
        self.books.payload = m.encode(request)
        publication = self.books.begin(
            session, name, nbytes=size * count, handles=count, meta=request.meta, ttl=request.ttl, claim=request.claim,
            words=7, updatable=updatable,
        )  # fmt: skip
        self.under_way[publication.id] = publication, request
        if pick([True, True, False]):
            self.go_on(session)

    def go_on(self, session: Session) -> None:
        if self.serving and self.random.random() < 0.5:
            self.carry_out(self.books.serve_on(self.serving.pop(0), self.now))
            return
        if not self.under_way:
            return
        number = self.random.choice(list(self.under_way))
        publication, request = self.under_way.pop(number)
        if number not in publication.session.publications:
            return
        pieces = self.random.choice([{}, {self.random.randrange(3): 30}])
        self.books.arrived(publication, publication.nbytes + self.random.choice([0, 30]), pieces, 30 * len(pieces))
        token = _held(1000 * self.calls, publication.handles, publication.nbytes, publication.session.uid)
        self.books.call = request.call
        version, effects = self.books.commit(publication, token, self.now, nbytes=publication.nbytes)
        settle(version, request)
        self.carry_out(effects)

    def give_up(self, session: Session) -> None:
        for publication in list(session.publications.values()):
            self.books.abandon(publication)

    def release(self, session: Session) -> None:
        held = list(session.leases)
        self.carry_out(self.books.release_all(session, self.random.sample(held, min(len(held), 3))))

    def expire(self, session: Session) -> None:
        self.now += self.random.choice([0.0, 6.0])
        self.carry_out(self.books.expire(self.now, self.random.choice([1, 16])))

    def watch(self, session: Session) -> None:
        self.books.watch(session, self.random.choice(NAMES), self.random.choice([1, 2, 3]))

    def remove(self, session: Session) -> None:
        revoke, force = self.random.choice([(False, False), (True, False), (True, True)])
        self.carry_out(self.books.remove(session, self.random.choice(NAMES), revoke=revoke, force=force))

    def drop(self, session: Session) -> None:
        for claim in list(session.claims):
            self.carry_out(self.books.drop_claim(session, claim, self.now))

    def cancel(self, session: Session) -> None:
        for call in list(session.waiters):
            self.books.cancel(session, call)

    def leave(self, session: Session) -> None:
        if self.random.random() < 0.3:
            for effects in self.books.leaving(session, self.now):
                self.carry_out(effects)

    def update(self, session: Session) -> None:
        for name, number in list(session.written):
            if self.random.random() < 0.7:
                self.books.update(session, name, number)
            if self.random.random() < 0.7:  # else it is under way until the next time, or until its publisher is gone
                self.books.updated(session, name, number, self.random.choice([2, 3]), whole=self.random.random() < 0.5)

    def page(self, session: Session) -> None:
        for lease in list(session.leases.values()):
            if lease.version.updates:
                page = _held(1000 * self.calls, 1, 16, session.uid)
                self.carry_out(self.books.give_page(session, lease.id, page))
                return


@pytest.fixture(params=[1, module.SERVED])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait are gone through at once, or one by one."""
    monkeypatch.setattr(module, "SERVED", request.param)


class Follower:
    """A replay that reads each record when it is written."""

    def __init__(self, keeper: Keeper, catalogue: Catalogue | None = None) -> None:
        made = catalogue or Catalogue(QUOTAS, keeper_uid=KEEPER, claim_timeout=5.0)
        self.keeper = keeper
        self.replay = Replay(made, [], self.token)
        self.read = 0

    def token(self, first: int, handles: int, nbytes: int, owner: int) -> Held:
        return _held(self.keeper.keeping.kept[first], handles, nbytes, owner)

    def follow(self) -> None:
        for index, (kind, body) in enumerate(self.keeper.log.records()):
            if index >= self.read:
                self.replay.apply(kind, body)
                self.read = index + 1


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("seed", range(12))
def test_after_every_record_the_books_are_those_of_the_keeper(seed: int) -> None:
    with closing(RecordLog.new(b"", 1)) as log:
        keeper = Keeper(log, seed)
        follower = Follower(keeper)
        for _ in range(160):
            keeper.step()
            follower.follow()
            assert books(follower.replay.catalogue) == books(keeper.books)
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
        publication = made.begin(maker, "published", nbytes=10, handles=1, words=7)
        version, effects = made.commit(publication, _held(1000, 1, 10, ANN), 1.0, nbytes=10)
        settle(version, request)
        keeper.carry_out(effects)
        keeper.carry_out(made.drop_claim(maker, *maker.claims, 2.0))
        keeper.carry_out(made.expire(4.0))
        for name in keeper.serving:
            keeper.carry_out(made.serve_on(name, 4.0))
        follower.follow()
        peer = follower.replay.peers[50]
        ((lease, claim),) = zip(reader.leases, reader.claims, strict=True)
        assert isinstance(peer.results[11], Lease)
        assert peer.results[11].id == lease
        assert isinstance(peer.results[12], WaitTimeoutError)
        assert isinstance(peer.results[13], Claim)
        assert peer.results[13].id == claim
        assert peer.evicted is None
        keeper.carry_out(made.remove(root, "published", revoke=True, force=True))
        follower.follow()
        assert isinstance(peer.evicted, Evicted)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("seed", range(6))
def test_a_log_goes_on_from_books_that_were_written_down(seed: int) -> None:
    """As where a log begins anew: nothing is between two steps, no round and no publication."""
    with closing(RecordLog.new(b"", 1)) as log, closing(RecordLog.new(b"", 2)) as second:
        keeper = Keeper(log, 100 + seed)
        for _ in range(120):
            keeper.step()
        while keeper.serving:
            keeper.carry_out(keeper.books.serve_on(keeper.serving.pop(0), keeper.now))
        for session in keeper.books.sessions.values():
            keeper.give_up(session)
        keeper.under_way.clear()
        tokens: list[Held] = []

        def number(held: Held) -> int:
            tokens.append(held)
            return len(tokens) - 1

        written = save(keeper.books, number)
        renumber(keeper.books, written.next_id)
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(written), type=Books)
        copies = [_held(held.fds[0], len(held.fds), held.nbytes, held.owner) for held in tokens]
        made, _ = restore(
            read, copies.__getitem__, QUOTAS, keeper_uid=KEEPER, nobody=65_534, claim_timeout=5.0, now=keeper.now
        )
        renumber(made, written.next_id)
        keeper.log = keeper.books.log = second
        follower = Follower(keeper, made)
        for _ in range(120):
            keeper.step()
            follower.follow()
            assert books(follower.replay.catalogue) == books(keeper.books)
        assert follower.read > 30


def _written() -> RecordLog:
    log = RecordLog.new(b"the books", 1)
    for index in range(5):
        log.append(kinds.WATCH, b"head %d" % index + b"rest" * index)
    return log


def _bodies(log: RecordLog) -> list[bytes]:
    return [body for _, body in log.records()]


def test_a_record_that_was_not_finished_was_never_decided() -> None:
    """The last one may have been written up to any byte: the end is moved after that, in one store."""
    with closing(_written()) as log:
        whole, end = _bodies(log), log.end
        log.append(kinds.WATCH, b"the last of all")
        torn = bytes(log._memory[end : log.end])
        for count in range(len(torn)):
            log._memory[end : log.end] = torn[:count] + bytes(len(torn) - count)
            log.words[2] = end
            with closing(RecordLog(os.dup(log.fd))) as again:
                assert _bodies(again) == whole
        log._memory[end : log.end] = torn
        log.words[2] = log.end
        with closing(RecordLog(os.dup(log.fd))) as again:
            assert _bodies(again) == [*whole, b"the last of all"]


def test_a_log_that_was_changed_anywhere_is_refused() -> None:
    with closing(_written()) as log:
        for at in range(log.begin, log.end):
            log._memory[at] ^= 0x40
            with closing(RecordLog(os.dup(log.fd))) as again, pytest.raises(ProtocolError, match=r"changed|cut"):
                _bodies(again)
            log._memory[at] ^= 0x40
        for at in range(log.begin - 9, log.begin):
            log._memory[at] ^= 0x40
            with pytest.raises(ProtocolError, match="changed"):
                RecordLog(os.dup(log.fd))
            log._memory[at] ^= 0x40
        assert len(_bodies(log)) == 5


def test_a_log_that_was_cut_is_refused() -> None:
    with closing(_written()) as log:
        for end in range(log.begin + 1, log.end):
            log.words[2] = end
            starts = {log.begin + length for length in _ends(log)}
            with closing(RecordLog(os.dup(log.fd))) as again:
                if end in starts:
                    assert len(_bodies(again)) < 5  # whole records: it ends there
                else:
                    with pytest.raises(ProtocolError, match="cut"):
                        _bodies(again)
    short = os.memfd_create("short")
    os.ftruncate(short, 100)
    with pytest.raises(ProtocolError, match="100 bytes"):
        RecordLog(short)


def _ends(log: RecordLog) -> list[int]:
    ends, at = [], 0
    for index in range(5):
        at += 12 + len(b"head 0") + 4 * index
        ends.append(at)
    return ends


def test_a_record_that_does_not_fit_the_books_is_refused() -> None:
    replay = Replay(Catalogue(QUOTAS, keeper_uid=KEEPER), [Peer(5)], _held)
    encode: Any = msgspec.msgpack.encode
    for kind, said in (
        (kinds.WATCH, (7, "a", 1)),
        (kinds.CONNECT, (99, ANN, 1, "", "")),
        (kinds.REMOVE, (1, "nothing", 0, False, False, 0)),
        (kinds.CANCEL, ()),
        (250, (1,)),
    ):
        with pytest.raises(ProtocolError):
            replay.apply(kind, encode(said))


def test_the_same_request_in_hand_at_each_end_is_found() -> None:
    with closing(RecordLog.new(b"", 1)) as log:
        log.take_in_hand(7, b"one")
        assert log.inherit(3) == (7, False)
        log.take_in_hand(7, b"one")
        assert log.inherit(3) == (7, False)
        assert log.inherit(3) == (0, False)  # nothing was in hand: an end like any other
        for _ in range(2):
            log.take_in_hand(7, b"one")
            assert log.inherit(3) == (7, False)
        log.take_in_hand(7, b"one")
        assert log.inherit(3) == (7, True)
        assert log.generation == 7
