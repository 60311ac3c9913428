"""Hands arrays from process to process: file descriptors the first time, an id ever after.

A :class:`Lender` numbers the memory that this end has shared; a :class:`Borrower` keeps what the other end shared
mapped under those numbers. Growth is followed: an array that its owner has resized and hands over again shows more
rows at the receiver, at the same address.

Ids are minted by the lender and mean something on one connection only (S6). A lent memory is a counted handle that
its region depends on, so the moment the region is unmapped here the other end can be told to let go as well.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..arrays import Array
from ..arrays.dtypes import dtype_name, dtype_of
from ..arrays.views import let_go
from ..errors import ClosedError, ProtocolError, RangeError, UsageError
from ..lifetime import Claim, Handle, own
from ..memory import Pin, Region
from ..sharing.channel import MAX_FDS
from ..sharing.descriptor import MemoryDescriptor
from ..spec import Access
from .mapping import describe, extend_memory, map_memory
from .wire import MemoryPart, Reference

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Borrower", "Lender", "Lent", "UnknownMemoryError", "nothing", "refer"]


class UnknownMemoryError(ProtocolError):
    """A reference names more of a memory than its receiver knows.

    Attributes
    ----------
    memory, known : int
        The memory's id, and how many of its segments are known; -1 if it was never heard of.
    """

    def __init__(self, memory: int, known: int) -> None:
        self.memory, self.known = memory, known
        beyond = f" beyond its first {known} segments" if known >= 0 else ""
        super().__init__(f"memory {memory} is referred to but not known here{beyond}")


class Lent:
    """One memory that was lent: its id, its description, and the arrays at home that stand for it.

    The file descriptors are the allocations' own. They stay open as long as the region's memory is mapped; who sends
    them has to :meth:`keep` it.

    Attributes
    ----------
    sent : int
        How many segments the other end of a channel was told of; -1 if it never heard of this memory.
    """

    __slots__ = (
        "_arrays",
        "_latest",
        "descriptor",
        "fds",
        "handle",
        "id",
        "layout",
        "memory",
        "region",
        "sent",
        "writable",
    )

    def __init__(self, number: int, region: Region, handle: Handle) -> None:
        self.id = number
        self.region = weakref.ref(region)
        self.memory = region.handle
        self.handle = handle
        self.writable = region.access is Access.READ_WRITE
        self.sent = -1
        self._latest: Callable[[], Array | None] = nothing
        self._arrays: weakref.WeakValueDictionary[tuple[object, ...], Array] | None = None
        self.describe(region)

    def describe(self, region: Region) -> None:
        """Take note of what the region has grown to."""
        self.layout = region.layout
        self.descriptor, self.fds = describe(region, 0, region.nbytes)

    def still_is(self, region: Region) -> bool:
        """Whether the region still begins with the memory that was lent, with the same rights."""
        return self._begins(region) and self.writable is (region.access is Access.READ_WRITE)

    def _begins(self, region: Region) -> bool:
        then, now = self.layout, region.layout
        return not then or (len(now) >= len(then) and now[len(then) - 1] is then[-1])

    def keep(self) -> Pin | Claim:
        """Keep the memory, and so its descriptors, until what is returned is released.

        Raises
        ------
        ClosedError
            If it is not what was lent any more: unmapped, or given back by a shrink.
        """
        region = self.region()
        if region is None or region.is_closed:  # then nobody can change its size
            return self.memory.claim("being sent to another process")
        try:
            kept = region.pin(0, region.nbytes, "being sent to another process")
        except RangeError:  # another thread shrank it in this moment
            raise ClosedError(f"memory {self.id} was given back by its owner") from None
        if not self._begins(region):
            kept.release()
            raise ClosedError(f"memory {self.id} was given back by its owner")
        return kept

    def parts(self, first: int) -> Iterator[tuple[MemoryPart, list[int]]]:
        """Yield messages for the segments from `first` on, each with at most 253 descriptors.

        Memory without segments is announced all the same, by one message: it may grow.
        """
        whole, total = self.descriptor, len(self.fds)
        region = self.region()
        # Asked now: what was frozen since it was lent can only be mapped read-only.
        writable = self.writable and (region is None or region.access is Access.READ_WRITE)
        for start in range(first, total, MAX_FDS) if total else (0,):
            stop = min(start + MAX_FDS, total)
            some = whole.segments[start:stop]
            nbytes = sum(segment.nbytes for segment in some)
            part = MemoryDescriptor(whole.device, some, 0, nbytes, whole.capacity)
            yield MemoryPart(self.id, start, stop == total, writable, part), self.fds[start:stop]

    # -- the arrays at home ---------------------------------------------------------------------------------------
    def stand_for(self, array: Array) -> None:
        """Remember, weakly, an array that was handed over on this memory."""
        latest = self._latest()
        if latest is array:
            return
        if latest is not None:
            if self._arrays is None:
                self._arrays = weakref.WeakValueDictionary()
            self._arrays[latest.offset, latest.shape, latest.dtype] = latest
        self._latest = weakref.ref(array)

    def at_home(self, reference: Reference) -> Array | None:
        """Return the array here that a reference to this memory means: the very object if it is still that array.

        None if the array was closed here, although its memory may be alive elsewhere.
        """
        dtype = _known(reference.dtype)
        looks = (reference.offset, reference.shape, dtype)
        found = self._latest()
        if found is None or (found.offset, found.shape, found.dtype) != looks:
            found = None if self._arrays is None else self._arrays.get(looks)
        if found is not None and found.shape == reference.shape and not found.is_closed:
            return found
        region = self.region()
        return None if region is None or region.is_closed else _array(region, dtype, reference)

    @property
    def is_at_home(self) -> bool:
        """Whether any of the arrays that were handed over is still open here."""
        arrays = [self._latest(), *(() if self._arrays is None else self._arrays.values())]
        return any(array is not None and not array.is_closed for array in arrays)


class Lender:
    """Numbers the memory that this end has lent.

    Parameters
    ----------
    retired : callable
        Told the id of each memory that is unmapped here. Finalizers reach it: it must neither wait nor raise.
    """

    def __init__(self, retired: Callable[[int], None]) -> None:
        self._retired: Callable[[int], None] | None = retired
        self._ids = itertools.count(1)
        self._by_region: dict[Handle, Lent] = {}
        self._by_id: dict[int, Lent] = {}

    def lend(self, array: Array) -> Lent:
        """Return the entry of an array's memory, a new one if the memory is new or no longer what was lent.

        Raises
        ------
        UsageError
            If the memory cannot leave this process.
        """
        region = array.region
        handle = region.handle
        lent = self._by_region.get(handle)
        if lent is not None:
            if lent.still_is(region):
                if len(lent.layout) != len(region.layout):
                    lent.describe(region)
                lent.stand_for(array)
                return lent
            handle.forgo(lent.handle)
        number = next(self._ids)
        claim = own(f"memory {number} lent to another process", _Retire(weakref.ref(self), handle, number))
        try:
            lent = Lent(number, region, claim.handle)
            lent.stand_for(array)
            handle.depend(claim.handle)
            self._by_region[handle] = self._by_id[number] = lent
        finally:
            claim.release()  # from here on the region alone keeps it
        return lent

    def find(self, number: int) -> Lent | None:
        """Return what was lent under an id, if its memory is still there."""
        return self._by_id.get(number)

    def at_home(self, reference: Reference) -> Array | None:
        """Return the array here that a reference to lent memory means; see :meth:`Lent.at_home`."""
        lent = self._by_id.get(reference.memory)
        return None if lent is None else lent.at_home(reference)

    def close(self) -> None:
        """Forget everything; the other end is gone and is told nothing."""
        self._retired = None
        for handle, lent in tuple(self._by_region.items()):
            handle.forgo(lent.handle)

    def _forget(self, handle: Handle, number: int) -> None:
        lent = self._by_id.pop(number, None)
        if lent is not None and self._by_region.get(handle) is lent:
            self._by_region.pop(handle, None)
        if self._retired is not None:
            self._retired(number)


class _Retire:
    """The undo of a lent memory. Holds its lender weakly: regions outlive connections."""

    __slots__ = ("_handle", "_lender", "_number")

    def __init__(self, lender: weakref.ref[Lender], handle: Handle, number: int) -> None:
        self._lender, self._handle, self._number = lender, handle, number

    def __call__(self) -> None:
        lender = self._lender()
        if lender is not None:
            lender._forget(self._handle, self._number)


class Borrower:
    """Keeps the memory that one lender shared with this process, under the lender's numbers."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self._numbers: dict[Handle, int] = {}
        self._latest: dict[int, tuple[Reference, weakref.ref[Array]]] = {}

    def learn(self, part: MemoryPart, fds: list[int]) -> None:
        """Map a memory, or what it has grown by. `fds` are lent.

        Raises
        ------
        ProtocolError
            If the part contradicts what is known, or its descriptors are not what it says.
        """
        part.descriptor.check()
        region = self._regions.get(part.memory)
        known = 0 if region is None else len(region.layout)
        if part.first != known:
            raise ProtocolError(f"segments of memory {part.memory} from {part.first} on came after {known}")
        if region is None:
            region = map_memory(part.descriptor, fds, access="rw" if part.writable else "r", follow=True)
            self._regions[part.memory] = region
            self._numbers[region.handle] = part.memory
        else:
            extend_memory(region, part.descriptor.segments, fds)

    def array(self, reference: Reference) -> Array:
        """Return the array that a reference means: the same object as the last time while that is in use.

        Raises
        ------
        UnknownMemoryError
            If its memory, or that much of it, was not shared yet.
        """
        latest = self._latest.get(reference.memory)
        if latest is not None and latest[0] == reference:
            array = latest[1]()
            if array is not None and not array.is_closed:
                return array
        array = self._make(reference)
        self._latest[reference.memory] = (reference, weakref.ref(array))
        return array

    def _make(self, reference: Reference) -> Array:
        region = self._regions.get(reference.memory)
        if region is None:
            raise UnknownMemoryError(reference.memory, -1)
        if len(region.layout) < reference.segments:
            raise UnknownMemoryError(reference.memory, len(region.layout))
        return _array(region, _known(reference.dtype), reference)

    def number_of(self, array: Array) -> int | None:
        """Return the id under which the lender knows an array's memory; None if it is not the lender's."""
        return self._numbers.get(array.region.handle) if self._numbers else None

    def numbers(self) -> tuple[int, ...]:
        """Return the ids of all memories that are kept."""
        return tuple(self._regions)

    def forget(self, number: int) -> None:
        """Let go of a memory; arrays and views of it that are alive keep it, and can be handed on as before."""
        self._latest.pop(number, None)
        region = self._regions.pop(number, None)
        if region is not None:
            self._numbers.pop(region._claim.handle, None)  # not `region.handle`, which a forked child may not ask for
            let_go(region)

    def close(self) -> None:
        """Let go of everything."""
        for number in tuple(self._regions):
            self.forget(number)


def nothing() -> None:
    """A weak reference to no array."""


def refer(number: int, segments: int, array: Array) -> Reference:
    """Write an array down as a part of memory `number`."""
    return Reference(number, segments, array.offset, dtype_name(array.dtype), array.shape)


def _known(dtype: str) -> np.dtype[Any]:
    try:
        return dtype_of(dtype)
    except UsageError as error:
        raise ProtocolError(f"an array came whose type this process does not know: {error}") from None


def _array(region: Region, dtype: np.dtype[Any], reference: Reference) -> Array:
    """The array that a peer meant; a wrong one is the peer's mistake (S7)."""
    try:
        return Array(region, dtype, reference.shape, offset=reference.offset)
    except UsageError as error:
        raise ProtocolError(f"an array came that does not lie in its memory {reference.memory}: {error}") from None
