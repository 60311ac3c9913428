"""Share memory that is there already: look at it, and do what its kind allows, or say why nothing can be done."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import driver as drivers
from ..arrays import Array
from ..arrays.dtypes import as_dtype
from ..arrays.sources import CudaSource, Source, as_source, find
from ..driver.foreign import MAX_POOL_ALLOCATION, PointerInfo
from ..errors import UnsupportedError, UsageError, VramError
from ..memory.foreign import ForeignRegion, find_foreign, look_up
from ..spec import HOST, Access, HandleKind, Location, format_size, parse_size
from .create import asarray, empty
from .mapping import visible

__all__ = ["Route", "copy_in", "explain", "route_of", "share"]

_COPY = "Copy it into memory of vram: vram.copy_in(...)"


@dataclass(frozen=True, slots=True)
class Route:
    """How memory can reach another process. False where it cannot.

    Attributes
    ----------
    kind : HandleKind
        POSIX_FD, LEGACY_IPC, POOL or FABRIC; NONE if in no way.
    made_by : str
        What made it: ``"vram"``, or the family of driver calls as :class:`~vram.driver.foreign.PointerInfo` names it;
        ``"other"`` for memory of the host that no driver knows.
    device : str
        Where it is.
    nbytes : int
        Bytes that are asked about.
    segments : int
        Allocations that they lie in.
    offset : int
        Where in the first allocation they begin, in bytes.
    outlives_maker : bool
        Whether it can be published, that is kept when the process that made it is gone.
    reason, remedy : str
        Why there is no way, and what to do about it; empty if there is one.
    """

    kind: HandleKind
    made_by: str
    device: str
    nbytes: int
    segments: int
    offset: int
    outlives_maker: bool
    reason: str = ""
    remedy: str = ""

    def __bool__(self) -> bool:
        return self.kind is not HandleKind.NONE

    def __str__(self) -> str:
        what = f"{format_size(self.nbytes)} on {self.device}, made by {_MADE.get(self.made_by, self.made_by)}"
        if not self:
            return f"{what}: cannot leave this process: {self.reason}. {self.remedy}"
        held = f"{self.segments} allocation{'s' * (self.segments != 1)}, from byte {self.offset} on"
        life = "can be published, lent and queued" if self.outlives_maker else "can be lent as long as its maker lives"
        return f"{what}, {held}: goes {_GOES[self.kind]}; {life}"


_MADE = {
    "vram": "vram",
    "vmm": "another library with cuMemCreate",
    "legacy": "another library with cudaMalloc",
    "pool": "another library's stream-ordered pool",
    "opened": "another process, and opened here",
    "host": "another library as page-locked memory of the host",
    "managed": "another library as managed memory",
    "other": "this process for itself",
}
_GOES = {
    HandleKind.POSIX_FD: "by file descriptor",
    HandleKind.LEGACY_IPC: "by a 64-byte handle",
    HandleKind.POOL: "by its pool's file descriptor and a 64-byte handle",
    HandleKind.FABRIC: "by a fabric handle",
}


def share(obj: object) -> Array:
    """Return an array over the memory of anything, without a copy, ready to be lent or sent (or published).

    The driver is asked how the memory was made; that decides how it will travel. Nothing is tried to see if it fails.

    Parameters
    ----------
    obj : Array, torch.Tensor, anything with __cuda_array_interface__ or DLPack, a view of vram memory, or a tuple
        The memory. A tuple is ``(address, nbytes, device)``; then the caller sees to it that the memory stays.

    Returns
    -------
    Array
        It keeps `obj` alive, and so do its slices and views. It cannot be resized. A vram array is returned as it is.

    Raises
    ------
    UnsupportedError
        If this memory cannot leave the process, with the reason and what to do instead.
    UsageError
        If it is no memory at all, or its elements do not lie one behind the other.

    Notes
    -----
    What another library allocated is that library's to use again: a caching allocator hands the memory of a tensor that
    is gone to the next one. The array keeps the tensor; whoever publishes it keeps the array for as long as it is read.
    """
    if isinstance(obj, Array):
        return obj
    source = _look(obj)
    _check_dense(source, obj)
    if not source.nbytes:  # nothing to share: nothing can go wrong with memory of its own
        return empty(source.shape, source.dtype, device=_place(source))
    ours = find(source.address, source.nbytes)
    if ours is not None:
        return Array(ours[0], source.dtype, source.shape, offset=ours[1], keeps=obj)
    if isinstance(source, Source):
        raise _refusal(route_of(source, obj))
    region, offset = _foreign(source, obj)
    owner = source.owner
    return Array(region, source.dtype, source.shape, offset=offset, keeps=owner)


def explain(obj: object) -> Route:
    """Say how memory would reach another process, or why it cannot. Changes nothing.

    Parameters
    ----------
    obj : Array, torch.Tensor, anything with __cuda_array_interface__, DLPack or a buffer, or a tuple
        The memory, as :func:`share` takes it.

    Raises
    ------
    UsageError
        If it is no memory at all.
    """
    return route_of(_look(obj), obj)


def copy_in(obj: object, *, device: str | Location | None = None) -> Array:
    """Return a new array of vram memory with the contents of anything: it can be published and outlives its maker.

    Parameters
    ----------
    obj : object
        As :func:`share` takes it, and also what :func:`vram.asarray` takes.
    device : str, optional
        Where to; by default where it is.

    Raises
    ------
    UsageError
        If it is no array, or on a GPU and not contiguous (its own library can make it so).
    OutOfMemoryError
        If there is not enough.
    """
    if isinstance(obj, tuple) and _is_span(obj):
        span = _span(obj)
        if isinstance(span, Source):
            obj = span.view
        else:
            _check_place(look_up(drivers.get(_place(span)), span.address, span.nbytes), span)
            obj = _OnGpu(span)
    if isinstance(obj, Array):
        place: Location | str = obj.device
    else:
        place = _place(as_source(obj)) if not isinstance(obj, (list, tuple, int, float)) else HOST
    wanted = visible(Location.parse(place if device is None else device))
    made = asarray(obj, device=wanted)
    if made is not obj:
        return made
    array = empty(made.shape, made.dtype, device=wanted)
    try:
        if made.nbytes:
            made.region.synchronize()
            made.region.driver.copy(array.address, made.address, made.nbytes)
    except BaseException:
        array.close()
        raise
    return array


# -- looking --------------------------------------------------------------------------------------------------------
def route_of(source: Source | CudaSource, obj: object = None) -> Route:
    """Return the route of what was looked at already; `obj` is what it was found in."""
    place = _place(source)
    nbytes = source.nbytes if source.contiguous else 1
    region = find(source.address, nbytes) if nbytes else None
    if region is not None:
        return _own_route(region[0], region[1], source.nbytes, str(place))
    if isinstance(obj, Array) and not isinstance(obj.region, ForeignRegion):
        return _own_route(obj.region, obj.offset, obj.nbytes, str(place))
    if not source.nbytes:
        return Route(HandleKind.POSIX_FD, "vram", str(place), 0, 0, 0, True)
    if isinstance(source, Source):
        return _host_route(source, str(place))
    try:
        infos = look_up(drivers.get(place), source.address, max(source.nbytes if source.contiguous else 1, 1))
        _check_place(infos, source)
    except UsageError as error:
        return Route(HandleKind.NONE, "other", str(place), source.nbytes, 0, 0, False, str(error), _COPY)
    return _foreign_route(infos, source, obj)


def _foreign_route(infos: tuple[PointerInfo, ...], source: CudaSource, obj: object) -> Route:
    first = infos[0]
    kinds = first.kinds
    for info in infos:
        kinds &= info.kinds
    ways = (HandleKind.POSIX_FD, HandleKind.LEGACY_IPC, HandleKind.POOL)
    kind = next((way for way in ways if way in kinds), HandleKind.NONE)
    reason = remedy = ""
    if kind is HandleKind.POOL and first.nbytes > MAX_POOL_ALLOCATION:
        kind, remedy = HandleKind.NONE, _COPY
        reason = f"the driver crashes whoever opens more than {format_size(MAX_POOL_ALLOCATION)} of a pool at once"
    elif kind is HandleKind.NONE:
        reason, remedy = _why_none(first, kinds, obj)
    return Route(
        kind, first.made_by, str(first.location), source.nbytes, len(infos), source.address - first.base,
        kind is HandleKind.POSIX_FD, reason, remedy,
    )  # fmt: skip


def _why_none(info: PointerInfo, kinds: HandleKind, obj: object) -> tuple[str, str]:
    """Why memory that the driver knows cannot leave the process, and what to do."""
    if kinds:
        return (
            f"it was made to leave the process as {kinds.name} only, which does not work within this machine",
            _COPY,
        )
    if info.made_by == "vmm":
        if type(obj).__module__.partition(".")[0] == "torch":
            return (
                "made with handle type 0 by PyTorch's expandable segments",
                "Set TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1 before the process starts (in releases that know it), or "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or copy with vram.copy_in()",
            )
        return (
            "made with handle type 0, or imported from another process, which alone can share it",
            "Ask for POSIX_FD when it is made, or copy with vram.copy_in()",
        )
    if info.made_by == "pool":
        return (
            "its pool was made without a handle type, as the default pool of cudaMallocAsync is",
            "Allocate from a pool made to be shared (vram.Pool), or copy with vram.copy_in()",
        )
    if info.made_by == "opened":
        return "it belongs to another process, which alone can share it", _COPY
    return f"the driver shares no {'page-locked' if info.made_by == 'host' else info.made_by} memory", _COPY


def _own_route(region: Any, offset: int, nbytes: int, device: str) -> Route:
    if isinstance(region, ForeignRegion):
        return Route(HandleKind.NONE, region.made_by, device, nbytes, 1, offset, False, "it is not ours", _COPY)
    if region.is_private:
        return Route(
            HandleKind.NONE, "vram", device, nbytes, 0, offset, False,
            "it is a private copy: what was written to it is in no memory that another process could map", _COPY,
        )  # fmt: skip
    if region.location != HOST and not isinstance(region.location.id, int):
        return Route(
            HandleKind.NONE, "vram", device, nbytes, 0, 0, False,
            "memory of the host that NVIDIA's driver made is at no place that other processes know by name",
            'Use device="host" for what is shared, or copy with vram.copy_in(..., device="host")',
        )  # fmt: skip
    allocations, start = region.segments(offset, offset + nbytes)
    kinds = HandleKind.POSIX_FD
    for allocation in allocations:
        kinds &= allocation.handle_kinds
    for allocation in allocations:
        allocation.close()
    if not kinds:
        return Route(
            HandleKind.NONE, "vram", device, nbytes, len(allocations), start, False,
            "it was made with handle_kinds=HandleKind.NONE", "Ask for POSIX_FD when it is made, or copy_in()",
        )  # fmt: skip
    return Route(kinds, "vram", device, nbytes, len(allocations), start, True)


def _host_route(source: Source, device: str) -> Route:
    what = _mapped_file(source.address)
    reason = (
        f"it is a mapping of {what}, whose size others may change under a reader"
        if what
        else "it is memory of this process alone, which no descriptor stands for"
    )
    return Route(HandleKind.NONE, "other", device, source.nbytes, 0, 0, False, reason, _COPY)


def _mapped_file(address: int) -> str:
    """Return the file that is mapped shared at an address of the host; empty if none is."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                span, rights, _, _, inode, *path = line.split(None, 5)
                start, _, stop = span.partition(b"-")
                if int(start, 16) <= address < int(stop, 16):
                    named = os.fsdecode(path[0].strip()) if path else ""
                    shared = rights[3:4] == b"s" and int(inode) and not named.startswith("/dev/zero")
                    return named if shared else ""
    except (OSError, ValueError):
        pass
    return ""


