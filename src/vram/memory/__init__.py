"""Memory with owners: physical allocations, address ranges, mappings of one in the other, and regions that grow.

One line each: a :class:`PhysicalAllocation` is bytes without an address, an :class:`AddressReservation` an address
without bytes, a :class:`MemoryMapping` puts one into the other, and a :class:`Region` is a reservation with a ceiling
that is mapped chunk by chunk and never moves. This room sees the drivers' contract and :func:`vram.driver.get`, which
finds the driver of a place; never a driver.

Only GPUs have an :class:`Event` (what a stream had to do at one moment), a stream-ordered :class:`Pool` and, few of
them, a :class:`MulticastObject`; these are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .event import Event, EventPool
    from .multicast import MulticastMapping, MulticastObject
    from .pool import Pool

from .allocation import PhysicalAllocation, Received
from .pin import Pin
from .region import Region
from .reservation import AddressReservation, MemoryMapping

__all__ = [
    "AddressReservation",
    "Event",
    "EventPool",
    "MemoryMapping",
    "MulticastMapping",
    "MulticastObject",
    "PhysicalAllocation",
    "Pin",
    "Pool",
    "Received",
    "Region",
]


_LATER = {
    "Event": "event",
    "EventPool": "event",
    "MulticastMapping": "multicast",
    "MulticastObject": "multicast",
    "Pool": "pool",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LATER[name]}", __name__), name)
