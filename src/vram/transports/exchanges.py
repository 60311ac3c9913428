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
import select
import socket
import stat
import struct
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import (
    BusyError,
    MissingFileError,
    NotFoundError,
    PeerGoneError,
    ProtocolError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
)
from ..lifetime import Claim, Owned, close_all, own, shielded, waiting
from ..memory.allocation import or_else
from ..sharing.channel import MAX_MESSAGE, Channel, check_path, connect

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from typing import Self

_T = TypeVar("_T")
_LENGTH = struct.Struct("<I")
_SLOTS, _SLOT = 256, 4096  # a window of messages, their receipts, and what is said of memory, all unread
_HERE, _FULL, _EMPTY = b"here", b"\1", b"\0"
_PAGE = 4096  # bytes in front: the word of who connected
_LOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_BYTES = _PAGE + 2 * _SLOTS * _SLOT
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


class ByteExchange(Owned, ABC):
    """The common part of named pipes and files in memory. Both carry bytes only."""

    __slots__ = ("_back", "_busy", "_end", "_fds")

    _warn_on_leak = False
    carries_fds = False
    way: str
    most: int

    def __init__(self, fds: list[int], claim: Claim, end: int) -> None:
        self._fds, self._claim, self._end = fds, claim, end
        self._back: list[bytes] = []  # received, and nobody got it
        # Held for a look, which never waits. Closing takes it, so that no number is used that belongs to somebody else
        # by then; no finalizer does.
        self._busy = threading.Lock()
        _open.add(self)

    # -- what differs -------------------------------------------------------------------------------------------
    @staticmethod
    @abstractmethod
    def _make(path: str, fds: list[int], names: list[str]) -> None:
        """Make what is to be at a path."""

    @staticmethod
    @abstractmethod
    def _meet(path: str, fds: list[int], end: int) -> bool | None:
        """Look for the other end, as who listens (0) or connects (1); None if it is not there yet."""

    @abstractmethod
    def _write(self, payload: bytes) -> bool | None:
        """Write a message; None if there is no room. Called with a lock."""

    @abstractmethod
    def _read(self) -> bytes | None:
        """Read a message; None if there is none. Called with a lock."""

    @abstractmethod
    def is_gone(self) -> bool:
        """Whether the other end is gone. Does not wait."""

    def _checked(self, length: int) -> int:
        """Return the length that a message is said to have, if it can have that."""
        if not 0 < length <= self.most:
            raise ProtocolError(f"a message of {length} bytes is said to come; over {self.way} it has 1 to {self.most}")
        return length

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
            with or_else(claim.release):
                if not end:
                    cls._make(path, fds, names)
                wait_until(lambda: cls._meet(path, fds, end), timeout, f"nobody {_ABSENT[end]} {path}")
                return cls(fds, claim, end)
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
            with self._busy:
                self.handle  # noqa: B018  (closed meanwhile?)
                return self._write(payload)

        wait_until(attempt, timeout, "the other end read nothing")

    @shielded(undo=lambda self, came: self._back.append(came[0]))
    def recv(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Return the next message; see :class:`Exchange`."""
        return wait_until(self._take, timeout, "no message came"), []

    def _take(self) -> bytes | None:
        with self._busy:
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
        with self._busy:
            super().close(strict=strict)


class PipeExchange(ByteExchange):
    """Over two named pipes, ``PATH.there`` and ``PATH.back``.

    Messages are no longer than what the kernel writes to a pipe in one piece, so none is ever half there.
    """

    __slots__ = ("_got", "_read_from", "_write_to")

    way = "named pipes"
    most = getattr(select, "PIPE_BUF", 512) - _LENGTH.size  # POSIX promises that much

    def __init__(self, fds: list[int], claim: Claim, end: int) -> None:
        self._read_from, self._write_to = fds[end], fds[1 - end]
        self._got = bytearray()
        super().__init__(fds, claim, end)

    @staticmethod
    def _make(path: str, fds: list[int], names: list[str]) -> None:
        for name in (f"{path}.there", f"{path}.back"):
            try:
                os.mkfifo(name, 0o600)
            except OSError as error:
                raise taken(name, error) from None
            names.append(name)
        _open_pipe(names[0], os.O_RDONLY, fds)

    @staticmethod
    def _meet(path: str, fds: list[int], end: int) -> bool | None:
        """Open a pipe to write to, once somebody reads from it. The connecting end opens both before the other."""
        try:
            _open_pipe(f"{path}.{'there' if end else 'back'}", os.O_WRONLY, fds)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):
                raise
            if not end and _events(fds[0]) & select.POLLHUP:  # told once somebody had it open
                raise PeerGoneError(f"who connected to {path} is gone already") from None
            return None
        if end:
            try:
                _open_pipe(f"{path}.back", os.O_RDONLY, fds)
            except FileNotFoundError:
                raise PeerGoneError(f"who listened at {path} has stopped") from None
        return True

    def _write(self, payload: bytes) -> bool | None:
        try:
            os.write(self._write_to, _LENGTH.pack(len(payload)) + payload)  # all of it or nothing: see the class
        except BrokenPipeError:
            raise PeerGoneError("the other end of the pipes closed them") from None
        except BlockingIOError:
            return None
        return True

    def _read(self) -> bytes | None:
        while (payload := self._next()) is None:
            try:
                more = os.read(self._read_from, 1 << 16)
            except BlockingIOError:
                return None
            if not more:  # the end, or the other end has not opened it yet
                return None
            self._got += more
        return payload

    def _next(self) -> bytes | None:
        """Take a message out of what was read; None if it is not whole yet."""
        if len(self._got) < _LENGTH.size:
            return None
        stop = _LENGTH.size + self._checked(*_LENGTH.unpack_from(self._got))
        if len(self._got) < stop:
            return None
        payload = bytes(self._got[_LENGTH.size : stop])
        del self._got[:stop]
        return payload

    def is_gone(self) -> bool:
        """Whether the other end is gone."""
        self.handle  # noqa: B018  (the check)
        return bool(_events(self._read_from) or _events(self._write_to))


class SharedMemoryExchange(ByteExchange):
    """Over a file in memory, such as one in /dev/shm: a ring of messages each way.

    It is read and written, not mapped: a peer that truncates a mapped file kills its reader with SIGBUS. Each end locks
    a byte of its own for as long as it lives, which the kernel takes away from whoever dies. The first byte of a slot
    says whether there is a message in it: its writer sets it last, and its reader clears it. Nothing wakes the reader:
    it looks again, after 20 us at first, later every 2 ms.
    """

    __slots__ = ("_received", "_sent")

    way = "shared memory"
    most = _SLOT - _LENGTH.size - 1

    def __init__(self, fds: list[int], claim: Claim, end: int) -> None:
        self._sent = self._received = 0
        super().__init__(fds, claim, end)

    @staticmethod
    def _make(path: str, fds: list[int], names: list[str]) -> None:
        try:
            _open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, fds)
        except OSError as error:
            raise taken(path, error) from None
        names.append(path)
        _is_free(fds[0], 0, lock=True)
        os.ftruncate(fds[0], _BYTES)  # last: whoever connects waits for this size

    @staticmethod
    def _meet(path: str, fds: list[int], end: int) -> bool | None:
        if not end:
            return os.pread(fds[0], 4, 0) == _HERE or None
        try:
            _open_file(path, os.O_RDWR, fds)
        except FileNotFoundError:
            return None
        found = os.fstat(fds[0])
        if not (stat.S_ISREG(found.st_mode) and found.st_size == _BYTES):
            close_all(fds)
            if found.st_size:
                raise NotFoundError(f"{path} is no file of a SharedMemoryExchange")
            return None
        if not _is_free(fds[0], 1, lock=True):
            raise BusyError("both ends of this shared memory are taken")
        os.pwrite(fds[0], _HERE, 0)  # after the lock: who listens may look when this process is dead already
        return True

    def is_gone(self) -> bool:
        """Whether the other end is gone."""
        self.handle  # noqa: B018  (the check)
        return _is_free(self._fds[0], 1 - self._end)

    def _write(self, payload: bytes) -> bool | None:
        if self.is_gone():
            raise PeerGoneError("the other end of the shared memory is gone")
        at = self._slot(self._end, self._sent)
        if self._get(1, at) != _EMPTY:
            return None
        self._put(_LENGTH.pack(len(payload)) + payload, at + 1)
        self._put(_FULL, at)
        self._sent += 1
        return True

    def _read(self) -> bytes | None:
        at = self._slot(1 - self._end, self._received)
        if self._get(1, at) == _EMPTY:
            return None
        length = self._checked(*_LENGTH.unpack(self._get(_LENGTH.size, at + 1)))
        payload = self._get(length, at + 1 + _LENGTH.size)
        self._put(_EMPTY, at)
        self._received += 1
        return payload

    @staticmethod
    def _slot(writer: int, number: int) -> int:
        return _PAGE + (writer * _SLOTS + number % _SLOTS) * _SLOT

    def _get(self, nbytes: int, at: int) -> bytes:
        data = os.pread(self._fds[0], nbytes, at)
        if len(data) != nbytes:
            raise ProtocolError("the file in memory was cut off by the other end")
        return data

    def _put(self, data: bytes, at: int) -> None:
        if os.pwrite(self._fds[0], data, at) != len(data):
            raise ProtocolError("the file in memory takes no more bytes")


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


def _open_file(path: str, flags: int, fds: list[int]) -> None:
    fds.append(os.open(path, flags | os.O_CLOEXEC, 0o600))


def _open_pipe(path: str, flags: int, fds: list[int]) -> None:
    _open_file(path, flags | os.O_NONBLOCK, fds)
    if not stat.S_ISFIFO(os.fstat(fds[-1]).st_mode):
        raise UsageError(f"{path} is no named pipe")


def _events(fd: int) -> int:
    """Return what there is to say of a pipe's end without being asked: hang-up, and errors."""
    poller = select.poll()
    poller.register(fd, 0)
    return sum(events for _, events in poller.poll(0))


def _is_free(fd: int, byte: int, *, lock: bool = False) -> bool:
    """Whether no other open file has locked a byte; then it is locked here, if that is wanted."""
    asked = fcntl.F_OFD_SETLK if lock else fcntl.F_OFD_GETLK
    try:
        answer = fcntl.fcntl(fd, asked, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return lock or _LOCK.unpack(answer)[0] == fcntl.F_UNLCK


def _after_fork_in_child() -> None:
    """Let go of the parent's ends: while a copy is open here, its peer would not see the parent's end."""
    for exchange in list(_open):
        with contextlib.suppress(OSError):
            close_all(exchange._fds)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
