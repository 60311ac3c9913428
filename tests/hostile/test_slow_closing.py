"""What takes long to close, and how long is for its sender to say: others notice nothing of it.

Each close of a descriptor goes through the POSIX locks of its file, which whoever may write to it can make any number
of: half a millisecond with 20,000, and a fifth of one with as many as here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial

import pytest
from tests.support.catalogues import publish, waits
from tests.support.gated_keeper import Gate, gated, hear, raw, reopen, say, wait_for, within
from tests.support.keeper_here import later, serving
from tests.support.open_files import is_open
from tests.support.other_users import needs_root
from tests.support.servers import make
from tests.support.stuck_files import locked, stuck
from tests.support.users import GREEDY, MODEST, being, open_to_all

from vram import open_files
from vram.errors import QuotaError
from vram.keeper import messages as m
from vram.keeper import server as server_module
from vram.keeper import slow_close
from vram.keeper.accounts import REPLACED
from vram.keeper.catalogue import Catalogue
from vram.keeper.client import KeeperClient, Segment
from vram.keeper.limits import Quotas
from vram.keeper.notices import _Line
from vram.keeper.private import short_directory
from vram.keeper.records import Effect, Free, Notify, Refused
from vram.keeper.server import KeeperServer
from vram.keeper.slow_close import SlowCloser, Unclosed
from vram.keeper.takeover import take_over
from vram.testing.keeper import SOON, memfds, until

pytestmark = pytest.mark.slow  # goes with lanes of closing

ME = os.geteuid()
ONE, ANOTHER = 5001, 5002
LOCKS = 8_000
KIB4 = Segment(4096)


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as place:
        yield f"{place}/k"


# -- descriptors that wait to be closed -------------------------------------------------------------------------------


@needs_root
def test_who_replaces_faster_than_is_closed_leaves_others_their_descriptors() -> None:
    """What was replaced counted no more: one user filled the keeper's table with what waited to be closed."""
    over, heard = threading.Event(), []

    def replace(one: KeeperClient, fd: int) -> None:
        while not over.is_set():
            try:
                one.publish("greedy", [KIB4] * 200, [fd] * 200, writable=True)
            except QuotaError as error:
                heard.append(str(error))

    with open_to_all(descriptors=2048) as keeper, contextlib.ExitStack() as stack, memfds(1) as fds:
        fd = stack.enter_context(locked(LOCKS))
        with being(GREEDY):
            greedy = stack.enter_context(KeeperClient.connect(keeper.path))
        with being(MODEST):
            modest = stack.enter_context(KeeperClient.connect(keeper.path))
        thread, came = later(partial(replace, greedy, fd))
        try:
            number = 0
            while not came and (number < 30 or not heard):
                number += 1
                modest.publish("modest", [KIB4] * 30, fds * 30)
        finally:
            over.set()
            thread.join(SOON)
        assert came == [None]
        assert "still being closed; try again when they are" in heard[0]


def test_what_is_not_counted_any_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader leaves what takes it long to threads of its own: a keeper that did the same counted what was open as
    closed, and one user filled its table."""
    monkeypatch.setattr(open_files, "_MOMENT", 0.0)
    monkeypatch.setattr(open_files, "_MAX_THREADS", 0)
    monkeypatch.setattr(slow_close, "_MAX_THREADS", 0)  # the test does it itself
    closer = SlowCloser(10_000, 400, ME, lambda: None)
    with memfds(1) as (little,):
        numbers = [os.dup(little) for _ in range(2 * slow_close._PART + 1)]
        closer.free(list(numbers), 4096, ANOTHER)
        assert closer.of(ANOTHER) == Unclosed(handles=len(numbers), nbytes=4096)
        lane = closer._lanes[ANOTHER]
        while lane:
            close, counted = lane.popleft()
            before = sum(map(is_open, numbers))
            close()
            assert before - sum(map(is_open, numbers)) == counted.handles, "it counts as closed, and is open"
        assert not any(map(is_open, numbers))


def test_descriptors_that_are_still_open_count_for_who_publishes(path: str) -> None:
    """Against their user's ceiling and against the keeper's own, but not against another user's."""
    with serving(make(path)) as server, KeeperClient.connect(path) as one:
        user, every = (
            getattr(server.catalogue.accounts.quotas, name) for name in ("user_descriptors", "max_descriptors")
        )
        closer = server.slow_closer
        for uid, count in ((ME, user - 5), (ANOTHER, every - 5)):
            with stuck(closer, uid, count):
                one.offer("w", 4096, handles=5)
                with pytest.raises(QuotaError, match=rf"holds 0, and {count} that were removed are still being closed"):
                    one.offer("w", 4096, handles=6)
            closer.finish(SOON)
        with stuck(closer, ANOTHER, user):
            one.offer("w", 4096, handles=6)


