"""A lender that is a stranger, and whoever listens where a keeper is looked for: what it says, sends and leaves unread
costs those who ask a bounded time, and a bounded number of descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.deadlines import AT_ONCE, SOON
from tests.support.keeper_here import later
from tests.support.memfds import memfds
from tests.support.places import short_directory

from vram.errors import (
    InternalError,
    ProtocolError,
    WaitTimeoutError,
)
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.rules import LENT
from vram.sharing import channel as channel_module

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


def test_what_finds_no_room_is_not_kept_as_said() -> None:
    """The next keeper would hear it once for each try, and what was said before would be forgotten for it."""
    with connected() as (one, _):
        fill(one)
        for lease in range(1, 200):
            one.release_later(lease)
        assert list(one._said) == []
        assert list(one._unsaid) == [m.Release(0, [lease]) for lease in range(1, 200)]


WITHOUT: dict[str, Callable[[int], m.Reply]] = {
    "done": m.Done,
    "an error": lambda call: m.Error(call, "NotFoundError", "none"),
    "a listing": lambda call: m.Rows(call, [], False),
    "a claim": lambda call: m.Claimed(call, 5),
    "news": lambda call: m.Notice(call, "n", 1, "replaced", 2),
    "an answer": lambda call: m.LeaseState(call, True, 1, False, 0, False, False, False),
}


@pytest.mark.parametrize("what", WITHOUT)
@pytest.mark.parametrize("whose", ["the call's", "nobody's"])
def test_descriptors_with_what_has_none_end_the_connection(what: str, whose: str) -> None:
    """A million locks on a memfd make it memory all the same, and slow to close."""
    with connected() as (one, other), memfds(2) as fds:
        thread, came = later(lambda: one.attach(LENT, timeout=SOON))
        call = other.hear().call
        other.say(WITHOUT[what](call if whose == "the call's" else call + 100), fds)
        thread.join(SOON)
        assert isinstance(came[0], ProtocolError), came
        assert "which has none" in str(came[0])
        assert not one.is_usable
        assert other.is_ended()


def test_descriptors_with_what_makes_no_sense_end_the_connection() -> None:
    with connected() as (one, other), memfds(2) as fds:
        thread, came = later(lambda: one.attach(LENT, timeout=SOON))
        call = other.hear().call
        socket.send_fds(other.sock, [m.encode(["novelty", call])], fds)
        thread.join(SOON)
        assert isinstance(came[0], ProtocolError), came
        assert not one.is_usable


# -- answers that come late --------------------------------------------------------------------------------------------
def test_the_answers_to_calls_that_were_given_up_may_come() -> None:
    count = 48
    with connected() as (one, other):
        one.grace = 0.0
        for _ in range(count):
            with pytest.raises(WaitTimeoutError):
                one.attach(LENT, timeout=0.001)
        calls = [other.hear().call for _ in range(2 * count)][::2]
        one.grace = SOON

        def answer() -> None:
            for number, call in enumerate(calls):
                other.say(m.Error(call, "NotFoundError", "none") if number % 2 else m.Attached(call, number, 1, ENTRY))
            while (request := other.hear()).call == 0:
                pass
            other.say(m.Rows(request.call, [], False))

        thread, _ = later(answer)
        assert one.list() == []
        thread.join(SOON)


# -- listening for news -----------------------------------------------------------------------------------------------
@contextlib.contextmanager
def leased() -> Iterator[tuple[KeeperClient, Lender]]:
    """A connection that has lease 1, and its lender."""
    with connected() as (one, other), memfds(1) as fds:
        thread, came = later(lambda: one.attach(LENT, timeout=SOON))
        other.say(m.Attached(other.hear().call, 1, 1, ENTRY), fds)
        thread.join(SOON)
        yield one, other
        one.give_back(came[0])


def test_news_that_come_before_the_reply_to_their_watch_are_told() -> None:
    """News of the same version that others were told of came in between."""
    with leased() as (one, other):
        thread, signals = later(lambda: one.signal((LENT, 1)))
        call = other.hear().call
        other.say(m.Notice(0, LENT, 1, "revoked", 0))
        other.say(m.Notice(0, LENT, 1, "revoked", 0))
        other.say(m.Done(call))
        thread.join(SOON)
        assert select.select([signals[0]], [], [], SOON)[0]
        assert not one.subscriptions
        signals[0].close()


def test_a_watch_that_was_not_accepted_is_sent_again_by_its_call_alone() -> None:
    """The keeper that follows would refuse a second one, over quota, as nobody's call: that ends a connection."""
    with leased() as (one, other):
        one.lends = ""  # a keeper, after which another one may go on
        thread, signals = later(lambda: one.signal((LENT, 1)))
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
