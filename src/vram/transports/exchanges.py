"""How the two ends of a transport between processes talk: a socket, two named pipes, or a file in memory.

What is said is small: handles and ids, never the bytes themselves. Only a socket carries file descriptors; the others
refuse them, with the reason, and tell the end of the other process as surely: a pipe by its end of file, a file by
the lock that the kernel takes away from whoever dies.

Each kind is made by ``listen(path)`` in one process and ``connect(path)`` in the other; it has one owner, is safe to
use from several threads, and is closed in the child of a fork.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import BusyError, MissingFileError, PeerGoneError, UnsupportedError, UsageError, WaitTimeoutError
from ..lifetime import Claim, Owned, close_all, own, shielded, waiting
from ..sharing.channel import MAX_MESSAGE, Channel, accept, check_path, poll

if TYPE_CHECKING:
    from typing import Self

_T = TypeVar("_T")
_SHORTEST, _LONGEST = 20e-6, 2e-3  # seconds between two looks, where nothing wakes who waits


class Exchange(Protocol):
    """Brings messages to the other end of a transport, in order. Owned by the transport that it is given to."""

    @property
    def carries_fds(self) -> bool:
        """Whether file descriptors can go with a message."""

    @property
    def most(self) -> int:
        """The bytes of the longest message."""

    def send(self, payload: bytes, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        """Send one message, whole or not at all.

        Raises
        ------
        UnsupportedError
            For descriptors, where they cannot travel.
        WaitTimeoutError
            If there was no room in so many seconds. Nothing was sent.
        PeerGoneError
            If the other end is gone.
        """

    def recv(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Return the next message and its descriptors, which the caller owns.

        Raises
        ------
        WaitTimeoutError
            If none came in so many seconds.
        PeerGoneError
            If the other end is gone, and everything that it sent was read.
        ProtocolError
            If what came is no message.
        """

    def is_gone(self) -> bool:
        """Whether the other end is gone, whatever may still be unread. Does not wait."""

    def close(self) -> None:
        """End it. Idempotent."""


