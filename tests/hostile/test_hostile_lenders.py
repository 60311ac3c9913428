"""A lender that is a stranger, and whoever listens where a keeper is looked for: what it says, sends and leaves unread
costs those who ask a bounded time, and a bounded number of descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.descriptor_limits import (
    limit_of_descriptors,
)
from tests.support.keeper_here import later
from tests.support.memfds import memfds

import vram
from vram.errors import (
    AccessDeniedError,
    DriverError,
    InternalError,
    PeerGoneError,
    ProtocolError,
    WaitTimeoutError,
)
from vram.keeper import messages as m
from vram.keeper import rpc_connection
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import short_directory
from vram.keeper.rules import LENT
from vram.sharing import channel as channel_module
from vram.sharing.channel import Channel, check_room

pytestmark = pytest.mark.slow  # goes with the defence against lenders

ENTRY = m.Entry(LENT, 1, 0, False, [m.SegmentRow(4096, 1, 0)], ["host"], b"", False, {})


class Lender:
    """The lender's end of a connection, which says what the test has it say."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(SOON)

    def greet(self) -> None:
        assert isinstance(m.decode_hello(self.sock.recv(1 << 17)), m.Hello)
        self.say(m.Welcome(os.getpid(), "lender-1"))

    def hear(self) -> Any:
        return m.decode_request(self.sock.recv(1 << 17))

    def say(self, reply: m.Reply, fds: list[int] | None = None) -> None:
        socket.send_fds(self.sock, [m.encode(reply)], fds or [])

    def is_ended(self) -> bool:
        """Whether the other end is, once everything that it said was read."""
        while True:
            try:
                if not self.sock.recv(1 << 17):
                    return True
            except ConnectionResetError:
                continue
            except TimeoutError:
                return False


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, Callable[[], Lender]]]:
    """A path at which a stranger listens, and what accepts the next connection there."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(short_directory())
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(f"{place}/s")
        listener.listen(50)
        listener.settimeout(SOON)

        def accept() -> Lender:
            return Lender(stack.enter_context(listener.accept()[0]))

        yield f"{place}/s", accept
        close_client(f"{place}/s")


@contextlib.contextmanager
def connected() -> Iterator[tuple[KeeperClient, Lender]]:
    """A connection, and the lender's end of it."""
    with listening() as (path, accept):
        thread, came = later(lambda: KeeperClient.connect(path, timeout=SOON))
        other = accept()
        other.greet()
        thread.join(SOON)
        with came[0] as one:
            yield one, other


def fill(one: KeeperClient) -> None:
    """Send until the lender's socket has no room, not even for a byte."""
    for size in (1000, 1):
        with contextlib.suppress(WaitTimeoutError):
            while True:
                one._channel.send(b"x" * size, timeout=0)


# -- what a lender says -----------------------------------------------------------------------------------------------
def test_a_lender_that_says_that_it_is_gone_is_not_asked_again_and_again() -> None:
    """One that says so and stays kept a borrower busy for ever, whatever its timeout."""
    heard: list[str] = []

    def serve(other: Lender) -> None:
        other.greet()
        while len(heard) < 100:
            request = other.hear()
            if isinstance(request, m.Attach):
                heard.append(request.name)
                kind = "AccessDeniedError" if len(heard) == 1 else "PeerGoneError"
                other.say(m.Error(request.call, kind, "as it says"))

    with listening() as (path, accept):
        thread, _ = later(lambda: serve(accept()))
        with pytest.raises(AccessDeniedError):
            vram.borrow(path, timeout=SOON)
        with pytest.raises(PeerGoneError, match="as it says"):
            vram.borrow(path, timeout=SOON)
        close_client(path)
        thread.join(SOON)
    assert len(heard) == 2


