"""The map of an entry: its versions, the arrays in the current one, and who holds them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..entries.administration import described
from ..keeper.reports import VersionInfo, access_of
from ..spec import format_count, format_size
from .drawing import Lane, MemoryMap, Span

if TYPE_CHECKING:
    from ..keeper.private import Keeper
    from ..sharing.descriptor import Manifest


def map_of_entry(name: str, keeper: Keeper | str | os.PathLike[str] | None) -> MemoryMap:
    """Return the map of an entry. Raises what :func:`vram.entry` raises."""
    entry, manifest = described(name, keeper=keeper)
    facts = [
        f"version {entry.version or 'none'}, {format_size(entry.nbytes)}, published by uid {entry.owner}; "
        f"{format_count(entry.leases, 'lease')} on {format_count(len(entry.versions), 'version')}",
        *(f"{key} = {value}" for key, value in entry.meta.items()),
    ]
    if entry.version and manifest is None:
        why = "it is parked: awake, they are described" if entry.parked else "what is in it cannot be read"
        facts.append(f"Arrays are not drawn: {why}.")
    lanes: list[Lane] = []
    for version in reversed(entry.versions):
        held = [f"held by {one}: {one.access}, for {one.age:.0f} s" for one in version.holders]
        said = [
            f"access {access_of(version)}, on {', '.join(version.devices)}",
            *(held or ["held by nobody but the keeper"]),
        ]
        if version.is_current and manifest is not None:
            lanes += _lanes_of_manifest(version, manifest, said)
        else:
            kind = "parked" if version.parked else "opaque" if version.is_current else "retired"
            state = "revoked" if version.is_revoked else "current" if version.is_current else "retired"
            rows = {"chunks": _chunks(version.sizes, kind)}
            lanes.append(Lane(f"version {version.version}, {state}", rows, said, used=sum(version.sizes)))
    return MemoryMap(f"entry {entry.name}", facts, lanes)


def _lanes_of_manifest(version: VersionInfo, manifest: Manifest, said: list[str]) -> list[Lane]:
    """Return each memory of the current version, with its arrays; the first one has what is said of them all."""
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
        facts = [f"{format_count(len(arrays), 'array')} on {memory.device}", *(() if number else said)]
        sizes = [segment.nbytes for segment in memory.segments]
        rows = {"arrays": arrays, "chunks": _chunks(sizes, "shared")}
        lanes.append(Lane(title, rows, facts, used=sum(sizes), capacity=memory.capacity))
    return lanes


def _chunks(sizes: Iterable[int], kind: str) -> list[Span]:
    spans: list[Span] = []
    for number, size in enumerate(sizes):
        start = spans[-1].stop if spans else 0
        spans.append(Span(start, start + size, kind, f"chunk {number}"))
    return spans
