"""The CUDA driver: one class out of its parts."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

from ...errors import DeviceLostError, OutOfMemoryError, UnsupportedError, VramError
from ...spec import AllocationFlags, HandleKind, Location
from ..protocol import Support
from .attributes import misread
from .bindings import Bindings, version_text
from .devices import Device, Devices
from .multicast import MulticastCalls

# Further attributes, CU_DEVICE_ATTRIBUTE_*. The manual has IPC_EVENT_SUPPORTED asked for all of cuIpc*; drivers before
# 12.0 do not know it, and had that with unified addressing.
_UNIFIED_ADDRESSING, _IPC_EVENTS, _IPC_EVENTS_SINCE = 41, 125, 12000
_POOLS, _POOL_HANDLE_TYPES = 115, 119
_RELEASE = Path("/proc/driver/nvidia/version")
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, and of CUcomputemode what is not the default
_REFUSING_MODES = {
    2: "its compute mode is PROHIBITED: nobody may use it",
    3: "its compute mode is EXCLUSIVE_PROCESS: one process at a time may use it, so none can share its memory",
}


class CudaDriver(MulticastCalls):
    """The :class:`~vram.driver.protocol.Driver` of GPU memory and of host memory for GPUs. Inert after a fork.
    A lost GPU takes the process's other GPUs along: calls raise DeviceLostError, and undo calls do nothing."""

    name = "cuda"

    def __init__(self) -> None:
        bindings = Bindings()
        super().__init__(bindings, Devices(bindings))
        self._support: dict[Location, Support] = {}

    @property
    def driver_version(self) -> int:
        """As ``cuDriverGetVersion`` says it: 12010 is 12.1."""
        return self._call.driver_version

    @property
    def versions(self) -> tuple[str, str]:
        """The versions of the driver's CUDA and of cuda-bindings, such as ``("13.0", "13.3.1")``."""
        return version_text(self._call.driver_version), self._call.bindings_version

    @property
    def release(self) -> str:
        """The release of NVIDIA's driver, such as 580.82.07; empty where the kernel does not say."""
        try:
            found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _RELEASE.read_text())
        except OSError:
            return ""
        return found[0] if found else ""

    def misread_attributes(self) -> str:
        """Return which pointer attribute the bindings do not pass on as the driver says it; empty if they do."""
        return misread(self._call)

    def compute_mode_refusal(self, location: Location) -> str:
        """Return why several processes cannot use a GPU at once; empty if they can."""
        mode = self._devices.device(location).attribute(_COMPUTE_MODE)
        return _REFUSING_MODES.get(mode, "")

    def support(self, location: Location) -> Support:
        """Find out what a device really can, by doing it, once for each driver object: some milliseconds."""
        # A device was measured to announce fabric handles and then refuse to make memory with them. So each route is
        # tried with one granule: created, exported, imported, given back. Creating a multicast object can put a whole
        # host out of service: the attribute has to do.
        found = self._support.get(location)
        if found is None:
            device, able = self._devices.device(location), AllocationFlags
            found = self._support[location] = Support(
                vmm=_try(self, location), posix_fd=_try(self, location, HandleKind.POSIX_FD),
                fabric=_try(self, location, HandleKind.FABRIC),
                compressible=_try(self, location, flags=able.COMPRESSIBLE),
                gpu_direct_rdma=_try(self, location, flags=able.GPU_DIRECT_RDMA),
                tile_pool=_try(self, location, flags=able.TILE_POOL),
                hw_decompress=_try(self, location, flags=able.HW_DECOMPRESS),
                multicast=_multicast_refusal(self, location),
                legacy_ipc=_legacy_refusal(self, device), pools=_pool_refusal(device),
            )  # fmt: skip
        return found

    def canonical(self, location: Location) -> Location:
        """Return what a place is called here: a GPU's UUID becomes its ordinal in this process."""
        return self._devices.location(*self._devices.place(location))


def _multicast_refusal(driver: CudaDriver, location: Location) -> str:
    try:
        driver.multicast_check(location)
    except UnsupportedError as error:
        return str(error)
    return ""


def _legacy_refusal(driver: CudaDriver, device: Device) -> str:
    attribute = _IPC_EVENTS if driver._call.driver_version >= _IPC_EVENTS_SINCE else _UNIFIED_ADDRESSING
    return "" if device.attribute(attribute) else f"{device.name} says that it has none"


def _pool_refusal(device: Device) -> str:
    if not device.attribute(_POOLS):
        return f"{device.name} says that it has none"
    if not device.attribute(_POOL_HANDLE_TYPES) & HandleKind.POSIX_FD:
        return f"{device.name} says that its pools do not leave the process by a descriptor"
    return ""


def _try(
    driver: CudaDriver,
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
