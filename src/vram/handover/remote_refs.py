"""Remote references: memory that lives as long as its maker, kept for the other end of a channel, and counted.

Memory that travels by descriptor needs none of this: a mapping keeps it. Memory that travels by a 64-byte handle must
not be freed while it is used elsewhere. So whoever sends it keeps its owner under a number, counts how often it was
sent, and lets go once the other end has told as often that it is done.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable

from ..arrays import Array
from ..errors import ClosedError, ProtocolError
from ..memory import Pin, Region

# Memory that others may still use, of channels that were closed: nobody can say any more when that is over.
unreturned: list[RemoteRefs] = []

_Span = tuple[int, int, int]  # the memory's number, offset and bytes in it


class RemoteRefs:
    """Memory sent by handle and in use at the other end, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # for a few dictionary operations; never taken by a finalizer
        # With the region object: as long as it is there, what is shared anew is the memory that the other end knows.
        self._by_number: dict[int, tuple[_Span, Pin, Region]] = {}
        self._by_span: dict[_Span, int] = {}
        self._counts: dict[int, int] = {}
        self._of: dict[int, set[int]] = {}  # by the memory's number: those with references
        # What the other end uses no more, but may have open: the last pin, which keeps its owner until it is closed.
        self.idle: dict[int, tuple[Pin, Region]] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def keep(self, array: Array, memory: int) -> int:
        """Keep an array's memory and its owner, once more, and return the number to say."""
        span = (memory, array.offset, array.nbytes)
        with self._lock:
            number = self._by_span.get(span)
            if number is not None:
                self._counts[number] += 1
                return number
        pin = array.pin
        if pin is None:
            raise ProtocolError("memory of others is never an array's own to resize")
        region = array.region
        kept = pin.subpin(array.offset, array.offset + array.nbytes, "sent to another process")
        with self._lock:
            number = next(self._numbers)
            self._by_number[number], self._by_span[span], self._counts[number] = (span, kept, region), number, 1
            self._of.setdefault(memory, set()).add(number)
            idle = self.idle.pop(memory, None)
        if idle is not None:
            idle[0].release()
        return number

    def incref(self, number: int) -> bool:
        """Count one more reference under a number; False if the other end has dropped all of them."""
        with self._lock:
            if number not in self._counts:
                return False
            self._counts[number] += 1
            return True

    def find(self, memory: int, offset: int, nbytes: int) -> Pin | None:
        """Return a pin of its own on a part of a memory, so that an array that comes back is kept as it was."""
        with self._lock:
            kept = self._by_number.copy().values()
        for (number, start, size), pin, _ in kept:
            if number == memory and start <= offset and offset + nbytes <= start + size:
                with contextlib.suppress(ClosedError):  # its last array was given back in this moment
                    return pin.subpin(offset, offset + nbytes, "came back from another process")
        return None

    def decref(self, number: int, times: int) -> int | None:
        """Count down `times` arrays under a number that the other end is done with, or raise ProtocolError if fewer are
        out. Return the memory's number if no reference to it is left: it is kept until it is :meth:`closed`."""
        with self._lock:
            left = self._counts.get(number, 0) - times
            if left < 0 or not times:
                raise ProtocolError(f"{times} arrays were given back under number {number}; {left + times} are out")
            if left:
                self._counts[number] = left
                return None
            del self._counts[number]
            span, pin, region = self._by_number.pop(number)
            del self._by_span[span]
            memory = span[0]
            others = self._of[memory]
            others.discard(number)
            if not others:
                del self._of[memory]
                self.idle[memory] = pin, region
                return memory
        pin.release()
        del region  # not under the lock
        return None

    def is_idle(self, memory: int) -> bool:
        """Whether no reference to a memory is left, and the other end may have it open."""
        return memory in self.idle

    def closed(self, memory: int) -> None:
        """The other end has closed a memory. Memory that was sent anew since then is another one to it."""
        found = self.idle.pop(memory, None)
        if found is not None:
            found[0].release()

    def close(self) -> None:
        """Let go of everything: the other end is gone, or told to look after itself."""
        with self._lock:
            kept = [*(pin for _, pin, _ in self._by_number.values()), *(pin for pin, _ in self.idle.values())]
            for one in (self._by_number, self._by_span, self._counts, self._of, self.idle):
                one.clear()
        for pin in kept:
            pin.release()


class RefToken:
    """A reference that the pins of a received array keep: its end tells the sender that the array is done with."""

    __slots__ = ("_tell", "number", "times")

    def __init__(self, number: int, tell: Callable[[int, int], object]) -> None:
        self.number = number
        self.times = 1
        self._tell = tell

    def __del__(self) -> None:
        # Reached from finalizers: `tell` neither waits nor raises. Number 0 is of a token that counts nothing yet.
        if self.number:
            self._tell(self.number, self.times)
