"""What a publication is put together from: arrays, regions that are shared as they are, and new memory for copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import driver as drivers
from ..arrays import Array
from ..arrays.cuda import copy_rows
from ..arrays.dtypes import dtype_name
from ..arrays.sources import CudaSource, Source, as_source
from ..errors import VramError
from ..memory import PhysicalAllocation, Region
from ..sharing.descriptor import ArrayEntry, MemoryDescriptor, SegmentEntry
from ..spec import HandleKind, Location, round_up
from .mapping import device_name

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CONSUME_CHUNKS", "Copy", "Item", "Span", "named"]

ALIGNMENT = 256  # of arrays in a packed copy, in bytes: what GPU libraries ask for
CONSUME_CHUNKS = 32  # at most, of a packed copy that grows as its sources go


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Say in an error which array it is about: in its message, which is all that many a log shows."""
    try:
        yield
    except VramError as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (f"array {name!r:.80}: {error.args[0]}", *error.args[1:])
        raise
    except Exception as error:  # of another library, whose words are its own
        error.add_note(f"that is array {name!r:.80}")
        raise


@dataclass(slots=True)
class Item:
    """One array on its way: shared in place (`region` is set), or to be copied for `reason` out of `source`."""

    name: str
    value: object
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    source: Source | CudaSource | None
    region: Region | None
    offset: int
    reason: str

    def entry(self, memory: int, start: int) -> ArrayEntry:
        """What the manifest says of it, in a memory that begins at offset `start` of the region."""
        return ArrayEntry(memory, self.offset - start, self.nbytes, dtype_name(self.dtype), self.shape)

    def give_up(self, reason: str) -> None:
        """It will be copied after all."""
        self.region, self.offset, self.reason = None, 0, self.reason or reason
        if self.source is None:
            with named(self.name):
                self.source = source = as_source(self.value)
            self.shape, self.nbytes = source.shape, source.nbytes


@dataclass(slots=True)
class Span:
    """The part of one region that is shared: from the first byte of any array in it to the last.

    Attributes
    ----------
    allocations : sequence of PhysicalAllocation
        What holds it, each with a claim of its own; none where it goes by handle.
    inside : int
        Where it begins in the first of them, in bytes.
    """

    region: Region
    start: int
    stop: int
    items: list[Item]
    by_handle: bool = False
    allocations: Sequence[PhysicalAllocation] = ()
    inside: int = 0


@dataclass(slots=True)
class Copy:
    """New memory for what is packed, all in one place; the sizes of its segments are known before there is any."""

    region: Region
    sizes: list[int]
    items: list[Item]

    @classmethod
    def reserve(cls, location: Location, items: list[Item], *, grows: bool) -> Copy:
        """Place the arrays, and reserve addresses for them; there is no memory yet."""
        end = 0
        for item in items:
            item.offset = round_up(end, ALIGNMENT)
            end = item.offset + item.nbytes
        driver = drivers.get(location)
        granule = driver.mem_granularity(location, HandleKind.POSIX_FD).recommended
        # An entry of empty arrays still is an entry: it has memory, if only a granule.
        capacity = round_up(max(end, 1), granule)
        size = round_up(-(-capacity // CONSUME_CHUNKS), granule) if grows else capacity
        region = Region.create(driver, location, capacity=capacity, chunk=size, managed=True)
        return cls(region, [min(size, capacity - start) for start in range(0, capacity, size)], items)

    def describe(self) -> MemoryDescriptor:
        """Describe it as it will be when it is full."""
        segments = tuple(SegmentEntry(size, int(HandleKind.POSIX_FD)) for size in self.sizes)
        return MemoryDescriptor(device_name(self.region.location), segments, 0, sum(self.sizes), self.region.capacity)

    def take(self, item: Item) -> Array:
        """Copy one array in, and return it as it is there."""
        region = self.region
        region.grow(max(region.nbytes, item.offset + item.nbytes, 1))
        target = Array(region, item.dtype, item.shape, offset=item.offset)
        if isinstance(item.source, CudaSource):
            copy_rows(region, item.offset, item.source)
        elif item.source is not None:
            target.numpy()[...] = item.source.view
        return target
