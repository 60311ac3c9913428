"""Drivers: each speaks to one kind of memory; integers in, integers out, no policy.

:func:`get` finds the driver that serves a location. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..errors import UnsupportedError
from ..spec import Location

if TYPE_CHECKING:
    from .protocol import Driver

__all__ = ["get"]

_drivers: dict[str, Driver] = {}


def get(location: Location) -> Driver:
    """Return this process's driver for a location; the same object every time.

    Raises
    ------
    UnsupportedError
        If the system has no such driver. There is never a silent fallback to another kind of memory.
    """
    driver = _drivers.get(location.kind)
    if driver is None:
        driver = _drivers.setdefault(location.kind, _load(location))
    return driver


def _load(location: Location) -> Driver:
    if location.kind == "host":
        if sys.platform != "linux":
            raise UnsupportedError("host memory", "Linux (memfd and sealing)", sys.platform)
        from .host import HostDriver

        return HostDriver()
    if location.kind == "cuda":
        from .cuda import CudaDriver

        return CudaDriver()
    raise UnsupportedError(f"memory on {location}", "a driver for it", "the drivers host and cuda")