# -- descriptors that it sends ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("said", [m.Welcome(1), m.Error(0, "PeerGoneError", "gone")])
@pytest.mark.parametrize("hears", [True, False])
def test_descriptors_that_come_with_a_greeting_are_not_received(
    monkeypatch: pytest.MonkeyPatch, said: m.Welcome | m.Error, hears: bool
) -> None:
    """They may be anything, and each greeting brought 253 of them."""

    def take(self: Channel, *, timeout: float | None = None) -> Any:
        raise AssertionError("it was received")

    monkeypatch.setattr(Channel, "take", take)
    with listening() as (path, accept), memfds(3) as fds:
        thread, came = later(lambda: KeeperClient.connect(path, timeout=SOON))
        other = accept()
        other.sock.recv(1 << 17, 0 if hears else socket.MSG_PEEK)
        other.say(said, fds)
        if not hears:  # the other end is told of a reset first, and finds what was said behind that
            other.sock.close()
        thread.join(SOON)
        assert isinstance(came[0], ProtocolError), came
        assert "is no keeper (descriptors came with its first message)" in str(came[0])
        assert not hears or other.is_ended()


WITHOUT: dict[str, Callable[[int], m.Reply]] = {
    "done": m.Done,
    "an error": lambda call: m.Error(call, "NotFoundError", "none"),
    "a listing": lambda call: m.Listing(call, [], False),
    "a claim": lambda call: m.Claimed(call, 5),
    "news": lambda call: m.Notice(call, "n", 1, "replaced", 2),
    "an answer": lambda call: m.IsStale(call, True, 1),
}


@pytest.mark.parametrize("what", WITHOUT)
@pytest.mark.parametrize("whose", ["the call's", "nobody's"])
def test_descriptors_with_what_has_none_end_the_connection(what: str, whose: str) -> None:
    """A million locks on a memfd make it memory all the same, and slow to close."""
    with connected() as (one, other), memfds(2) as fds:
        thread, came = later(lambda: one.lease(LENT, timeout=SOON))
        call = other.hear().call
        other.say(WITHOUT[what](call if whose == "the call's" else call + 100), fds)
        thread.join(SOON)
        assert isinstance(came[0], ProtocolError), came
        assert "which has none" in str(came[0])
        assert not one.is_usable
        assert other.is_ended()


def test_descriptors_with_what_makes_no_sense_end_the_connection() -> None:
    with connected() as (one, other), memfds(2) as fds:
        thread, came = later(lambda: one.lease(LENT, timeout=SOON))
        call = other.hear().call
        socket.send_fds(other.sock, [m.encode(["novelty", call])], fds)
        thread.join(SOON)
        assert isinstance(came[0], ProtocolError), came
        assert not one.is_usable


def lend_in_parts(one: KeeperClient, other: Lender, fd: int, total: int) -> tuple[Any, int]:
    """What comes of a lease of so many descriptors, 100 in a message, and how many were sent."""
    thread, came = later(lambda: one.lease(LENT, timeout=SOON))
    request, sent = other.hear(), 0
    entry = m.Entry(LENT, 1, os.geteuid(), False, [m.SegmentRow(4096, 1, 0)] * total, ["host"], b"", False, {})
    while isinstance(request, m.Attach | m.More):
        part = [fd] * min(100, total - sent)
        if isinstance(request, m.Attach):
            other.say(m.Attached(request.call, 1, total, entry), part)
        else:
            other.say(m.Descriptors(request.call, sent), part)
        sent += len(part)
        if sent == total:
            break
        request = other.hear()  # a Release, where no more are wanted
    thread.join(SOON)
    return came[0], sent


def test_no_lender_has_all_descriptors_of_a_process() -> None:
    """What came in parts was not counted until all had come, or not: 988 of 1,024 were open, and closed slowly."""
    with connected() as (one, other), memfds(1) as (fd,), limit_of_descriptors(1024):
        one.lends = "lender-1"
        refused, sent = lend_in_parts(one, other, fd, 1020)
        assert isinstance(refused, DriverError), refused
        assert "receiving 920 more descriptors" in str(refused)
        assert "less than a quarter" in str(refused)
        assert "`ulimit -n " in str(refused)
        assert sent == 100
        assert one.is_usable
        leased, sent = lend_in_parts(one, other, fd, 500)
        assert len(leased.fds) == sent == 500
        one.give_back(leased)
        assert isinstance(other.hear(), m.Release)
        one.lends = ""  # a keeper's are not refused where the entry is one's own
        leased, sent = lend_in_parts(one, other, fd, 800)
        assert len(leased.fds) == sent == 800
        one.give_back(leased)


