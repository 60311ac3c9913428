"""Connections that wait for their turn: nothing that happens meanwhile is lost, and the wait is not their fault.

The keeper runs in a thread of this process, and the test says whose turn it is.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.gated_keeper import NOBODY_HERE, Gate, gated, hear, raw, reopen, say, wait_for, within
from tests.support.keeper_here import serving
from tests.support.servers import connect, make

from vram.errors import PeerGoneError
from vram.keeper import messages as m
from vram.keeper.catalogue import PART
from vram.keeper.client import KeeperClient, Segment
from vram.keeper.connection import _EACH
from vram.keeper.fairness import ADVANCE, SHARE
from vram.keeper.private import short_directory
from vram.keeper.records import Notify, Session
from vram.keeper.server import KeeperServer
from vram.keeper.takeover import take_over
from vram.keeper.turns import Turns, TurnsHost
from vram.sharing.channel import Channel
from vram.testing.keeper import SOON, memfds, until

pytestmark = pytest.mark.slow  # goes with the fair shares of a keeper


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as place:
        yield f"{place}/k"


def test_what_waits_is_answered_once_it_may(path: str) -> None:
    with gated(path) as (server, gate), contextlib.ExitStack() as stack:
        one, other = raw(stack, path), raw(stack, path)
        gate.shut = True
        for channel in (one, other):
            for call in range(1, 6):
                say(channel, m.Statistics(call))
        wait_for(gate, 2)
        reopen(server, gate)
        for channel in (one, other):
            calls = [hear(channel) for _ in range(5)]
            assert [reply.call for reply in calls if isinstance(reply, m.KeeperStatistics)] == [1, 2, 3, 4, 5]


def test_a_peer_is_not_cut_off_for_what_the_keeper_did_not_read(path: str) -> None:
    """A greeting that came, and a part of a publication: their time stands still while they wait."""
    with gated(path) as (server, gate), contextlib.ExitStack() as stack, memfds(3) as fds:
        publisher, stranger = raw(stack, path), raw(stack, path, greet=False)
        say(publisher, m.Publish(7, "w", [m.SegmentRow(4096, 1, 0)] * 3, ["host"]), fds[:1])
        assert hear(publisher) == m.NextPart(7, 1)
        gate.shut = True
        say(publisher, m.Part(8, 7, 1), fds[1:2])
        say(stranger, m.Hello(1, 1))
        wait_for(gate, 2)
        ahead = 0.0
        server.now = lambda: time.monotonic() + ahead
        ahead = server.patience * 10
        within(server, server._tick)
        assert gate.waits == 2, "who was kept waiting was cut off"
        reopen(server, gate)
        assert isinstance(hear(stranger), m.Welcome)
        assert hear(publisher) == m.NextPart(8, 2)
        ahead *= 2  # and from here on it is theirs again
        within(server, server._tick)
        say(publisher, m.Part(9, 7, 2), fds[2:])
        late = hear(publisher)
        assert isinstance(late, m.Error)
        assert "publish again" in late.text


def test_between_two_turns_time_does_not_run_out_either(path: str) -> None:
    """The second of two messages is not read in the turn of the first; what passed before does not count."""
    with gated(path) as (server, gate), contextlib.ExitStack() as stack, memfds(2) as fds:
        publisher = raw(stack, path)
        say(publisher, m.Publish(7, "w", [m.SegmentRow(4096, 1, 0)] * 2, ["host"]), fds[:1])
        assert hear(publisher) == m.NextPart(7, 1)
        (connection,) = server.connections.values()
        (partial,) = connection.partials.values()
        since = partial.since
        gate.shut = True
        say(publisher, m.Statistics(8))
        wait_for(gate, 1)
        server.now = lambda: time.monotonic() + 1_000
        reopen(server, gate)
        assert isinstance(hear(publisher), m.KeeperStatistics)
        assert partial.since - since > 900


def test_what_closes_while_it_waits_is_forgotten(path: str) -> None:
    with gated(path) as (server, gate), contextlib.ExitStack() as stack:
        one, other = raw(stack, path), raw(stack, path)
        gate.shut = True
        say(one, m.Statistics(1))
        say(other, m.Statistics(1))
        wait_for(gate, 2)
        first = next(iter(server.connections.values()))
        within(server, first.close)
        assert gate.waits == 1, "a closed connection waits"
        with pytest.raises(PeerGoneError):
            one.recv(timeout=SOON)
        reopen(server, gate)
        assert isinstance(hear(other), m.KeeperStatistics)
        until(lambda: gate.waits == 0)
        assert server.turns.fairness.delay(0.0) is None


def test_who_has_answers_to_read_is_not_read_from_when_its_turn_comes(path: str) -> None:
    """And is, once it has read them: the two reasons not to read from it do not undo each other."""
    with gated(path) as (server, gate), contextlib.ExitStack() as stack:
        one = raw(stack, path)
        (connection,) = server.connections.values()
        gate.shut = True
        say(one, m.Statistics(1))
        wait_for(gate, 1)

        def full() -> None:
            connection.queue.append((m.encode(m.Done(99)), None, 0, 0))  # as if there had been no room for it
            connection._count_queued(len(connection.queue[0][0]) + _EACH)
            connection.pause()

        since = connection.parked
        within(server, full)
        within(server, connection.resume)
        say(raw(stack, path, greet=False), m.Hello(1, 1))  # once this waits too, the loop has looked at everything
        wait_for(gate, 2)
        assert connection.parked == since, "it waits for its turn, whoever would read on"
        reopen(server, gate)
        until(lambda: connection.parked is None)
        assert not connection.reading, "it has not read what there is for it"
        within(server, connection.writable)
        assert hear(one) == m.Done(99)
        assert isinstance(hear(one), m.KeeperStatistics)


def test_a_successor_reads_what_waited(path: str) -> None:
    with contextlib.ExitStack() as stack:
        first, gate = stack.enter_context(gated(path))
        one, stranger = raw(stack, path), raw(stack, path, greet=False)
        successor = make(path, connections=20)

        def shut() -> None:
            gate.shut = True

        within(first, shut)
        say(one, m.Statistics(1))
        say(one, m.Statistics(2))
        say(stranger, m.Hello(1, 1))
        wait_for(gate, 2)
        first.by_user.pop(NOBODY_HERE)  # whoever takes over is not kept waiting here
        assert take_over(successor)
        stack.enter_context(serving(successor))
        assert [hear(one).call, hear(one).call] == [1, 2]  # type: ignore[union-attr]
        assert isinstance(hear(stranger), m.Welcome)


@pytest.fixture
def parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is much is done in parts that are as small as can be."""
    for name in ("catalogue.PART", "service.PART", "catalogue.SERVED"):
        monkeypatch.setattr(f"vram.keeper.{name}", 1)


