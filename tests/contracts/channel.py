"""What every channel between two processes must do: :class:`~vram.sharing.channel.Channel` as tests.

A subclass supplies a fixture ``channels``: two that are connected.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.support.deadlines import SOON, until
from tests.support.memfds import make_memfd, memfds

from vram.errors import ClosedError, PeerGoneError, UsageError, WaitTimeoutError
from vram.open_files import close_fds
from vram.sharing.channel import MAX_FDS, MAX_MESSAGE, Channel

_FUTEX = ("202", "98")  # the numbers of that system call on x86-64 and on arm64


class ChannelContract:
    """Messages keep their borders, descriptors their owners, and everything that waits has a deadline."""

    # -- messages -----------------------------------------------------------------------------------------------
    def test_messages_arrive_whole_and_in_order(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        sent = [b"a", b"bb" * 500, b"\0", bytes(range(256))]
        for payload in sent:
            one.send(payload)
        assert [other.recv(timeout=SOON) for _ in sent] == [(payload, []) for payload in sent]

    def test_any_buffer_can_be_sent(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        for payload in (b"bytes", bytearray(b"bytearray"), memoryview(b"a view of it")[2:6]):
            one.send(payload, timeout=SOON)
            assert other.recv(timeout=SOON)[0] == bytes(payload)

    def test_the_longest_message_passes_and_a_longer_one_is_refused(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        longest = os.urandom(MAX_MESSAGE)
        one.send(longest, timeout=SOON)
        assert other.recv(timeout=SOON)[0] == longest
        with pytest.raises(UsageError, match=str(MAX_MESSAGE)):
            one.send(longest + b"!")

    def test_an_empty_message_is_refused(self, channels: tuple[Channel, Channel]) -> None:
        one, _ = channels
        with pytest.raises(UsageError):
            one.send(b"")

    def test_each_message_goes_to_one_receiver(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        got: list[bytes] = []

        def receive() -> None:
            while (payload := other.recv(timeout=SOON)[0]) != b"end":
                got.append(payload)

        def send(start: int) -> None:
            for number in range(start, 400, 2):
                one.send(b"%d" % number, timeout=SOON)

        receivers = [threading.Thread(target=receive) for _ in range(3)]
        senders = [threading.Thread(target=send, args=(start,)) for start in (0, 1)]
        for thread in receivers + senders:
            thread.start()
        for thread in senders:
            thread.join(SOON)
        for _ in receivers:
            one.send(b"end", timeout=SOON)
        for thread in receivers:
            thread.join(SOON)
        assert sorted(int(payload) for payload in got) == list(range(400))

    # -- descriptors (I9) ---------------------------------------------------------------------------------------
    def test_i9_a_descriptor_arrives_as_the_same_file_and_close_on_exec(
        self, channels: tuple[Channel, Channel]
    ) -> None:
        one, other = channels
        with memfds(3) as sent:
            one.send(b"three", sent, timeout=SOON)
            payload, got = other.recv(timeout=SOON)
            try:
                assert payload == b"three"
                assert [os.fstat(fd).st_ino for fd in got] == [os.fstat(fd).st_ino for fd in sent]
                assert not set(got) & set(sent)
                assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in got)
            finally:
                close_fds(got)

    def test_i9_what_was_sent_outlives_the_senders_own(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        fd = make_memfd(content=b"still here")
        one.send(b"take it", [fd], timeout=SOON)
        os.close(fd)
        _, (got,) = other.recv(timeout=SOON)
        try:
            assert os.pread(got, 10, 0) == b"still here"
        finally:
            os.close(got)

    def test_the_most_descriptors_pass_and_more_are_refused(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        with memfds(1) as (fd,):
            one.send(b"many", [fd] * MAX_FDS, timeout=SOON)
            _, got = other.recv(timeout=SOON)
            count = len(got)
            close_fds(got)
            assert count == MAX_FDS
            with pytest.raises(UsageError, match=str(MAX_FDS)):
                one.send(b"too many", [fd] * (MAX_FDS + 1))

    def test_i4_a_bad_descriptor_sends_nothing(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        with memfds(1) as (fd,):
            with pytest.raises(UsageError, match="not open"):
                one.send(b"lost", [fd, 1_000_000], timeout=SOON)
        one.send(b"next", timeout=SOON)
        assert other.recv(timeout=SOON) == (b"next", [])

    def test_unread_descriptors_go_with_the_channel(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        reader, writer = os.pipe()
        try:
            one.send(b"a pipe", [writer], timeout=SOON)
            os.close(writer)
            other.close()
            poll = select.poll()
            poll.register(reader, select.POLLIN)
            assert poll.poll(SOON * 1000), "the pipe's other end is still open somewhere"
            assert os.read(reader, 1) == b""
        finally:
            os.close(reader)

    # -- waiting ------------------------------------------------------------------------------------------------
    def test_receiving_gives_up_in_time(self, channels: tuple[Channel, Channel]) -> None:
        one, _ = channels
        for timeout in (0, 0.02):
            started = time.monotonic()
            with pytest.raises(WaitTimeoutError):
                one.recv(timeout=timeout)
            assert timeout <= time.monotonic() - started < SOON

    def test_sending_to_who_does_not_read_gives_up_in_time_and_sends_nothing(
        self, channels: tuple[Channel, Channel]
    ) -> None:
        one, other = channels
        sent = 0
        with contextlib.suppress(WaitTimeoutError):
            while sent < 100_000:
                one.send(b"%06d" % sent, timeout=0)
                sent += 1
        assert sent < 100_000
        with pytest.raises(WaitTimeoutError):
            one.send(b"late", timeout=0.02)
        for number in range(sent):
            assert other.recv(timeout=SOON)[0] == b"%06d" % number
        with pytest.raises(WaitTimeoutError):
            other.recv(timeout=0)

    def test_sending_waits_until_there_is_room(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        got: list[bytes] = []

        def drain() -> None:
            while (payload := other.recv(timeout=SOON)[0]) != b"end":
                got.append(payload)

        reader = threading.Thread(target=drain)
        reader.start()
        block = bytes(MAX_MESSAGE)
        for timeout in [SOON, None] * 10:
            one.send(block, timeout=timeout)
        one.send(b"end", timeout=SOON)
        reader.join(SOON)
        assert len(got) == 20

    # -- ends ---------------------------------------------------------------------------------------------------
    def test_what_was_sent_before_the_end_is_read_before_the_end(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        one.send(b"last words", timeout=SOON)
        one.close()
        assert other.recv(timeout=SOON)[0] == b"last words"
        for timeout in (0, SOON, None):
            with pytest.raises(PeerGoneError):
                other.recv(timeout=timeout)
        for timeout in (0, SOON, None):
            with pytest.raises(PeerGoneError):
                other.send(b"anybody?", timeout=timeout)
        assert other.is_gone()

    def test_closing_wakes_who_waits_here(self, channels: tuple[Channel, Channel]) -> None:
        for attempt in range(20):
            one, other = channels if attempt == 0 else Channel.pair()
            ended: list[type[BaseException]] = []
            waiting = threading.Thread(target=_receive, args=(one, SOON if attempt % 2 else None, ended))
            waiting.start()
            until(lambda: _waits_in_kernel(waiting))  # noqa: B023
            one.close()
            waiting.join(SOON)
            other.close()
            assert ended == [ClosedError]

    def test_i2_a_closed_channel_says_so_and_closes_again(self, channels: tuple[Channel, Channel]) -> None:
        one, _ = channels
        for _ in range(2):
            one.close()
        for use in (lambda: one.send(b"x"), lambda: one.recv(timeout=0), one.fileno, one.peer, one.is_gone):
            with pytest.raises(ClosedError):
                use()

    # -- who ----------------------------------------------------------------------------------------------------
    def test_the_peer_is_who_the_kernel_says(self, channels: tuple[Channel, Channel]) -> None:
        for channel in channels:
            peer = channel.peer()
            assert (peer.uid, peer.gid) == (os.geteuid(), os.getegid())
            assert peer.pid is None or peer.pid > 0

    def test_it_can_be_polled(self, channels: tuple[Channel, Channel]) -> None:
        one, other = channels
        poll = select.poll()
        poll.register(one.fileno(), select.POLLIN)
        assert not poll.poll(0)
        other.send(b"news", timeout=SOON)
        assert poll.poll(SOON * 1000)
        assert one.recv(timeout=0)[0] == b"news"
        assert not one.is_gone()


def _waits_in_kernel(thread: threading.Thread) -> bool:
    """Whether a thread is in the system call that it went for; where the kernel does not say, whether it is near."""
    if sys._current_frames()[thread.ident or 0].f_code.co_filename == __file__:
        return False
    try:
        call = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()[0]
    except OSError:
        return True
    return call not in ("running", *_FUTEX)  # which is how it waits for the interpreter


def _receive(channel: Channel, timeout: float | None, ended: list[type[BaseException]]) -> None:
    try:
        channel.recv(timeout=timeout)
    except BaseException as error:
        ended.append(type(error))
