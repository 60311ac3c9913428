"""Pinned memory of the host that is kept for the next time, since one thread makes and pins 2 to 3 GB/s of it.

One :class:`PinnedStore` for each driver whose devices read pinned memory on their own. It takes slabs of host memory,
has several threads make and pin their pieces, and lends spans of them at once: a user of a span waits for each piece.
The spans that come back are lent again. :func:`trim` gives back the slabs of which nothing is lent.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ..errors import CapacityError, ClosedError, OutOfMemoryError
from ..lifetime import Claim, Handle, own, shielded, wait_for
from ..spec import Location, format_size, parse_size, round_up
from .allocation import acquire, or_else
from .chunks import supplies

LIMIT: Final = "VRAM_PINNED_LIMIT"  # of the environment: the most that is pinned for sleeping memory, such as 64GiB
_GRANULE = 2 << 20  # bytes; spans begin and end at multiples of it
_PIECE = 64 << 20  # bytes that are pinned in one call
_THREADS = 16  # at most, that make and pin pieces

Span = tuple[int, int]  # an address, and a number of bytes


def pin(driver: Any, address: int, nbytes: int, location: Location, depends: Iterable[Handle] = ()) -> Claim:
    """Pin memory of the host for a device, and return the claim that keeps it pinned."""
    label = f"{format_size(nbytes)} of pinned memory at {address:#x}"
    make, back = partial(driver.host_register, address, nbytes, location), driver.host_unregister
    return acquire(label, make, lambda _: back(address), depends=depends)[0]


class _Slab:
    """Memory whose pieces are pinned one after the other. `free` is in the order of addresses; two spans that touch are
    one. `error` says why a piece could not be pinned: then nothing of it is lent any more."""

    def __init__(self, driver: Any, nbytes: int, location: Location, promised: int) -> None:
        from ..driver import anonymous  # with ctypes: whoever loads this room seldom pins anything

        self.address = address = anonymous.make(nbytes, promised)
        self._touch = anonymous.touch
        self.nbytes = nbytes
        self.claim = own(f"{format_size(nbytes)} of pinned memory at {address:#x}", None)
        with or_else(self.claim.release):
            undo = partial(anonymous.give_back, address, nbytes)
            self._memory = self.claim.handle.keep(f"{format_size(nbytes)} of host memory", undo)
        self.free: list[Span] = [(address, nbytes)]
        self.error: BaseException | None = None
        self._driver, self._location = driver, location
        self._ready = [threading.Event() for _ in range(0, nbytes, _PIECE)]

    def pieces(self) -> list[tuple[_Slab, int, Claim]]:
        """Return the number of each piece that is to be made, with a claim that keeps the memory meanwhile."""
        return [(self, number, self.claim.handle.claim("pinning")) for number in range(len(self._ready))]

    def make(self, number: int) -> None:
        """Have the pages of a piece made, and pin them."""
        at = number * _PIECE
        nbytes = min(_PIECE, self.nbytes - at)
        try:
            if self.error is None:
                self._touch(self.address + at, nbytes)
                claim = pin(self._driver, self.address + at, nbytes, self._location, [self._memory])
                self.claim.handle.adopt(claim)
        except BaseException as error:  # noqa: BLE001  (raised by whoever waits for a piece)
            self.error = error
        self._ready[number].set()

    def parts(self, address: int, nbytes: int) -> Iterator[Span]:
        """Yield a span in parts that lie in one piece each, once that is pinned."""
        end = address + nbytes
        while address < end:
            number = (address - self.address) // _PIECE
            wait_for(self._ready[number])
            if self.error is not None:
                raise self.error.with_traceback(None)
            stop = min(end, self.address + (number + 1) * _PIECE)
            yield address, stop - address
            address = stop

    def is_free(self) -> bool:
        """Whether nothing of it is lent."""
        return self.free == [(self.address, self.nbytes)]

    def put_back(self, address: int, nbytes: int) -> None:
        """Join a span with what is free beside it."""
        joined: list[Span] = []
        for start, size in sorted([*self.free, (address, nbytes)]):
            if joined and joined[-1][0] + joined[-1][1] == start:
                start, size = joined[-1][0], joined.pop()[1] + size
            joined.append((start, size))
        self.free = joined


class PinnedStore:
    """Slabs of pinned memory, and which of it is lent; for any thread. Made by :func:`store_of`. :meth:`give_back`
    never waits, since finalizers come there (I3): the next loan or trim enters returned spans into the books."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._lock = threading.RLock()  # never reached from a finalizer
        self._slabs: list[_Slab] = []
        self._due: deque[tuple[_Slab, int, Claim]] = deque()  # pieces that are to be made
        self._threads = 0  # that make them
        self._returned: deque[Span] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned, lent or not."""
        return sum(slab.nbytes for slab in self._slabs)

    def lend(self, nbytes: int, location: Location, into: list[Span], *, whole: bool = False) -> None:
        """Put spans of pinned memory, `nbytes` in all, into a list that the caller gives back; `whole` prefers one
        span. Raises OutOfMemoryError, or CapacityError beyond ``VRAM_PINNED_LIMIT``; nothing is lent then."""
        needed = round_up(nbytes, _GRANULE)
        with self._lock:
            self._enter_returned()
            slabs = [slab for slab in self._slabs if slab.error is None]
            if whole and needed:
                if _take_whole(slabs, needed, into):
                    return
                with suppress(CapacityError, OutOfMemoryError):
                    slabs.append(self._pin(needed, location))
                if _take_whole(slabs, needed, into):
                    return
            missing = needed - sum(size for slab in slabs for _, size in slab.free)
            if missing > 0:
                slabs.append(self._pin(missing, location))
            for slab in slabs:
                while slab.free and needed:
                    address, size = slab.free.pop(0)
                    part = min(size, needed)
                    if part < size:
                        slab.free.insert(0, (address + part, size - part))
                    needed -= part
                    into.append((address, part))

    def parts(self, address: int, nbytes: int) -> Iterator[Span]:
        """Yield a lent span in parts, each of which a device copies at once, as soon as it is pinned. Raises
        OutOfMemoryError, or DriverError, if it cannot be."""
        slab = next(slab for slab in self._slabs if slab.address <= address < slab.address + slab.nbytes)
        return slab.parts(address, nbytes)

    def give_back(self, spans: list[Span]) -> None:
        """Take back what was lent, out of the list that it is in. Never waits."""
        while spans:
            self._returned.append(spans.pop())

    def trim(self) -> int:
        """Unpin the slabs of which nothing is lent; return their bytes."""
        with self._lock:
            self._enter_returned()
            unused = [slab for slab in self._slabs if slab.is_free()]
            self._slabs = [slab for slab in self._slabs if not slab.is_free()]
            for slab in unused:
                slab.error = ClosedError("given back")  # to nobody: pieces that are not made yet are left out
                slab.claim.release()
            return sum(slab.nbytes for slab in unused)

    def _enter_returned(self) -> None:
        """Enter what came back into the books."""
        while self._returned:
            address, nbytes = self._returned.popleft()
            for slab in self._slabs:
                if slab.address <= address < slab.address + slab.nbytes:
                    slab.put_back(address, nbytes)
        for slab in self._slabs:
            if slab.error is not None and slab.is_free():
                self._slabs = [one for one in self._slabs if one is not slab]
                slab.claim.release()

    def _pin(self, nbytes: int, location: Location) -> _Slab:
        """Begin to make a slab of so many bytes, or of a whole piece where the limit allows it."""
        size, limit = round_up(max(nbytes, _PIECE), _GRANULE), _limit()
        if limit is not None and self.nbytes + size > limit:
            size = round_up(nbytes, _GRANULE)
        if limit is not None and self.nbytes + size > limit:
            raise CapacityError(
                f"{format_size(size)} more would be pinned than the {format_size(self.nbytes)} that are, and {LIMIT} "
                f"allows {format_size(limit)}: raise it, or let memory sleep in a directory (to=) or without its bytes "
                f"(to=None)"
            )
        slab = _Slab(self._driver, size, location, len(self._due) * _PIECE)
        self._slabs = [*self._slabs, slab]
        self._due += slab.pieces()
        if len(self._due) > 1:
            with suppress(RuntimeError):  # no other thread is to be had
                for _ in range(self._threads, min(len(self._due), _THREADS, len(os.sched_getaffinity(0)))):
                    threading.Thread(target=self._make_pieces, name="vram pinning", daemon=True).start()
                    self._threads += 1
        if not self._threads:
            self._make_all()
        return slab

    def _make_pieces(self) -> None:
        """Make pieces until there are none; the work of each thread."""
        while True:
            self._make_all()
            with self._lock:
                if not self._due:
                    self._threads -= 1
                    return

    def _make_all(self) -> None:
        while True:
            try:
                slab, number, using = self._due.popleft()
            except IndexError:
                return
            slab.make(number)
            using.release()


def _take_whole(slabs: Iterable[_Slab], needed: int, into: list[Span]) -> bool:
    """Whether there was so much in one piece, which is in the list then."""
    for slab in slabs:
        for number, (address, size) in enumerate(slab.free):
            if size < needed:
                continue
            slab.free[number : number + 1] = [(address + needed, size - needed)] if size > needed else []
            into.append((address, needed))
            return True
    return False


_stores: dict[object, PinnedStore] = {}


def store_of(driver: Any) -> PinnedStore:
    """Return the pinned memory that the devices of a driver read."""
    return _stores.get(driver) or _stores.setdefault(driver, PinnedStore(driver))


@shielded
def trim() -> int:
    """Give back what is kept for the next time: pinned memory, and what was prepared; return its bytes.

    Backups of sleeping memory stay. Every :func:`vram.prepare` is over.
    """
    prepared: int = sum(supply._end() for supply in supplies.copy().values())
    return prepared + sum(store.trim() for store in list(_stores.values()))


def _limit() -> int | None:
    """Return the most that may be pinned, in bytes; None where nobody said."""
    said = os.environ.get(LIMIT)
    return parse_size(said, what=LIMIT) if said else None


# In a forked child the slabs are inert, and a lock may be held by a thread that does not exist there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stores.clear)
