"""The map of an address space: of this process everything, of another one what the system and a keeper say of it."""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
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
from .of_entry import ROOM_DRAWN, room_behind
from .picture import Lane, Picture, Row, Span, bounded

if TYPE_CHECKING:
    from ..keeper.reports import HolderInfo
    from ..keeper.session import Keeper

_MOST_ASKED = 256  # entries of a keeper that are asked who published them
_MOST_PROCESSES = 4096  # that are asked whether they have the same memory
_MOST_NAMED = 8
_LINE = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ (\S+) (\d+) *(.*)")
_OURS = b"/memfd:vram (deleted)"


# -- this process ------------------------------------------------------------------------------------------------------
def picture_of_this_process() -> Picture:
    """Return what this process has reserved and mapped by this library, on the host and on GPUs."""
    regions = {region.address: region for region in known_regions()}
    lanes = []
    for name, address, nbytes, spans in drivers.reserved():
        region = regions.pop(address, None)
        lanes.append(_lane_of_range(name, address, nbytes, spans) if region is None else lane_of_region(region))
    lanes += [lane_of_region(region) for region in regions.values()]  # what others have made
    mapped = sum(stop - start for _, _, _, spans in drivers.reserved() for start, stop in spans)
    facts = (f"{format_count(len(lanes), 'range')} of addresses, {format_size(mapped)} of memory mapped",)
    return bounded(Picture(f"process {os.getpid()}, this one", facts, tuple(lanes)))


def lane_of_region(region: Region, arrays: Sequence[Span] = ()) -> Lane:
    """Return the lane of one region: its chunks, its room to grow, and its users. `arrays` are named arrays in it."""
    asleep = region.asleep  # once: other threads wake it
    mapped, capacity = region.mapped, region.capacity
    known = mapped if asleep is None else region.nbytes
    is_drawn = known >= ROOM_DRAWN * capacity
    whole = capacity if is_drawn else max(known, 1)
    chunks = _chunks_of(region) if asleep is None else [Span(0, region.nbytes, "asleep", str(asleep))]
    facts = [f"on {region.location}, {region.access.letters}, size {format_size(region.nbytes)}"]
    leases = [label for label in region.handle.needs() if label.startswith("lease on ")]
    if asleep is not None:
        facts.append(str(asleep))
    if known < capacity:
        if is_drawn:
            chunks.append(Span(known, capacity, "reserved", "room to grow"))
        else:
            facts.append(room_behind(capacity - known))
    pins = [one for one in region.handle.tags() if isinstance(one, Pinned)]
    used = [Span(one.start, min(one.stop, whole), "view", str(one.holder)) for one in pins]
    rows = [Row("arrays", tuple(arrays))] if arrays else []
    rows += [Row("chunks", tuple(chunks)), *([Row("used by", tuple(used))] if used else [])]
    title = leases[0] if leases else f"region on {region.location}"
    return Lane(title, whole, tuple(rows), tuple(facts), region.address)


def _chunks_of(region: Region) -> list[Span]:
    spans = []
    for number, one in enumerate(cast("tuple[Chunk, ...]", region.layout)):
        memory = one.known
        is_shared = region.is_imported or (memory is not None and memory.has_left)
        kind = "private" if region.is_private else "shared" if is_shared else "mapped"
        spans.append(Span(one.start, one.stop, kind, f"chunk {number}"))
    return spans


def _lane_of_range(name: str, address: int, nbytes: int, spans: Sequence[tuple[int, int]]) -> Lane:
    """Return addresses that no array is on: what the driver knows of them."""
    mapped = spans[-1][1] if spans else 0
    is_drawn = mapped >= ROOM_DRAWN * nbytes or not mapped
    drawn = [Span(start, stop, "mapped", f"mapping {number}") for number, (start, stop) in enumerate(spans)]
    if is_drawn and mapped < nbytes:
        drawn.append(Span(mapped, nbytes, "reserved", "reserved"))
    room = () if is_drawn else (room_behind(nbytes - mapped),)
    what = (f"{format_count(len(spans), 'mapping')}; no array is on it", *room)
    return Lane(f"addresses of {name}", nbytes if is_drawn else mapped, (Row("mapped", tuple(drawn)),), what, address)


