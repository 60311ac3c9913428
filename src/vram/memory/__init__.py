"""Memory with owners: physical allocations, address ranges, mappings of one in the other, and regions that grow.

One line each: a :class:`PhysicalAllocation` is bytes without an address, an :class:`AddressReservation` an address
without bytes, a :class:`MemoryMapping` puts one into the other, and a :class:`Region` is a reservation with a ceiling
that is mapped chunk by chunk and never moves. Only GPUs have an :class:`Event` (what a stream had to do at one moment)
and, few of them, a :class:`MulticastObject`.

The names in ``__all__`` are public: these owners, and the values that describe memory. Only :meth:`Region.create` finds
its driver by the place: everything below takes the driver that :func:`vram.driver.get` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .event import Event
    from .event import EventPool as EventPool
    from .multicast import MulticastMapping, MulticastObject
    from .pinned import trim
    from .sleep import on_remap

from ..spec import Access, AllocationFlags, AllocationSpec, HandleKind, Location
from .allocation import PhysicalAllocation
from .allocation import Received as Received
from .pin import Pin
from .region import Region
from .reservation import AddressReservation, MemoryMapping

__all__ = [
    "Access", "AddressReservation", "AllocationFlags", "AllocationSpec", "Event", "HandleKind", "Location",
    "MemoryMapping", "MulticastMapping", "MulticastObject", "PhysicalAllocation", "Pin", "Region", "on_remap",
    "trim",
]  # fmt: skip


_LATER = {
    "Event": "event", "EventPool": "event", "MulticastMapping": "multicast", "MulticastObject": "multicast",
    "on_remap": "sleep", "trim": "pinned",
}  # fmt: skip


if not TYPE_CHECKING:  # with it a name that is not there would be an `object` to a type checker, and no mistake

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f".{_LATER[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