def test_a_quarter_of_the_descriptors_is_left() -> None:
    with limit_of_descriptors(1024):
        check_room([9, 3], 758, "/path")
        check_room([], 768, "/path")
        with pytest.raises(DriverError, match="receiving 759 more descriptors from /path"):
            check_room([9, 3], 759, "/path")


# -- what it does not read --------------------------------------------------------------------------------------------
@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for longer than its deadline waits for ever."""
    monkeypatch.setattr(rpc_connection, "REQUEST", 1e6)
    monkeypatch.setattr(rpc_connection, "CANCEL", 1e6)


@pytest.mark.usefixtures("patient")
def test_a_call_is_over_in_time_though_its_lender_reads_nothing() -> None:
    with connected() as (one, other):
        one.grace = 0.05
        fill(one)
        for _ in range(2):
            thread, came = later(lambda: one.lease(LENT, timeout=0.05))
            thread.join(AT_ONCE)
            assert came, "it waits to send"
            assert isinstance(came[0], WaitTimeoutError), came
        assert one.is_usable
        one._given_back.append(7)  # as a finalizer does: it is sent before the next request
        thread, came = later(lambda: one.lease(LENT, timeout=0.05))
        thread.join(AT_ONCE)
        assert isinstance(came[0], WaitTimeoutError), came
        del other


@pytest.mark.usefixtures("patient")
def test_who_waits_for_its_turn_to_send_is_over_in_time_too() -> None:
    with connected() as (one, _):
        one.grace = 0.05
        with one._sending:
            thread, came = later(lambda: one.lease(LENT, timeout=0.05))
            thread.join(AT_ONCE)
            assert came, "it waits for the thread that sends"
            assert isinstance(came[0], WaitTimeoutError), came


def is_taken(lock: Any) -> bool:
    if lock.acquire(False):
        lock.release()
        return False
    return True


class Interrupt(Exception):
    """What the signal handler raises."""


@contextlib.contextmanager
def interrupted() -> Iterator[Callable[[], None]]:
    """Have a signal raise in the main thread; yields what sends it."""

    def handle(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def ended_at_the_latest(one: KeeperClient) -> Iterator[list[bool]]:
    """End a connection that is waited for too long; says whether that was so."""
    late: list[bool] = []

    def end() -> None:
        late.append(True)
        one.close()

    timer = threading.Timer(AT_ONCE, end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        timer.join(SOON)


@pytest.mark.usefixtures("patient")
def test_an_interrupt_of_a_call_that_waits_to_send_is_passed_on_at_once() -> None:
    """It was never sent: nothing is to be cancelled, and the connection goes on."""
    with connected() as (one, other), ended_at_the_latest(one) as late, interrupted() as interrupt:
        fill(one)
        thread, _ = later(lambda: (until(lambda: is_taken(one._sending), what="the wait"), interrupt()))
        with pytest.raises(Interrupt):
            one.lease(LENT, timeout=None)
        thread.join(SOON)
        assert late == []
        assert one.is_usable
        del other


@pytest.mark.usefixtures("patient")
def test_an_interrupt_of_a_call_whose_lender_reads_nothing_is_passed_on_at_once() -> None:
    """There is no room to say that nobody waits: that is said later, and what the call is granted is given back."""
    with connected() as (one, other), ended_at_the_latest(one) as late, interrupted() as interrupt:

        def fill_and_interrupt() -> None:
            assert isinstance(other.hear(), m.Attach)
            fill(one)
            interrupt()

        thread, came = later(fill_and_interrupt)
        with pytest.raises(Interrupt):
            one.lease(LENT, timeout=None)
        thread.join(SOON)
        assert came == [None]
        assert late == []
        assert one.is_usable
        assert list(one._cancelled) == [1]


# -- answers that come late --------------------------------------------------------------------------------------------
def test_the_answers_to_calls_that_were_given_up_may_come() -> None:
    count = 48
    with connected() as (one, other):
        one.grace = 0.0
        for _ in range(count):
            with pytest.raises(WaitTimeoutError):
                one.lease(LENT, timeout=0.001)
        calls = [other.hear().call for _ in range(2 * count)][::2]
        one.grace = SOON

        def answer() -> None:
            for number, call in enumerate(calls):
                other.say(m.Error(call, "NotFoundError", "none") if number % 2 else m.Attached(call, number, 1, ENTRY))
            while (request := other.hear()).call == 0:
                pass
            other.say(m.Listing(request.call, [], False))

        thread, _ = later(answer)
        assert one.list() == []
        thread.join(SOON)


def test_a_lender_that_takes_nothing_more_and_talks_on_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that shut its reading half and went on answering had a call of 1 s last 15 s."""
    monkeypatch.setattr(rpc_connection, "GOODBYE", 0.1)
    with connected() as (one, other):
        one.grace = SOON
        other.sock.shutdown(socket.SHUT_RD)
        talks = threading.Event()

        def talk() -> None:
            with contextlib.suppress(OSError):
                while not talks.is_set():
                    other.say(m.Error(99, "NotFoundError", "again"))

        talking, _ = later(talk)
        thread, came = later(one.list)
        thread.join(AT_ONCE)
        talks.set()
        talking.join(SOON)
        assert [type(error) for error in came] == [PeerGoneError]
        assert "is gone" in str(came[0])