# -- another process ---------------------------------------------------------------------------------------------------
class Mapped(NamedTuple):
    """One line of /proc/PID/maps that is memory of ours."""

    start: int
    stop: int
    rights: str
    identity: tuple[bytes, int]


class Range(NamedTuple):
    """Mappings behind one another, and the addresses without rights behind them."""

    mapped: list[Mapped]
    stop: int


def picture_of_process(pid: int, keeper: Keeper | str | os.PathLike[str] | None) -> Picture:
    """Return the map of another process: host memory from ``/proc``, leases and entries from the keeper.
    Raises AccessDeniedError if another user owns the process and the keeper knows nothing of it."""
    if pid <= 0 or pid >= 2**31:
        raise UsageError(f"{pid} is no number of a process: they are above 0; an entry is named by a str")
    if pid == os.getpid():
        return picture_of_this_process()
    notes = ["Memory on GPUs is in no /proc/PID/maps: it is drawn by vram.memory_map() in that process."]
    refused: OSError | None = None
    ranges: list[Range] = []
    try:
        ranges = read_maps(Path(f"/proc/{pid}/maps").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        raise NotFoundError(f"there is no process {pid}; vram ls --holders names those that hold something") from None
    except PermissionError as error:
        refused = error
        notes.append("Its addresses are not shown: it belongs to another user.")
    held, published, keeper_says = _known_to_keeper(pid, keeper)
    notes += keeper_says
    if not ranges and not held and not published:
        if refused is not None:
            raise AccessDeniedError(
                f"process {pid} belongs to another user, and the keeper knows nothing of it: ask as that user, or root"
            )
        raise NotFoundError(
            f"process {pid} has no host memory of vram mapped, and holds and has published nothing at the keeper; "
            f"vram ls --holders names those that do"
        )
    others = _who_has({one.identity for group in ranges for one in group.mapped}, besides=pid)
    lanes = [_lane_of_maps(group, others) for group in ranges]
    lanes += [_lane_of_lease(one) for one in held]
    lanes += [_lane_of_published(*one) for one in published]
    mapped = sum(one.stop - one.start for group in ranges for one in group.mapped)
    facts = (
        _called(pid),
        f"{format_size(mapped)} of host memory mapped in {format_count(len(ranges), 'range')}, "
        f"{format_count(len(held), 'lease')}, {format_count(len(published), 'version')} published",
    )
    return bounded(Picture(f"process {pid}", facts, tuple(lanes), tuple(notes)))


def read_maps(text: bytes) -> list[Range]:
    """Return the ranges of ``/proc/PID/maps`` with memory of this library, by address; other lines are skipped.
    Addresses without rights behind such memory count as the rest of its reservation: no line says whose they are."""
    found: list[Range] = []
    for line in text.splitlines():
        parts = _LINE.fullmatch(line)
        if parts is None:
            continue
        start, stop, rights = int(parts[1], 16), int(parts[2], 16), parts[3].decode("ascii", "replace")
        follows = bool(found) and found[-1].stop == start
        if parts[6] == _OURS:
            one = Mapped(start, stop, rights, (parts[4], int(parts[5])))
            if follows:
                found[-1] = Range([*found[-1].mapped, one], stop)
            else:
                found.append(Range([one], stop))
        elif follows and rights == "---p" and not parts[6]:
            found[-1] = found[-1]._replace(stop=stop)
    return found


def _who_has(wanted: set[tuple[bytes, int]], *, besides: int) -> dict[tuple[bytes, int], list[int]]:
    """Return which other processes of this user have the same memory mapped."""
    found: dict[tuple[bytes, int], list[int]] = defaultdict(list)
    if not wanted:
        return found
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in sorted(pids)[:_MOST_PROCESSES]:
        if pid == besides:
            continue
        with contextlib.suppress(OSError):  # another user's, or gone
            text = Path(f"/proc/{pid}/maps").read_bytes()
            if _OURS in text:
                for identity in {one.identity for group in read_maps(text) for one in group.mapped} & wanted:
                    found[identity].append(pid)
    return found


def _lane_of_maps(group: Range, others: dict[tuple[bytes, int], list[int]]) -> Lane:
    base = group.mapped[0].start
    last = group.mapped[-1].stop
    is_drawn = last - base >= ROOM_DRAWN * (group.stop - base)
    spans, sharers = [], set()
    for number, one in enumerate(group.mapped):
        pids = others.get(one.identity, [])
        sharers.update(pids)
        kind = "private" if one.rights.endswith("p") else "shared" if pids else "mapped"
        label = f"chunk {number}, {one.rights}" + (f", shared with {_named(pids)}" if pids else "")
        spans.append(Span(one.start - base, one.stop - base, kind, label))
    if group.stop > last and is_drawn:
        spans.append(Span(last - base, group.stop - base, "reserved", "room to grow"))
    facts = [f"shared with {_named(sorted(sharers))}"] if sharers else ["no other process of this user has it mapped"]
    if not is_drawn:
        facts.append(room_behind(group.stop - last))
    whole = (group.stop if is_drawn else last) - base
    return Lane("host memory", whole, (Row("chunks", tuple(spans)),), tuple(facts), base)


def _named(pids: Sequence[int]) -> str:
    shown = ", ".join(f"pid {pid}" for pid in pids[:_MOST_NAMED])
    return shown + (f" and {len(pids) - _MOST_NAMED} more" if len(pids) > _MOST_NAMED else "")


def _lane_of_lease(one: HolderInfo) -> Lane:
    row = Row("leased", (Span(0, one.nbytes, "shared", one.name),))
    said = f"lease {one.lease_id}, {one.access}, held for {one.age:.0f} s by {one}"
    return Lane(f"lease on {one.name} version {one.version}", one.nbytes, (row,), (said,))


def _lane_of_published(name: str, version: int, nbytes: int) -> Lane:
    row = Row("version", (Span(0, nbytes, "shared", name),))
    return Lane(f"published {name} version {version}", nbytes, (row,))


def _known_to_keeper(
    pid: int, keeper: Keeper | str | os.PathLike[str] | None
) -> tuple[list[HolderInfo], list[tuple[str, int, int]], list[str]]:
    """Return the leases of a process, what it has published, and what is to be said of that."""
    try:
        held = [one for one in holders(keeper=keeper) if one.pid == pid]
        names = [one.name for one in list_entries(keeper=keeper, most_meta=0)]
        published: list[tuple[str, int, int]] = []
        for name in names[:_MOST_ASKED]:
            with contextlib.suppress(NotFoundError):  # removed meanwhile
                published += _published_by(pid, name, keeper)
    except PeerError as error:
        if keeper is not None:
            raise
        return [], [], [f"No keeper was asked: {error}"]
    left = len(names) - _MOST_ASKED
    return held, published, [f"{left:,} entries were not asked who published them"] if left > 0 else []


def _published_by(
    pid: int, name: str, keeper: Keeper | str | os.PathLike[str] | None
) -> Iterable[tuple[str, int, int]]:
    versions = connect(keeper).show(name).versions
    return [(name, one.version, one.nbytes) for one in versions if one.publisher_pid == pid]


def _called(pid: int) -> str:
    """Return what a process calls itself."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()[:400].split(b"\0")
        return " ".join(word.decode("utf-8", "replace") for word in words).strip() or f"pid {pid}"
    return f"pid {pid}"