def test_half_a_replacement_does_not_hold_as_many_descriptors_once_more() -> None:
    """A publication that is never completed: those of the version that it would replace are open as well."""
    books = Catalogue(Quotas(max_descriptors=40, user_descriptors=20), keeper_uid=ME)
    ann = books.connect(ONE)
    publish(books, ann, handles=20)
    with pytest.raises(QuotaError, match=f"uid {ONE} may hold 20 descriptors .*and would hold {40 - REPLACED}"):
        books.begin(ann, "w", nbytes=100, handles=20)
    books.abandon(books.begin(ann, "w", nbytes=100, handles=REPLACED))


# -- whose turn it is in closing --------------------------------------------------------------------------------------


def test_nobodys_memory_waits_for_another_users_to_be_freed() -> None:
    closer = SlowCloser(100, 25, ME, lambda: None)
    with stuck(closer, ONE), memfds(1) as (fd,):
        number = os.dup(fd)
        closer.free([number], 4096, ANOTHER)
        until(lambda: not is_open(number), what="the end of one user's memory beside another's that does not end")
        assert closer.of(ONE) == Unclosed(handles=1)
    closer.finish(SOON)
    assert closer.total == Unclosed()


def test_where_there_are_more_users_than_threads_each_has_one_closed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_close, "_MAX_THREADS", 1)
    closer, order = SlowCloser(100, 25, 0, lambda: None), []
    with stuck(closer, ANOTHER + 1):
        for uid in (ONE, ONE, ONE, ANOTHER):
            closer._put(uid, (partial(order.append, uid), Unclosed(handles=1)))
    closer.finish(SOON)
    assert order == [ONE, ANOTHER, ONE, ONE]


# -- the end and a takeover, with lanes half done ---------------------------------------------------------------------


def test_a_keeper_waits_at_its_end_for_memory_that_is_being_freed() -> None:
    closer, ended = SlowCloser(100, 25, ME, lambda: None), threading.Event()
    with stuck(closer, ONE):
        closer.finish(0.0)
        thread = threading.Thread(target=lambda: (closer.finish(SOON), ended.set()))
        thread.start()
        assert not ended.wait(0.05)
    thread.join(SOON)
    assert ended.is_set()


def test_a_takeover_does_not_wait_for_what_is_still_being_closed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_CLOSING", 0.1)
    first, second = make(path), make(path)
    with contextlib.ExitStack() as stack, memfds(1) as fds:
        stack.enter_context(stuck(first.slow_closer, ME))
        stack.enter_context(serving(first))
        one = stack.enter_context(KeeperClient.connect(path))
        for _ in range(2):
            one.publish("w", [KIB4], fds)
        assert take_over(second)
        stack.enter_context(serving(second))
        assert [entry.version for entry in one.list()] == [2]
        assert one.statistics().descriptors == 1
        assert second.slow_closer.total == Unclosed(), "what the first one closes counts no more"


# -- many that are late at once ---------------------------------------------------------------------------------------


def unfinished(server: KeeperServer) -> list[int]:
    return [len(one.partials) for one in server.connections.values()]


