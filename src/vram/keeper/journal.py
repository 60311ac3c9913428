"""The journal of a keeper: rows of what changed, in a memfd, for the keeper that goes on when this one is gone.

::

    words     magic, format, end, generation
    records   length, check, rows; and so on, up to `end`

A record is the change of one request, written behind the end; then the end is moved, in one store. Bytes
behind the end count for nothing. A record that was changed since is left out, and counted.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from zlib import crc32

from ..errors import ProtocolError

CAPACITY = 1 << 30  # bytes of addresses; memory is taken as it is written
_FIRST = 4096  # where the records begin
_MAGIC, _FORMAT = 0x676F6C_6D617276, 7
_HEAD = struct.Struct("<II")
_pack = _HEAD.pack
_MAGIC_AT, _FORMAT_AT, _END, _GENERATION = range(4)


class Journal:
    """A journal in a memfd, which it owns and other processes may have as well; `end` is where the next record goes.
    Raises ProtocolError if the memfd has no journal of this format."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.bad = 0  # records that were not as they were written
        try:
            self.capacity = os.fstat(fd).st_size
            if self.capacity < _FIRST or self.capacity % mmap.PAGESIZE:
                raise ProtocolError(f"the journal of the keeper before has {self.capacity} bytes: it was cut")
            self._memory = mmap.mmap(fd, self.capacity)
        except BaseException:
            os.close(fd)
            raise
        self.words = memoryview(self._memory).cast("Q")
        self.end = self.words[_END]
        if (self.words[_MAGIC_AT], self.words[_FORMAT_AT]) != (_MAGIC, _FORMAT):
            self.close()
            raise ProtocolError("the journal of the keeper before is none, or one of another version")
        if not _FIRST <= self.end <= self.capacity:
            self.close()
            raise ProtocolError(f"the journal of the keeper before ends at {self.end}: it was changed")

    @classmethod
    def new(cls, generation: int, nbytes: int = 0) -> Journal:
        """Make a journal with room for `nbytes` of rows that come at once, and many more."""
        fd = os.memfd_create("vram-journal", os.MFD_CLOEXEC)
        capacity = max(CAPACITY, 4 * nbytes)
        os.ftruncate(fd, capacity + -capacity % mmap.PAGESIZE)
        words = {_MAGIC_AT: _MAGIC, _FORMAT_AT: _FORMAT, _END: _FIRST, _GENERATION: generation}
        for at, word in words.items():
            os.pwrite(fd, struct.pack("<Q", word), 8 * at)
        return cls(fd)

    @property
    def nbytes(self) -> int:
        """Bytes of records."""
        return self.end - _FIRST

    def append(self, rows: bytes) -> None:
        """Write a record. Once this returns it has happened, and not before the last store."""
        begin = self.end
        stop = begin + 8 + len(rows)
        self._memory[begin:stop] = _pack(len(rows), crc32(rows)) + rows  # raises without room, and has done nothing
        self.end = self.words[_END] = stop

    def records(self) -> Iterator[bytes]:
        """Yield the rows of each record, but of those that were changed, which are counted in `bad`."""
        at = _FIRST
        while at < self.end:
            size, check = _HEAD.unpack_from(self._memory, at) if at + 8 <= self.end else (self.end, 0)
            stop = at + 8 + size
            if stop > self.end:  # its length was changed: nothing behind it can be found
                self.bad += 1
                return
            rows = self._memory[at + 8 : stop]
            if crc32(rows) == check:
                yield rows
            else:
                self.bad += 1
            at = stop

    # -- who has it ---------------------------------------------------------------------------------------------------
    @property
    def generation(self) -> int:
        """Which keeper has it: a number above those of all keepers before."""
        return self.words[_GENERATION]

    def inherit(self) -> None:
        """Note that the keeper before has died."""
        self.words[_GENERATION] += 1

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self.fd >= 0:
            self.words.release()
            self._memory.close()
            os.close(self.fd)
            self.fd = -1
