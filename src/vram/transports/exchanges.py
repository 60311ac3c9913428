"""How the two ends of a transport between processes talk: a socket, two named pipes, or a file in memory.

The messages are small: handles and ids, never the bytes themselves. Only a socket carries file descriptors; the others
refuse them, with the reason, and tell the end of the other process as surely: a pipe by its end of file, a file by
the lock that the kernel takes away from whoever dies.

Each kind is made by ``listen(path)`` in one process and ``connect(path)`` in the other; it has one owner, is safe to
use from several threads, and is closed in the child of a fork.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import BusyError, MissingFileError, PeerGoneError, UnsupportedError, UsageError, WaitTimeoutError
from ..lifetime import Claim, Owned, close_all, own, shielded, unwinding, waiting
from ..sharing.channel import MAX_MESSAGE, Channel, check_path, connect

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
        """Send one message, whole or not at all. Raises UnsupportedError for descriptors where they cannot travel,
        WaitTimeoutError if there was no room in so many seconds, PeerGoneError if the other end is gone.
        """

    def recv(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Return the next message and its descriptors, which the caller owns. Raises WaitTimeoutError if none came in
        so many seconds, PeerGoneError if the other end is gone and all that it sent was read, ProtocolError for what is
        no message.
        """

    def is_gone(self) -> bool:
        """Whether the other end is gone, whatever may still be unread. Does not wait."""

    def close(self) -> None:
        """End it. Idempotent."""


class SocketExchange(Channel):
    """Over a unix socket: bytes and file descriptors. Made of a connected socket, or by the methods below."""

    __slots__ = ()

    carries_fds = True
    way = "a unix socket"
    most = MAX_MESSAGE

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.only_memory = True

    @classmethod
    @shielded
    def listen(cls, path: str, timeout: float | None = None) -> Self:
        """Wait at a path for the other end, for so many seconds. The path is gone afterwards. Raises BusyError if
        something is at that path already, WaitTimeoutError if nobody came.
        """
        check_path(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(path)
            except OSError as error:
                raise taken(path, error) from None
            with _own_paths([path]):
                listener.listen(1)
                listener.settimeout(timeout)
                try:
                    return cls(waiting(listener.accept)[0])
                except (TimeoutError, BlockingIOError):
                    raise WaitTimeoutError(f"nobody connected to {path} for {timeout:g} s") from None

    @classmethod
    @shielded
    def connect(cls, path: str, timeout: float | None = None) -> Self:  # type: ignore[override]
        """Connect to who listens at a path, or will within so many seconds; raises WaitTimeoutError after those."""

        def attempt() -> socket.socket | None:
            with contextlib.suppress(PeerGoneError):
                return connect(path, timeout)
            return None

        return cls(wait_until(attempt, timeout, f"nobody listens at {path}"))

    send = shielded(Channel.send)
    recv = shielded(undo=Channel.put_back)(Channel.recv)


class ByteExchange(Owned):
    """The common part of named pipes and files in memory. Both carry bytes only."""

    __slots__ = ("_back", "_end", "_fds", "_reading", "_writing")

    _warn_on_leak = False
    carries_fds = False
    way: str
    most: int

    def __init__(self, fds: list[int], claim: Claim, end: int) -> None:
        self._fds, self._claim, self._end = fds, claim, end
        self._back: list[bytes] = []  # received, and nobody got it
        # Closing takes both, so that no number is read from that belongs to somebody else by then; no finalizer does.
        self._reading, self._writing = threading.Lock(), threading.Lock()
        _open.add(self)

    # -- what differs -------------------------------------------------------------------------------------------
    @staticmethod
    def _make(path: str, fds: list[int], names: list[str]) -> None:
        """Make what is to be at a path."""
        raise NotImplementedError

    @staticmethod
    def _meet(path: str, fds: list[int], end: int) -> bool | None:
        """Look for the other end, as who listens (0) or connects (1); None if it is not there yet."""
        raise NotImplementedError

    def _write(self, payload: bytes) -> bool | None:
        """Write a message; None if there is no room. Called with a lock."""
        raise NotImplementedError

    def _read(self) -> bytes | None:
        """Read a message; None if there is none. Called with a lock."""
        raise NotImplementedError

    def is_gone(self) -> bool:
        """Whether the other end is gone."""
        raise NotImplementedError

    # -- what does not ------------------------------------------------------------------------------------------
    @classmethod
    @shielded
    def listen(cls, path: str, timeout: float | None = None) -> Self:
        """Wait at a path for the other end, for so many seconds. The files made there are gone afterwards."""
        return cls._met(path, timeout, 0)

    @classmethod
    @shielded
    def connect(cls, path: str, timeout: float | None = None) -> Self:
        """Connect to who waits at a path, or will within so many seconds."""
        return cls._met(path, timeout, 1)

    @classmethod
    def _met(cls, path: str, timeout: float | None, end: int) -> Self:
        fds: list[int] = []
        names: list[str] = []
        paths, claim = _own_paths(names), own(f"exchange over {cls.way}", partial(close_all, fds))
        try:
            if not end:
                cls._make(path, fds, names)
            wait_until(lambda: cls._meet(path, fds, end), timeout, f"nobody {_ABSENT[end]} {path}")
            return cls(fds, claim, end)
        except BaseException as error:
            with unwinding(error):
                claim.release()
            raise
        finally:
            paths.release()

    @shielded
    def send(self, payload: bytes, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        """Send one message; see :class:`Exchange`."""
        self.handle  # noqa: B018  (the check)
        if fds:
            raise UnsupportedError(
                f"sending {len(fds)} file descriptors", "a unix socket (SCM_RIGHTS)", f"{self.way}, which carry bytes "
                "only: the number of a descriptor means nothing in another process", "Use SocketExchange",
            )  # fmt: skip
        if not 0 < len(payload) <= self.most:
            raise UsageError(f"a message of {len(payload)} bytes; over {self.way} it has 1 to {self.most}")

        def attempt() -> bool | None:
            with self._writing:
                self.handle  # noqa: B018  (closed meanwhile?)
                return self._write(payload)

        wait_until(attempt, timeout, "the other end read nothing")

    @shielded(undo=lambda self, came: self._back.append(came[0]))
    def recv(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Return the next message; see :class:`Exchange`."""
        return wait_until(self._take, timeout, "no message came"), []

    def _take(self) -> bytes | None:
        with self._reading:
            self.handle  # noqa: B018  (closed meanwhile?)
            if self._back:
                return self._back.pop()
            payload = self._read()
            if payload is None and self.is_gone():
                payload = self._read()  # its last words may have come in between
                if payload is None:
                    raise PeerGoneError(f"the other end of the {self.way} is gone")
            return payload

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """End it; see :class:`Exchange`."""
        if not self._claim.handle.is_open:  # or in a forked child, where nobody would ever let go of the locks
            super().close(strict=strict)
            return
        with self._reading, self._writing:
            super().close(strict=strict)


_ABSENT = ("connected to", "listens at")
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


def _own_paths(names: list[str]) -> Claim:
    """Own what is made at the paths in a list: it is gone with the claim, and at exit (I8)."""
    return own("what an exchange made at its path", partial(_unlink, names), at_exit=True)


def _unlink(names: list[str]) -> None:
    while names:
        with contextlib.suppress(OSError):
            os.unlink(names.pop())


def taken(path: str, error: OSError) -> Exception:
    """Return what to raise where nothing can be made at a path."""
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
