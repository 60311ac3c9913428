"""A driver as one that can more than every driver must, or the word that this one cannot."""

from __future__ import annotations

import functools
from typing import Any, cast

from ..driver.foreign import Foreign, InterprocessEvents, LegacyIpc, Pools
from ..driver.protocol import Driver, Fabric, Multicast, NativeHandles, StreamOrdered
from ..errors import UnsupportedError


def foreign(driver: Driver) -> Foreign:
    """Return the driver as one that knows memory of others."""
    return cast("Foreign", _able(driver, Foreign, "memory that others made"))


def fabric(driver: Driver) -> Fabric:
    """Return the driver as one whose memory another machine can open."""
    return cast("Fabric", _able(driver, Fabric, "64-byte handles of the fabric", "Share it by descriptor: export()"))


def legacy(driver: Driver) -> LegacyIpc:
    """Return the driver as one with 64-byte handles of allocations."""
    return cast("LegacyIpc", _able(driver, LegacyIpc, "64-byte handles of cudaMalloc memory"))


def multicast(driver: Driver) -> Multicast:
    """Return the driver as one with multicast objects."""
    return cast("Multicast", _able(driver, Multicast, "a multicast object", "Write to each memory on its own"))


def native(driver: Driver) -> NativeHandles:
    """Return the driver as one whose handles stand for those of another API."""
    remedy = "A descriptor stands for it: export()"
    return cast("NativeHandles", _able(driver, NativeHandles, "handles of CUDA", remedy))


def pools(driver: Driver) -> Pools:
    """Return the driver as one with stream-ordered pools."""
    return cast("Pools", _able(driver, Pools, "stream-ordered pools"))


def events(driver: Driver) -> StreamOrdered:
    """Return the driver as one with streams and events."""
    return cast("StreamOrdered", _able(driver, StreamOrdered, "events", "Its work is done when the call returns"))


def interprocess(driver: Driver) -> InterprocessEvents:
    """Return the driver as one whose events other processes can wait for."""
    remedy = "Wait for the work, then say so: synchronize()"
    return cast("InterprocessEvents", _able(driver, InterprocessEvents, "events between processes", remedy))


def _able(driver: Driver, capability: Any, what: str, remedy: str = "Copy it: vram.copy()") -> Driver:
    if not _has(type(driver), capability):
        name = getattr(driver, "name", None) or f"{driver!r:.40} for a"
        raise UnsupportedError(what, "a driver of GPUs", f"the {name} driver, which has none", remedy)
    return driver


@functools.lru_cache(maxsize=64)  # the question takes microseconds, and there are few drivers
def _has(kind: type, capability: Any) -> bool:
    return issubclass(kind, capability)
