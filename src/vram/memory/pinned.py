"""Pinned memory of the host that is kept for the next time, since pinning costs 0.4 s for a GiB.

One :class:`PinnedStore` for each driver whose devices read pinned memory on their own. It takes slabs of host memory,
pins each once, and lends spans of them; what comes back is lent again. :func:`trim` gives back what nobody uses.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ..errors import CapacityError, OutOfMemoryError
from ..lifetime import Claim, Handle, shielded
from ..spec import HOST, Location, format_size, parse_size, round_up
from .allocation import acquire
from .chunks import supplies
from .region import Region

LIMIT: Final = "VRAM_PINNED_LIMIT"  # of the environment: the most that is pinned for sleeping memory, such as 64GiB
_GRANULE = 2 << 20  # bytes; spans begin and end at multiples of it
_LEAST_SLAB = 64 << 20  # bytes that are pinned at once, at least

Span = tuple[int, int]  # an address, and a number of bytes


def pin(driver: Any, address: int, nbytes: int, location: Location, depends: Iterable[Handle] = ()) -> Claim:
    """Pin memory of the host for a device, and return the claim that keeps it pinned."""
    label = f"{format_size(nbytes)} of pinned memory at {address:#x}"
    make, back = partial(driver.host_register, address, nbytes, location), driver.host_unregister
    return acquire(label, make, lambda _: back(address), depends=depends)[0]


class _Slab:
    """Memory that was pinned in one call. `free` is in the order of addresses; two spans that touch are one."""

    def __init__(self, claim: Claim, address: int, nbytes: int) -> None:
        self.claim = claim
        self.address = address
        self.nbytes = nbytes
        self.free: list[Span] = [(address, nbytes)]

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
            if whole and needed:
                if self._take_whole(needed, into):
                    return
                with suppress(CapacityError, OutOfMemoryError):
                    self._pin(max(needed, _LEAST_SLAB), location)
                if self._take_whole(needed, into):
                    return
            missing = needed - sum(size for slab in self._slabs for _, size in slab.free)
            if missing > 0:
                self._pin(max(missing, _LEAST_SLAB), location)
            for slab in self._slabs:
                while slab.free and needed:
                    address, size = slab.free.pop(0)
                    part = min(size, needed)
                    if part < size:
                        slab.free.insert(0, (address + part, size - part))
                    needed -= part
                    into.append((address, part))

    def _take_whole(self, needed: int, into: list[Span]) -> bool:
        for slab in self._slabs:
            for number, (address, size) in enumerate(slab.free):
                if size < needed:
                    continue
                slab.free[number : number + 1] = [(address + needed, size - needed)] if size > needed else []
                into.append((address, needed))
                return True
        return False

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
                slab.claim.release()
            return sum(slab.nbytes for slab in unused)

    def _enter_returned(self) -> None:
        """Enter what came back into the books."""
        while self._returned:
            address, nbytes = self._returned.popleft()
            for slab in self._slabs:
                if slab.address <= address < slab.address + slab.nbytes:
                    slab.put_back(address, nbytes)

    def _pin(self, nbytes: int, location: Location) -> None:
        size = round_up(nbytes, _GRANULE)
        limit = _limit()
        if limit is not None and self.nbytes + size > limit:
            raise CapacityError(
                f"{format_size(size)} more would be pinned than the {format_size(self.nbytes)} that are, and {LIMIT} "
                f"allows {format_size(limit)}: raise it, or let memory sleep in a directory (to=) or without its bytes "
                f"(to=None)"
            )
        with Region.create(HOST, capacity=size, nbytes=size, managed=True) as memory:
            claim = pin(self._driver, memory.address, size, location, [memory.handle])
            self._slabs = [*self._slabs, _Slab(claim, memory.address, size)]


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
