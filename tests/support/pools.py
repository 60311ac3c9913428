"""Memory of a stream-ordered pool that this process made, as another library's allocator makes it."""

from __future__ import annotations

from tests.support.raw_cuda import CudaStranger

from vram import driver as drivers
from vram.memory.foreign import ForeignRegion, find_foreign
from vram.spec import Location


class MadePool(CudaStranger):
    """A pool of a GPU that can be shared, and what was allocated from it, all of which goes with the block."""

    def __init__(self, where: Location) -> None:
        assert isinstance(where.id, int)
        super().__init__(where.id)
        self._where = where
        self.number = self.pool()

    def region(self, nbytes: int) -> ForeignRegion:
        """Return new memory as a region, for the caller to close."""
        return find_foreign(drivers.get(self._where), self.allocate(self.number, nbytes), nbytes)[0]
