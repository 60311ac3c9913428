"""Where each array of a publication will lie: shared where it is, or packed into new memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from ..arrays import Array
from ..arrays.create import ALIGNMENT
from ..arrays.dtypes import dtype_name
from ..arrays.gpu import CudaSource
from ..arrays.shapes import as_shape
from ..arrays.share import Finder
from ..arrays.sources import Source, as_source
from ..arrays.views import RegionViews, Spans, close_when_unused, find, handed_out
from ..errors import BusyError, UnsupportedError, UsageError
from ..handover.by_handle import PoolDescriptors, describe_by_handle, goes_by_handle, handle_bytes
from ..keeper.client import Segment
from ..lifetime import Handle, let_in, noted
from ..memory import Pin, Region
from ..memory.foreign import ForeignRegion
from ..sharing.descriptor import (
    MANIFEST_VERSION,
    MAX_SEGMENTS,
    ArrayEntry,
    HandleEntry,
    Manifest,
    MemoryDescriptor,
    check_array_name,
)
from ..sharing.mapping import describe, describe_allocations
from ..spec import HOST, Access, HandleKind, Location
from .by_name import Provenance
from .packing import CONSUME_CHUNKS, PackedCopy, PlannedArray, SharedSpan, name_in, named

# -- what a reader would see besides ----------------------------------------------------------------------------------
# Memory goes as whole allocations. A keeper hands them to whoever may connect, and none of these is held to look only
# where an array is: rows beyond a slice, rows that a shrink left, and other arrays in the same memory are there to be
# read. So a publication shares memory in place only if there is nothing else in it.

# Bytes between arrays that are looked at, for a span: what pads a packed copy, or the end of its last allocation.
_MOST_READ = 16 << 20
_STEP = 1 << 20
_ZEROS = bytes(_STEP)

_PART = "it is a part of memory that holds more, which all readers would see (whole=True publishes all of it)"
_LEFT = (
    "its memory holds rows from before it was made smaller, which all readers would see and others may be using "
    "(whole=True publishes them, too)"
)


def _why_not_whole(spans: Iterable[SharedSpan]) -> dict[int, str]:
    """Return why memory that somebody gives out in parts cannot be published as it is, by address; empty if it can."""
    asked: dict[Callable[[Mapping[int, Spans]], Mapping[int, str]], dict[int, Spans]] = {}
    for span in spans:
        address = span.region.address
        if (giver := handed_out.get(address)) is not None:
            where = [(item.offset, item.offset + item.nbytes) for item in span.items]
            asked.setdefault(giver, {})[address] = where
    return {address: reason for giver, where in asked.items() for address, reason in giver(where).items()}


def other_contents(span: SharedSpan) -> tuple[str, bool]:
    """Return why the memory of a span cannot be published as it is (empty: it can), and whether it has remains.
    Remains are rows that a shrink left and a reader would see: :func:`clear` has to zero them first."""
    region = span.region
    first = span.start - span.inside
    last = first + sum([one.nbytes for one in span.allocations])
    between = _uncovered(span, first, min(last, region.nbytes))
    if between and not _is_padding(region, between):
        return _PART, False
    start, stop = region.remains
    if last <= start or start == stop:
        return "", False
    return ("", True) if region.may_clear else (_LEFT, False)


def clear(regions: Sequence[Region]) -> None:
    """Zero the remains that :func:`other_contents` found. Raises BusyError if a region came into use meanwhile."""
    for region in regions:
        if not region.clear():
            raise BusyError(f"{region.handle.label} is being changed while it is published; publish it again")


def _uncovered(span: SharedSpan, first: int, last: int) -> list[tuple[int, int]]:
    """Return the parts of a region from `first` to `last` in which no array of the span is."""
    found: list[tuple[int, int]] = []
    at = first
    for start, stop in sorted([(item.offset, item.offset + item.nbytes) for item in span.items]):
        if start > at:
            found.append((at, start))
        at = max(at, stop)
    if at < last:
        found.append((at, last))
    return found


def _is_padding(region: Region, between: Sequence[tuple[int, int]]) -> bool:
    """Whether what lies between arrays is nobody's: in memory that is no array's rows, and zero."""
    if isinstance(region, ForeignRegion) or RegionViews.of(region).is_grown or region.access < Access.READ:
        return False
    if sum(stop - start for start, stop in between) > _MOST_READ:
        return False
    first, last = between[0][0], between[-1][1]
    if RegionViews.of(region).addressable:
        driver: Any = region.driver
        with driver.buffer(region.address + first, last - first, readonly=True) as view:
            return all(_is_zero(view[start - first : stop - first]) for start, stop in between)
    return all(_is_zero_there(region, start, stop) for start, stop in between)


def _is_zero(view: memoryview) -> bool:
    return all(
        part == _ZEROS[: len(part)] for part in (bytes(view[at : at + _STEP]) for at in range(0, len(view), _STEP))
    )


def _is_zero_there(region: Region, start: int, stop: int) -> bool:
    """Whether a part of a GPU's memory is zero."""
    for at in range(start, stop, _STEP):
        part = bytearray(min(_STEP, stop - at))
        region.driver.copy_out(memoryview(part), region.address + at)
        if part != _ZEROS[: len(part)]:
            return False
    return True


