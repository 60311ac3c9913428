"""Imports from another process: kept mapped under its numbers, as long as it is lent or in use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from msgspec import structs

from ..arrays import Array
from ..arrays.views import close_when_unused
from ..errors import ProtocolError
from ..lifetime import Handle, held
from ..memory import Region
from ..memory.foreign import ForeignRegion
from ..memory.kinds import BY_NUMBER
from ..sharing.descriptor import HANDLE_BYTES, HandleEntry
from ..sharing.mapping import extend_memory, map_memory
from ..sharing.parcels import check_next
from ..spec import Access, Location
from .by_handle import Imports
from .exports import array_on_lent, known_dtype
from .messages import MemoryPart, Reference
from .remote_refs import RefToken


class ImportTable:
    """Keeps the memory that one exporter shared, under its numbers. Finalizers call `dropped` with number and count of
    handle memory that is done with; without it none is taken. With `is_fresh` each array is a new one. `until`
    (``time.monotonic``) bounds waits for a seal."""

    until: float | None = None

    def __init__(
        self,
        dropped: Callable[[tuple[int, int]], None] | None = None,
        *,
        user: Location | None = None,
        is_fresh: bool = False,
    ) -> None:
        self._dropped = dropped
        self._user = user
        self._is_fresh = is_fresh
        self._imports = Imports()
        self._lock = threading.Lock()  # of what is learnt; never taken by a finalizer
        self.regions: dict[int, Region] = {}  # by number, what is kept
        self._numbers: dict[Handle, int] = {}
        self._latest: dict[int, tuple[Reference, weakref.ref[Array]]] = {}

    def learn(self, part: MemoryPart, fds: list[int]) -> None:
        """Map a memory, or what it has grown by; what is known already is passed over. `fds` are lent.
        Raises ProtocolError if the part contradicts what is known, or its descriptors are not what it says."""
        part.descriptor.check()
        with held(self._lock):
            region = self.regions.get(part.memory)
            known = 0 if region is None else len(region.layout)
            if part.first < known:  # somebody brought it by hand
                part, fds = _rest(part, fds, known - part.first)
                if not part.descriptor.segments:
                    return
            check_next(part.first, known, f"segments of memory {part.memory}")
            if part.handle:
                made = self._open(part, fds, region)
            elif region is None:
                access = "rw" if part.writable else "r"
                made = map_memory(part.descriptor, fds, access=access, growing=True, user=self._user, until=self.until)
            else:
                extend_memory(region, part.descriptor.segments, fds, until=self.until)
                return
            self.regions[part.memory] = made
            self._numbers[made.handle] = part.memory

    def _open(self, part: MemoryPart, fds: list[int], known: Region | None) -> Region:
        """Open memory that no descriptor stands for."""
        kinds = [segment.kind for segment in part.descriptor.segments]
        kind = BY_NUMBER.get(kinds[0]) if len(kinds) == 1 else None
        of_pool = part.pool >= 0
        is_so = kind is not None and kind.by_handle and kind.has_pool is of_pool and len(fds) == of_pool
        if known is not None or self._dropped is None or not is_so:
            raise ProtocolError(f"memory {part.memory} came with a handle, {len(fds)} descriptors and kinds {kinds}")
        if len(part.handle) != HANDLE_BYTES:
            raise ProtocolError(f"memory {part.memory} came with a handle of {len(part.handle)} bytes")
        entry = HandleEntry(0, part.handle, part.pool)
        pool = ((part.pool,), fds[0]) if of_pool else None
        access = Access.READ_WRITE if part.writable else Access.READ
        return self._imports.open(part.memory, part.descriptor, entry, pool, access=access, depends=(), user=self._user)

    def array(self, reference: Reference, keep: int = 0) -> Array:
        """Return the array that a reference means, the same object while that is in use; `keep` is its sender's number
        for kept memory, or 0. Raises ProtocolError if its memory, or that much of it, was not shared yet."""
        array = self.find(reference, keep)
        if array is None:
            known = self.known(reference.memory)
            beyond = f" beyond its first {known} segments" if known >= 0 else ""
            raise ProtocolError(f"memory {reference.memory} is referred to but not known here{beyond}")
        return array

    def find(self, reference: Reference, keep: int = 0) -> Array | None:
        """Return the array that a reference means as :meth:`array` does; None if its memory was not shared yet."""
        latest = self._latest.get(reference.memory)
        if latest is not None and latest[0] == reference:
            array = latest[1]()
            if array is not None and not array.is_closed and (not keep or _counted(array, keep)):
                return array
        # Before it is known whether there is an array: else it is dropped here, and its sender keeps it no longer.
        token = RefToken(keep, self._dropped) if keep and self._dropped is not None else None
        region = self.regions.get(reference.memory)
        if region is None or len(region.layout) < reference.segments:
            return None
        array = array_on_lent(region, known_dtype(reference.dtype), reference, token)
        if not self._is_fresh:
            self._latest[reference.memory] = (reference, weakref.ref(array))
        return array

    def known(self, memory: int) -> int:
        """Return how many segments of a memory are known; -1 if it was never heard of."""
        region = self.regions.get(memory)
        return -1 if region is None else len(region.layout)

    def number_of(self, array: Array) -> int | None:
        """Return the id under which the exporter knows an array's memory; None if it is not the exporter's."""
        return self._numbers.get(array.region.handle) if self._numbers else None

    def release(self, number: int) -> bool:
        """Let go of a memory; arrays and views of it that are alive keep it, and can be handed on as before. Return
        whether its owner may free it: it is closed here now, or a descriptor keeps it for whoever uses it here."""
        self._latest.pop(number, None)
        region = self.regions.pop(number, None)
        if region is None:
            return True  # it could not be opened
        self._numbers.pop(region._claim.handle, None)  # not `region.handle`, which a forked child may not ask for
        close_when_unused(region)
        return region.is_closed or not isinstance(region, ForeignRegion)

    def close(self) -> None:
        """Let go of everything."""
        for number in list(self.regions):
            self.release(number)


def _counted(array: Array, keep: int) -> bool:
    """Whether an array that is sent again is the one that its sender keeps under this number; counts it if so."""
    token = None if array.pin is None else array.pin.keeps
    if not isinstance(token, RefToken) or token.number != keep:
        return False
    token.times += 1
    return True


def _rest(part: MemoryPart, fds: list[int], skipped: int) -> tuple[MemoryPart, list[int]]:
    """Return a part of memory without its first segments."""
    whole = part.descriptor
    segments = whole.segments[skipped:]
    left = structs.replace(whole, segments=segments, offset=0, nbytes=sum(one.nbytes for one in segments))
    return structs.replace(part, first=part.first + skipped, descriptor=left), fds[skipped:]
