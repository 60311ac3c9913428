"""Capabilities of the driver and its GPUs: found out by doing, or from versions and attributes."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

from ...errors import DeviceLostError, OutOfMemoryError, UnsupportedError, VramError
from ...spec import AllocationFlags, HandleKind, Location
from ..protocol import Support
from .attributes import misread
from .bindings import Bindings
from .devices import Device, Devices
from .memory import Memory
from .multicast import Multicast
from .sharing import Sharing

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


class Capabilities:
    """Capabilities of the driver and of each GPU. Support is found out once for each GPU."""

    def __init__(
        self, bindings: Bindings, devices: Devices, memory: Memory, sharing: Sharing, multicast: Multicast
    ) -> None:
        self._call = bindings
        self._devices = devices
        self._memory = memory
        self._sharing = sharing
        self._multicast = multicast
        self._support: dict[Location, Support] = {}

    def support(self, location: Location) -> Support:
        # A device was measured to announce fabric handles and then refuse to make memory with them. So each route is
        # tried with one granule: created, exported, imported, given back. Creating a multicast object can put a whole
        # host out of service: the attribute has to do.
        found = self._support.get(location)
        if found is None:
            device, able = self._devices.device(location), AllocationFlags
            ipc = _IPC_EVENTS if self._call.driver_version >= _IPC_EVENTS_SINCE else _UNIFIED_ADDRESSING
            found = self._support[location] = Support(
                vmm=self._refusal(location), posix_fd=self._refusal(location, HandleKind.POSIX_FD),
                fabric=self._refusal(location, HandleKind.FABRIC),
                compressible=self._refusal(location, flags=able.COMPRESSIBLE),
                gpu_direct_rdma=self._refusal(location, flags=able.GPU_DIRECT_RDMA),
                tile_pool=self._refusal(location, flags=able.TILE_POOL),
                hw_decompress=self._refusal(location, flags=able.HW_DECOMPRESS),
                multicast=self._multicast_refusal(location),
                legacy_ipc="" if device.attribute(ipc) else f"{device.name} says that it has none",
                pools=_pool_refusal(device),
            )  # fmt: skip
        return found

    def misread_attributes(self) -> str:
        """Return which pointer attribute the bindings do not pass on as the driver says it; empty if they do."""
        return misread(self._call)

    def release(self) -> str:
        """Return the release of NVIDIA's driver, such as 580.82.07; empty where the kernel does not say."""
        try:
            found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _RELEASE.read_text())
        except OSError:
            return ""
        return found[0] if found else ""

    def compute_mode_refusal(self, location: Location) -> str:
        """Return why several processes cannot use a GPU at once; empty if they can."""
        return _REFUSING_MODES.get(self._devices.device(location).attribute(_COMPUTE_MODE), "")

    def _refusal(
        self, location: Location, kinds: HandleKind = HandleKind.NONE, flags: AllocationFlags = AllocationFlags.NONE
    ) -> str:
        """Make memory and share it within this process; return why that does not work."""
        memory, sharing = self._memory, self._sharing
        with ExitStack() as undo:  # what cannot be given back is no answer, but an error
            try:
                nbytes = memory.mem_granularity(location, kinds, flags).minimum
                handle = memory.mem_create(nbytes, location, kinds, flags)
                undo.callback(memory.mem_release, handle)
                if flags and flags not in memory.mem_properties(handle).flags:
                    return f"the driver takes {flags!r} and makes memory without it"
                if kinds is HandleKind.POSIX_FD:
                    fd = sharing.mem_export(handle, kinds)
                    undo.callback(os.close, fd)
                    undo.callback(memory.mem_release, sharing.mem_import(fd, kinds, nbytes))
                elif kinds is HandleKind.FABRIC:
                    data = sharing.mem_export_fabric(handle)
                    undo.callback(memory.mem_release, sharing.mem_import_fabric(data, nbytes, location))
            except (OutOfMemoryError, DeviceLostError):
                raise
            except VramError as error:
                return str(error)
        return ""

    def _multicast_refusal(self, location: Location) -> str:
        try:
            self._multicast.multicast_check(location)
        except UnsupportedError as error:
            return str(error)
        return ""


def _pool_refusal(device: Device) -> str:
    if not device.attribute(_POOLS):
        return f"{device.name} says that it has none"
    if not device.attribute(_POOL_HANDLE_TYPES) & HandleKind.POSIX_FD:
        return f"{device.name} says that its pools do not leave the process by a descriptor"
    return ""
