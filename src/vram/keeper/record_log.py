"""The log of records in a memfd: what a keeper that was killed had decided, for the next one.

::

    words     magic, format, end, length and check of the base, generation, request in hand, takeover under way
    base      the books and connections as they were when this log was begun
    records   length, kind, check, body; and so on, up to `end`

A record is written behind the end; then the end is moved, in one store. What is behind it was never decided. Each check
is of the record and of all before it, so that one that is missing, was changed or came in between is found.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from zlib import crc32

from ..errors import ProtocolError

CAPACITY = 1 << 30  # bytes of addresses, or more where the base is large; memory is taken as it is written
SPARE = 16 << 20  # of them, for what is decided where nobody asked: of who leaves, and at what time
_FIRST = 4096  # where the base begins
_MAGIC, _FORMAT = 0x676F6C_6D617276, 1
_RECORD = struct.Struct("<III")
_pack = _RECORD.pack
_MAGIC_AT, _FORMAT_AT, _END, _BASE, _CHECK, _GENERATION, HAND, DIGEST, _DEATHS, _OF, _OF_DIGEST, _TAKEOVER = range(12)
GIVEN, TAKEN = 1, 2  # to another keeper, which may serve; from another one, which has not heard yet that this one does


class RecordLog:
    """A log in a memfd that other processes may have as well; it owns `fd`. `end` is where the next record goes.
    Without `base` the log is there already. Raises ProtocolError if it is none, or not whole."""

    _memory: mmap.mmap = None  # type: ignore[assignment]  # until it is mapped

    def __init__(self, fd: int, base: bytes | None = None) -> None:
        self.fd = fd
        try:
            if base is None:
                self._open()
            else:
                self._make(base)
        except BaseException:
            self.close()
            raise

    def _map(self) -> None:
        self._memory = mmap.mmap(self.fd, self.capacity)
        self.words = memoryview(self._memory).cast("Q")

    def _make(self, base: bytes) -> None:
        self.capacity = max(CAPACITY, 4 * len(base) + 2 * SPARE)
        self.capacity += -self.capacity % mmap.PAGESIZE
        os.ftruncate(self.fd, self.capacity)
        self._map()
        self._memory[_FIRST : _FIRST + len(base)] = base
        self.begin = self.end = _FIRST + len(base)
        self.check = crc32(base)
        self.words[_FORMAT_AT], self.words[_BASE], self.words[_CHECK] = _FORMAT, len(base), self.check
        self.words[_END] = self.end
        self.words[_MAGIC_AT] = _MAGIC

    def _open(self) -> None:
        nbytes = os.fstat(self.fd).st_size
        if nbytes < _FIRST or nbytes % mmap.PAGESIZE:
            raise ProtocolError(f"the log of the keeper before has {nbytes} bytes: it was cut")
        self.capacity = nbytes
        self._map()
        if self.words[_MAGIC_AT] != _MAGIC or self.words[_FORMAT_AT] != _FORMAT:
            raise ProtocolError("the log of the keeper before is none, or one of another version")
        self.begin, self.end = _FIRST + self.words[_BASE], self.words[_END]
        if not _FIRST <= self.begin <= self.end <= nbytes:
            raise ProtocolError(f"the log of the keeper before ends at {self.end}, before it begins: it was changed")
        self.check = crc32(self.base)
        if self.check != self.words[_CHECK]:
            raise ProtocolError("the books at the beginning of the log are not as they were written: it was changed")

    @classmethod
    def new(cls, base: bytes, generation: int) -> RecordLog:
        """Make a log that begins with `base`."""
        made = cls(os.memfd_create("vram-log", os.MFD_CLOEXEC), base)
        made.words[_GENERATION] = generation
        return made

    @property
    def base(self) -> bytes:
        """What it begins with."""
        return self._memory[_FIRST : self.begin]

    @property
    def nbytes(self) -> int:
        """Bytes of records."""
        return self.end - self.begin

    @property
    def has_room(self) -> bool:
        """Whether any request may still be done, and what follows from it."""
        return self.end < self.capacity - SPARE

    def append(self, kind: int, body: bytes) -> None:
        """Write a record. Once this returns it is decided, and not before the last store."""
        begin, size = self.end, len(body)
        stop = begin + 12 + size
        check = crc32(body, self.check ^ kind)
        self._memory[begin:stop] = _pack(size, kind, check) + body  # raises without room, and has done nothing
        self.check = check
        self.end = self.words[_END] = stop

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield the kind and the body of each record. Raises ProtocolError at the first that was changed or cut."""
        at, check = self.begin, self.words[_CHECK]
        while at < self.end:
            if at + 12 > self.end:
                raise ProtocolError(f"the log of the keeper before was cut at {at}, in the middle of a record")
            size, kind, said = _RECORD.unpack_from(self._memory, at)
            stop = at + 12 + size
            if stop > self.end:
                raise ProtocolError(f"the log of the keeper before was cut at {at}, in the middle of a record")
            body = self._memory[at + 12 : stop]
            check = crc32(body, check ^ kind)
            if check != said:
                raise ProtocolError(f"a record at {at} of the log is not as it was written: it was changed")
            yield kind, body
            at = stop
        self.check = check

    # -- who has it, and what is being done ---------------------------------------------------------------------------
    @property
    def generation(self) -> int:
        """Which keeper has it: one more than the one before."""
        return self.words[_GENERATION]

    def take_in_hand(self, number: int, payload: bytes) -> None:
        """Note whose request is about to be done; with 0, that it is."""
        self.words[HAND] = number
        self.words[DIGEST] = crc32(payload)

    def done(self) -> None:
        """Nothing is in hand."""
        self.words[HAND] = 0

    @property
    def takeover(self) -> int:
        """How far one is that is under way: 0, GIVEN or TAKEN."""
        return self.words[_TAKEOVER]

    @takeover.setter
    def takeover(self, state: int) -> None:
        self.words[_TAKEOVER] = state

    def inherit(self, most: int) -> tuple[int, bool]:
        """Note that the keeper before has died; return whose request it had in hand (0: nobody's), and whether the same
        one has been in hand when so many died."""
        words = self.words
        words[_GENERATION] += 1
        hand, digest = words[HAND], words[DIGEST]
        same = hand != 0 and (hand, digest) == (words[_OF], words[_OF_DIGEST])
        words[_DEATHS] = words[_DEATHS] + 1 if same else 1
        words[_OF], words[_OF_DIGEST], words[HAND] = hand, digest, 0
        return hand, hand != 0 and words[_DEATHS] >= most

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self.fd >= 0:
            if self._memory is not None:
                self.words.release()
                self._memory.close()
            os.close(self.fd)
            self.fd = -1
