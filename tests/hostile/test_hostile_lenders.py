"""A lender that is a stranger, and whoever listens where a keeper is looked for: what it says, sends and leaves unread
costs those who ask a bounded time, and a bounded number of descriptors."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.keeper_here import later
from tests.support.memfds import memfds

import vram
from vram.errors import WaitTimeoutError
from vram.keeper import messages as m
from vram.keeper import notices, rpc_connection
from vram.keeper.client import KeeperClient, client, close_client
from vram.keeper.private import short_directory
from vram.keeper.rules import LENT

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


# -- what it does not read --------------------------------------------------------------------------------------------
@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for longer than its deadline waits for ever."""
    monkeypatch.setattr(rpc_connection, "GRACE", 1e6)
    monkeypatch.setattr(rpc_connection, "_TAKE_BACK", 1e6)


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


# -- connections in the making ----------------------------------------------------------------------------------------
def test_who_does_not_greet_keeps_no_connection_to_others_waiting() -> None:
    with vram.zeros(8, "uint8", device="host") as array, short_directory() as place, listening() as (path, accept):
        with vram.lend(array, at=f"{place}/h"):
            slow, came = later(lambda: client(path, timeout=SOON))
            other = accept()  # it says hello now
            thread, honest = later(lambda: vram.borrow(f"{place}/h", timeout=SOON))
            thread.join(AT_ONCE)
            is_over = bool(honest)
            others = later(lambda: client(path, timeout=0.05))  # of this path it is waited for
            others[0].join(AT_ONCE)
            other.greet()
            slow.join(SOON)
            thread.join(SOON)
            assert is_over, "it waited for another connection"
            assert not isinstance(honest[0], WaitTimeoutError), "it waited for another connection"
            assert isinstance(came[0], KeeperClient), came
            assert isinstance(others[1][0], WaitTimeoutError), others
            assert client(path) is came[0]
            honest[0].close()
        close_client(f"{place}/h")


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


# -- listening for news -----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def leased() -> Iterator[tuple[KeeperClient, Callable[[], Lender]]]:
    """A connection that has lease 1, and what accepts the next one to where it listens for news."""
    with connected() as (one, other), listening() as (path, accept), memfds(1) as fds:
        one.path = path
        one.lends = "lender-1"
        thread, came = later(lambda: one.lease(LENT, timeout=SOON))
        other.say(m.Attached(other.hear().call, 1, 1, ENTRY), fds)
        thread.join(SOON)
        yield one, accept
        one.give_back(came[0])


@pytest.fixture
def long_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not answer is waited for as long as a test lasts."""
    monkeypatch.setattr(notices, "CONNECT_SECONDS", SOON)
    monkeypatch.setattr(rpc_connection, "_LENDERS_GRACE", SOON)


def answers_a_watch(accept: Callable[[], Lender]) -> Lender:
    line = accept()
    line.greet()
    line.say(m.Done(line.hear().call))
    return line


@pytest.mark.usefixtures("long_patience")
def test_who_is_told_before_its_question_is_answered_keeps_the_connection() -> None:
    """News of the same version that others were told of came in between, and nobody listened there any more."""
    with leased() as (one, accept):
        thread, first = later(lambda: one.signal(1))
        line = answers_a_watch(accept)
        thread.join(SOON)
        thread, second = later(lambda: one.signal(1))
        call = line.hear().call
        line.say(m.Notice(0, LENT, 1, "revoked", 0))
        ours = first[0].subscription.line
        until(lambda: notices._thread._wake() or not ours.listeners, what="the news for both")  # who asks may read it
        notices._thread._is_over()
        assert ours in notices._thread._lines
        line.say(m.Done(call))
        thread.join(SOON)
        assert isinstance(second[0], notices.Signal), second
        for came in (first, second):
            came[0].close()
        assert line.is_ended()
