"""Memory with owners: physical allocations, address ranges, mappings of one in the other, and regions that grow.

One line each: a :class:`PhysicalAllocation` is bytes without an address, an :class:`AddressReservation` an address
without bytes, a :class:`MemoryMapping` puts one into the other, and a :class:`Region` is a reservation with a ceiling
that is mapped chunk by chunk and never moves. This room sees the drivers' contract only, never a driver.

:class:`MulticastObject` is loaded on first use: few have the hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .multicast import MulticastMapping, MulticastObject

from .allocation import PhysicalAllocation, Received
from .pin import Pin
from .region import Region
from .reservation import AddressReservation, MemoryMapping

__all__ = [
    "AddressReservation",
    "MemoryMapping",
    "MulticastMapping",
    "MulticastObject",
    "PhysicalAllocation",
    "Pin",
    "Received",
    "Region",
]


def __getattr__(name: str) -> object:
    if name in ("MulticastMapping", "MulticastObject"):
        from . import multicast

        return getattr(multicast, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
