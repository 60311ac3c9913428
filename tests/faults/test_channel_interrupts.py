"""Ctrl-C at every point where a channel is made, or dropped, the standard library's lines included (I12)."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON, until
from tests.support.interrupts import interrupt, interrupt_finalizers, room
from tests.support.samples import least, nths

from vram import lifetime
from vram.keeper.bind import Listener
from vram.open_files import close_fds, unclosed
from vram.sharing.channel import Channel, accept, take_over

ROOMS = room("sharing/", "lifetime.py", "open_files.py", "std:socket")


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(tmp_path / "s"))
        sock.listen(8)
        sock.setblocking(False)
        yield sock


Making = Callable[[socket.socket], Callable[[], object]]


def connect(listener: socket.socket) -> Callable[[], object]:
    path = listener.getsockname()
    return lambda: Channel.connect(path, 5.0)


def pair(listener: socket.socket) -> Callable[[], object]:
    return Channel.pair


def adopt(listener: socket.socket) -> Callable[[], object]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.close()
    return lambda: Channel(one)  # if it was not taken over it goes with this function


def accepted(listener: socket.socket) -> Callable[[], object]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(listener.getsockname())  # it waits to be accepted, although it is closed
    return lambda: Channel(accept(listener))


MAKING = {"connect": connect, "pair": pair, "adopt": adopt, "accept": accepted}


@pytest.mark.parametrize("how", MAKING)
def test_an_interrupt_leaves_no_socket_open_i12(listener: socket.socket, how: str) -> None:
    assert interrupts(listener, MAKING[how], lambda nth, act: interrupt(nth, act, ROOMS)) >= least(10)


@pytest.mark.parametrize("how", MAKING)
def test_an_interrupt_in_the_finalizer_of_a_channel_leaves_no_socket_open_i12(
    listener: socket.socket, how: str
) -> None:
    """Python prints such an interrupt, and what is left of the finalizer never runs."""
    assert interrupts(listener, MAKING[how], lambda nth, act: interrupt_finalizers(nth, act, ROOMS)) >= least(3)


def test_no_interrupt_comes_before_a_socket_that_nobody_took_is_closed_i12() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        fds = [one.detach()]
        assert not interrupt_finalizers(1, lambda: take_over(fds), ROOMS)
        assert not fds
        assert other.recv(1) == b""


def test_a_path_that_was_taken_away_when_an_interrupt_came_is_not_taken_away_again_i12(tmp_path: Path) -> None:
    """By then somebody else may listen there, with a socket of the same number."""
    path = tmp_path / "k"
    for nth in nths():
        listener = Listener(str(path))
        came = interrupt(nth, listener.unlink, room("keeper/bind.py"), returns=False)
        assert path.exists() or listener.inode is None, f"an interrupt at point {nth}"
        listener.unlink()
        assert not path.exists()
        listener.sock.close()
        if not came:
            break
    assert nth > 3


def test_descriptors_are_closed_wherever_an_interrupt_comes_i12() -> None:
    """One that stayed among those that are still to be closed, and that no thread came to, was closed by a forked child
    when its number was another file's."""
    for nth in nths():
        ends = [end for _ in range(2) for end in os.pipe()]
        left = list(ends)
        came = interrupt(nth, lambda left=left: close_fds(left), room("open_files.py"), returns=False)  # type: ignore[misc]
        for fd in left:  # which the caller still has
            os.close(fd)
        finish_closing()
        assert not unclosed()
        assert not open_files() & set(ends), f"left open by an interrupt at point {nth}"
        if not came:
            break
    assert nth > 5


def interrupts(listener: socket.socket, making: Making, come: Callable[[int, Callable[[], object]], bool]) -> int:
    """Make a channel and drop it, with an interrupt at each point; return how many there were."""
    before = descriptors(listener)
    for nth in nths():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was made and never handed out is dropped, as anything may be
            came = come(nth, making(listener))
            gc.collect(0)
            lifetime.live()  # works off what a finalizer could not
        assert descriptors(listener) == before, f"left open by an interrupt at point {nth}"
        assert not lifetime.stuck()
        if not came:
            return nth - 1
    raise AssertionError("there is an end to all points")


def descriptors(listener: socket.socket) -> int:
    """Count those of this process, once nobody is queued at the listener."""
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
    return len(os.listdir("/proc/self/fd"))


def finish_closing() -> None:
    """Wait for the threads that close what may block; an interrupt may have come before one of them started."""
    close_fds([os.open(os.devnull, os.O_RDONLY)])
    until(lambda: not any(thread.name == "vram: closing" for thread in threading.enumerate()))


def open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}


def test_descriptors_that_an_interrupted_finalizer_leaves_open_are_counted_i12() -> None:
    """It comes where the finalizer begins, or later in it: what is left open is known to be."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left_open = 0
    with other, Channel(one) as channel, open(os.devnull, "rb") as file:

        def take_and_drop() -> None:
            channel.take(timeout=SOON)

        for nth in nths():
            before, known = open_files(), len(lifetime.stuck())
            socket.send_fds(other, [b"x"], [file.fileno()])
            came = interrupt_finalizers(nth, take_and_drop, ROOMS)
            counted = len(lifetime.stuck()) - known
            finish_closing()  # what it owns may not be closed here as well: by then the number may be another file's
            left = open_files() - before
            for fd in left:
                os.close(fd)
            del lifetime._stuck[known:]
            assert counted >= len(left), "descriptors stay open, and nobody knows"
            assert counted <= came
            left_open += len(left)
            if not came:
                break
    assert left_open, "no finalizer was kept from closing anything"
