"""Threads that close what may take long: one slow descriptor keeps nobody from the others."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import is_open

from vram.open_files import Closer
from vram.sharing.unread import close_filled


def pipes(count: int) -> list[int]:
    return [end for _ in range(count // 2) for end in os.pipe()]


class Stuck(socket.socket):
    """A socket whose close returns when the test lets it."""

    let = threading.Event()

    def close(self) -> None:
        assert type(self).let.wait(SOON)
        super().close()


def filled() -> tuple[socket.socket, socket.socket]:
    """Two ends, in the first of which a descriptor is unread."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open("/dev/null", "rb") as file:
        socket.send_fds(far, [b"unread"], [file.fileno()])
    return near, far


@pytest.mark.parametrize("sent", [[], [b"x"], [b"x"] * 63, [b"", b"x", b""]])
def test_a_socket_without_unread_descriptors_is_closed_at_once(sent: list[bytes]) -> None:
    closer = Closer()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        for payload in sent:
            far.send(payload)
        close_filled(near, closer)
        assert near.fileno() == -1


@pytest.mark.parametrize("before", [[], [b"x"], [b""], [b"x"] * 70])
def test_a_socket_with_unread_descriptors_is_closed_elsewhere(before: list[bytes]) -> None:
    closer = Closer()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with far:
        for payload in before:
            far.send(payload)
        with open("/dev/null", "rb") as file:
            socket.send_fds(far, [b""], [file.fileno()])
        close_filled(near, closer)
        closer.finish(SOON)
        assert near.fileno() == -1


def test_what_does_not_close_keeps_neither_others_nor_the_end_waiting() -> None:
    Stuck.let.clear()
    closer, ends = Closer(), [filled() for _ in range(7)]
    for near, far in ends:
        close_filled(Stuck(fileno=near.detach()), closer)
        assert far.recv(1) == b"", "its peer is told at once"
    others = pipes(20)
    closer.close(others)
    until(lambda: not any(map(is_open, others)))
    began = time.monotonic()
    closer.finish(0.1)
    assert time.monotonic() - began < SOON / 4
    Stuck.let.set()
    for _, far in ends:
        far.close()
    closer.finish(SOON)


def test_closing_takes_eight_threads_and_their_end_is_awaited() -> None:
    closer, fds = Closer(linger=SOON), pipes(1000)
    before = threading.active_count()
    for fd in fds:
        closer.close([fd])
    assert threading.active_count() <= before + 8
    closer.finish(SOON)
    assert not any(map(is_open, fds))
    assert threading.active_count() == before
