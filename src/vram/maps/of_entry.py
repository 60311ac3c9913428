"""The map of an entry: its versions, the arrays in the current one, and who holds them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..entries.administration import described
from ..spec import format_count, format_size
from .picture import Lane, Picture, Row, Span, bounded

if TYPE_CHECKING:
    from ..keeper.reports import EntryInfo, HolderInfo, VersionInfo
    from ..keeper.session import Keeper
    from ..sharing.descriptor import Manifest, MemoryDescriptor

# Room to grow is drawn as long as the memory is at least this part of it all; else it would be all there is to see.
ROOM_DRAWN = 1 / 4
_MOST_HOLDERS = 8
_MOST_META = 8


def picture_of_entry(name: str, keeper: Keeper | str | os.PathLike[str] | None) -> Picture:
    """Return the map of an entry. Raises what :func:`vram.entry` raises."""
    entry, manifest = described(name, keeper=keeper)
    lanes: list[Lane] = []
    for version in reversed(entry.versions):
        if version.is_current and manifest is not None:
            lanes += _lanes_of(version, manifest)
        else:
            lanes.append(_lane_of_sizes(version))
    said = [f"{key} = {value}" for key, value in list(entry.meta.items())[:_MOST_META]]
    more = len(entry.meta) - len(said)
    return bounded(
        Picture(
            title=f"entry {entry.name}",
            facts=(_summary(entry), *said, *([f"and {more} more keys of meta"] if more else [])),
            lanes=tuple(lanes),
            notes=_notes(entry, manifest),
        )
    )


def _summary(entry: EntryInfo) -> str:
    shown = f"version {entry.version}" if entry.version else "no current version"
    return (
        f"{shown}, {format_size(entry.nbytes)}, published by uid {entry.owner}; {format_count(entry.leases, 'lease')} "
        f"on {format_count(len(entry.versions), 'version')}"
    )


def _notes(entry: EntryInfo, manifest: Manifest | None) -> tuple[str, ...]:
    if manifest is not None or not entry.version:
        return ()
    why = "it is parked: its arrays are described once it is awake" if entry.parked else "what is in it cannot be read"
    return (f"Arrays are not drawn: {why}.",)


def _lanes_of(version: VersionInfo, manifest: Manifest) -> list[Lane]:
    count = len(manifest.memories) // manifest.slots
    lanes = []
    for number, memory in enumerate(manifest.memories):
        slot, first = divmod(number, count)
        arrays = [
            Span(memory.offset + one.offset, memory.offset + one.offset + one.nbytes, "array", called)
            for called, one in manifest.arrays.items()
            if one.memory == first
        ]
        title = f"version {version.version}"
        title += f", memory {first + 1} of {count}" if count > 1 else ""
        title += f", slot {slot} of {manifest.slots}" if manifest.slots > 1 else ""
        facts = (
            [_how(version), f"{format_count(len(arrays), 'array')} on {memory.device}"]
            if not number
            else [f"{format_count(len(arrays), 'array')} on {memory.device}"]
        )
        lanes.append(_lane_of_memory(memory, title, arrays, facts, holding(version.holders) if not number else ()))
    return lanes


def _lane_of_memory(
    memory: MemoryDescriptor, title: str, arrays: Sequence[Span], facts: Sequence[str], held: Sequence[str]
) -> Lane:
    mapped = sum(segment.nbytes for segment in memory.segments)
    is_drawn = mapped >= ROOM_DRAWN * memory.capacity
    kind = "shared"
    chunks = row_of_sizes("chunks", [segment.nbytes for segment in memory.segments], kind)
    if memory.capacity > mapped and is_drawn:
        chunks = Row(chunks.label, (*chunks.spans, Span(mapped, memory.capacity, "reserved", "room to grow")))
    room = [] if is_drawn else [room_behind(memory.capacity - mapped)]
    return Lane(
        title=title,
        nbytes=memory.capacity if is_drawn else mapped,
        rows=(Row("arrays", tuple(arrays)), chunks),
        facts=(*facts, *room, *held),
    )


def _lane_of_sizes(version: VersionInfo) -> Lane:
    kind = "parked" if version.parked else "opaque" if version.is_current else "retired"
    state = "revoked" if version.is_revoked else "current" if version.is_current else "retired"
    return Lane(
        title=f"version {version.version}, {state}",
        nbytes=sum(version.sizes),
        rows=(row_of_sizes("chunks", version.sizes, kind),),
        facts=(f"{_how(version)}, on {', '.join(version.devices)}", *holding(version.holders)),
    )


def _how(version: VersionInfo) -> str:
    access = "writable for its readers" if version.writable else "read-only"
    state = [*(["parked"] if version.parked else []), *(["updated in place"] if version.updatable else [])]
    return ", ".join([access, *state])


def row_of_sizes(label: str, sizes: Iterable[int], kind: str) -> Row:
    """Return chunks behind one another."""
    spans, at = [], 0
    for number, size in enumerate(sizes):
        spans.append(Span(at, at + size, kind, f"chunk {number}"))
        at += size
    return Row(label, tuple(spans))


def room_behind(nbytes: int) -> str:
    """Say what is left out of a drawing, in which nothing else could be seen."""
    return f"behind it {format_size(nbytes)} of addresses, not drawn: room to grow"


def holding(holders: Sequence[HolderInfo]) -> tuple[str, ...]:
    """Say who holds a version, the oldest leases first."""
    if not holders:
        return ("held by nobody but the keeper",)
    shown = [f"held by {one}: {one.access}, for {one.age:.0f} s" for one in holders[:_MOST_HOLDERS]]
    more = len(holders) - len(shown)
    return (*shown, *([f"and by {format_count(more, 'more lease')}"] if more else []))