@pytest.fixture(params=["this", "older"])
def successor_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which version takes over: an older one cannot go on with what is half done."""
    if request.param == "older":
        spoken = {**vars(m), "Takeover": lambda call, **_: m.Takeover(call)}
        monkeypatch.setattr("vram.keeper.takeover.m", SimpleNamespace(**spoken))
    return str(request.param)


def many_leases(first: KeeperServer, count: int) -> Session:
    (session,) = [one for one in first.catalogue.sessions.values() if not one.leases][-1:]
    for _ in range(count):
        first.catalogue.attach(session, "w", 0.0)
    return session


def about_to_be_taken_over(
    stack: contextlib.ExitStack, path: str
) -> tuple[KeeperServer, KeeperServer, KeeperClient, Channel]:
    """Return a keeper that serves, its successor, and two clients of the first.

    The first does two parts of what it is asked. Then it waits, or it might have done all before its successor comes.
    """
    first, second = make(path, connections=20), make(path, connections=20)
    first.turns.fairness = gate = Gate()
    gate.shuts_after = 2
    stack.enter_context(serving(first))
    return first, second, connect(stack, path), raw(stack, path)


def publish_one(owner: KeeperClient, meta: dict[str, str] | None = None) -> None:
    with memfds(1) as fds:
        owner.publish("w", [Segment(4096)], fds, meta=meta or {})


@pytest.mark.usefixtures("parted")
def test_a_takeover_comes_between_the_parts_of_the_end_of_a_connection(path: str, successor_of: str) -> None:
    """Whoever held much does not keep the others waiting for a takeover, and nothing of it stays."""
    with contextlib.ExitStack() as stack:
        first, second, owner, _ = about_to_be_taken_over(stack, path)
        publish_one(owner)
        session = many_leases(first, 20_000)
        gone = first.connections[session.id]
        first.loop.call_soon_threadsafe(gone.close)
        assert take_over(second)
        left = len(second.catalogue.leases)
        assert (left > 19_000) == (successor_of == "this"), "an older keeper would keep what is left for ever"
        stack.enter_context(serving(second))
        until(lambda: owner.statistics().leases == 0, what="the end of the leases")
        until(lambda: list(second.catalogue.sessions) != [session.id] and len(second.catalogue.sessions) == 1)
        owner.remove("w")
        assert owner.statistics().descriptors == 0


@pytest.mark.usefixtures("parted")
def test_a_takeover_comes_between_the_parts_of_a_release(path: str, successor_of: str) -> None:
    with contextlib.ExitStack() as stack:
        first, second, owner, reader = about_to_be_taken_over(stack, path)
        publish_one(owner)
        session = many_leases(first, 4_000)
        say(reader, m.Release(7, list(session.leases)))
        until(lambda: first.turns.fairness.shut, what="two parts")  # type: ignore[attr-defined]
        assert take_over(second)
        assert len(second.catalogue.leases) == (3_998 if successor_of == "this" else 0)
        stack.enter_context(serving(second))
        assert hear(reader) == m.Done(7), "the call is answered by whoever does the rest"
        assert owner.statistics().leases == 0


@pytest.mark.usefixtures("parted")
def test_a_takeover_comes_between_the_parts_of_a_publication_that_many_wait_for(path: str, successor_of: str) -> None:
    with contextlib.ExitStack() as stack:
        first, second, owner, reader = about_to_be_taken_over(stack, path)
        for call in range(1, 1_001):
            say(reader, m.Attach(call, "w", expect={"is": "other"}, wait=None))
        until(lambda: first.catalogue.waiting == 1_000, what="those who wait")
        publish_one(owner, {"is": "this"})
        until(lambda: first.turns.fairness.shut, what="two parts")  # type: ignore[attr-defined]
        assert take_over(second)
        answered = 3 if successor_of == "this" else 1_000  # one with the publication itself, two in parts
        assert second.catalogue.waiting == 1_000 - answered
        stack.enter_context(serving(second))
        refused = [hear(reader) for _ in range(1_000)]
        assert {reply.kind for reply in refused if isinstance(reply, m.Error)} == {"MismatchError"}
        assert sorted(reply.call for reply in refused) == list(range(1, 1_001))


def test_a_user_alone_never_waits(path: str) -> None:
    """Also behind a gate that is shut: nobody asks it."""
    with serving(make(path, connections=20)) as server, contextlib.ExitStack() as stack:
        server.turns.fairness = gate = Gate()
        gate.shut = True
        for _ in range(5):
            one: KeeperClient = connect(stack, path)
            assert one.list() == []
        assert gate.waits == 0


# -- who pays ---------------------------------------------------------------------------------------------------------


class Clock:
    """The keeper's own time, and a loop that does what is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: Callable[[], None] = lambda: None
        self.due: list[tuple[float, Callable[[], None]]] = []

    def thread_time(self) -> float:
        return self.now

    monotonic = thread_time

    def call_soon(self, act: Callable[[], None]) -> Handle:
        return self.call_later(0.0, act)

    def call_later(self, delay: float, act: Callable[[], None]) -> Handle:
        entry = (self.now + delay, act)
        self.due.append(entry)
        return Handle(lambda: self.due.remove(entry))

    def run(self, until: float) -> None:
        """Do what is due until then."""
        while self.due and min(self.due)[0] <= until:
            entry = min(self.due, key=lambda one: one[0])
            self.due.remove(entry)
            self._pass(entry[0])
            entry[1]()
        self._pass(until)

    def _pass(self, until: float) -> None:
        """Nothing is done until then."""
        self.now = max(self.now, until)
        self.waits()


