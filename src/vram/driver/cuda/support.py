"""What a device really can: found out by doing it, since its attributes lie.

A device was measured to announce fabric handles and then refuse to make memory with them. So each route is tried with
one granule: created, exported, imported, given back. Multicast alone is never tried: creating such an object can put a
whole host out of service, and the attribute has to do.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import DeviceLostError, OutOfMemoryError, VramError
from ...spec import HandleKind, Location
from .bindings import version_text
from .devices import Device

if TYPE_CHECKING:
    from .driver import CudaDriver

__all__ = ["MULTICAST", "MULTICAST_SINCE", "Support", "probe"]

MULTICAST = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
MULTICAST_SINCE = 12010


@dataclass(frozen=True, slots=True)
class Support:
    """What a device can. Each field is empty where it works, and otherwise says why it does not.

    Attributes
    ----------
    vmm : str
        Making and mapping memory at addresses of one's own.
    posix_fd, fabric : str
        Sharing it by file descriptor, and between machines.
    multicast : str
        Going by version and device attribute, never by a try.
    """

    vmm: str
    posix_fd: str
    fabric: str
    multicast: str


def probe(driver: CudaDriver, location: Location, device: Device) -> Support:
    """Try each route once.

    Raises
    ------
    OutOfMemoryError, DeviceLostError
        If that is why: it says nothing about what the device can at another time.
    """
    return Support(
        vmm=_try(driver, location, HandleKind.NONE),
        posix_fd=_try(driver, location, HandleKind.POSIX_FD),
        fabric=_try(driver, location, HandleKind.FABRIC),
        multicast=multicast_refusal(driver, device),
    )


def multicast_refusal(driver: CudaDriver, device: Device) -> str:
    """Return why a device has no multicast objects; empty if it says that it has."""
    version = driver.driver_version
    if version < MULTICAST_SINCE:
        return f"driver too old: needs {version_text(MULTICAST_SINCE)}, have {version_text(version)}"
    if not device.attribute(MULTICAST):
        return f"{device.name} says that it has none"
    return ""


def _try(driver: CudaDriver, location: Location, kinds: HandleKind) -> str:
    with ExitStack() as undo:  # what cannot be given back is no answer, but an error
        try:
            nbytes = driver.mem_granularity(location, kinds).minimum
            handle = driver.mem_create(nbytes, location, kinds)
            undo.callback(driver.mem_release, handle)
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
