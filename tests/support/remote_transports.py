"""What a peer of a transport says, by hand."""

from __future__ import annotations

from vram.handover.messages import MemoryPart, Mixed, Part, Reference, Shared, Value, encode
from vram.sharing.descriptor import MemoryDescriptor, SegmentEntry
from vram.transports.remote import VERSION

GRANULE = 2 << 20


def greeting(kind: str, version: int = VERSION) -> bytes:
    """The first message of each end."""
    return encode(Value([version, kind, bytes(16)]))  # type: ignore[arg-type]


def memory(number: int) -> bytes:
    """Describe a granule of the host."""
    descriptor = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, GRANULE, GRANULE)
    return encode(Part(MemoryPart(number, 0, True, True, descriptor)))


def piece(at: int, nbytes: int, length: int, *, offset: int = 0, of: int = 1, dtype: str = "uint8") -> bytes:
    """Bytes of an array of `length` that begin at `at` in it, and lie at `offset` in memory `of`."""
    there = Shared(Reference(of, 1, offset, "uint8", (nbytes,)))
    return encode(Mixed([1, [2, 0], at, dtype, [1, length]], (there,)))  # type: ignore[arg-type]
