"""A driver as one that can more than every driver must, or the word that this one cannot."""

from __future__ import annotations

import functools
from typing import Any, cast

from ..driver.protocol import DeviceMemory, Driver, HostMemory
from ..errors import UnsupportedError


def devices(driver: Driver, what: str, remedy: str = "Copy it: vram.copy()") -> DeviceMemory:
    """Return the driver as one of GPUs; `what` is wanted of it."""
    if not has(type(driver), DeviceMemory):
        name = getattr(driver, "name", None) or f"{driver!r:.40} for a"
        raise UnsupportedError(what, "a driver of GPUs", f"the {name} driver, which has none", remedy)
    return cast("DeviceMemory", driver)


def foreign(driver: Driver) -> DeviceMemory:
    """Return the driver as one that knows memory of others."""
    return devices(driver, "memory that others made")


def legacy(driver: Driver) -> DeviceMemory:
    """Return the driver as one with 64-byte handles of allocations."""
    return devices(driver, "64-byte handles of cudaMalloc memory")


def copy_on_write(driver: Driver) -> HostMemory:
    """Return the driver as one that can map privately."""
    if not has(type(driver), HostMemory):
        raise UnsupportedError(
            "a private mapping", "memory that is copied on write", f"the {driver.name} driver, which has none",
            "Map it with Access.READ, or copy it into memory of your own",
        )  # fmt: skip
    return cast("HostMemory", driver)


@functools.lru_cache(maxsize=64)  # the question takes microseconds, and there are few drivers
def has(kind: type, capability: Any) -> bool:
    """Whether drivers of a class are of the host's memory, or of devices."""
    return issubclass(kind, capability)
