"""Maps of memory: an entry, an array or an address space, drawn to scale as SVG or as a page."""

from __future__ import annotations

from .drawing import MemoryMap, memory_map

__all__ = ["MemoryMap", "memory_map"]
