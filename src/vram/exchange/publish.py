"""Publish arrays under a name: zero copy where the memory can be shared, one packed copy where it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from .. import driver as drivers
from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..arrays.shapes import as_shape
from ..arrays.sources import Source, as_source, find
from ..arrays.views import Home, let_go
from ..errors import UsageError, VramError
from ..keeper.client import KeeperClient, PublishClaim, Segment
from ..keeper.session import Keeper
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
    encode_manifest,
)
from ..spec import HOST, Access, HandleKind, round_up
from .keepers import as_notes, connect
from .mapping import describe, sealed_copy, sealed_size
from .provenance import Provenance

__all__ = ["Published", "publish", "publish_to"]

ALIGNMENT = 256  # of arrays in a packed copy, in bytes: what GPU libraries ask for
INLINE_MANIFEST = 32 << 10
_CONSUME_CHUNKS = 32  # at most, of a packed copy that grows as its sources go


@dataclass(frozen=True, slots=True)
class Published:
    """What came of a publish.

    Attributes
    ----------
    name, version : str, int
        What to attach.
    arrays, nbytes : int
        How many arrays, and the bytes of all of them.
    copied : dict of str to str
        The arrays that were copied, and why each could not be shared as it was. Empty means zero copy.
    """

    name: str
    version: int
    arrays: int
    nbytes: int
    copied: dict[str, str] = field(default_factory=dict)

    @property
    def zero_copy(self) -> bool:
        """Whether not one byte was copied."""
        return not self.copied


def publish(
    name: str,
    arrays: Mapping[str, object],
    *,
    meta: Mapping[str, str] | None = None,
    writable: bool = False,
    ttl: float | None = None,
    consume: bool = False,
    keeper: Keeper | str | None = None,
) -> Published:
    """Publish arrays as a new version of an entry, in one step: a reader sees all of it or none.

    The keeper holds the memory from then on; this process may exit. Publishing a name again retires the version
    before it, which is freed with its last lease.

    Parameters
    ----------
    name : str
        1 to 200 characters of ``A-Z a-z 0-9 . _ / @ : + -``.
    arrays : mapping of str to array
        vram arrays (and contiguous slices and numpy or torch views of them) are shared as they are; other numpy
        arrays, torch CPU tensors and buffers are copied, once and packed, into new memory.
    meta : mapping of str to str, optional
        Up to 4 KiB that readers can ask for with ``expect=``.
    writable : bool
        False seals the memory: from then on nobody can write to it, this process and its existing views included.
        Where a vram array shares its memory with others, all of them are sealed. A write through a pointer taken
        before, such as a torch tensor's, kills the process with SIGSEGV. True lets readers ask for ``access="rw"``.
    ttl : float, optional
        Seconds after which the version is retired.
    consume : bool
        Take the arrays out of the mapping, freeing each source as soon as it is copied, so that the peak stays at
        one copy. What is zero copy is closed. If publishing fails, what was copied is in the mapping as vram arrays.
    keeper : Keeper or str, optional
        Whom to give it to; see :func:`vram.attach`.

    Returns
    -------
    Published
        The version, and which arrays were copied and why.

    Raises
    ------
    UsageError
        For a bad name, a mapping of something else than arrays, too many segments.
    AccessDeniedError
        If the name belongs to another user.
    CapacityError
        If the keeper's quota does not allow it.
    OutOfMemoryError
        If a copy is needed and there is no room for it.
    """
    return publish_to(
        connect(keeper), name, arrays, meta=as_notes(meta), writable=writable, ttl=ttl, consume=consume, close=True
    )


def publish_to(
    client: KeeperClient,
    name: str,
    arrays: Mapping[str, object],
    *,
    meta: dict[str, str],
    writable: bool,
    ttl: float | None,
    consume: bool,
    close: bool = False,
    claim: PublishClaim | None = None,
) -> Published:
    """Publish over a connection; see :func:`publish`.

    Parameters
    ----------
    close : bool
        With `consume`, close the vram arrays that are taken out of the mapping, not just forget them.
    claim : PublishClaim, optional
        The claim on the name that this publication fulfils.
    """
    if not isinstance(arrays, Mapping):
        raise UsageError(
            f'publish takes a mapping of names to arrays, not a {type(arrays).__name__}; one array is {{"name": array}}'
        )
    if consume and not isinstance(arrays, MutableMapping):
        kind = type(arrays).__name__
        raise UsageError(f"consume=True takes the arrays out of the mapping as it goes; a {kind} is fixed")
    sources = arrays if consume and isinstance(arrays, MutableMapping) else None
    with _Plan(arrays, writable, sources, close) as plan, contextlib.ExitStack() as made:
        manifest, segments = plan.manifest()
        inline = encode_manifest(manifest)
        nbytes = sum(segment.size for segment in segments)
        extra = inline if len(inline) > INLINE_MANIFEST else b""
        # What follows cannot be taken back (a seal) or costs a copy: whoever is refused, is refused before (I4).
        client.offer(
            name,
            nbytes + (sealed_size(extra) if extra else 0),
            handles=len(segments) + bool(extra),
            writable=writable,
            meta=meta,
            ttl=ttl,
            claim=claim,
        )
        plan.copy()
        plan.synchronize()
        manifest_fd = made.enter_context(sealed_copy(extra)).export() if extra else None
        if not writable:
            plan.freeze()
        try:
            version = client.publish(
                name,
                segments,
                plan.descriptors(),
                manifest=b"" if extra else inline,
                manifest_fd=manifest_fd,
                writable=writable,
                meta=meta,
                ttl=ttl,
                claim=claim,
            )
        except BaseException as error:
            if plan.spans and not writable:
                error.add_note("the arrays that were to be shared in place are read-only from now on all the same")
            raise
        plan.done(client.path, name, version)
    copied = {item.name: item.reason for item in plan.packed if item.nbytes}
    return Published(name, version, len(plan.items), plan.nbytes, copied)


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


class _Plan:
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
    def __enter__(self) -> _Plan:
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
