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

_Span = tuple[int, int]  # offset and bytes in a memory


class _Kept:
    """Memory under one number. The region object, too: as long as it is there, what is shared anew is the memory that
    the other end knows."""

    __slots__ = ("count", "memory", "pin", "region", "span")

    def __init__(self, memory: int, span: _Span, pin: Pin, region: Region) -> None:
        self.memory, self.span, self.pin, self.region = memory, span, pin, region
        self.count = 1


class RemoteRefs:
    """Memory sent by handle and in use at the other end, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # for a few dictionary operations; never taken by a finalizer
        self._kept: dict[int, _Kept] = {}
        self._of: dict[int, dict[_Span, int]] = {}  # by the memory's number: what of it has which number
        # What the other end uses no more, but may have open: the last pin, which keeps its owner until it is closed.
        self.idle: dict[int, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, array: Array, memory: int) -> int:
        """Keep an array's memory and its owner, once more, and return the number to say."""
        span = (array.offset, array.nbytes)
        with self._lock:
            number = self._of.get(memory, {}).get(span)
            if number is not None:
                self._kept[number].count += 1
                return number
        pin = array.pin
        if pin is None:
            raise ProtocolError("memory of others is never an array's own to resize")
        region = array.region
        kept = pin.subpin(array.offset, array.offset + array.nbytes, "sent to another process")
        with self._lock:
            number = next(self._numbers)
            self._kept[number] = _Kept(memory, span, kept, region)
            self._of.setdefault(memory, {})[span] = number
            idle = self.idle.pop(memory, None)
        if idle is not None:
            idle.pin.release()
        return number

    def incref(self, number: int) -> bool:
        """Count one more reference under a number; False if the other end has dropped all of them."""
        with self._lock:
            kept = self._kept.get(number)
            if kept is not None:
                kept.count += 1
            return kept is not None

    def find(self, memory: int, offset: int, nbytes: int) -> Pin | None:
        """Return a pin of its own on a part of a memory, so that an array that comes back is kept as it was."""
        with self._lock:
            kept = [(span, self._kept[number].pin) for span, number in self._of.get(memory, {}).items()]
        for (start, size), pin in kept:
            if start <= offset and offset + nbytes <= start + size:
                with contextlib.suppress(ClosedError):  # its last array was given back in this moment
                    return pin.subpin(offset, offset + nbytes, "came back from another process")
        return None

    def decref(self, number: int, times: int) -> int | None:
        """Count down `times` arrays under a number that the other end is done with, or raise ProtocolError if fewer are
        out. Return the memory's number if no reference to it is left: it is kept until it is :meth:`closed`."""
        with self._lock:
            kept = self._kept.get(number)
            count = 0 if kept is None else kept.count
            if kept is None or not 0 < times <= count:
                raise ProtocolError(f"{times} arrays were given back under number {number}; {count} are out")
            kept.count -= times
            if kept.count:
                return None
            del self._kept[number]
            others = self._of[kept.memory]
            del others[kept.span]
            if not others:
                del self._of[kept.memory]
                self.idle[kept.memory] = kept
                return kept.memory
        kept.pin.release()
        return None

    def closed(self, memory: int) -> None:
        """The other end has closed a memory. Memory that was sent anew since then is another one to it."""
        found = self.idle.pop(memory, None)
        if found is not None:
            found.pin.release()

    def close(self) -> None:
        """Let go of everything: the other end is gone, or told to look after itself."""
        with self._lock:
            kept = [*self._kept.values(), *self.idle.values()]
            for one in (self._kept, self._of, self.idle):
                one.clear()
        for each in kept:
            each.pin.release()


class RefToken:
    """A reference that the pins of a received array keep: its end tells the sender that the array is done with."""

    __slots__ = ("_tell", "number", "times")

    def __init__(self, number: int, tell: Callable[[tuple[int, int]], object]) -> None:
        self.number = number
        self.times = 1
        self._tell = tell

    def __del__(self) -> None:
        # Reached from finalizers: `tell` neither waits nor raises. Number 0 is of a token that counts nothing yet.
        if self.number:
            self._tell((self.number, self.times))
