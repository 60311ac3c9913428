"""Memory with owners: physical allocations, address ranges, mappings of one in the other, and regions that grow.

One line each: a :class:`PhysicalAllocation` is bytes without an address, an :class:`AddressReservation` an address
without bytes, a :class:`MemoryMapping` puts one into the other, and a :class:`Region` is a reservation with a ceiling
that is mapped chunk by chunk and never moves. This room sees the drivers' contract only, never a driver.
"""

from __future__ import annotations

from .allocation import PhysicalAllocation
from .pin import Pin
from .region import Region
from .reservation import AddressReservation, MemoryMapping

__all__ = ["AddressReservation", "MemoryMapping", "PhysicalAllocation", "Pin", "Region"]
