"""Which way memory would take to another process, or why it has none: the driver is asked, nothing is tried."""

from __future__ import annotations

import functools
import operator
import os
from dataclasses import dataclass
from typing import Any

from .. import driver as drivers
from ..driver.protocol import PointerInfo
from ..errors import UnsupportedError, UsageError, VramError
from ..memory.foreign import ForeignRegion, look_up
from ..memory.kinds import BY_MAKER, BY_NUMBER, OTHERS, OWN, way
from ..spec import HOST, HandleKind, Location, format_size
from . import Array
from .gpu import CudaSource
from .sources import Source
from .views import find

COPY = "Copy it into memory of vram: vram.copy(...)"


@dataclass(frozen=True, slots=True)
class ShareRoute:
    """How memory can reach another process. False where it cannot.

    `kind` is NONE if in none; then `reason` and `remedy` say why and what to do about it. `made_by` is ``"vram"``, the
    family of driver calls as :class:`~vram.driver.protocol.PointerInfo` names it, or ``"other"`` for memory of the host
    that no driver knows. The `nbytes` bytes asked about lie in so many `segments`, from byte `offset` of the first on.
    """

    kind: HandleKind
    made_by: str
    device: str
    nbytes: int
    segments: int
    offset: int
    reason: str = ""
    remedy: str = ""

    @property
    def outlives_maker(self) -> bool:
        """Whether it can be published, that is kept when the process that made it is gone."""
        return bool(self) and BY_NUMBER[self.kind].is_kept

    def __bool__(self) -> bool:
        return self.kind is not HandleKind.NONE

    def __str__(self) -> str:
        known = BY_MAKER.get(self.made_by)
        maker = f"another library with {known.makes}" if known else OTHERS.get(self.made_by, self.made_by)
        what = f"{format_size(self.nbytes)} on {self.device}, made by {maker}"
        if not self:
            remedy = f". {self.remedy}" if self.remedy else ""
            return f"{what}: cannot leave this process, being {self.reason}{remedy}"
        held = f"{self.segments} allocation{'s' * (self.segments != 1)}, from byte {self.offset} on"
        life = "can be published, lent and queued"
        if not self.outlives_maker:
            life = "can be lent and sent while this process lives; a publish copies it"
        return f"{what}, {held}: goes {BY_NUMBER[self.kind].goes}; {life}"


# The route of memory that has none: its maker, place, bytes, allocations, offset, the reason, and the remedy.
no_route = functools.partial(ShareRoute, HandleKind.NONE)


def route_of(source: Source | CudaSource, obj: object = None) -> ShareRoute:
    """Return the route of what was looked at already; `obj` is what it was found in."""
    device, nbytes = str(place_of(source)), source.nbytes
    if not source.contiguous:
        return no_route(
            "other", device, nbytes, 0, 0, "elements that do not lie one behind the other",
            "Share what it is a view of, or copy it: vram.copy(...) (on a GPU, after .contiguous())",
        )  # fmt: skip
    region = find(source.address, nbytes) if nbytes else None
    if region is not None:
        return _own_route(region[0], region[1], nbytes, device)
    if isinstance(obj, Array) and not isinstance(obj.region, ForeignRegion):
        return _own_route(obj.region, obj.offset, obj.nbytes, device)
    if not nbytes:
        return ShareRoute(OWN.kind, "vram", device, 0, 0, 0)
    if isinstance(source, Source):
        return _host_route(source, device)
    try:
        infos = look_up(drivers.get(place_of(source)), source.address, nbytes)
        check_place(infos, source)
    except UsageError as error:
        return no_route("unknown", device, nbytes, 0, 0, f"unknown: {error}")
    return foreign_route(infos, source, obj)


def foreign_route(infos: tuple[PointerInfo, ...], source: CudaSource, obj: object) -> ShareRoute:
    """Return the route of memory that another library made."""
    first = infos[0]
    kinds = functools.reduce(operator.and_, (info.kinds for info in infos))
    found = way(kinds, first.nbytes)
    reason, remedy = ("", "") if found else _why_none(first, kinds, obj)
    return ShareRoute(
        found.kind if found else HandleKind.NONE, first.made_by, str(first.location), source.nbytes, len(infos),
        source.address - first.base, reason, remedy,
    )  # fmt: skip


def _why_none(info: PointerInfo, kinds: HandleKind, obj: object) -> tuple[str, str]:
    """Why memory that the driver knows cannot leave the process, and what to do."""
    kind = BY_MAKER.get(info.made_by)
    if way(kinds) and kind:
        return f"an allocation of a pool larger than {format_size(kind.most)}, which crashes whoever opens it", COPY
    if kinds:
        return f"memory made to leave the process as {kinds.name} only, by which nothing is shared here", COPY
    if info.made_by == "vmm" and type(obj).__module__.partition(".")[0] == "torch":
        return (
            "memory made with handle type 0 by PyTorch's expandable segments",
            "Set TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1 before the process starts (in releases that know it), or "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or copy with vram.copy()",
        )
    if kind:
        return kind.lacking
    if info.made_by == "opened":
        return "memory of another process, which alone can share it", COPY
    return f"{'page-locked' if info.made_by == 'host' else info.made_by} memory, which the driver does not share", COPY


def _own_route(region: Any, offset: int, nbytes: int, device: str) -> ShareRoute:
    maker, segments, why, remedy = "vram", 0, "", COPY
    if isinstance(region, ForeignRegion):
        maker, segments = region.made_by, 1
        why = "memory of another library that is not known by its address any more"
    elif region.is_private:
        why = "a private copy: what was written to it is in no memory that another process could map"
    elif region.location != HOST and not isinstance(region.location.id, int):
        why = "memory of the host that NVIDIA's driver made, at no place that other processes know by name"
        remedy = 'Use device="host" for what is shared, or copy with vram.copy(..., device="host")'
    else:
        allocations, offset = region.segments(offset, offset + nbytes)
        segments = len(allocations)
        lacking = {allocation.handle_kinds for allocation in allocations if not way(allocation.handle_kinds)}
        for allocation in allocations:
            allocation.close()
        if not lacking:
            return ShareRoute(OWN.kind, maker, device, nbytes, segments, offset)
        why = f"memory made with {' and '.join(sorted(f'handle_kinds=HandleKind.{kinds.name}' for kinds in lacking))}"
        remedy = OWN.lacking[1]
    return no_route(maker, device, nbytes, segments, offset, why, remedy)


def _host_route(source: Source, device: str) -> ShareRoute:
    what = _mapped_file(source.address)
    reason = "memory of this process alone, which no descriptor stands for"
    if what:
        reason = f"a mapping of {what}, whose size others may change under a reader"
    return no_route("other", device, source.nbytes, 0, 0, reason, COPY)


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
    what = f"sharing {format_size(route.nbytes)} on {route.device}"
    return UnsupportedError(what, "memory that can leave its process", route.reason, route.remedy)


def place_of(source: Source | CudaSource) -> Location:
    """Return where the memory is that was looked at."""
    return HOST if isinstance(source, Source) else Location("cuda", source.gpu)


def check_place(infos: tuple[PointerInfo, ...], source: CudaSource) -> None:
    """Raise UsageError for memory of another GPU than it was said to be on; what is on none is for others to refuse."""
    where = infos[0].location
    if isinstance(where.id, int) and where.id != source.gpu:
        raise UsageError(f"the memory at {source.address:#x} is on {where}, not on {place_of(source)}")
