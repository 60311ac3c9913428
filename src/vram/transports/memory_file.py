"""An exchange over a file in memory, such as one in /dev/shm: a ring of messages each way. Bytes only.

It is read and written, not mapped: a peer that truncates a mapped file kills its reader with SIGBUS. Each end locks a
byte of its own for as long as it lives, and one that both share while it reads or writes: nothing is ever half there.
The kernel takes the locks away from whoever dies.
"""

from __future__ import annotations

import errno
import os
import stat
import struct

from ..errors import BusyError, NotFoundError, PeerGoneError, ProtocolError
from ..lifetime import close_all
from .exchanges import ByteExchange, taken

_SLOTS, _SLOT = 256, 4096  # a window of messages, their receipts, and what is said of memory, all unread
_HERE = b"here"
_PAGE = 4096  # bytes in front: the word of who connected, and how many messages were written and read each way
_LENGTH = struct.Struct("<I")
_COUNTS = struct.Struct("<QQ")  # messages written, and read
_LOCK = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_BYTES = _PAGE + 2 * _SLOTS * _SLOT
_BUSY = 2  # the bytes that are locked while something is read or written, one for each way


class SharedMemoryExchange(ByteExchange):
    """Over a file in memory. Nothing wakes who waits: it looks again, after 20 us at first, later every 2 ms."""

    __slots__ = ()

    way = "shared memory"
    most = _SLOT - _LENGTH.size

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
        if not _lock(self._fds[0], _BUSY + self._end):
            return None
        try:
            written, read = self._counts(self._end)
            if written - read >= _SLOTS:
                return None
            self._put(_LENGTH.pack(len(payload)) + payload, self._slot(self._end, written))
            self._put(_COUNTS.pack(written + 1, read), 64 * (1 + self._end))
        finally:
            _lock(self._fds[0], _BUSY + self._end, unlocks=True)
        return True

    def _read(self) -> bytes | None:
        writer = 1 - self._end
        if not _lock(self._fds[0], _BUSY + writer):
            return None
        try:
            written, read = self._counts(writer)
            if written == read:
                return None
            at = self._slot(writer, read)
            (length,) = _LENGTH.unpack(self._get(_LENGTH.size, at))
            if not 0 < length <= self.most:
                raise ProtocolError(f"a message of {length} bytes is said to be there; it has 1 to {self.most}")
            payload = self._get(length, at + _LENGTH.size)
            self._put(_COUNTS.pack(written, read + 1), 64 * (1 + writer))
        finally:
            _lock(self._fds[0], _BUSY + writer, unlocks=True)
        return payload

    def _counts(self, writer: int) -> tuple[int, int]:
        written, read = _COUNTS.unpack(self._get(_COUNTS.size, 64 * (1 + writer)))
        if not read <= written <= read + _SLOTS:
            raise ProtocolError(f"the other end says that {read} messages of {written} were read")
        return written, read

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


def _lock(fd: int, byte: int, *, unlocks: bool = False) -> bool:
    """Lock a byte, or unlock it; return whether no other open file has it."""
    import fcntl  # not on every system where this module is imported

    kind = fcntl.F_UNLCK if unlocks else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
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