def test_publications_of_which_nothing_more_came_end_in_turns_of_their_user(path: str) -> None:
    """Thousands in one turn of the loop were seconds in which nobody was served."""
    with gated(path) as (server, gate), contextlib.ExitStack() as stack, memfds(2) as fds:
        channels = [raw(stack, path) for _ in range(3)]
        for channel in channels:
            for call in (1, 2):
                say(channel, m.Publish(call, f"w{call}", [m.SegmentRow(4096, 1, 0)] * 2, ["host"]), fds[:1])
                assert hear(channel) == m.NextPart(call, 1)
        late = server.patience * 10
        server.now = lambda: time.monotonic() + late
        gate.shut = True
        for _ in range(2):
            within(server, server._tick)
        assert unfinished(server) == [2, 2, 2], "they were ended in nobody's turn"
        wait_for(gate, 1)
        take_turns(server, gate, 1)
        assert unfinished(server) == [0, 2, 2]
        take_turns(server, gate, 1)
        assert unfinished(server) == [0, 0, 2]
        reopen(server, gate)
        until(lambda: not any(unfinished(server)), what="the end of them all")
        assert server._late == {}


def take_turns(server: KeeperServer, gate: Gate, count: int) -> None:
    gate.shuts_after = count
    reopen(server, gate)
    until(lambda: gate.shut, what="the end of its turns")
    within(server, lambda: None)
    gate.shuts_after = None


def test_a_publication_that_goes_on_before_its_end_came_is_not_ended(path: str) -> None:
    with gated(path) as (server, gate), contextlib.ExitStack() as stack, memfds(2) as fds:
        channel = raw(stack, path)
        say(channel, m.Publish(1, "w", [m.SegmentRow(4096, 1, 0)] * 2, ["host"]), fds[:1])
        assert hear(channel) == m.NextPart(1, 1)
        gate.shut = True
        ahead = server.patience * 10
        server.now = lambda: time.monotonic() + ahead
        within(server, server._tick)
        wait_for(gate, 1)
        (connection,) = server.connections.values()
        connection.partials[1].since = server.now()
        reopen(server, gate)
        until(lambda: not server._late, what="its turn")
        say(channel, m.Part(2, 1, 1), fds[1:])
        assert hear(channel) == m.Published(2, 1)


def test_what_is_due_is_charged_to_whose_it_is(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """In nobody's turn, it had the time of those who wait for a name; and whoever asked next paid for it."""
    with gated(path) as (server, _):
        carried: list[tuple[int, list[Effect]]] = []
        charged: dict[int, int] = {}
        monkeypatch.setattr(server.service, "carry_out", lambda effects, uid: carried.append((uid, list(effects))))
        monkeypatch.setattr(server.turns, "shared", lambda users: keeping(users, charged))

        def act() -> None:
            books = server.catalogue
            owner, waiter, watcher = (books.connect(uid) for uid in (1, 2, 3))
            publish(books, owner, ttl=5.0)
            books.watch(watcher, "w", 1)
            waits(books, waiter, 1, "late", wait=5.0)
            server.service.expire()

        server.now = lambda: time.monotonic() + 3600
        within(server, act)
        found = [(uid, [type(effect) for effect in effects]) for uid, effects in carried]
        assert found == [(3, [Notify]), (1, [Free]), (2, [Refused])]
        assert charged == {1: 2, 2: 2, 3: 1}, "for each that was due, and for each whom it is told to"


@contextlib.contextmanager
def keeping(users: dict[int, int], charged: dict[int, int]) -> Iterator[None]:
    yield
    charged.update(users)


class Talkative(_Line):
    """To a keeper that never stops telling news."""

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self.heard = deque()

    def _read_one(self, timeout: float | None) -> None:
        self.heard.append(m.Notice(0, "w", 1, "replaced", 2))
        assert len(self.heard) < 1000, "it reads for ever, and passes nothing on"

    def _wake_waiters(self) -> None:
        pass


def test_news_without_end_are_passed_on_as_they_come() -> None:
    line = Talkative()
    line.pump()
    assert line.heard
    assert not line._reading.locked()