# -- where each array will lie ----------------------------------------------------------------------------------------
_NOT_OURS = "it is not in vram memory"


class Placement:
    """The plan of a publication: which arrays are shared in place, which are packed, and where each will be.
    With `sources`, each packed array is replaced there by its copy as copying goes on, so that a failure loses nothing.
    With `lends` or `whole`, memory goes as it is, whatever else is in it; `swap` adds a second slot."""

    def __init__(
        self, arrays: Mapping[str, object], writable: bool, sources: MutableMapping[str, object] | None, close: bool, *,
        lends: bool = False, whole: bool = False, updatable: bool = False, swap: bool = False,
    ) -> None:  # fmt: skip
        self._writable = writable
        self._updatable = updatable
        self._swap = swap
        self._whole = whole or lends
        self._unclear: list[Region] = []  # what is shared where it is, and has rows that a shrink left
        self._sources = sources
        self._close = close
        self._taken: dict[str, Array] = {}
        self._pins: list[Pin] = []
        self.pools: PoolDescriptors | None = None
        self.held: list[tuple[Handle | None, int]] = []  # memory of GPUs that was published where it is, and its bytes
        self._lends = lends
        known: dict[Region, str] = {}
        finder = Finder() if lends else None
        self.items = [_look(name, value, writable, finder, known, updatable) for name, value in arrays.items()]
        if not self.items:
            raise UsageError(f"there is nothing to {'lend' if lends else 'publish'}: the mapping is empty")
        self.spans: dict[Handle, SharedSpan] = {}
        for item in self.items:
            if item.region is not None:
                self._share(item.region, item, item.offset)
        try:
            shared = self._hold()
        except BaseException:
            self._release()
            raise
        copies = bool([item for item in self.items if item.region is None and item.nbytes])
        segments = shared + copies * (1 if sources is None else CONSUME_CHUNKS)
        if segments + swap * (len(self.spans) + copies) > MAX_SEGMENTS:  # in the second slot a memory is in one piece
            self.spans.clear()
            for item in self.items:
                item.give_up(f"all of it lies in {shared} segments; {MAX_SEGMENTS} is the most")
        if lends:
            self._refuse_copies()
        # An empty array needs memory of its own only if nothing else is in the same place.
        for span in list(self.spans.values()):
            for item in self.items:
                if item.region is None and not item.nbytes and _place(item) == span.region.location:
                    self._share(span.region, item, span.start)
        self.nbytes = sum([item.nbytes for item in self.items])
        self.packed = [item for item in self.items if item.region is None]
        groups: dict[Location, list[PlannedArray]] = {}
        for item in self.packed:
            groups.setdefault(_place(item), []).append(item)
        self._copies: list[PackedCopy] = []
        self._spares: list[PackedCopy] = []  # the memories of the second slot, in the order of those of the first
        # What is sealed when it is full, and nobody looks at here: a child forked meanwhile would have it mapped,
        # and keep the kernel from sealing it for as long as it lives.
        inherited = writable or updatable or sources is not None
        try:
            for location, items in groups.items():
                self._copies.append(PackedCopy.reserve(location, items, grows=sources is not None, inherited=inherited))
            for region, start, stop, _ in self._memories() if swap else ():
                inside = start % ALIGNMENT  # arrays are aligned in both slots, or in none
                size = inside + stop - start
                self._spares.append(PackedCopy.of_size(region.location, size, [], grows=False, inside=inside))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._regions = [*[copy.region for copy in self._copies], *[span.region for span in self.spans.values()]]

    def _memories(self) -> list[tuple[Region, int, int, list[PlannedArray]]]:
        """Return each memory: its region, from where to where in that it is published, and which arrays lie there."""
        found = [(span.region, span.start, span.stop, span.items) for span in self.spans.values()]
        return found + [(copy.region, 0, copy.region.capacity, copy.items) for copy in self._copies]

    def _refuse_copies(self) -> None:
        """A lender lends the memory itself; lend a copy where a copy is wanted."""
        for item in self.items:
            if item.region is None and item.nbytes:
                self._release()
                raise UnsupportedError(
                    f"lending array {item.name!r:.80}", "memory that can be shared as it is", item.reason,
                    "Copy it into memory of its own: vram.copy(...)",
                )  # fmt: skip

    def _share(self, region: Region, item: PlannedArray, offset: int) -> None:
        start, stop = offset, offset + item.nbytes
        by_handle = isinstance(region, ForeignRegion) and goes_by_handle(region)
        span = self.spans.setdefault(region.handle, SharedSpan(region, start, stop, [], by_handle))
        span.start, span.stop = min(span.start, start), max(span.stop, stop)
        span.items.append(item)
        item.region, item.offset = region, offset

    def _hold(self) -> int:
        """Keep what is shared from being shrunk away; return how many segments it has."""
        shared = 0
        spans = self.spans.copy()
        for span in spans.values():
            self._pins.append(span.region.pin(span.start, span.stop, "lent" if self._lends else "being published"))
            if span.by_handle:
                shared += 1
                continue
            span.allocations, span.inside = span.region.segments(span.start, span.stop)
        given_out = _why_not_whole(spans.values()) if handed_out and not self._lends else {}
        for handle, span in spans.items():
            if span.by_handle:
                continue
            if [one for one in span.allocations if HandleKind.POSIX_FD not in one.handle_kinds]:
                reason = "its memory was made not to leave this process"
            elif self._lends:
                reason = ""
            elif not (reason := given_out.get(span.region.address, "")) and not self._whole:
                reason, has_remains = other_contents(span)
                self._unclear += [span.region] * has_remains
            if not reason:
                shared += len(span.allocations)
                continue
            del self.spans[handle]
            for item in span.items:
                item.give_up(reason)
        return shared

    # -- in this order --------------------------------------------------------------------------------------------
    def manifest(self) -> tuple[Manifest, list[Segment]]:
        """Return the manifest and the segments that it speaks of."""
        memories: list[MemoryDescriptor] = []
        handles: list[HandleEntry] = []
        entries: dict[str, ArrayEntry] = {}
        for number, span in enumerate(self.spans.values()):
            if span.by_handle:
                self.pools = self.pools or PoolDescriptors()
                pool = self.pools.number(span.region)  # first: see handle_bytes
                handles.append(HandleEntry(number, handle_bytes(span.region), pool))
                memories.append(describe_by_handle(span.region, span.start, span.stop))
            else:
                nbytes = span.stop - span.start
                memories.append(describe_allocations(span.region, span.allocations, span.inside, nbytes))
            entries |= {item.name: item.entry(number, span.start) for item in span.items}
        for copy in self._copies:
            entries |= {item.name: item.entry(len(memories), 0) for item in copy.items}
            memories.append(copy.describe())
        memories += [spare.describe() for spare in self._spares]
        ordered = {item.name: entries[item.name] for item in self.items}
        pieces = [
            Segment(entry.nbytes, entry.kind, memory.device)
            for memory in memories
            for entry in memory.segments
            if entry.kind == HandleKind.POSIX_FD
        ]
        pools = [] if self.pools is None else self.pools.fds
        pieces += [Segment(1, int(HandleKind.POOL), memories[0].device) for _ in pools]
        serials: list[int] = []
        # Memory that is read-only for good cannot grow, nor a copy, and lent memory has no second version.
        if self._writable and not self._lends and not self._copies:
            for span in self.spans.values():
                serials += [allocation.serial for allocation in span.allocations]
        manifest = Manifest(
            MANIFEST_VERSION, tuple(memories), ordered, tuple(handles), len(pools), updatable=self._updatable,
            serials=tuple(serials), slots=1 + self._swap,
        )  # fmt: skip
        return manifest, pieces

    def copy(self) -> None:
        """Pack what cannot be shared where it is, and clear what goes with the rest and is nobody's."""
        if self._unclear:
            clear(self._unclear)
        for copy in self._copies:
            if self._sources is None:
                copy.fill()
                continue
            done: list[PlannedArray] = []
            for item in copy.items:
                let_in()
                with named(item.name):
                    target = copy.take(item)
                try:
                    self._sources[item.name] = target
                except BaseException as error:
                    with noted(error):
                        if self._sources.get(item.name) is not target:
                            target.close()
                            # Or those before it would lie beside what is in no array, and be copied once more.
                            copy.region.shrink(max([one.offset + one.nbytes for one in done], default=0))
                    raise
                done.append(item)
                self._taken[item.name] = target
                if self._close and isinstance(item.value, Array):
                    item.value.close()
                item.value, item.source = target, None
            copy.region.grow(copy.region.capacity)
        for spare in self._spares:  # last: sources that are consumed are gone by now
            spare.region.grow(spare.region.capacity)

    @property
    def is_to_be_asked_for(self) -> bool:
        """Whether a refusal has to come before what publishing begins with: a copy, or what has no undo, as a seal."""
        if self._copies or self._unclear or self._updatable:
            return True
        if self._writable:
            return False
        return bool([one for one in self._regions if one.access is Access.READ_WRITE or not one.is_frozen])

    def synchronize(self) -> None:
        """Wait for the work that fills the memory: a reader may come the moment it is published (S10)."""
        for region in (*self._regions, *[spare.region for spare in self._spares]):
            region.synchronize()

    def freeze(self) -> None:
        """Seal everything; of lent memory only that of the host, since work on a GPU may be about to write there.
        Shared regions come before copies: if sealing is refused, nothing has changed."""
        for region in reversed(self._regions):
            if self._lends and region.location != HOST:
                continue
            region.freeze()
            RegionViews.of(region).freeze_views()

    def slots(self) -> list[dict[str, Array]]:
        """Return the arrays of each slot by name, over what is published; they keep it for this updating process."""
        found: list[dict[str, Array]] = [{} for _ in range(1 + self._swap)]
        for number, (region, start, _, items) in enumerate(self._memories()):
            for item in items:
                found[0][item.name] = Array(region, item.dtype, item.shape, offset=item.offset)
                if self._swap:
                    spare = self._spares[number]
                    offset = item.offset - start + spare.inside
                    found[1][item.name] = Array(spare.region, item.dtype, item.shape, offset=offset)
        return [{item.name: arrays[item.name] for item in self.items} for arrays in found]

    @property
    def is_frozen(self) -> bool:
        """Whether any of what is shared where it is has become read-only."""
        return any(span.region.is_frozen for span in self.spans.values())

    def places(self) -> list[Location]:
        """Return where the memories are, each as often as it comes."""
        return [place for region in self._regions for place in region.users]

    def descriptors(self) -> list[int]:
        """Return the descriptors of all segments, in their order, lent by the allocations."""
        fds = [one.export() for span in self.spans.values() for one in span.allocations]
        for copy in self._copies:
            fds += describe(copy.region, 0, copy.region.nbytes)[1]
        for spare in self._spares:
            fds += describe(spare.region, 0, spare.region.nbytes)[1]
        return fds if self.pools is None else fds + self.pools.fds

    def done(self, path: str, name: str, version: int) -> None:
        """It is published: let the arrays that were shared know where they can be had again, and take out the rest."""
        access = "rw" if self._writable else "r"
        for span in self.spans.values():
            region, layout = span.region, span.region.layout
            if region.location is not HOST:  # of what another library made nobody here knows when it goes
                is_foreign = isinstance(region, ForeignRegion)
                self.held += [(None if is_foreign else one.handle, one.nbytes) for one in span.allocations]
            for item in span.items:
                array = item.value
                if isinstance(array, Array) and not array.is_closed and array.region is region:
                    # One of two slots is not had again by its name.
                    array.provenance = (
                        None
                        if self._swap
                        else Provenance(path, name, version, item.name, access, item.offset, item.nbytes, layout)
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
        self._release()
        for copy in (*self._copies, *self._spares):
            close_when_unused(copy.region)  # arrays that were put into the mapping keep its memory
        if self.pools is not None:
            self.pools.close()

    def _release(self) -> None:
        """Keep what is shared no longer."""
        for span in self.spans.values():
            span.allocations = ()  # which were managed: each claim goes with its object
        for pin in self._pins:
            pin.release()


def _look(
    name: object, value: object, writable: bool, finder: Finder | None, known: dict[Region, str], updatable: bool
) -> PlannedArray:
    """Plan one array: shared in place, or copied for a reason. With a `finder` it is lent, or the finder raises.
    `known` caches by region why no array on it can be shared."""
    called = check_array_name(name)
    address = 0
    try:  # not `named`: every array of thousands comes by here
        found: tuple[Region, int] | None
        if isinstance(value, Array):
            source = None
            dtype, shape, nbytes, contiguous = value.dtype, value.shape, value.nbytes, True
            found = value.region, value.offset
        elif finder is not None:
            value, source, found = finder.find(value)
            dtype, shape, nbytes, contiguous = source.dtype, source.shape, source.nbytes, True
            if writable and isinstance(source, Source) and not source.view.flags.writeable:
                raise UsageError("it is given as read-only, and writable=True was asked for; give what may be written")
        else:
            source = as_source(value)
            dtype, shape, nbytes, contiguous = source.dtype, source.shape, source.nbytes, source.contiguous
            address = source.address
            found = find(address, nbytes if contiguous else 1)
            as_shape(shape)
        # Arrays that no reader could name or shape are refused before anything is copied.
        kind = dtype_name(dtype)
    except Exception as error:
        name_in(error, called)
        raise
    where = address if contiguous else 0
    if found is None:
        return PlannedArray(called, value, dtype, kind, shape, nbytes, source, None, 0, _NOT_OURS, where)
    region, offset = found
    item = PlannedArray(called, value, dtype, kind, shape, nbytes, source, region, offset, "", where)
    if not contiguous:
        item.give_up("it is not contiguous")
    elif not nbytes:
        item.give_up("it is empty")
    else:
        reason = known.get(region)
        if reason is None:
            reason = known[region] = _why_not(region, writable, finder is not None, updatable)
        if reason:
            item.give_up(reason)
    return item


def _place(item: PlannedArray) -> Location:
    """Where a packed array goes: to where it is."""
    source = item.source
    return Location("cuda", source.gpu) if isinstance(source, CudaSource) else HOST


def _why_not(region: Region, writable: bool, lends: bool, updatable: bool) -> str:
    """Return why nothing on a region can be shared in place; empty if it can."""
    if region.is_closed:
        return "its region was closed"
    if region.is_updatable:
        return "it is published with updatable=True, and its bytes change under its readers"
    if updatable:
        return _why_not_updated(region)
    if region.is_private:
        return "it is a private copy of what was attached"
    if isinstance(region, ForeignRegion):
        if not lends and not region.kinds & HandleKind.POSIX_FD:
            return "memory of cudaMalloc or of a pool lives only as long as its maker: a keeper cannot hold it"
        if writable and region.access is not Access.READ_WRITE:
            return "its owner lets nobody write to it, and writable=True was asked for"
        return ""
    if writable and region.is_frozen:
        return "its memory is read-only for good, and writable=True was asked for"
    if region.is_imported and not region.is_frozen and not (writable and region.access is Access.READ_WRITE):
        return "its memory is another process's, which did not make it read-only"
    return ""


def _why_not_updated(region: Region) -> str:
    """Return why nothing on a region can be shared in place and be updated there; empty if it can."""
    if isinstance(region, ForeignRegion) or region.is_imported or region.is_private:
        return "its memory is not this library's own, made in this process"
    if region.is_frozen or region.access is not Access.READ_WRITE:
        return "it cannot be written here"
    if region.has_left:  # whoever has a writable mapping keeps it
        return "its memory has left this process before, and others may be able to write to it"
    return ""
