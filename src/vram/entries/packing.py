"""The parts of a publication: arrays on their way, memory that is shared, and memory that is packed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import driver as drivers
from ..arrays import Array
from ..arrays.create import ALIGNMENT
from ..arrays.gpu import CudaSource, copy_rows
from ..arrays.numpy_on_use import np
from ..arrays.sources import Source, as_source
from ..arrays.views import NDArray
from ..errors import VramError
from ..lifetime import let_in
from ..memory import PhysicalAllocation, Region
from ..sharing.descriptor import ArrayEntry, MemoryDescriptor, SegmentEntry
from ..sharing.mapping import device_name
from ..spec import HandleKind, Location, round_up

CONSUME_CHUNKS = 32  # at most, of a packed copy that grows as its sources go


def name_in(error: Exception, name: str) -> None:
    """Say in an error which array it is about: in its message, which is all that many a log shows."""
    if not isinstance(error, VramError):  # of another library, whose words are its own
        error.add_note(f"that is array {name!r:.80}")
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"array {name!r:.80}: {error.args[0]}", *error.args[1:])


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Have errors in a block say which array they are about."""
    try:
        yield
    except Exception as error:
        name_in(error, name)
        raise


@dataclass(slots=True)
class PlannedArray:
    """One array of a publication: shared in place if `region` is set, else copied from `source` for `reason`.
    `address` is that of its elements if they are contiguous, or 0."""

    name: str
    value: object
    dtype: np.dtype[Any]
    kind: str  # the name of the type on the wire
    shape: tuple[int, ...]
    nbytes: int
    source: Source | CudaSource | None
    region: Region | None
    offset: int
    reason: str
    address: int = 0

    def entry(self, memory: int, start: int) -> ArrayEntry:
        """Its item in the manifest, in a memory that begins at offset `start` of the region."""
        return ArrayEntry(memory, self.offset - start, self.nbytes, self.kind, self.shape)

    def give_up(self, reason: str) -> None:
        """It will be copied after all."""
        self.region, self.offset, self.reason = None, 0, self.reason or reason
        if self.source is None:
            with named(self.name):
                self.source = source = as_source(self.value)
            self.shape, self.nbytes, self.address = source.shape, source.nbytes, source.address


@dataclass(slots=True)
class SharedSpan:
    """The shared part of one region: from the first byte of any array in it to the last.
    `allocations` hold it, each with a claim of its own (none by handle); it begins `inside` bytes into the first."""

    region: Region
    start: int
    stop: int
    items: list[PlannedArray]
    by_handle: bool = False
    allocations: Sequence[PhysicalAllocation] = ()
    inside: int = 0


@dataclass(slots=True)
class PackedCopy:
    """New memory for all packed arrays of one place; the sizes of its segments are known before it is allocated.
    It is used from byte `inside` on."""

    region: Region
    sizes: list[int]
    items: list[PlannedArray]
    inside: int = 0

    @classmethod
    def reserve(
        cls, location: Location, items: list[PlannedArray], *, grows: bool, inherited: bool = True
    ) -> PackedCopy:
        """Place the arrays, and reserve addresses for them; there is no memory yet."""
        end = 0
        blocks = _tied(items)
        for item in items:
            if item.address not in blocks:
                item.offset = round_up(end, ALIGNMENT)
                end = item.offset + item.nbytes
                continue
            block = blocks[item.address]
            if block.offset < 0:
                block.offset = round_up(end, ALIGNMENT) + block.start % ALIGNMENT
                end = block.offset + block.stop - block.start
            item.offset = block.offset + item.address - block.start
        return cls.of_size(location, end, items, grows=grows, inherited=inherited)

    @classmethod
    def of_size(
        cls, location: Location, nbytes: int, items: list[PlannedArray], *, grows: bool, inside: int = 0,
        inherited: bool = True,
    ) -> PackedCopy:  # fmt: skip
        """Reserve addresses for arrays that were placed; there is no memory yet. See :meth:`Region.create`."""
        driver = drivers.get(location)
        granule = driver.mem_granularity(location, HandleKind.POSIX_FD).recommended
        # An entry of empty arrays still is an entry: it has memory, if only a granule.
        capacity = round_up(max(nbytes, 1), granule)
        size = round_up(-(-capacity // CONSUME_CHUNKS), granule) if grows else capacity
        region = Region.create(
            location, driver=driver, capacity=capacity, chunk=size, inherited=inherited, managed=True
        )
        return cls(region, [min(size, capacity - start) for start in range(0, capacity, size)], items, inside)

    def describe(self) -> MemoryDescriptor:
        """Describe it as it will be when it is full."""
        segments = tuple(SegmentEntry(size, int(HandleKind.POSIX_FD)) for size in self.sizes)
        nbytes, inside = sum(self.sizes), self.inside
        return MemoryDescriptor(
            device_name(self.region.location), segments, inside, nbytes - inside, self.region.capacity
        )

    def fill(self) -> None:
        """Copy all arrays in, without an object for each: there may be many thousands of them."""
        region = self.region
        region.grow(region.capacity)
        whole: NDArray | None = None
        done: set[tuple[int, int]] = set()  # of those that are tied, one is copied
        for item in self.items:
            source = item.source
            if (where := (item.offset, item.nbytes)) in done:
                continue
            done.add(where)
            let_in()
            try:
                if isinstance(source, CudaSource):
                    copy_rows(region, item.offset, source)
                elif source is not None:
                    if whole is None:
                        with Array(region, "uint8", (region.nbytes,)) as all_of_it:
                            whole = all_of_it.numpy()
                    _write(source, np.ndarray(item.shape, item.dtype, whole, item.offset))
            except Exception as error:
                name_in(error, item.name)
                raise

    def take(self, item: PlannedArray) -> Array:
        """Copy one array in, and return it as it is there."""
        region = self.region
        region.grow(max(region.nbytes, item.offset + item.nbytes, 1))
        target = Array(region, item.dtype, item.shape, offset=item.offset)
        if isinstance(item.source, CudaSource):
            copy_rows(region, item.offset, item.source)
        elif item.source is not None:
            _write(item.source, target.numpy())
        return target


def _write(source: Source, target: NDArray) -> None:
    if source.write is None:
        target[...] = source.view
    else:
        source.write(target)


@dataclass(slots=True)
class _Block:
    """Memory in which several arrays lie: at which addresses, and at which offset it will lie (-1: not placed yet)."""

    start: int
    stop: int
    offset: int = -1


def _tied(items: Iterable[PlannedArray]) -> dict[int, _Block]:
    """Return the blocks of arrays that share bytes (tied weights, views of one array), by the address of each array.
    A block is copied once, and a reader has its arrays tied as they are here."""
    found: dict[int, _Block] = {}
    block: _Block | None = None
    members: list[int] = []
    for address, nbytes in sorted([(item.address, item.nbytes) for item in items if item.address and item.nbytes]):
        if block is not None and address < block.stop:
            block.stop = max(block.stop, address + nbytes)
            members.append(address)
            found |= dict.fromkeys(members, block)
        else:
            block, members = _Block(address, address + nbytes), [address]
    return found