class SocketExchange(Owned):
    """Over a unix socket: bytes and file descriptors.

    Parameters
    ----------
    channel : Channel
        A connected channel, taken over.
    """

    __slots__ = ("_channel",)

    _warn_on_leak = False
    carries_fds = True
    way = "a unix socket"
    most = MAX_MESSAGE

    def __init__(self, channel: Channel) -> None:
        channel.only_memory = True
        self._channel = channel
        self._claim = own("exchange over a socket", channel.close)

    @classmethod
    @shielded
    def pair(cls) -> tuple[SocketExchange, SocketExchange]:
        """Return two ends that are connected with each other, in this process."""
        one, other = Channel.pair()
        return cls(one), cls(other)

    @classmethod
    @shielded
    def listen(cls, path: str, timeout: float | None = None) -> SocketExchange:
        """Wait at a path for the other end, for so many seconds. The path is gone afterwards.

        Raises
        ------
        UsageError
            If something is at that path already, or it is too long.
        WaitTimeoutError
            If nobody came.
        """
        check_system("a unix socket")
        check_path(path)
        deadline = None if timeout is None else time.monotonic() + timeout
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(path)
            except OSError as error:
                raise _taken(path, error) from None
            with own_paths([path]):
                listener.listen(1)
                while not poll(listener, select.POLLIN, None if deadline is None else deadline - time.monotonic()):
                    if deadline is not None and time.monotonic() >= deadline:
                        raise WaitTimeoutError(f"nobody connected to {path} for {timeout:g} s")
                sock = accept(listener)
        return cls(Channel(sock))

    @classmethod
    @shielded
    def connect(cls, path: str, timeout: float | None = None) -> SocketExchange:
        """Connect to who listens at a path, or will within so many seconds.

        Raises
        ------
        WaitTimeoutError
            If nobody does.
        """
        check_system("a unix socket")

        def attempt() -> Channel | None:
            with contextlib.suppress(PeerGoneError):
                return Channel.connect(path, timeout)
            return None

        return cls(wait_until(attempt, timeout, f"nobody listens at {path}"))

    @shielded
    def send(self, payload: bytes, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        """Send one message; see :class:`Exchange`."""
        self._channel.send(payload, fds, timeout=timeout)

    @shielded(undo=lambda self, came: self._channel.put_back(came))
    def recv(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Return the next message; see :class:`Exchange`."""
        return self._channel.recv(timeout=timeout)

    def is_gone(self) -> bool:
        """Whether the other end is gone."""
        return self._channel.is_hung_up()


class ByteExchange(Owned):
    """What those that carry bytes only have in common: named pipes, and files in memory."""

    __slots__ = ("_fds",)

    _warn_on_leak = False
    carries_fds = False
    way = "bytes"

    def __init__(self, fds: list[int], claim: Claim) -> None:
        self._fds = fds
        self._claim = claim
        _open.add(self)

    @classmethod
    def _owning(cls, fds: list[int]) -> Claim:
        """Own descriptors from before there is any."""
        return own(f"exchange over {cls.way}", partial(close_all, fds))

    def _check(self, payload: bytes, fds: Sequence[int], most: int) -> None:
        self.handle  # noqa: B018  (the check)
        if fds:
            raise UnsupportedError(
                f"sending {len(fds)} file descriptors", "a unix socket (SCM_RIGHTS)", f"{self.way}, which carry bytes "
                "only: the number of a descriptor means nothing in another process", "Use SocketExchange",
            )  # fmt: skip
        if not 0 < len(payload) <= most:
            raise UsageError(f"a message of {len(payload)} bytes; over {self.way} it has 1 to {most}")

    @classmethod
    def listen(cls, path: str, timeout: float | None = None) -> Self:
        """Wait at a path for the other end, for so many seconds. What was made there is gone afterwards."""
        raise NotImplementedError

    @classmethod
    def connect(cls, path: str, timeout: float | None = None) -> Self:
        """Connect to who waits at a path, or will within so many seconds."""
        raise NotImplementedError


_open: weakref.WeakSet[ByteExchange] = weakref.WeakSet()


def wait_until(attempt: Callable[[], _T | None], timeout: float | None, what: str) -> _T:
    """Return what an attempt returns as soon as that is not None, with growing pauses between attempts.
    Raises WaitTimeoutError with `what` after `timeout` seconds."""
    deadline = None if timeout is None else time.monotonic() + timeout
    pause = _SHORTEST
    while (found := attempt()) is None:
        left = _LONGEST if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise WaitTimeoutError(f"{what} for {timeout or 0:g} s")
        waiting(time.sleep, min(pause, left))
        pause = min(pause * 1.5, _LONGEST)
    return found


def own_paths(names: list[str]) -> Claim:
    """Own what is made at the paths in a list: it is gone with the claim, and at exit (I8)."""
    return own("what an exchange made at its path", partial(_unlink, names), at_exit=True)


def _unlink(names: list[str]) -> None:
    while names:
        with contextlib.suppress(OSError):
            os.unlink(names.pop())


def check_system(way: str) -> None:
    """Raise where there is no such thing."""
    if sys.platform != "linux":
        raise UnsupportedError(f"an exchange over {way}", "Linux", sys.platform)


def _taken(path: str, error: OSError) -> Exception:
    if error.errno in (errno.EADDRINUSE, errno.EEXIST):
        return BusyError(f"something is at {path} already: choose another path, or remove it")
    if error.errno == errno.ENOENT:
        return MissingFileError(f"there is no directory for {path}")
    return error


def _after_fork_in_child() -> None:
    """Let go of the parent's ends: while a copy is open here, its peer would not see the parent's end."""
    for exchange in list(_open):
        with contextlib.suppress(OSError):
            close_all(exchange._fds)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
