"""An exchange over a file in memory, such as one in /dev/shm: a ring of messages each way. Bytes only.

It is read and written, not mapped: a peer that truncates a mapped file kills its reader with SIGBUS. Each end locks a
byte of its own for as long as it lives, which the kernel takes away from whoever dies. The first byte of a slot says
whether there is a message in it: whoever writes one sets it last, and whoever has read one clears it.
"""

from __future__ import annotations

import errno
import os
import stat
import struct

from ..errors import BusyError, NotFoundError, PeerGoneError, ProtocolError
from ..lifetime import Claim, close_all
from .exchanges import ByteExchange, taken

_SLOTS, _SLOT = 256, 4096  # a window of messages, their receipts, and what is said of memory, all unread
_HERE, _FULL, _EMPTY = b"here", b"\1", b"\0"
_PAGE = 4096  # bytes in front: the word of who connected
_LENGTH = struct.Struct("<I")
_LOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_BYTES = _PAGE + 2 * _SLOTS * _SLOT


class SharedMemoryExchange(ByteExchange):
    """Over a file in memory. Nothing wakes who waits: it looks again, after 20 us at first, later every 2 ms."""

    __slots__ = ("_received", "_sent")

    way = "shared memory"
    most = _SLOT - _LENGTH.size - 1

    def __init__(self, fds: list[int], claim: Claim, end: int) -> None:
        self._sent = self._received = 0
        super().__init__(fds, claim, end)

    @staticmethod
    def _make(path: str, fds: list[int], names: list[str]) -> None:
        try:
            _open_file(path, os.O_CREAT | os.O_EXCL, fds)
        except OSError as error:
            raise taken(path, error) from None
        names.append(path)
        _lock(fds[0], 0)
        os.ftruncate(fds[0], _BYTES)  # last: whoever connects waits for this size

    @staticmethod
    def _meet(path: str, fds: list[int], end: int) -> bool | None:
        if not end:
            return os.pread(fds[0], 4, 0) == _HERE or None
        try:
            _open_file(path, 0, fds)
        except FileNotFoundError:
            return None
        found = os.fstat(fds[0])
        if not (stat.S_ISREG(found.st_mode) and found.st_size == _BYTES):
            close_all(fds)
            if found.st_size:
                raise NotFoundError(f"{path} is no file of a SharedMemoryExchange")
            return None
        if not _lock(fds[0], 1):
            raise BusyError("both ends of this shared memory are taken")
        os.pwrite(fds[0], _HERE, 0)  # after the lock: who listens may look when this process is dead already
        return True

    def is_gone(self) -> bool:
        """Whether the other end is gone."""
        self.handle  # noqa: B018  (the check)
        return not _is_locked(self._fds[0], 1 - self._end)

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
        (length,) = _LENGTH.unpack(self._get(_LENGTH.size, at + 1))
        if not 0 < length <= self.most:
            raise ProtocolError(f"a message of {length} bytes is said to be there; it has 1 to {self.most}")
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


def _lock(fd: int, byte: int) -> bool:
    """Lock a byte; return whether no other open file has it."""
    import fcntl  # not on every system where this module is imported

    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _is_locked(fd: int, byte: int) -> bool:
    """Whether another open file has locked a byte."""
    import fcntl

    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _open_file(path: str, flags: int, fds: list[int]) -> None:
    fds.append(os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600))