# -- listening for news -----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def leased() -> Iterator[tuple[KeeperClient, Lender]]:
    """A connection that has lease 1, and its lender."""
    with connected() as (one, other), memfds(1) as fds:
        thread, came = later(lambda: one.lease(LENT, timeout=SOON))
        other.say(m.Attached(other.hear().call, 1, 1, ENTRY), fds)
        thread.join(SOON)
        yield one, other
        one.give_back(came[0])


def test_news_that_come_before_the_reply_to_their_watch_are_told() -> None:
    """News of the same version that others were told of came in between."""
    with leased() as (one, other):
        thread, signals = later(lambda: one.signal(1))
        call = other.hear().call
        other.say(m.Notice(0, LENT, 1, "revoked", 0))
        other.say(m.Notice(0, LENT, 1, "revoked", 0))
        other.say(m.Done(call))
        thread.join(SOON)
        assert select.select([signals[0]], [], [], SOON)[0]
        assert not one.subscriptions
        signals[0].close()


def test_a_lender_that_does_not_answer_a_watch_is_left_in_time() -> None:
    with leased() as (one, _):
        one.grace = 0.05
        with pytest.raises(WaitTimeoutError):
            one.signal(1)
        assert not one.subscriptions


def test_a_watch_that_was_not_accepted_is_sent_again_by_its_call_alone() -> None:
    """The keeper that follows would refuse a second one, over quota, as nobody's call: that ends a connection."""
    with leased() as (one, other):
        one._repeats = rpc_connection.Repeats()
        thread, signals = later(lambda: one.signal(1))
        call = other.hear().call
        other.say(m.Recovered(0, 1, 1))
        assert isinstance(other.hear(), m.Repeating)
        again = other.hear()
        assert (type(again), again.call) == (m.Watch, call)
        other.say(m.Done(call))
        thread.join(SOON)
        other.say(m.Recovered(0, 2, 1))
        assert isinstance(other.hear(), m.Repeating)
        again = other.hear()
        assert (type(again), again.call) == (m.Watch, 0)
        signals[0].close()


def test_a_thread_that_cannot_read_any_more_says_so_to_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with connected() as (one, other):
        thread, came = later(one.list)
        other.hear()
        monkeypatch.setattr(channel_module, "_receive", no_memory)
        other.say(m.Welcome(1))  # what the thread had been waiting for; the next one fails
        thread.join(AT_ONCE)
        assert [type(error) for error in came] == [InternalError]
        assert "no memory" in str(came[0])


def test_a_finalizer_in_the_middle_of_reading_may_ask_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run it in any thread, between the arrival of a message and its delivery."""
    asked: list[list[Any]] = []
    sort = rpc_connection.RpcConnection._sort

    def with_a_finalizer(self: Any, *message: Any) -> None:
        monkeypatch.setattr(rpc_connection.RpcConnection, "_sort", sort)
        asked.append(one.list())
        sort(self, *message)

    with connected() as (one, other):
        monkeypatch.setattr(rpc_connection.RpcConnection, "_sort", with_a_finalizer)
        thread, came = later(one.list)
        other.say(m.Listing(other.hear().call, [], False))
        other.say(m.Listing(other.hear().call, [], False))  # of the finalizer
        thread.join(AT_ONCE)
        assert came == [[]]
        assert asked == [[]]
