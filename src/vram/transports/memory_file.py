"""An exchange over a file in memory, such as one in /dev/shm: a ring of messages each way. Bytes only.

It is read and written, not mapped: a peer that truncates a mapped file kills its reader with SIGBUS. Each message
says its number and the checksum of it all, and counts only when both are right, so that no half is ever taken for a
whole, whatever the order in which the bytes show.

Each end locks a byte of its own. The kernel takes the lock away from whoever dies, which is how the other end knows.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import BusyError, NotFoundError, PeerGoneError, ProtocolError
from ..lifetime import Claim, close_all, shielded, unwinding
from .exchanges import ByteExchange, _taken, check_system, own_paths, wait_until

if TYPE_CHECKING:
    from typing import Self

_SLOTS, _SLOT = 256, 4096  # a window of messages, their receipts, and what is said of memory, all unread
_HERE = b"here"
_PAGE = 4096  # bytes in front: the locks, and how far each end has read
_HEAD = struct.Struct("<QII")  # the message's number from 1 on, its length, its checksum
_COUNT = struct.Struct("<QI")  # messages read so far, and the checksum of that
_LOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_BYTES = _PAGE + 2 * _SLOTS * _SLOT


class SharedMemoryExchange(ByteExchange):
    """Over a file in memory. Nothing wakes who waits: it looks again, after 20 us at first, later every 2 ms."""

    __slots__ = ("_back", "_end", "_fd", "_read", "_reading", "_sent", "_writing")

    way = "shared memory"
    most = _SLOT - _HEAD.size

    def __init__(self, fds: list[int], claim: Claim, end: int) -> None:
        (self._fd,), self._end = fds, end
        self._sent = self._read = 0
        self._back: list[bytes] = []  # received, and nobody got it
        # Closing takes both, so that no number is read from that belongs to somebody else by then; no finalizer does.
        self._reading, self._writing = threading.Lock(), threading.Lock()
        super().__init__(fds, claim)

    @classmethod
    @shielded
    def listen(cls, path: str, timeout: float | None = None) -> Self:
        """Make the file and wait for the other end; see :class:`SocketExchange`."""
        check_system(cls.way)
        fds: list[int] = []
        names: list[str] = []
        paths, claim = own_paths(names), cls._owning(fds)
        try:
            try:
                _open_file(path, os.O_CREAT | os.O_EXCL, fds)
            except OSError as error:
                raise _taken(path, error) from None
            names.append(path)
            (fd,) = fds
            _lock(fd, 0)
            os.ftruncate(fd, _BYTES)  # last: whoever connects waits for this size
            wait_until(lambda: os.pread(fd, 4, 0) == _HERE or None, timeout, f"nobody connected to {path}")
            return cls(fds, claim, 0)
        except BaseException as error:
            with unwinding(error):
                claim.release()
            raise
        finally:
            paths.release()

    @classmethod
    @shielded
    def connect(cls, path: str, timeout: float | None = None) -> Self:
        """Open the file of who waits there, or will; see :class:`SocketExchange`."""
        check_system(cls.way)
        fds: list[int] = []
        claim = cls._owning(fds)
        try:
            wait_until(lambda: _is_ready(path, fds), timeout, f"nobody listens at {path}")
            (fd,) = fds
            _lock(fd, 1)
            os.pwrite(fd, _HERE, 0)  # after the lock: who listens may look when this process is dead already
            return cls(fds, claim, 1)
        except BaseException as error:
            with unwinding(error):
                claim.release()
            raise

    @shielded
    def send(self, payload: bytes, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        """Send one message; see :class:`Exchange`."""
        self._check(payload, fds, self.most)
        wait_until(lambda: self._write(payload), timeout, "the other end read nothing")

    @shielded(undo=lambda self, came: self._back.append(came[0]))
    def recv(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Return the next message; see :class:`Exchange`."""
        return wait_until(self._take, timeout, "no message came"), []

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """End it; see :class:`Exchange`."""
        if not self._claim.handle.is_open:  # or in a forked child, where nobody would ever let go of the locks
            super().close(strict=strict)
            return
        with self._reading, self._writing:
            super().close(strict=strict)

    def is_gone(self) -> bool:
        """Whether the other end is gone."""
        self.handle  # noqa: B018  (the check)
        return not _is_locked(self._fd, 1 - self._end)

    def _write(self, payload: bytes) -> bool | None:
        with self._writing:
            self.handle  # noqa: B018  (closed meanwhile?)
            if not self._has_room():
                return None
            number = self._sent + 1
            data = _HEAD.pack(number, len(payload), _checksum(number, payload)) + payload
            self._put(data, self._slot(self._end, number))
            self._sent = number
        return True

    def _take(self) -> bytes | None:
        with self._reading:
            self.handle  # noqa: B018  (closed meanwhile?)
            if self._back:
                return self._back.pop()
            payload = self._arrived()
            if payload is not None:
                count = (self._read + 1).to_bytes(8, "little")
                self._put(count + zlib.crc32(count).to_bytes(4, "little"), 64 * (1 + self._end))
                self._read += 1
        return payload

    def _arrived(self) -> bytes | None:
        payload = self._look()
        if payload is None and self.is_gone():
            payload = self._look()  # its last words may have come in between
            if payload is None:
                raise PeerGoneError("the other end of the shared memory is gone")
        return payload

    def _look(self) -> bytes | None:
        number = self._read + 1
        at = self._slot(1 - self._end, number)
        said, length, checksum = _HEAD.unpack(self._get(_HEAD.size, at))
        if said != number:
            return None
        if length >= _SLOT:  # no half of a true one looks like that
            raise ProtocolError(f"a message of {length} bytes is said to be there; there is room for {self.most}")
        if not 0 < length <= self.most:
            return None
        payload = self._get(length, at + _HEAD.size)
        return payload if _checksum(number, payload) == checksum else None

    def _has_room(self) -> bool:
        if self.is_gone():
            raise PeerGoneError("the other end of the shared memory is gone")
        raw = self._get(_COUNT.size, 64 * (2 - self._end))
        taken: int
        taken, checksum = _COUNT.unpack(raw)
        if taken and zlib.crc32(raw[:8]) != checksum:
            return False  # it is just being written
        if taken > self._sent:
            raise ProtocolError(f"the other end says that it has read {taken} messages of {self._sent}")
        return self._sent - taken < _SLOTS

    @staticmethod
    def _slot(writer: int, number: int) -> int:
        return _PAGE + (writer * _SLOTS + number % _SLOTS) * _SLOT

    def _get(self, nbytes: int, at: int) -> bytes:
        data = os.pread(self._fd, nbytes, at)
        if len(data) != nbytes:
            raise ProtocolError("the file in memory was cut off by the other end")
        return data

    def _put(self, data: bytes, at: int) -> None:
        if os.pwrite(self._fd, data, at) != len(data):
            raise ProtocolError("the file in memory takes no more bytes")


def _checksum(number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(number.to_bytes(8, "little")))


def _lock(fd: int, byte: int) -> None:
    import fcntl  # not on every system where this module is imported

    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BusyError("both ends of this shared memory are taken") from None
        raise


def _is_locked(fd: int, byte: int) -> bool:
    """Whether another open file has locked a byte."""
    import fcntl

    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    kind: int = _LOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def _open_file(path: str, flags: int, fds: list[int]) -> None:
    fds.append(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600))


def _is_ready(path: str, fds: list[int]) -> bool | None:
    """Open the file once it is there and whole: None if not yet."""
    try:
        _open_file(path, 0, fds)
    except FileNotFoundError:
        return None
    found = os.fstat(fds[-1])
    if stat.S_ISREG(found.st_mode) and found.st_size == _BYTES:
        return True
    close_all(fds)
    if found.st_size:
        raise NotFoundError(f"{path} is no file of a SharedMemoryExchange")
    return None