class Handle:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


GREEDY, MODEST, MILLISECOND = 1, 2, 0.001


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("vram.keeper.turns.time", made)
    return made


def turns_at(clock: Clock) -> Turns:
    server = SimpleNamespace(by_user={GREEDY: 1, MODEST: 1}, loop=clock, paused=False, now=clock.thread_time)
    turns = Turns(cast("TurnsHost", server))
    turns.selector.close()

    def turn() -> None:
        turns.selector.began = clock.now

    clock.waits = turn
    return turns


def asks_little(turns: Turns, clock: Clock) -> None:
    now = clock.now
    assert turns.fairness.may(MODEST, now), "who asks little waits"
    clock.now += MILLISECOND / 10
    turns.fairness.spent(MODEST, MILLISECOND / 10, now)
    clock.waits()


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside who asks little"])
def test_who_connects_all_the_time_has_a_share_of_the_keepers_time(clock: Clock, company: bool) -> None:
    """A tenth of a millisecond for each connection: alone all there are, and beside others a share of the time."""
    turns = turns_at(clock)
    accepted: list[float] = []
    waits = [False]

    def accept(*, in_turn: bool = False) -> None:
        with turns.accepting(in_turn=in_turn) as charge:
            clock.now += MILLISECOND / 10
            charge(GREEDY)
        accepted.append(clock.now)

    def in_turn() -> None:
        waits[0] = False
        accept(in_turn=True)

    while clock.now < 1.0:
        end = clock.now + MILLISECOND
        if company:
            asks_little(turns, clock)
        while clock.now < end and not waits[0]:
            if turns.may_accept(in_turn):
                accept()
            else:
                waits[0] = True
        clock.run(end)
    used = len(accepted) / 10_000
    if company:
        assert used < SHARE * 1.2 + ADVANCE, "more than a share was used"
        assert used > SHARE * 0.8
    else:
        assert used > 0.95


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside who asks little"])
def test_what_a_user_left_to_be_done_is_done_in_that_users_time(clock: Clock, company: bool) -> None:
    turns = turns_at(clock)
    done: list[float] = []

    def part() -> None:
        clock.now += MILLISECOND / 10
        done.append(clock.now)
        turns.later(GREEDY, part)

    turns.later(GREEDY, part)
    while clock.now < 1.0:
        if company:
            asks_little(turns, clock)
        clock.run(clock.now + MILLISECOND)
    used = len(done) / 10_000
    if company:
        assert used < SHARE * 1.2 + ADVANCE, "more than a share was used"
        assert used > SHARE * 0.8
    else:
        assert used > 0.95


