"""Which way memory would take to another process, or why it has none: the driver is asked, nothing is tried."""

from __future__ import annotations

import os
from typing import Any

from .. import driver as drivers
from ..driver.protocol import MAX_POOL_ALLOCATION, PointerInfo
from ..errors import UnsupportedError, UsageError, VramError
from ..memory.foreign import ForeignRegion, look_up
from ..memory.share_route import ShareRoute
from ..spec import HOST, HandleKind, Location, format_size
from . import Array
from .gpu import CudaSource
from .sources import Source
from .views import find

COPY = "Copy it into memory of vram: vram.copy(...)"


def route_of(source: Source | CudaSource, obj: object = None) -> ShareRoute:
    """Return the route of what was looked at already; `obj` is what it was found in."""
    place = place_of(source)
    if not source.contiguous:
        return ShareRoute(
            HandleKind.NONE, "other", str(place), source.nbytes, 0, 0, False,
            "elements that do not lie one behind the other",
            "Share what it is a view of, or copy it: vram.copy(...) (on a GPU, after .contiguous())",
        )  # fmt: skip
    region = find(source.address, source.nbytes) if source.nbytes else None
    if region is not None:
        return _own_route(region[0], region[1], source.nbytes, str(place))
    if isinstance(obj, Array) and not isinstance(obj.region, ForeignRegion):
        return _own_route(obj.region, obj.offset, obj.nbytes, str(place))
    if not source.nbytes:
        return ShareRoute(HandleKind.POSIX_FD, "vram", str(place), 0, 0, 0, True)
    if isinstance(source, Source):
        return _host_route(source, str(place))
    try:
        infos = look_up(drivers.get(place), source.address, source.nbytes)
        check_place(infos, source)
    except UsageError as error:
        return ShareRoute(HandleKind.NONE, "unknown", str(place), source.nbytes, 0, 0, False, f"unknown: {error}")
    return foreign_route(infos, source, obj)


def foreign_route(infos: tuple[PointerInfo, ...], source: CudaSource, obj: object) -> ShareRoute:
    """Return the route of memory that another library made."""
    first = infos[0]
    kinds = first.kinds
    for info in infos:
        kinds &= info.kinds
    ways = (HandleKind.POSIX_FD, HandleKind.LEGACY_IPC, HandleKind.POOL)
    kind = next((way for way in ways if way in kinds), HandleKind.NONE)
    reason = remedy = ""
    if kind is HandleKind.POOL and first.nbytes > MAX_POOL_ALLOCATION:
        kind, remedy = HandleKind.NONE, COPY
        reason = (
            f"an allocation of a pool larger than {format_size(MAX_POOL_ALLOCATION)}, which crashes whoever opens it"
        )
    elif kind is HandleKind.NONE:
        reason, remedy = _why_none(first, kinds, obj)
    return ShareRoute(
        kind, first.made_by, str(first.location), source.nbytes, len(infos), source.address - first.base,
        kind is HandleKind.POSIX_FD, reason, remedy,
    )  # fmt: skip


def _why_none(info: PointerInfo, kinds: HandleKind, obj: object) -> tuple[str, str]:
    """Why memory that the driver knows cannot leave the process, and what to do."""
    if kinds:
        return (
            f"memory made to leave the process as {kinds.name} only, by which nothing is shared here",
            COPY,
        )
    if info.made_by == "vmm":
        if type(obj).__module__.partition(".")[0] == "torch":
            return (
                "memory made with handle type 0 by PyTorch's expandable segments",
                "Set TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1 before the process starts (in releases that know it), or "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or copy with vram.copy()",
            )
        return (
            "memory made with handle type 0, or imported from another process, which alone can share it",
            "Ask for POSIX_FD when it is made, or copy with vram.copy()",
        )
    if info.made_by == "pool":
        return (
            "memory of a pool made without a handle type, as the default pool of cudaMallocAsync is",
            "Allocate from a pool made with a handle type (cudaMemPoolCreate), or copy with vram.copy()",
        )
    if info.made_by == "opened":
        return "memory of another process, which alone can share it", COPY
    return f"{'page-locked' if info.made_by == 'host' else info.made_by} memory, which the driver does not share", COPY


def _own_route(region: Any, offset: int, nbytes: int, device: str) -> ShareRoute:
    if isinstance(region, ForeignRegion):
        return ShareRoute(
            HandleKind.NONE,
            region.made_by,
            device,
            nbytes,
            1,
            offset,
            False,
            "memory of another library that is not known by its address any more",
            COPY,
        )
    if region.is_private:
        return ShareRoute(
            HandleKind.NONE, "vram", device, nbytes, 0, offset, False,
            "a private copy: what was written to it is in no memory that another process could map", COPY,
        )  # fmt: skip
    if region.location != HOST and not isinstance(region.location.id, int):
        return ShareRoute(
            HandleKind.NONE, "vram", device, nbytes, 0, 0, False,
            "memory of the host that NVIDIA's driver made, at no place that other processes know by name",
            'Use device="host" for what is shared, or copy with vram.copy(..., device="host")',
        )  # fmt: skip
    allocations, start = region.segments(offset, offset + nbytes)
    lacking = {
        allocation.handle_kinds for allocation in allocations if HandleKind.POSIX_FD not in allocation.handle_kinds
    }
    for allocation in allocations:
        allocation.close()
    if lacking:
        made = " and ".join(sorted(f"handle_kinds=HandleKind.{kinds.name}" for kinds in lacking))
        return ShareRoute(
            HandleKind.NONE, "vram", device, nbytes, len(allocations), start, False, f"memory made with {made}",
            "Ask for POSIX_FD when it is made, or copy with vram.copy()",
        )  # fmt: skip
    return ShareRoute(HandleKind.POSIX_FD, "vram", device, nbytes, len(allocations), start, True)


def _host_route(source: Source, device: str) -> ShareRoute:
    what = _mapped_file(source.address)
    reason = (
        f"a mapping of {what}, whose size others may change under a reader"
        if what
        else "memory of this process alone, which no descriptor stands for"
    )
    return ShareRoute(HandleKind.NONE, "other", device, source.nbytes, 0, 0, False, reason, COPY)


def _mapped_file(address: int) -> str:
    """Return the file that is mapped shared at an address of the host; empty if none is."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            for line in maps:
                span, rights, _, _, inode, *path = line.split(None, 5)
                start, _, stop = span.partition(b"-")
                if not int(start, 16) <= address < int(stop, 16):
                    continue
                named = os.fsdecode(path[0].strip()) if path else ""
                shared = rights[3:4] == b"s" and int(inode) and not named.startswith("/dev/zero")
                return named if shared else ""
    except (OSError, ValueError):
        pass
    return ""


def refusal(route: ShareRoute) -> VramError:
    """Return the error for memory that has no way out of its process."""
    return UnsupportedError(
        f"sharing {format_size(route.nbytes)} on {route.device}", "memory that can leave its process", route.reason,
        route.remedy,
    )  # fmt: skip


def place_of(source: Source | CudaSource) -> Location:
    """Return where the memory is that was looked at."""
    return HOST if isinstance(source, Source) else Location("cuda", source.gpu)


def check_place(infos: tuple[PointerInfo, ...], source: CudaSource) -> None:
    """Raise UsageError for memory of another GPU than it was said to be on; what is on none is for others to refuse."""
    where = infos[0].location
    if isinstance(where.id, int) and where.id != source.gpu:
        raise UsageError(f"the memory at {source.address:#x} is on {where}, not on {place_of(source)}")
