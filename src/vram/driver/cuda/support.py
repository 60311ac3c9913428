"""What a device really can: found out by doing it, since its attributes lie.

A device was measured to announce fabric handles and then refuse to make memory with them. So each route is tried with
one granule: created, exported, imported, given back. Multicast alone is never tried: creating such an object can put a
whole host out of service, and the attribute has to do.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ...errors import DeviceLostError, OutOfMemoryError, UnsupportedError, VramError
from ...spec import AllocationFlags, HandleKind, Location
from ..protocol import Support
from .devices import Device

if TYPE_CHECKING:
    from .multicast import MulticastCalls

# Further attributes, CU_DEVICE_ATTRIBUTE_*. The manual has IPC_EVENT_SUPPORTED asked for all of cuIpc*; drivers before
# 12.0 do not know it, and had that with unified addressing.
_UNIFIED_ADDRESSING, _IPC_EVENTS, _IPC_EVENTS_SINCE = 41, 125, 12000
_POOLS, _POOL_HANDLE_TYPES = 115, 119


def probe(driver: MulticastCalls, location: Location, device: Device) -> Support:
    """Try each route once. Raises OutOfMemoryError or DeviceLostError if that is why a route fails: neither says what
    the device can at another time."""
    return Support(
        vmm=_try(driver, location),
        posix_fd=_try(driver, location, HandleKind.POSIX_FD),
        fabric=_try(driver, location, HandleKind.FABRIC),
        compressible=_try(driver, location, flags=AllocationFlags.COMPRESSIBLE),
        gpu_direct_rdma=_try(driver, location, flags=AllocationFlags.GPU_DIRECT_RDMA),
        tile_pool=_try(driver, location, flags=AllocationFlags.TILE_POOL),
        hw_decompress=_try(driver, location, flags=AllocationFlags.HW_DECOMPRESS),
        multicast=_multicast_refusal(driver, location),
        legacy_ipc=_legacy_refusal(driver, device),
        pools=_pool_refusal(device),
    )


def _multicast_refusal(driver: MulticastCalls, location: Location) -> str:
    try:
        driver.multicast_check(location)
    except UnsupportedError as error:
        return str(error)
    return ""


def _legacy_refusal(driver: MulticastCalls, device: Device) -> str:
    attribute = _IPC_EVENTS if driver._call.driver_version >= _IPC_EVENTS_SINCE else _UNIFIED_ADDRESSING
    return "" if device.attribute(attribute) else f"{device.name} says that it has none"


def _pool_refusal(device: Device) -> str:
    if not device.attribute(_POOLS):
        return f"{device.name} says that it has none"
    if not device.attribute(_POOL_HANDLE_TYPES) & HandleKind.POSIX_FD:
        return f"{device.name} says that its pools do not leave the process by a descriptor"
    return ""


def _try(
    driver: MulticastCalls,
    location: Location,
    kinds: HandleKind = HandleKind.NONE,
    flags: AllocationFlags = AllocationFlags.NONE,
) -> str:
    with ExitStack() as undo:  # what cannot be given back is no answer, but an error
        try:
            nbytes = driver.mem_granularity(location, kinds, flags).minimum
            handle = driver.mem_create(nbytes, location, kinds, flags)
            undo.callback(driver.mem_release, handle)
            if flags and flags not in driver.mem_properties(handle).flags:
                return f"the driver takes {flags!r} and makes memory without it"
            if kinds is HandleKind.POSIX_FD:
                fd = driver.mem_export(handle, kinds)
                undo.callback(os.close, fd)
                undo.callback(driver.mem_release, driver.mem_import(fd, kinds, nbytes))
            elif kinds is HandleKind.FABRIC:
                data = driver.mem_export_fabric(handle)
                undo.callback(driver.mem_release, driver.mem_import_fabric(data, nbytes, location))
        except (OutOfMemoryError, DeviceLostError):
            raise
        except VramError as error:
            return str(error)
    return ""
