"""What is published as a file that nobody answers for."""

from __future__ import annotations

from vram.sharing.descriptor import ArrayEntry, Manifest, MemoryDescriptor, SegmentEntry, encode_manifest

GRANULE = 2 << 20


def manifest(device: str = "host") -> bytes:
    memory = MemoryDescriptor(device, (SegmentEntry(GRANULE, 1),), 0, 8, GRANULE)
    return encode_manifest(Manifest(1, (memory,), {"x": ArrayEntry(0, 0, 8, "float64", (1,))}))