def test_the_loops_own_work_for_a_request_is_charged_with_it(clock: Clock) -> None:
    turns = turns_at(clock)
    clock.now += 1.0  # of somebody's that is charged already
    turns._since(turns._begin())
    clock.waits()
    clock.now += MILLISECOND  # the loop looks at what is ready, and calls
    with turns.charged(GREEDY):
        clock.now += MILLISECOND
    assert turns.fairness._users[GREEDY].owed == pytest.approx(2 * MILLISECOND), "what the loop does nobody pays for"
    with turns.charged(MODEST):
        clock.now += MILLISECOND
    assert turns.fairness._users[MODEST].owed == pytest.approx(MILLISECOND), "it pays for the one before, too"


def test_those_who_wait_pay_for_being_served_in_nobodys_turn(path: str) -> None:
    with contextlib.ExitStack() as stack:
        server = make(path, connections=20)
        stack.enter_context(serving(server))
        owner, reader = connect(stack, path), raw(stack, path)
        charged: list[int] = []
        spent = server.turns.fairness.spent

        def note(uid: int, *arguments: Any, **options: Any) -> None:
            charged.append(uid)
            spent(uid, *arguments, **options)

        server.turns.fairness.spent = note  # type: ignore[method-assign]
        for call in range(1, 501):
            say(reader, m.Attach(call, "w", expect={"is": "other"}, wait=None))
        until(lambda: server.catalogue.waiting == 500, what="those who wait")
        publish_one(owner, {"is": "this"})
        assert {reply.kind for reply in (hear(reader) for _ in range(500)) if isinstance(reply, m.Error)}
        assert charged.count(os.getuid()) > 1, "nobody's turns are free for those who wait"


