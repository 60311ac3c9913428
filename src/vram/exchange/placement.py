"""Where each array of a publication will lie: shared where it is, or packed into new memory."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from .. import driver as drivers
from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..arrays.shapes import as_shape
from ..arrays.sources import Source, as_source, find
from ..arrays.views import Home, let_go
from ..errors import UsageError, VramError
from ..keeper.client import Segment
from ..lifetime import Handle
from ..memory import Region
from ..sharing.descriptor import (
    MANIFEST_VERSION,
    MAX_SEGMENTS,
    ArrayEntry,
    Manifest,
    MemoryDescriptor,
    SegmentEntry,
    check_array_name,
)
from ..spec import HOST, Access, HandleKind, round_up
from .mapping import describe
from .provenance import Provenance

__all__ = ["Placement"]

ALIGNMENT = 256  # of arrays in a packed copy, in bytes: what GPU libraries ask for
_CONSUME_CHUNKS = 32  # at most, of a packed copy that grows as its sources go


@dataclass(slots=True)
class _Item:
    """One array on its way: shared in place (`region` is set), or to be copied for `reason`."""

    name: str
    value: object
    source: Source
    region: Region | None
    offset: int
    reason: str

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    def entry(self, memory: int, start: int) -> ArrayEntry:
        """What the manifest says of it, in a memory that begins at offset `start` of the region."""
        source = self.source
        return ArrayEntry(memory, self.offset - start, source.nbytes, dtype_name(source.dtype), source.shape)


@dataclass(slots=True)
class _Span:
    """The part of one region that is shared: from the first byte of any array in it to the last."""

    region: Region
    start: int
    stop: int
    items: list[_Item]


class Placement:
    """Which arrays are shared where they are, which are packed, and where in the manifest each will be.

    With `sources`, each packed array is replaced in that mapping by a vram array over its copy, whose memory grows as
    it goes. In the end they are taken out; if anything fails before, they stay, and nothing is lost.
    """

    def __init__(
        self, arrays: Mapping[str, object], writable: bool, sources: MutableMapping[str, object] | None, close: bool
    ) -> None:
        self._writable = writable
        self._sources = sources
        self._close = close
        self._taken: dict[str, Array] = {}
        self.items = [_look(name, value, writable) for name, value in arrays.items()]
        if not self.items:
            raise UsageError("there is nothing to publish: the mapping is empty")
        self.nbytes = sum(item.nbytes for item in self.items)
        self.spans: dict[Handle, _Span] = {}
        for item in self.items:
            if item.region is not None:
                self._share(item.region, item, item.offset)
        shared = sum(len(s.region.segments(s.start, s.stop)[0]) for s in self.spans.values())
        copies = any(item.region is None and item.nbytes for item in self.items)
        if shared + copies * (1 if sources is None else _CONSUME_CHUNKS) > MAX_SEGMENTS:
            self.spans.clear()
            for item in self.items:
                item.reason = item.reason or f"all of it lies in {shared} segments; {MAX_SEGMENTS} is the most"
                item.region = None
        for span in [*self.spans.values()][:1]:  # what is empty needs memory of its own only if there is no other
            for item in self.items:
                if item.region is None and not item.nbytes:
                    self._share(span.region, item, span.start)
        self.packed = [item for item in self.items if item.region is None]
        self._copy: Region | None = None
        self._copy_sizes: list[int] = []
        if self.packed:
            self._reserve()

    def _share(self, region: Region, item: _Item, offset: int) -> None:
        start, stop = offset, offset + item.nbytes
        span = self.spans.setdefault(region.handle, _Span(region, start, stop, []))
        span.start, span.stop = min(span.start, start), max(span.stop, stop)
        span.items.append(item)
        item.region, item.offset = region, offset

    def _reserve(self) -> None:
        """Place the packed arrays, and reserve addresses for them; there is no memory yet."""
        end = 0
        for item in self.packed:
            item.offset = round_up(end, ALIGNMENT)
            end = item.offset + item.nbytes
        driver = drivers.get(HOST)
        granule = driver.mem_granularity(HOST, HandleKind.POSIX_FD).recommended
        # An entry of empty arrays still is an entry: it has memory, if only a granule.
        capacity = round_up(max(end, 1), granule)
        size = capacity if self._sources is None else round_up(-(-capacity // _CONSUME_CHUNKS), granule)
        self._copy = Region.create(driver, HOST, capacity=capacity, chunk=size, managed=True)
        # Known before there is memory, so that the keeper can be asked.
        self._copy_sizes = [min(size, capacity - start) for start in range(0, capacity, size)]

    # -- in this order --------------------------------------------------------------------------------------------
    def manifest(self) -> tuple[Manifest, list[Segment]]:
        """Return the manifest and the segments that it speaks of."""
        memories = [describe(span.region, span.start, span.stop)[0] for span in self.spans.values()]
        entries: dict[str, ArrayEntry] = {}
        for number, span in enumerate(self.spans.values()):
            entries |= {item.name: item.entry(number, span.start) for item in span.items}
        if self._copy is not None:
            entries |= {item.name: item.entry(len(memories), 0) for item in self.packed}
            segments = tuple(SegmentEntry(size, int(HandleKind.POSIX_FD)) for size in self._copy_sizes)
            capacity = self._copy.capacity
            memories.append(MemoryDescriptor("host", segments, 0, sum(self._copy_sizes), capacity))
        ordered = {item.name: entries[item.name] for item in self.items}
        pieces = [Segment(entry.nbytes, entry.kind, memory.device) for memory in memories for entry in memory.segments]
        return Manifest(MANIFEST_VERSION, tuple(memories), ordered), pieces

    def copy(self) -> None:
        """Pack what cannot be shared where it is."""
        region = self._copy
        if region is None:
            return
        if self._sources is None:
            region.grow(region.capacity)
        for item in self.packed:
            region.grow(max(region.nbytes, item.offset + item.nbytes, 1))
            target = Array(region, item.source.dtype, item.source.shape, offset=item.offset)
            target.numpy()[...] = item.source.view
            if self._sources is None:
                target.close()
                continue
            self._taken[item.name] = self._sources[item.name] = target
            if self._close and isinstance(item.value, Array):
                item.value.close()
            item.value, item.source = target, as_source(target)
        region.grow(region.capacity)

    def synchronize(self) -> None:
        """Wait for the work that fills the memory: a reader may come the moment it is published (S10)."""
        for span in self.spans.values():
            span.region.driver.synchronize(span.region.location)

    def freeze(self) -> None:
        """Seal everything."""
        if self._copy is not None:
            self._copy.freeze()
            Home.of(self._copy).freeze_views()
        for span in self.spans.values():
            span.region.freeze()
            Home.of(span.region).freeze_views()

    def descriptors(self) -> list[int]:
        """Return the descriptors of all segments, in their order, lent by the allocations."""
        fds = [fd for span in self.spans.values() for fd in describe(span.region, span.start, span.stop)[1]]
        if self._copy is not None:
            fds += describe(self._copy, 0, self._copy.nbytes)[1]
        return fds

    def done(self, path: str, name: str, version: int) -> None:
        """It is published: let the arrays that were shared know where they can be had again, and take out the rest."""
        for span in self.spans.values():
            for item in span.items:
                array = item.value
                if isinstance(array, Array) and not array.is_closed and array.region is span.region:
                    access = "rw" if self._writable else "r"
                    array.provenance = Provenance(
                        path, name, version, item.name, access, array.offset, array.nbytes, span.region.layout
                    )
                if self._sources is not None:
                    self._sources.pop(item.name, None)
                    if self._close and isinstance(array, Array):
                        array.close()
        if self._sources is not None:
            for name, array in self._taken.items():
                self._sources.pop(name, None)
                array.close()

    # -- the end --------------------------------------------------------------------------------------------------
    def __enter__(self) -> Placement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._copy is not None:
            let_go(self._copy)  # arrays that were put into the mapping keep its memory


def _look(name: object, value: object, writable: bool) -> _Item:
    """Decide for one array whether it is shared in place, and if not, why."""
    called = check_array_name(name)
    try:
        source = as_source(value)
        # What no reader could name or shape is refused before anything is copied.
        dtype_name(source.dtype)
        as_shape(source.shape)
    except VramError as error:
        error.add_note(f"that is array {called!r:.80}")
        raise
    if isinstance(value, Array):
        found: tuple[Region, int] | None = (value.region, value.offset)
    else:
        found = find(source.address, source.nbytes if source.contiguous else 1)
    if found is None:
        return _Item(called, value, source, None, 0, "it is not in vram memory")
    region, offset = found
    reason = ""
    if not source.contiguous:
        reason = "it is not contiguous"
    elif not source.nbytes:
        reason = "it is empty"
    elif region.is_closed:
        reason = "its region was closed"
    elif region.is_private:
        reason = "it is a private copy of what was attached"
    elif region.is_frozen and writable:
        reason = "its memory is read-only for good, and writable=True was asked for"
    elif region.is_imported and not region.is_frozen and not (writable and region.access is Access.READ_WRITE):
        reason = "its memory is another process's, which did not make it read-only"
    elif not all(HandleKind.POSIX_FD in a.handle_kinds for a in region.segments(offset, offset + source.nbytes)[0]):
        reason = "its memory was made not to leave this process"
    return _Item(called, value, source, None if reason else region, offset, reason)
