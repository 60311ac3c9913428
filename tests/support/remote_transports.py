"""Memory that goes through a transport."""

from __future__ import annotations

from vram.handover.messages import MemoryPart, Part
from vram.sharing.descriptor import MemoryDescriptor, SegmentEntry
from vram.transports.wire import encode

GRANULE = 2 << 20


def memory(number: int) -> bytes:
    """Describe a granule of the host."""
    descriptor = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, GRANULE, GRANULE)
    return encode(Part(MemoryPart(number, 0, True, True, descriptor)))
