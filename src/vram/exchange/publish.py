"""Publish arrays under a name: zero copy where the memory can be shared, one packed copy where it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from .. import driver as drivers
from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..arrays.sources import Source, as_source, find
from ..arrays.views import Home
from ..errors import UsageError
from ..keeper.client import PublishClaim, Segment
from ..keeper.session import Keeper
from ..lifetime import Handle
from ..memory import Region
from ..sharing.descriptor import (
    MANIFEST_VERSION,
    MAX_SEGMENTS,
    ArrayEntry,
    Manifest,
    MemoryDescriptor,
    encode_manifest,
)
from ..spec import HOST, Access, round_up
from .keepers import connect
from .mapping import describe, sealed_copy
from .provenance import Provenance

__all__ = ["Published", "publish"]

ALIGNMENT = 256  # of arrays in a packed copy, in bytes: what GPU libraries ask for
INLINE_MANIFEST = 32 << 10


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
    claim: PublishClaim | None = None,
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
    sources = None
    if consume:
        if not isinstance(arrays, MutableMapping):
            kind = type(arrays).__name__
            raise UsageError(f"consume=True takes the arrays out of the mapping as it goes; a {kind} is fixed")
        sources = arrays
    client = connect(keeper)
    notes = dict(meta or {})
    plan = _Plan(arrays, writable)
    packed = _Packed(plan, sources)
    with packed, contextlib.ExitStack() as made:
        if not writable:
            plan.freeze()
            packed.freeze()
        manifest, memories, fds = plan.describe(packed.region)
        inline, manifest_fd = encode_manifest(manifest), None
        if len(inline) > INLINE_MANIFEST:
            manifest_fd = made.enter_context(sealed_copy(inline)).export()
            inline = b""
        version = client.publish(
            name,
            [Segment(s.nbytes, s.kind, memory.device) for memory in memories for s in memory.segments],
            fds,
            manifest=inline,
            manifest_fd=manifest_fd,
            writable=writable,
            meta=notes,
            ttl=ttl,
            claim=None if claim is None else claim.id,
        )
    plan.mark(client.path, name, version, writable)
    if sources is not None:
        plan.consume(sources)
    return Published(name, version, len(plan.items), plan.nbytes, {item.name: item.reason for item in plan.packed if item.nbytes})


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


@dataclass(slots=True)
class _Span:
    """The part of one region that is shared: from the first byte of any array in it to the last."""

    region: Region
    start: int
    stop: int
    items: list[_Item]


class _Plan:
    """Which arrays are shared where they are, which are packed, and where in the manifest each will be."""

    def __init__(self, arrays: Mapping[str, object], writable: bool) -> None:
        if not isinstance(arrays, Mapping):
            raise UsageError(
                f"publish takes a mapping of names to arrays, not a {type(arrays).__name__}; one array is "
                f'{{"name": array}}'
            )
        self.items = [_look(name, value, writable) for name, value in arrays.items()]
        if not self.items:
            raise UsageError("there is nothing to publish: the mapping is empty")
        self.nbytes = sum(item.nbytes for item in self.items)
        self.spans: dict[Handle, _Span] = {}
        for item in self.items:
            if item.region is not None:
                self._share(item.region, item)
        segments = sum(len(s.region.segments(s.start, s.stop)[0]) for s in self.spans.values())
        if segments >= MAX_SEGMENTS:
            self.spans.clear()
            for item in self.items:
                item.region = None
                item.reason = f"all of it together lies in {segments} segments, more than {MAX_SEGMENTS - 1}"
        self.packed = [item for item in self.items if item.region is None]

    def _share(self, region: Region, item: _Item) -> None:
        start, stop = item.offset, item.offset + item.nbytes
        span = self.spans.setdefault(region.handle, _Span(region, start, stop, []))
        span.start, span.stop = min(span.start, start), max(span.stop, stop)
        span.items.append(item)

    def freeze(self) -> None:
        for span in self.spans.values():
            span.region.freeze()
            Home.of(span.region).freeze_views()

    def describe(self, packed: Region | None) -> tuple[Manifest, list[MemoryDescriptor], list[int]]:
        """Return the manifest, its memories and, in their order, the descriptors lent by the allocations."""
        memories: list[MemoryDescriptor] = []
        fds: list[int] = []
        entries: dict[str, ArrayEntry] = {}
        spans = list(self.spans.values())
        if packed is not None:
            spans.append(_Span(packed, 0, packed.nbytes, self.packed))
        for number, span in enumerate(spans):
            memory, lent = describe(span.region, span.start, span.stop)
            memories.append(memory)
            fds += lent
            for item in span.items:
                source = item.source
                entries[item.name] = ArrayEntry(
                    number, item.offset - span.start, source.nbytes, dtype_name(source.dtype), source.shape
                )
        ordered = {item.name: entries[item.name] for item in self.items}
        return Manifest(MANIFEST_VERSION, tuple(memories), ordered), memories, fds

    def mark(self, path: str, name: str, version: int, writable: bool) -> None:
        """Let the vram arrays that were shared know where they can be had again."""
        for item in self.items:
            array = item.value
            if isinstance(array, Array) and item.region is not None:
                access = "rw" if writable else "r"
                array.provenance = Provenance(path, name, version, item.name, access, array.offset, array.nbytes)

    def consume(self, arrays: MutableMapping[str, object]) -> None:
        """Give up what was shared in place; what was packed is out of the mapping already."""
        for item in self.items:
            if item.region is not None and item.name in arrays:
                del arrays[item.name]
                if isinstance(item.value, Array):
                    item.value.close()


class _Packed:
    """The packed copy: one region that takes in, one behind the other, what cannot be shared where it is.

    With `sources`, each array is replaced in that mapping by a vram array over its copy, and the region grows as it
    goes. In the end these are taken out; if anything fails before, they stay, and nothing is lost.
    """

    def __init__(self, plan: _Plan, sources: MutableMapping[str, object] | None) -> None:
        self._items = plan.packed
        self._sources = sources
        self._taken: dict[str, Array] = {}
        self.region: Region | None = None
        if not self._items:
            return
        end = 0
        for item in self._items:
            item.offset = round_up(end, ALIGNMENT)
            end = item.offset + item.nbytes
        # An entry of empty arrays still is an entry: it has memory, if only a granule.
        capacity = max(end, 1)
        self.region = Region.create(
            drivers.get(HOST), HOST, capacity=capacity, nbytes=0 if sources is not None else capacity, managed=True
        )

    def __enter__(self) -> _Packed:
        try:
            self._fill()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _fill(self) -> None:
        region = self.region
        if region is None:
            return
        for item in self._items:
            end = item.offset + item.nbytes
            if region.nbytes < max(end, 1):
                region.grow(max(end, 1))
            target = Array(region, item.source.dtype, item.source.shape, offset=item.offset)
            target.numpy()[...] = item.source.view
            if self._sources is None:
                target.close()
            else:
                self._taken[item.name] = self._sources[item.name] = target
                item.value, item.source = target, as_source(target)

    def freeze(self) -> None:
        if self.region is not None:
            self.region.freeze()
            Home.of(self.region).freeze_views()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self._sources is not None:
            for name, array in self._taken.items():
                del self._sources[name]
                array.close()
        if self.region is not None:
            self.region.close()  # arrays that were put back keep its memory


def _look(name: object, value: object, writable: bool) -> _Item:
    """Decide for one array whether it is shared in place, and if not, why."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"array names are non-empty strings, not {name!r}")
    source = as_source(value)
    dtype_name(source.dtype)  # what no reader could name is refused before anything is copied
    if isinstance(value, Array):
        found: tuple[Region, int] | None = (value.region, value.offset)
    else:
        found = find(source.address, source.nbytes)
    if found is None:
        return _Item(name, value, source, None, 0, "it is not in vram memory")
    region, offset = found
    reason = ""
    if not source.contiguous:
        reason = "it is not contiguous"
    elif not source.nbytes:
        reason = "it is empty"
    elif region.is_private:
        reason = "it is a private copy of what was attached"
    elif region.is_frozen and writable:
        reason = "its memory is read-only for good, and writable=True was asked for"
    elif region.is_imported and not region.is_frozen and not (writable and region.access is Access.READ_WRITE):
        reason = "its memory is another process's, which did not make it read-only"
    return _Item(name, value, source, None if reason else region, offset, reason)