def _foreign(source: CudaSource, obj: object) -> tuple[ForeignRegion, int]:
    driver = drivers.get(Location("cuda", source.gpu))
    access = Access.READ if source.readonly else Access.READ_WRITE
    region, offset = find_foreign(driver, source.address, source.nbytes, access=access)
    _check_place(region.infos, source)
    if not region.kinds or region.infos[0].nbytes > MAX_POOL_ALLOCATION:  # seldom: then it is asked what it is
        route = _foreign_route(region.infos, source, obj)
        if not route:
            raise _refusal(route)
    return region, offset


def _refusal(route: Route) -> VramError:
    return UnsupportedError(
        f"sharing {format_size(route.nbytes)} on {route.device}", "memory that can leave its process", route.reason,
        route.remedy,
    )  # fmt: skip


def _check_dense(source: Source | CudaSource, obj: object) -> None:
    if not source.contiguous:
        raise UsageError(
            f"the elements of this {type(obj).__name__} do not lie one behind the other; share what it is a view of, "
            f"or copy it: vram.copy_in(...) (on a GPU, after .contiguous())"
        )
    as_dtype(source.dtype)


def _check_place(infos: tuple[PointerInfo, ...], source: CudaSource) -> None:
    """Raise UsageError for memory of another GPU than it was said to be on; what is on none is for others to refuse."""
    where = infos[0].location
    if isinstance(where.id, int) and where.id != source.gpu:
        raise UsageError(f"the memory at {source.address:#x} is on {where}, not on {_place(source)}")


