"""Multicast objects: one address whose writes go to memory on every GPU of a team, through NVSwitch.

This has not run on hardware: making such an object can take a host out of service, with all that others run there. So
it is off unless the environment says ``VRAM_MULTICAST=on``, and nothing of it is ever tried out; its granularity may
be asked for at any time, which makes nothing. The rules are those of cuda.h of CUDA 13 ("Multicast Object Management"),
and what is not written there is marked as a guess.

In the books an object is a :class:`~.objects.CudaMemory` at no place. Its devices and what is bound to it are in no
book of the driver: the caller sees to the order of the calls.
"""

from __future__ import annotations

import os
import re
from typing import Any

from ...errors import DriverError, ProtocolError, RangeError, UnsupportedError, UsageError
from ...spec import HandleKind, Location
from ..protocol import Granularity
from .arguments import check_kinds, no_channel
from .bindings import UINT32, UINT64, Bindings, version_text, write
from .devices import Device, Devices
from .failures import INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED
from .memory import Memory, place_in
from .objects import NOWHERE, CudaMemory, Place
from .sharing import Sharing

_MULTICAST = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
_SINCE, _BINDS_NAME_THE_DEVICE_SINCE = 12010, 13010
_SWITCH = "VRAM_MULTICAST"
_REFUSED = (INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED)
# Variables that people set for other libraries where multicast does harm, and the values that say so.
_YES = r"(?!(0|false|no|off|f|n)$).+"
_OTHERS = {
    "NCCL_NVLS_ENABLE": r"[+-]?(0x)?0+",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": _YES,
    "NVSHMEM_DISABLE_NVLS": _YES,
}


