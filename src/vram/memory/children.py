"""Forked children, which keep memory of the host mapped until they end or become another program."""

from __future__ import annotations

import time

from ..driver.protocol import Driver, HostMemory
from ..lifetime import last_fork
from .allocation import Memory
from .chunks import Chunk


def is_inherited(chunk: Chunk) -> bool:
    """Whether a child lives that was forked since a chunk's memory was mapped first, and may share it."""
    return _forked_at(chunk) is not None


def may_be_inherited(memory: Memory) -> bool:
    """Whether a child lives that was forked since memory was mapped first, as far as that is known of the memory."""
    return bool(memory.first_mapped) and _forked_since(memory.driver, memory.first_mapped) is not None


def child_with(chunk: Chunk) -> tuple[str, ...]:
    """Return words for the youngest child that has a chunk's memory mapped; none without such a child."""
    when = _forked_at(chunk)
    return () if when is None else (f"a child that was forked at {time.strftime('%H:%M:%S', time.localtime(when))}",)


def _forked_at(chunk: Chunk) -> float | None:
    memory = chunk.known  # which may have been mapped before, and was not made anew since
    return _forked_since(chunk.undo.where.driver, chunk.mapping._id if memory is None else memory.first_mapped)


def _forked_since(driver: Driver, serial: int) -> float | None:
    if serial > last_fork()[0] or not isinstance(driver, HostMemory):  # memory of a GPU means nothing in a child
        return None
    return driver.child_since(serial)