def _place(source: Source | CudaSource) -> Location:
    return HOST if isinstance(source, Source) else Location("cuda", source.gpu)


def _look(obj: object) -> Source | CudaSource:
    return _span(obj) if isinstance(obj, tuple) and _is_span(obj) else as_source(obj)


def _is_span(obj: tuple[object, ...]) -> bool:
    return len(obj) == 3 and isinstance(obj[2], (str, Location)) and isinstance(obj[0], int)


def _span(obj: Any) -> Source | CudaSource:
    """Look at ``(address, nbytes, device)``."""
    address, size, device = obj
    place, nbytes = visible(Location.parse(device)), parse_size(size, what="nbytes")
    if not 0 < address < 1 << 64:
        raise UsageError(f"{address:#x} is no address")
    if place != HOST:
        if not isinstance(place.id, int):
            raise UsageError(f"{place} is memory of the host that a GPU works on; name the GPU")
        return CudaSource(address, nbytes, np.dtype(np.uint8), (nbytes,), True, place.id, obj)
    if nbytes and find(address, nbytes) is None:
        raise _refusal(Route(HandleKind.NONE, "other", "host", nbytes, 0, 0, False, "no vram memory is there", _COPY))
    return Source(np.asarray(_At(address, nbytes)) if nbytes else np.empty(0, np.uint8))


class _OnGpu:
    """Memory of a GPU by its address, for those who take arrays."""

    def __init__(self, span: CudaSource) -> None:
        data = (span.address, True)
        self.__cuda_array_interface__ = {"version": 3, "data": data, "shape": span.shape, "typestr": "|u1"}


class _At:
    """Memory of the host by its address, for numpy to look at."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, True), "shape": (nbytes,), "typestr": "|u1"}
