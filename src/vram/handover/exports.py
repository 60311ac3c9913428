"""Exports of this end to another process: file descriptors the first time, an id ever after.

An :class:`ExportTable` mints the ids, for one connection only (S6), and follows growth: an array that was resized
shows more rows at the receiver, at the same address. An export is a counted handle that its region depends on, so that
the other end is told as soon as the region is unmapped here.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..arrays import Array
from ..arrays.dtypes import dtype_name, dtype_of
from ..arrays.shapes import nbytes_of
from ..errors import ClosedError, ProtocolError, RangeError, UnsupportedError, UsageError
from ..lifetime import Claim, Handle, own
from ..memory import PhysicalAllocation, Pin, Region
from ..memory.allocation import or_else
from ..memory.kinds import BY_NUMBER
from ..sharing.descriptor import MemoryDescriptor
from ..sharing.mapping import describe_held, map_memory
from ..sharing.parcels import next_part
from ..spec import Access
from .by_handle import LentPools, describe_by_handle, goes_by_handle, handle_bytes
from .messages import MemoryPart, Reference
from .remote_refs import RemoteRefs

if TYPE_CHECKING:
    import numpy as np


class Export:
    """A memory that was exported: its id, its description, and the local arrays on it. `sent` segments are known to the
    other end, -1 if it never heard of it. The allocations own the descriptors: to send them, :meth:`keep` the memory.
    With `is_held` the allocations are held, so that memory that was unmapped here can be mapped again."""

    __slots__ = (
        "_arrays", "_remapped", "allocations", "data", "descriptor", "fds", "handle", "id", "is_held",
        "layout", "memory", "pool", "pools", "region", "sent", "writable",
    )  # fmt: skip

    def __init__(self, number: int, region: Region, handle: Handle, pools: LentPools | None) -> None:
        self.id = number
        self.pools = pools
        self.is_held = pools is not None
        self.allocations: tuple[PhysicalAllocation, ...] = ()
        self._remapped: Callable[[], Region | None] = nothing
        self.region = weakref.ref(region)
        self.memory = region.handle
        self.handle = handle
        self.writable = region.access is Access.READ_WRITE
        self.sent = -1
        self._arrays: weakref.WeakValueDictionary[tuple[object, ...], Array] = weakref.WeakValueDictionary()
        self.describe(region)

    def describe(self, region: Region) -> None:
        """Take note of what the region has grown to."""
        self.layout = region.layout
        self.data, self.pool = b"", -1
        if self.pools is not None and goes_by_handle(region):
            self.descriptor, self.fds = describe_by_handle(region, 0, region.nbytes), list[int]()
            if BY_NUMBER[self.descriptor.segments[0].kind].has_pool:
                self.pool, claim, self.fds = self.pools.of(region)  # first: see handle_bytes
                self.handle.adopt(claim)
            self.data = handle_bytes(region)
        else:
            self.descriptor, allocations = describe_held(region, 0, region.nbytes)
            self.fds = [allocation.export() for allocation in allocations]
            if self.is_held:
                self.allocations = allocations

    @property
    def count(self) -> int:
        """How many segments it has."""
        return len(self.descriptor.segments)

    def still_is(self, region: Region) -> bool:
        """Whether the region still begins with the memory that was exported, with the same rights."""
        return self._begins(region) and self.writable is (region.access is Access.READ_WRITE)

    def _begins(self, region: Region) -> bool:
        then, now = self.layout, region.layout
        return not then or (len(now) >= len(then) and now[len(then) - 1] is then[-1])

    def keep(self) -> Pin | Claim:
        """Keep the memory, and so its descriptors, until what is returned is released.
        Raises ClosedError if it is not what was exported any more: unmapped, or given back by a shrink."""
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

    def part(self, first: int) -> tuple[MemoryPart, list[int]] | None:
        """Return the message for the segments from `first` on, with its descriptors; None if there are none.
        Memory without segments is announced all the same, by one message: it may grow."""
        whole, total = self.descriptor, len(self.fds)
        if self.data:
            return self.whole()
        if first >= max(total, 1):
            return None
        part = next_part(total, first)
        some = whole.segments[part]
        nbytes = sum([segment.nbytes for segment in some])
        described = MemoryDescriptor(whole.device, some, 0, nbytes, whole.capacity)
        return MemoryPart(self.id, first, part.stop == total, self._is_writable(), described), self.fds[part]

    def whole(self) -> tuple[MemoryPart, list[int]]:
        """Return all of it as one part, however many descriptors that has, for who brings it to the other end."""
        return MemoryPart(self.id, 0, True, self._is_writable(), self.descriptor, self.data, self.pool), self.fds

    def _is_writable(self) -> bool:
        """Whether it can be mapped writable now: not what was frozen since it was exported."""
        region = self.region()
        return self.writable and (region is None or region.access is Access.READ_WRITE)

    # -- the local arrays ----------------------------------------------------------------------------------------
    def remember(self, array: Array) -> None:
        """Remember, weakly, an array that was handed over on this memory."""
        looks = (array.offset, array.shape, array.dtype)
        if self._arrays.get(looks) is not array:
            self._arrays[looks] = array

    def local_array(self, reference: Reference, refs: RemoteRefs | None = None) -> Array | None:
        """Return the array here that a reference to this memory means, the very object if it is still that array; None
        if it was closed, or its memory given back. Held allocations are mapped again: the other end has the memory."""
        dtype = known_dtype(reference.dtype)
        found = self._arrays.get((reference.offset, reference.shape, dtype))
        if found is not None and found.shape == reference.shape and not found.is_closed and self._is_of(found):
            return found
        region = self.region()
        if region is None or region.is_closed or not self._begins(region):
            region = self._remap()
            if region is None:
                return None
            array = array_on_lent(region, dtype, reference)
            self.remember(array)  # what comes back twice is one object while it is in use
            return array
        if not self.data:
            return array_on_lent(region, dtype, reference)
        # Not without its owner: the other end has the array, so it is kept here.
        nbytes = nbytes_of(reference.shape, dtype)
        pin = None if refs is None else refs.find(self.id, reference.offset, nbytes)
        return None if pin is None else array_on_lent(region, dtype, reference, pin)

    def _is_of(self, array: Array) -> bool:
        """Whether an array lies on what was exported: what was given back and grown again since is other memory."""
        region = array.region
        return region is self._remapped() or self._begins(region)

    def _remap(self) -> Region | None:
        """Map what was unmapped here, or given back, and the other end still has; None if it is not held."""
        region = self._remapped()
        if region is not None and not region.is_closed:
            return region
        if not self.is_held or self.data:
            return None
        # Frozen since it was exported: then nobody can map it writable any more.
        writable = self.writable and not any(allocation.is_sealed for allocation in self.allocations)
        region = map_memory(self.descriptor, self.fds, access="rw" if writable else "r", growing=True)
        self._remapped = weakref.ref(region)
        return region

    def release(self) -> None:
        """Hold the allocations no longer: the other end has no use for this memory. Finalizers reach it."""
        self.is_held = False
        allocations, self.allocations = self.allocations, ()
        for allocation in allocations:
            allocation.close()

    @property
    def has_local_array(self) -> bool:
        """Whether any of the arrays that were handed over is still open here."""
        arrays = (ref() for ref in self._arrays.valuerefs())  # listed in one step: others remember arrays meanwhile
        return any(array is not None and not array.is_closed for array in arrays)


class ExportTable:
    """Numbers the memory that this end has exported; finalizers call `retired`, which neither waits nor raises, with
    what is unmapped here. One that `is_channels` takes memory that lives as long as its maker, which the caller keeps.
    A retired export is known there, and held, until the other end is done with it (:meth:`closed`)."""

    def __init__(self, retired: Callable[[int], None], *, is_channels: bool = False) -> None:
        self._pools = LentPools() if is_channels else None
        self.remembered: dict[int, Export] = {}
        self._retired: Callable[[int], None] | None = retired
        self._undo = weakly(self._forget)  # regions outlive connections
        self._ids = itertools.count(1)
        self._by_region: dict[Handle, Export] = {}
        self.by_id: dict[int, Export] = {}  # what is exported, and its memory still there

    def export(self, array: Array) -> Export:
        """Return the entry of an array's memory, a new one if the memory is new or no longer what was exported.
        Raises UsageError if the memory cannot leave this process."""
        region = array.region
        if region.is_updatable:
            raise UsageError(
                f"{region.handle.label} was published with updatable=True: nobody else can map it as it is here, and "
                f"nothing would tell when its bytes change. Send its name, and attach it there (vram.attach, "
                f"lease.reading); or send a copy (vram.copy)"
            )
        if self._pools is None and goes_by_handle(region):
            raise UnsupportedError(
                "queueing memory that lives only as long as its maker", "memory that a descriptor stands for",
                f"memory that its owner may free, {region.handle.label}",
                "Copy it into memory of vram: vram.copy(...); or hand it over directly, with vram.lend or a channel",
            )  # fmt: skip
        handle = region.handle
        export = self._by_region.get(handle)
        if export is not None:
            if export.still_is(region):
                if len(export.layout) != len(region.layout):
                    export.describe(region)
                export.remember(array)
                return export
            handle.drop_dependency(export.handle)
        number = next(self._ids)
        claim = own(f"memory {number} lent to another process", partial(self._undo, handle, number))
        with or_else(claim.release):
            export = Export(number, region, claim.handle, self._pools)
            export.remember(array)
            self._by_region[handle] = self.by_id[number] = export
            handle.adopt(claim)  # from here on the region alone keeps it
        return export

    def release(self, number: int) -> None:
        """Lend a memory no longer, though it is there; `retired` is told."""
        export = self.by_id.get(number)
        if export is not None:
            export.memory.drop_dependency(export.handle)

    def known(self, region: Region) -> Export | None:
        """Return the entry of a region as it is now; None if this end has not exported it, or not all of it."""
        export = self._by_region.get(region.handle)
        is_all = export is not None and export.still_is(region) and len(export.layout) == len(region.layout)
        return export if is_all else None

    def local_array(self, reference: Reference, refs: RemoteRefs | None = None) -> Array | None:
        """Return the array here that a reference to exported memory means; see :meth:`Export.local_array`."""
        export = self.by_id.get(reference.memory) or self.remembered.get(reference.memory)
        return None if export is None else export.local_array(reference, refs)

    def closed(self, number: int) -> None:
        """The other end is done with a memory that is exported no longer: no array on it comes back."""
        export = self.remembered.pop(number, None)
        if export is not None:
            export.release()

    def expect_nothing(self) -> None:
        """The other end is gone, and everything that it said was heard: nothing comes back any more."""
        for number in tuple(self.remembered):
            self.closed(number)

    def close(self) -> None:
        """Forget everything; the other end is gone and is told nothing."""
        self._retired = None
        for handle, export in self._by_region.copy().items():
            export.release()
            handle.drop_dependency(export.handle)
        self.expect_nothing()

    def _forget(self, handle: Handle, number: int) -> None:
        export = self.by_id.get(number)
        if export is not None and export.is_held and export.sent >= 0 and self._retired is not None:
            self.remembered[number] = export  # first: another thread may just be looking for it
        self.by_id.pop(number, None)
        if export is not None and self._by_region.get(handle) is export:
            self._by_region.pop(handle, None)
        if self._retired is not None:
            self._retired(number)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return what calls a method without keeping its object: a channel that is dropped ends at once."""
    ref = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        found = ref()
        if found is not None:
            found(*arguments)

    return call


def nothing() -> None:
    """A weak reference to no array."""


def refer(number: int, segments: int, array: Array) -> Reference:
    """Write an array down as a part of memory `number`."""
    return Reference(number, segments, array.offset, dtype_name(array.dtype), array.shape)


def known_dtype(dtype: str) -> np.dtype[Any]:
    """Return an element type that a peer named."""
    try:
        return dtype_of(dtype)
    except UsageError as error:
        raise ProtocolError(f"an array came whose type this process does not know: {error}") from None


def array_on_lent(region: Region, dtype: np.dtype[Any], reference: Reference, keeps: object = None) -> Array:
    """The array that a peer meant; a wrong one is the peer's mistake (S7)."""
    try:
        return Array(region, dtype, reference.shape, offset=reference.offset, keeps=keeps)
    except UsageError as error:
        raise ProtocolError(f"an array came that does not lie in its memory {reference.memory}: {error}") from None