class Multicast:
    """Multicast objects: handles in the books, each at no place."""

    def __init__(self, bindings: Bindings, devices: Devices, memory: Memory, sharing: Sharing) -> None:
        self._call = bindings
        self._devices = devices
        self._memory = memory
        self._sharing = sharing

    def multicast_check(self, location: Location) -> None:
        self._multicast_on(self._devices.device(location))

    def multicast_granularity(self, num_devices: int, nbytes: int, handle_kinds: HandleKind) -> Granularity:
        # CUDA Driver API, "Multicast Object Management", cuMulticastGetGranularity: it takes no object, so
        # it may be asked while multicast is off.
        self._multicast_known(*self._devices.all)
        prop = self._team_prop("multicast_granularity", num_devices, nbytes, handle_kinds)
        flags = self._call.api.CUmulticastGranularity_flags
        asked = (flags.CU_MULTICAST_GRANULARITY_MINIMUM, flags.CU_MULTICAST_GRANULARITY_RECOMMENDED)
        try:
            least, best = (int(self._call("cuMulticastGetGranularity", prop, flag)) for flag in asked)
        except DriverError as error:
            raise self._team_refused(error, num_devices, handle_kinds) from None
        return Granularity(least, best)

    def multicast_create(self, num_devices: int, nbytes: int, handle_kinds: HandleKind) -> int:
        self._multicast_on(*self._devices.all)
        prop = self._team_prop("multicast_create", num_devices, nbytes, handle_kinds)
        team = CudaMemory(nbytes, handle_kinds, NOWHERE)
        try:
            self._memory.obtain(team, "cuMulticastCreate", int(prop.getPtr()))
        except DriverError as error:
            raise self._team_refused(error, num_devices, handle_kinds) from None
        return self._memory.first_handle(team)

    def multicast_import(self, fd: int, nbytes: int) -> int:
        self._multicast_on(*self._devices.all)
        return self._memory.first_handle(
            self._sharing.import_as("multicast_import", fd, HandleKind.POSIX_FD, nbytes, self._no_place)
        )

    def multicast_import_fabric(self, data: bytes, nbytes: int) -> int:
        self._multicast_on(*self._devices.all)
        return self._memory.first_handle(
            self._sharing.import_fabric_as("multicast_import_fabric", data, nbytes, self._no_place)
        )

    def multicast_add_device(self, handle: int, location: Location) -> None:
        device = self._devices.device(location)
        self._multicast_known(device)
        self._call.past("cuMulticastAddDevice", self._memory.mem_native_handle(handle), device.handle)

    def multicast_bind_mem(
        self, handle: int, location: Location, offset: int, nbytes: int, memory_handle: int, memory_offset: int
    ) -> None:
        memory = self._memory.mem_native_handle(memory_handle)
        self._bind("cuMulticastBindMem", handle, location, offset, memory, memory_offset, nbytes)

    def multicast_bind_address(self, handle: int, location: Location, offset: int, nbytes: int, address: int) -> None:
        mapping = self._memory.books.mapping_at("multicast_bind_address", address)
        if address + nbytes > mapping.end:
            raise RangeError(
                f"multicast_bind_address: {nbytes} bytes at {address:#x} go beyond the mapping there, which ends at "
                f"{mapping.end:#x}; bind each mapping on its own"
            )
        self._bind("cuMulticastBindAddr", handle, location, offset, address, nbytes)

    def multicast_unbind(self, handle: int, location: Location, offset: int, nbytes: int) -> None:
        device = self._devices.device(location)
        self._call.undo("cuMulticastUnbind", self._memory.mem_native_handle(handle), device.handle, offset, nbytes)

    # -- inside -------------------------------------------------------------------------------------------------
    def _bind(self, name: str, handle: int, location: Location, *arguments: int) -> None:
        """Call the form of a function that this driver has: since 13.1 it takes the device, and cuda-bindings give that
        form a name of its own. The old name stays the old form there, with any driver."""
        raw, newer = self._memory.mem_native_handle(handle), f"{name}_v2"
        if self._call.driver_version >= _BINDS_NAME_THE_DEVICE_SINCE and self._call.has(newer):
            self._call(newer, raw, self._devices.device(location).handle, *arguments, 0)
        else:
            self._call(name, raw, *arguments, 0)

    def _multicast_known(self, *devices: Device) -> None:
        """Raise unless the driver knows such objects, and one of some devices says that it can be in one."""
        version = self._call.driver_version
        if version < _SINCE:
            raise _off(f"a driver of CUDA {version_text(_SINCE)}", version_text(version), "Upgrade the NVIDIA driver")
        if not any(device.attribute(_MULTICAST) for device in devices):
            names = ", ".join(f"{device.name} (cuda:{device.ordinal})" for device in devices)
            raise _off("a GPU with multicast, joined to others by NVSwitch", f"{names}, which says that it has none",
                       "Copy to each GPU on its own")  # fmt: skip

    def _multicast_on(self, *devices: Device) -> None:
        """Raise unless the environment allows such objects besides."""
        self._multicast_known(*devices)
        said = os.environ.get(_SWITCH)
        if said != "on":
            raise _off(f"{_SWITCH}=on", f"{_SWITCH} not set, which is off" if said is None else f"{_SWITCH}={said!r}",
                       f"Set {_SWITCH}=on only on a host that nobody else uses: making such an object can take it out "
                       f"of service")  # fmt: skip
        for variable, refusal in _OTHERS.items():
            value = os.environ.get(variable, "")
            if re.fullmatch(refusal, value.strip(), re.IGNORECASE):
                raise _off(f"an environment without {variable}={value}", f"{variable}={value!r}",
                           f"Take {variable} out of the environment if they are wanted")  # fmt: skip

    def _team_prop(self, call: str, num_devices: int, nbytes: int, kinds: HandleKind) -> Any:
        check_kinds(call, kinds, self._call.driver_version)
        prop = self._call.api.CUmulticastObjectProp()
        write(prop, 0, UINT32, num_devices)
        for place, value in ((8, nbytes), (16, int(kinds)), (24, 0)):
            write(prop, place, UINT64, value)
        return prop

    def _team_refused(self, error: DriverError, num_devices: int, kinds: HandleKind) -> Exception:
        if error.code in _REFUSED and HandleKind.FABRIC in kinds:
            return no_channel("a multicast object that can be exported as FABRIC", error.name)
        if error.code == INVALID_VALUE:
            return UsageError(
                f"{error.call}: a multicast object for {num_devices} devices cannot be made ({error.name}); "
                f"are there as many? This process sees {len(self._devices.all)}"
            )
        return error

    def _no_place(self, raw: int) -> Place:
        """Refuse imported memory. A guess: the driver is expected to describe only that."""
        try:
            place = place_in(self._call("cuMemGetAllocationPropertiesFromHandle", raw))
        except DriverError as error:
            if error.code not in _REFUSED:
                raise
            return NOWHERE
        if place[0] != NOWHERE[0]:
            raise ProtocolError("this is memory, not a multicast object: import it as a PhysicalAllocation")
        return NOWHERE


def _off(needs: str, have: str, remedy: str) -> UnsupportedError:
    return UnsupportedError("a multicast object", needs, have, remedy)
