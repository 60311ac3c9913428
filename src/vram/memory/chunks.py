"""How a region is mapped: a row of chunks at the front of its addresses. Internal to this room; no policy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ..driver.protocol import Driver, HostAddressable
from ..errors import UnsupportedError, UsageError
from ..lifetime import Claim, Handle, own, unwinding
from ..spec import Access, HandleKind, Location, format_size, round_up
from .allocation import Memory, PhysicalAllocation, create_memory, is_sealed
from .reservation import AddressRange, Unmap, map_at, reserve_addresses

__all__ = ["Chunk", "Chunks", "measure", "plan", "reserve", "touchable"]

_PATIENCE = 60.0  # seconds to wait for an unmap that another thread is running


class Chunk(NamedTuple):
    """One allocation mapped whole, at an offset in bytes."""

    start: int
    stop: int
    memory: Memory
    mapping: Handle
    undo: Unmap


class Chunks:
    """The chunks of one region, back to back from its first byte; what keeps them is the region's handle.

    `row` is replaced, never changed, so that it can be read without a lock.
    """

    __slots__ = ("depends", "handle", "location", "populate", "private", "row", "where")

    def __init__(
        self,
        where: AddressRange,
        handle: Handle,
        location: Location,
        *,
        private: bool = False,
        populate: bool = False,
        depends: tuple[Handle, ...] = (),
    ) -> None:
        self.where = where
        self.handle = handle
        self.location = location
        self.private = private
        self.populate = populate
        self.depends = depends
        self.row: tuple[Chunk, ...] = ()

    @property
    def mapped(self) -> int:
        """Bytes from the first that have memory behind them."""
        row = self.row
        return row[-1].stop if row else 0

    @property
    def ends_sealed(self) -> bool:
        """Whether the last chunk is read-only for good.

        The driver is asked only where somebody could have done that behind our back: every growth comes by here.
        """
        if not self.row:
            return False
        memory = self.row[-1].memory
        return memory.sealed or (bool(memory.exported) and is_sealed(memory))

    def make(self, sizes: Sequence[int], kinds: HandleKind, access: Access) -> None:
        """Make memory and map it behind what is mapped: all of it, or nothing (invariant I4)."""
        made: list[tuple[Memory, Claim]] = []
        try:
            for size in sizes:
                made.append(create_memory(self.where.driver, size, self.location, kinds))
            self.append([memory for memory, _ in made], access)
        except BaseException as error:
            with unwinding(error):
                for _, claim in reversed(made):
                    claim.release()
            raise
        for _, claim in made:
            claim.release()  # the mappings keep it now

    def append(self, memories: Sequence[Memory], access: Access) -> None:
        """Map memory behind what is mapped: all of it, or nothing (invariant I4)."""
        handle, where = self.handle, self.where
        start = offset = self.mapped
        made: list[tuple[Claim, Chunk]] = []
        try:
            for memory in memories:
                claim, undo = map_at(where, offset, memory, self.private, self.depends)
                stop = offset + memory.nbytes
                made.append((claim, Chunk(offset, stop, memory, claim.handle, undo)))
                offset = stop
            if access is not Access.NONE:
                where.driver.mem_set_access(where.address + start, offset - start, access, (self.location,))
            if self.populate:
                touchable(where.driver, access).populate(where.address + start, offset - start)
            row = (*self.row, *(chunk for _, chunk in made))
            for claim, _ in made:
                handle.adopt(claim)
            self.row = row
        except BaseException as error:
            with unwinding(error):
                for claim, chunk in reversed(made):
                    handle.forgo(chunk.mapping)
                    claim.release()
            raise

    def cut(self, nbytes: int) -> tuple[Chunk, ...]:
        """Take the chunks that lie wholly beyond `nbytes` out of the row, and return them for :meth:`unmap`."""
        row = self.row
        kept = len(row)
        while kept and row[kept - 1].start >= nbytes:
            kept -= 1
        self.row = row[:kept]
        return row[kept:]

    def unmap(self, chunks: Sequence[Chunk]) -> None:
        """Give chunks back, last one first, and return when they are unmapped."""
        try:
            for chunk in reversed(chunks):
                self.handle.forgo(chunk.mapping)
        except BaseException:  # an interrupt: they are in no row any more, and nobody else would let go of them
            for chunk in reversed(chunks):
                self.handle.forgo(chunk.mapping)
            raise
        for chunk in chunks:
            chunk.undo.wait(_PATIENCE)  # another thread may be working off the queue, and this one with it


def plan(nbytes: int, mapped: int, capacity: int, granularity: int, least: int, exact: bool) -> list[int]:
    """Return the sizes of the chunks that take a region from `mapped` to at least `nbytes` bytes.

    Parameters
    ----------
    least : int
        The least size of a chunk in bytes; with `exact`, the size of every chunk. The ceiling cuts the last one.
    """
    room = capacity - mapped
    if not exact:
        return [min(max(round_up(nbytes - mapped, granularity), least), room)]
    count = -(-(nbytes - mapped) // least)
    return [min(least, room - least * number) for number in range(count)]


def reserve(driver: Driver, nbytes: int, location: Location, depends: tuple[Handle, ...]) -> tuple[AddressRange, Claim]:
    """Reserve a region's addresses; return them with the first claim on the region's own handle.

    That handle undoes nothing itself: it keeps the reservation, the mappings made later, and what they depend on.
    """
    where, reserved = reserve_addresses(driver, nbytes)
    try:
        claim = own(partial(_label, where, location), None, depends=depends)
        claim.handle.adopt(reserved)
    except BaseException as error:
        with unwinding(error):
            reserved.release()
        raise
    return where, claim


def _label(where: AddressRange, location: Location) -> str:
    return f"region of {format_size(where.nbytes)} on {location} at {where.address:#x}"


def measure(
    driver: Driver, allocations: Sequence[PhysicalAllocation], location: Location | None
) -> tuple[int, Location]:
    """Check allocations that are to lie in one region; return their bytes and their place."""
    total = 0
    for allocation in allocations:
        if not isinstance(allocation, PhysicalAllocation):
            raise UsageError(f"allocations must be PhysicalAllocation objects, not {allocation!r}")
        allocation.handle  # noqa: B018  (the check)
        if allocation.driver is not driver:
            raise UsageError(f"{allocation!r} belongs to another driver than the region's")
        if location is not None and allocation.location != location:
            raise UsageError(f"{allocation!r} is not on {location}; a region's memory is all in one place")
        location = allocation.location
        total += allocation.nbytes
    return total, location or Location(driver.name)


def touchable(driver: Driver, access: Access) -> HostAddressable:
    """Return the driver as one whose memory the CPU can touch."""
    if not isinstance(driver, HostAddressable):
        raise UnsupportedError(
            "touching pages ahead of use", "memory that the CPU can address", f"the {driver.name} driver's"
        )
    if access is Access.NONE:
        raise UsageError("pages without access cannot be touched; make the region with READ or READ_WRITE")
    return driver
