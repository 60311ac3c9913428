"""Hands arrays from process to process: file descriptors the first time, an id ever after.

A :class:`Lender` numbers the memory that this end has shared; a :class:`Borrower` keeps what the other end shared
mapped under those numbers. Growth is followed: an array that its owner has resized and hands over again shows more
rows at the receiver, at the same address.

Ids are minted by the lender and mean something on one connection only (S6). A lent memory is a counted handle that
its region depends on, so the moment the region is unmapped here the other end can be told to let go as well.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Annotated

from msgspec import Meta, Struct

from ..arrays import Array
from ..arrays.dtypes import dtype_name, dtype_of
from ..errors import ProtocolError
from ..lifetime import Handle, own
from ..memory import Region
from ..sharing.channel import MAX_FDS
from ..sharing.descriptor import MAX_SEGMENTS, MemoryDescriptor
from ..spec import Access
from .mapping import describe, extend_memory, map_memory

__all__ = ["Borrower", "Lender", "Lent", "MemoryPart", "Reference", "UnknownMemoryError", "refer"]

Size = Annotated[int, Meta(ge=0, le=2**62)]
Count = Annotated[int, Meta(ge=0, le=MAX_SEGMENTS)]


class Reference(Struct, frozen=True, array_like=True):
    """An array on memory that was shared: the memory's id, how many of its segments must be known, and where in it
    the array lies."""

    memory: Size
    segments: Count
    offset: Size
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]


class MemoryPart(Struct, frozen=True, array_like=True):
    """Segments of a memory from the `first` on, with as many file descriptors; `last` ends the series.

    `descriptor` holds the segments of this part; `writable` says how the receiver is to map them.
    """

    memory: Size
    first: Count
    last: bool
    writable: bool
    descriptor: MemoryDescriptor


class UnknownMemoryError(ProtocolError):
    """A reference names more of a memory than its receiver knows.

    Attributes
    ----------
    memory, known : int
        The memory's id, and how many of its segments are known.
    """

    def __init__(self, memory: int, known: int) -> None:
        self.memory, self.known = memory, known
        super().__init__(f"memory {memory} is referred to but not known here beyond its first {known} segments")


class Lent:
    """One memory that was lent: its id, its description, and the objects at home that stand for it.

    The file descriptors are the allocations' own. They stay open while the region's memory lives, which is as long
    as this entry does.
    """

    __slots__ = ("array", "descriptor", "fds", "handle", "id", "layout", "region", "sent", "writable")

    def __init__(self, number: int, array: Array, region: Region, handle: Handle) -> None:
        self.id = number
        self.array = weakref.ref(array)
        self.region = weakref.ref(region)
        self.handle = handle
        self.writable = region.access is Access.READ_WRITE
        self.sent = 0
        self.describe(region)

    def describe(self, region: Region) -> None:
        """Take note of what the region has grown to."""
        self.layout = region.layout
        self.descriptor, self.fds = describe(region, 0, region.nbytes)

    def still_is(self, region: Region) -> bool:
        """Whether the region still begins with the memory that was lent, with the same rights."""
        then, now = self.layout, region.layout
        begins_alike = not then or (len(now) >= len(then) and now[len(then) - 1] is then[-1])
        return begins_alike and self.writable is (region.access is Access.READ_WRITE)

    def parts(self, first: int) -> Iterator[tuple[MemoryPart, list[int]]]:
        """Yield messages for the segments from `first` on, each with at most 253 descriptors."""
        whole, total = self.descriptor, len(self.fds)
        for start in range(first, total, MAX_FDS):
            stop = min(start + MAX_FDS, total)
            some = whole.segments[start:stop]
            nbytes = sum(segment.nbytes for segment in some)
            part = MemoryDescriptor(whole.device, some, 0, nbytes, whole.capacity)
            yield MemoryPart(self.id, start, stop == total, self.writable, part), self.fds[start:stop]


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
                return lent
            handle.forgo(lent.handle)
        number = next(self._ids)
        claim = own(f"memory {number} lent to another process", _Retire(weakref.ref(self), handle, number))
        try:
            lent = Lent(number, array, region, claim.handle)
            handle.depend(claim.handle)
            self._by_region[handle] = self._by_id[number] = lent
        finally:
            claim.release()  # from here on the region alone keeps it
        return lent

    def find(self, number: int) -> Lent | None:
        """Return what was lent under an id, if its memory is still there."""
        return self._by_id.get(number)

    def at_home(self, reference: Reference) -> Array | None:
        """Return the array here that a reference to lent memory means: the very object if it is still that array.

        None if the array was closed here, although its memory may be alive elsewhere.
        """
        lent = self._by_id.get(reference.memory)
        if lent is None:
            return None
        array = lent.array()
        dtype = dtype_of(reference.dtype)
        if (
            array is not None
            and not array.is_closed
            and (array.offset, array.shape, array.dtype) == (reference.offset, reference.shape, dtype)
        ):
            return array
        region = lent.region()
        if region is None or region.is_closed:
            return None
        return Array(region, dtype, reference.shape, offset=reference.offset)

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
        """Return the array that a reference means.

        Raises
        ------
        UnknownMemoryError
            If its memory, or that much of it, was not shared yet.
        """
        region = self._regions.get(reference.memory)
        known = 0 if region is None else len(region.layout)
        if region is None or known < reference.segments:
            raise UnknownMemoryError(reference.memory, known)
        return Array(region, dtype_of(reference.dtype), reference.shape, offset=reference.offset)

    def number_of(self, array: Array) -> int | None:
        """Return the id under which the lender knows an array's memory; None if it is not the lender's."""
        return self._numbers.get(array.region.handle) if self._numbers else None

    def numbers(self) -> tuple[int, ...]:
        """Return the ids of all memories that are kept."""
        return tuple(self._regions)

    def forget(self, number: int) -> None:
        """Let go of a memory; views of it that are alive keep it."""
        region = self._regions.pop(number, None)
        if region is not None:
            self._numbers.pop(region.handle, None)
            region.close()

    def close(self) -> None:
        """Let go of everything."""
        for number in tuple(self._regions):
            self.forget(number)


_name = functools.cache(dtype_name)  # element types are few, and asked for in every message


def refer(number: int, segments: int, array: Array) -> Reference:
    """Write an array down as a part of memory `number`."""
    return Reference(number, segments, array.offset, _name(array.dtype), array.shape)
