"""Memory of a stream-ordered pool that this process made, as another library's allocator makes it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from vram import driver as drivers
from vram.memory.foreign import ForeignRegion, find_foreign
from vram.spec import HandleKind, Location


class MadePool:
    """A pool of a GPU that can be shared, and what was allocated from it, all of which goes with the block."""

    def __init__(self, where: Location) -> None:
        self.driver: Any = drivers.get(where)
        self.number = self.driver.pool_create(where, HandleKind.POSIX_FD)
        self._addresses: list[int] = []

    def allocate(self, nbytes: int) -> ForeignRegion:
        """Return new memory as a region, for the caller to close."""
        self._addresses.append(self.driver.pool_allocate(self.number, nbytes, 1))
        return find_foreign(self.driver, self._addresses[-1], nbytes)[0]

    def __enter__(self) -> MadePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._addresses:
            self.driver.pool_free(self._addresses.pop(), 1)
        self.driver.pool_destroy(self.number)
