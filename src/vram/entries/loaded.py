"""Arrays published as they were loaded, such as a file: it is known what lies where, and nobody else looks at it."""

from __future__ import annotations

from ..arrays import Array
from ..arrays.dtypes import dtype_of
from ..keeper.client import Segment
from ..memory import Region
from ..sharing.descriptor import MANIFEST_VERSION, ArrayEntry, Manifest, MemoryDescriptor
from ..sharing.mapping import describe


class Loaded:
    """Arrays on one new region that no other code looks at, such as a loaded file: nothing to find, nothing to copy.
    `spare` is as much memory again, for a second slot. The caller closes both regions."""

    def __init__(
        self, region: Region, arrays: dict[str, ArrayEntry], updatable: bool, spare: Region | None = None
    ) -> None:
        self._regions = [region] if spare is None else [region, spare]
        self._arrays = arrays
        self._updatable = updatable
        self._memories: list[MemoryDescriptor] = []
        self._fds: list[int] = []
        for one in self._regions:
            memory, fds = describe(one, 0, one.nbytes)
            self._memories.append(memory)
            self._fds += fds

    def manifest(self) -> tuple[Manifest, list[Segment]]:
        """Return the manifest and the segments that it speaks of."""
        memories = tuple(self._memories)
        pieces = [Segment(entry.nbytes, entry.kind, memory.device) for memory in memories for entry in memory.segments]
        updatable, slots = self._updatable, len(memories)
        return Manifest(MANIFEST_VERSION, memories, self._arrays, updatable=updatable, slots=slots), pieces

    @property
    def is_to_be_asked_for(self) -> bool:
        """Whether a refusal has to come before the seal: nobody else sees this memory, which goes if it is refused."""
        return False

    def synchronize(self) -> None:
        """Wait for the work that fills the memory (S10)."""
        for region in self._regions:
            region.synchronize()

    def freeze(self) -> None:
        """Seal everything."""
        self._regions[0].freeze()

    def slots(self) -> list[dict[str, Array]]:
        """Return arrays over what is published, that keep it for this process, which updates it; of each slot."""
        return [
            {
                name: Array(region, dtype_of(entry.dtype), entry.shape, offset=entry.offset)
                for name, entry in self._arrays.items()
            }
            for region in self._regions
        ]

    def descriptors(self) -> list[int]:
        """Return the descriptors of all segments, in their order, lent by the allocations."""
        return self._fds
