"""The map of an address space: of this process everything, of another one what the system and a keeper say of it."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from .. import driver as drivers
from ..arrays.views import known_regions
from ..entries.administration import holders, list_entries
from ..entries.keepers import connect
from ..errors import AccessDeniedError, NotFoundError, PeerError, UsageError
from ..memory import Region
from ..memory.chunks import Chunk
from ..memory.pin import Span as Pinned
from ..spec import format_count, format_size
from .drawing import Lane, MemoryMap, Span

if TYPE_CHECKING:
    from ..keeper.private import Keeper

_MOST_ASKED = 256  # entries of a keeper that are asked who published them
_MOST_PROCESSES = 4096  # that are asked whether they have the same memory
_LINE = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ (\S+ \d+) *(.*)")
_OURS = b"/memfd:vram (deleted)"


# -- this process ------------------------------------------------------------------------------------------------------
def map_of_this_process() -> MemoryMap:
    """Return what this process has reserved and mapped by this library, on the host and on GPUs."""
    regions = {region.address: region for region in known_regions()}
    lanes = []
    mapped = 0
    for name, address, nbytes, spans in drivers.reserved():
        mapped += sum(stop - start for start, stop in spans)
        if address in regions:
            lanes.append(lane_of_region(regions.pop(address)))
            continue
        drawn = [Span(start, stop, "mapped", f"mapping {number}") for number, (start, stop) in enumerate(spans)]
        facts = [f"{format_count(len(spans), 'mapping')}; no array is on it"]
        used = spans[-1][1] if spans else 0
        rows = {"mappings": drawn}
        lanes.append(Lane(f"addresses of {name}", rows, facts, used=used, capacity=nbytes, address=address))
    lanes += map(lane_of_region, regions.values())  # what others have made
    fact = f"{format_count(len(lanes), 'range')} of addresses, {format_size(mapped)} of memory mapped"
    return MemoryMap(f"process {os.getpid()}, this one", [fact], lanes)


def lane_of_region(region: Region, arrays: Sequence[Span] = ()) -> Lane:
    """Return one region: its chunks, its room to grow, and its users. `arrays` are named arrays in it."""
    asleep = region.asleep  # once: other threads wake it
    facts = [f"on {region.location}, {region.access.letters}, size {format_size(region.nbytes)}"]
    used, chunks = region.mapped, []
    for number, one in enumerate(cast("tuple[Chunk, ...]", region.layout)):
        is_shared = region.is_imported or (one.known is not None and one.known.has_left)
        kind = "private" if region.is_private else "shared" if is_shared else "mapped"
        chunks.append(Span(one.start, one.stop, kind, f"chunk {number}"))
    if asleep is not None:
        facts.append(str(asleep))
        used, chunks = region.nbytes, [Span(0, region.nbytes, "asleep", str(asleep))]
    pins = [one for one in region.handle.tags() if isinstance(one, Pinned)]
    rows = {
        **({"arrays": list(arrays)} if arrays else {}),
        **({"views": [Span(one.start, one.stop, "view", str(one.holder)) for one in pins]} if pins else {}),
        "chunks": chunks,
    }
    leases = [label for label in region.handle.needs() if label.startswith("lease on ")]
    title = leases[0] if leases else f"region on {region.location}"
    return Lane(title, rows, facts, used=used, capacity=region.capacity, address=region.address)


# -- another process ---------------------------------------------------------------------------------------------------
class Mapped(NamedTuple):
    """A line of /proc/PID/maps. The inode of memory of ours; None for addresses without rights behind such memory."""

    start: int
    stop: int
    rights: str
    inode: bytes | None


def map_of_process(pid: int, keeper: Keeper | str | os.PathLike[str] | None) -> MemoryMap:
    """Return the map of another process: host memory from ``/proc``, leases and entries from the keeper.
    Raises AccessDeniedError if another user owns the process and the keeper knows nothing of it."""
    if pid <= 0 or pid >= 2**31:
        raise UsageError(f"{pid} is no number of a process: they are above 0; an entry is named by a str")
    if pid == os.getpid():
        return map_of_this_process()
    facts = ["Memory on GPUs is in no /proc/PID/maps: it is drawn by vram.memory_map() in that process."]
    ranges: list[list[Mapped]] = []
    is_refused = False
    try:
        ranges = read_maps(Path(f"/proc/{pid}/maps").read_bytes())
        facts.insert(0, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        raise NotFoundError(f"there is no process {pid}; vram ls --holders names those that hold something") from None
    except PermissionError:
        is_refused = True
        facts.append("Its addresses are not shown: it belongs to another user.")
    known = _known_to_keeper(pid, keeper, facts)
    if is_refused and not known:
        raise AccessDeniedError(
            f"process {pid} belongs to another user, and the keeper knows nothing of it: ask as that user, or root"
        )
    if not ranges and not known:
        raise NotFoundError(
            f"process {pid} has no host memory of vram mapped, and holds and has published nothing at the keeper; "
            f"vram ls --holders names those that do"
        )
    others = _processes_with({one.inode for group in ranges for one in group if one.inode}, besides=pid)
    return MemoryMap(f"process {pid}", facts, [*(_lane_of_range(group, others) for group in ranges), *known])


def read_maps(text: bytes) -> list[list[Mapped]]:
    """Return the ranges of ``/proc/PID/maps`` with memory of this library, by address; other lines are skipped.
    Addresses without rights behind such memory count as the rest of its reservation: no line says whose they are."""
    ranges: list[list[Mapped]] = []
    for line in text.splitlines():
        if (parts := _LINE.fullmatch(line)) is None:
            continue
        start, stop, rights = int(parts[1], 16), int(parts[2], 16), parts[3].decode("ascii", "replace")
        is_ours = parts[5] == _OURS
        follows = bool(ranges) and ranges[-1][-1].stop == start
        one = Mapped(start, stop, rights, parts[4] if is_ours else None)
        if follows and (is_ours or (rights == "---p" and not parts[5])):
            ranges[-1].append(one)
        elif is_ours:
            ranges.append([one])
    return ranges


def _processes_with(inodes: set[bytes], *, besides: int) -> dict[bytes, list[int]]:
    """Return which other processes of this user have the same memory mapped."""
    found: dict[bytes, list[int]] = defaultdict(list)
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {besides} if inodes else ()
    for pid in sorted(pids)[:_MOST_PROCESSES]:
        with contextlib.suppress(OSError):  # another user's, or gone
            text = Path(f"/proc/{pid}/maps").read_bytes()
            for inode in {one.inode for group in read_maps(text) for one in group if one.inode} & inodes:
                found[inode].append(pid)
    return found


def _lane_of_range(group: Sequence[Mapped], others: Mapping[bytes, list[int]]) -> Lane:
    base, used = group[0].start, 0
    spans: list[Span] = []
    sharers: set[int] = set()
    for one in group:
        if one.inode is None:
            continue
        pids = others.get(one.inode, ())
        sharers.update(pids)
        kind = "private" if one.rights.endswith("p") else "shared" if pids else "mapped"
        used = one.stop - base
        spans.append(Span(one.start - base, used, kind, f"chunk {len(spans)}, {one.rights}{_with(pids)}"))
    fact = _with(sorted(sharers)) or "no other process of this user has it mapped"
    capacity = group[-1].stop - base
    return Lane("host memory", {"chunks": spans}, [fact], used=used, capacity=capacity, address=base)


def _with(pids: Sequence[int]) -> str:
    return f" shared with {', '.join(f'pid {pid}' for pid in pids)}" if pids else ""


def _known_to_keeper(pid: int, keeper: Keeper | str | os.PathLike[str] | None, facts: list[str]) -> list[Lane]:
    """Return the leases of a process and what it has published; `facts` says what could not be found out."""
    lanes = []
    try:
        for one in holders(keeper=keeper):
            if one.pid == pid:
                said = f"lease {one.lease_id}, {one.access}, held for {one.age:.0f} s by {one}"
                lanes.append(_lane_of_version(f"lease on {one.name}", one.version, one.nbytes, said))
        names = [one.name for one in list_entries(keeper=keeper)]
        for name in names[:_MOST_ASKED]:
            with contextlib.suppress(NotFoundError):  # removed meanwhile
                for version in connect(keeper).show(name).versions:
                    if version.publisher_pid == pid:
                        lanes.append(_lane_of_version(f"published {name}", version.version, version.nbytes))
    except PeerError as error:
        if keeper is not None:
            raise
        facts.append(f"No keeper was asked: {error}")
        return []
    if len(names) > _MOST_ASKED:
        facts.append(f"{len(names) - _MOST_ASKED:,} entries were not asked who published them")
    return lanes


def _lane_of_version(what: str, version: int, nbytes: int, *facts: str) -> Lane:
    title = f"{what} version {version}"
    return Lane(title, {"versions": [Span(0, nbytes, "shared", title)]}, facts, used=nbytes)