def test_leases_that_are_given_back_again_and_again_are_kept_once(path: str) -> None:
    """Nothing more is read of who gave many back until that is done, and ids of nothing are not kept at all."""
    with contextlib.ExitStack() as stack:
        first, _, owner, reader = about_to_be_taken_over(stack, path)
        publish_one(owner)
        session = many_leases(first, 4_000)
        ids = list(session.leases)
        say(reader, m.Release(1, list(range(10**6, 10**6 + 4_000))))
        assert hear(reader) == m.Done(1), "what is not there takes parts"
        for call in range(2, 7):
            say(reader, m.Release(call, ids))
        until(lambda: first.turns.fairness.shut, what="two parts")  # type: ignore[attr-defined]
        parts: list[int] = []
        within(first, lambda: parts.append(len(first.service._parts)))
        assert parts == [1], "what is asked for again is kept again"
        first.turns.fairness.shuts_after = None  # type: ignore[attr-defined]
        reopen(first, cast("Gate", first.turns.fairness))
        assert [hear(reader) for _ in range(5)] == [m.Done(call) for call in range(2, 7)]
        assert owner.statistics().leases == 0


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside another user"])
def test_requests_wait_for_the_effects_of_those_before(path: str, company: bool) -> None:
    """Or a user who asks for more than is done at once would have the keeper remember all of it."""
    with gated(path) as (server, gate), contextlib.ExitStack() as stack:
        if not company:
            server.by_user.pop(NOBODY_HERE)
        owner, reader = connect(stack, path), raw(stack, path)
        publish_one(owner)
        service = server.service
        gate.shut = True
        uid = os.getuid()

        def much() -> None:
            """More than a part."""
            session = next(iter(server.connections.values())).session
            service.carry_out([Notify(session, "w", number, "replaced", 0) for number in range(100)], uid)

        within(server, much)
        say(reader, m.Statistics(7))
        wait_for(gate, 2)
        assert len(service._due[uid]) == 100 - PART
        reopen(server, gate)
        assert isinstance(hear(reader), m.KeeperStatistics)
        assert not service._due


def test_nobodys_answer_stands_behind_what_another_user_has_done(path: str) -> None:
    with gated(path) as (server, gate), contextlib.ExitStack() as stack:
        reader = raw(stack, path)
        gate.shut = True
        service, session = server.service, next(iter(server.connections.values())).session
        assert session is not None
        news = [Notify(session, "w", number, "replaced", 0) for number in range(100)]
        within(server, lambda: service.carry_out(news, GREEDY))
        within(server, lambda: service.carry_out([Notify(session, "answer", 1, "removed", 0)], MODEST))
        heard = [hear(reader) for _ in range(PART + 1)]
        assert [one.name for one in heard if isinstance(one, m.Notice)] == ["w"] * PART + ["answer"]
        successor = make(path, connections=20)
        server.by_user.pop(NOBODY_HERE)
        assert take_over(successor)
        stack.enter_context(serving(successor))
        say(reader, m.Statistics(1))
        rest = [hear(reader) for _ in range(100 - PART + 1)]
        assert [type(one) for one in rest] == [m.Notice] * (100 - PART) + [m.KeeperStatistics], (
            "a takeover loses effects"
        )
