"""Multicast objects: one address whose writes go to memory on every GPU of a team, through NVSwitch.

This has not run on hardware: making such an object can take a host out of service, with all that others run there. So
it is off unless the environment says ``VRAM_MULTICAST=on``, and nothing of it is ever tried out; its granularity may
be asked for at any time, which makes nothing. The rules are those of cuda.h of CUDA 13 ("Multicast Object Management"),
and what is not written there is marked as a guess.

Two functions have two forms that one name stands for: ``cuMulticastBindMem`` and ``cuMulticastBindAddr`` take a device
more since 13.1. cuda-bindings ask the driver for each form by its version and give the new one a name of its own with
``_v2``, from 13.1 on; the old name stays the old form there, with any driver.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ...errors import DriverError, OutOfMemoryError, ProtocolError, RangeError, UnsupportedError, UsageError
from ...spec import Access, HandleKind, Location
from ..arguments import check_size
from ..books import duplicate
from ..protocol import Granularity, LiveObjects, MemoryProperties
from .arguments import check_descriptor, check_fabric, check_kinds, no_channel
from .bindings import UINT32, UINT64, Bindings, check_numbers, read, version_text, write
from .devices import DEVICE, Device, Devices
from .failures import INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED
from .objects import UNCLAIMED, CudaMapping, CudaMemory
from .pools import PoolCalls

MULTICAST = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
MULTICAST_SINCE = 12010
_SWITCH = "VRAM_MULTICAST"
_BINDS_NAME_THE_DEVICE = 13010  # since this driver
_NOWHERE = (0, 0)  # CU_MEM_LOCATION_TYPE_INVALID
_REFUSED = (INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED)
_NO = ("", "0", "false", "no", "off", "f", "n")


class CudaMulticast(CudaMemory):
    """A multicast object in the books. It has no memory of its own and is at no place."""

    __slots__ = ("added", "is_shared", "num_devices")

    def __init__(
        self, nbytes: int, kinds: HandleKind, num_devices: int, fd: int | None = None, fabric: bytes = b""
    ) -> None:
        super().__init__(nbytes, kinds, _NOWHERE, fd, fabric)
        self.num_devices = num_devices
        self.added: dict[int, None] = {}  # ordinals, by this process
        self.is_shared = self.is_imported  # then other processes may add devices, and nobody here knows

    def needs_team(self, call: str) -> None:
        """Refuse what would certainly wait for ever in the driver."""
        if not self.is_shared and len(self.added) < self.num_devices:
            raise UsageError(
                f"{call}: {len(self.added)} of {self.num_devices} devices were added to the multicast object; until "
                f"the last was, the driver would wait for ever. Call multicast_add_device for the others first"
            )


class MulticastCalls(PoolCalls):
    """A part of :class:`~vram.driver.cuda.CudaDriver`."""

    def __init__(self, bindings: Bindings, devices: Devices) -> None:
        super().__init__(bindings, devices)
        self._teams: dict[tuple[int, int, int], Granularity] = {}
        self._multicast_seen = False  # spares everybody else the checks below

    def multicast_check(self, location: Location) -> None:
        device = self._devices.device(location)
        self._multicast_on()
        self._multicast_on_device((device,))

    def multicast_granularity(self, num_devices: int, nbytes: int, handle_kinds: HandleKind) -> Granularity:
        # CUDA Driver API, "Multicast Object Management", cuMulticastGetGranularity: it takes no object, so
        # it may be asked while multicast is off.
        self._multicast_known()
        check_kinds("multicast_granularity", handle_kinds, self._call.driver_version)
        key = (num_devices, nbytes, int(handle_kinds))
        found = self._teams.get(key)
        if found is None:
            prop = self._team_prop("multicast_granularity", num_devices, nbytes, handle_kinds)
            flags = self._api.CUmulticastGranularity_flags
            asked = (flags.CU_MULTICAST_GRANULARITY_MINIMUM, flags.CU_MULTICAST_GRANULARITY_RECOMMENDED)
            try:
                # A question only, but the first of its functions: a driver without that says so here.
                least, best = (int(self._call("cuMulticastGetGranularity", prop, flag)) for flag in asked)
            except DriverError as error:
                self._multicast_on_device(self._devices.all)
                raise self._team_refused(error, num_devices, handle_kinds) from None
            self._multicast_on_device(self._devices.all)
            found = self._teams[key] = Granularity(least, best)
        return found

    def multicast_create(self, num_devices: int, nbytes: int, handle_kinds: HandleKind) -> int:
        self._multicast_on()
        least = self.multicast_granularity(num_devices, nbytes, handle_kinds).minimum
        check_size("multicast_create", nbytes, least)
        prop = self._team_prop("multicast_create", num_devices, nbytes, handle_kinds)
        team = CudaMulticast(nbytes, handle_kinds, num_devices)
        try:
            self._obtain(team, "cuMulticastCreate", int(prop.getPtr()))
            self._multicast_seen = True
            return self._first_handle(team)
        except DriverError as error:
            raise self._team_refused(error, num_devices, handle_kinds) from None

    def multicast_import(self, fd: int, kind: HandleKind, nbytes: int, num_devices: int) -> int:
        self._multicast_on()
        if kind != HandleKind.POSIX_FD:
            check_kinds("multicast_import", kind, self._call.driver_version)
            raise UsageError("multicast_import: kind must be POSIX_FD; of 64 bytes see multicast_import_fabric")
        check_size("multicast_import", nbytes, self.multicast_granularity(num_devices, nbytes, kind).minimum)
        check_descriptor("multicast_import", fd)
        kept, team = duplicate(fd), None
        try:
            team = CudaMulticast(nbytes, kind, num_devices, kept)
            try:
                self._obtain(team, "cuMemImportFromShareableHandle", kept, int(kind))
            except DriverError as error:
                if isinstance(error, OutOfMemoryError):
                    raise
                raise ProtocolError(
                    f"multicast_import({fd}): nothing that the driver exported ({error.name})"
                ) from None
            if self._is_memory(team.raw[UNCLAIMED]):
                raise ProtocolError(f"multicast_import({fd}): this is memory, not a multicast object; see mem_import")
            self._multicast_seen = True
            return self._first_handle(team)
        except BaseException as error:
            if team is not None and team.raw:
                self._give_back(team, error)  # in the books if it fails
            else:
                os.close(kept)
            raise

    def multicast_import_fabric(self, data: bytes, nbytes: int, num_devices: int) -> int:
        self._multicast_on()
        wanted = check_fabric("multicast_import_fabric", data, self._call.driver_version)
        least = self.multicast_granularity(num_devices, nbytes, HandleKind.FABRIC).minimum
        check_size("multicast_import_fabric", nbytes, least)
        team = CudaMulticast(nbytes, HandleKind.FABRIC, num_devices, fabric=bytes(data))
        try:
            self._obtain_fabric("multicast_import_fabric", team, wanted)
            if self._is_memory(team.raw[UNCLAIMED]):
                raise ProtocolError(
                    "multicast_import_fabric: this is memory, not a multicast object; see mem_import_fabric"
                )
            self._multicast_seen = True
            return self._first_handle(team)
        except BaseException as error:
            self._give_back(team, error)  # in the books if it fails
            raise

    def multicast_add_device(self, handle: int, location: Location) -> None:
        team = self._team("multicast_add_device", handle)
        device = self._devices.device(location)
        if device.ordinal in team.added:
            raise UsageError(f"multicast_add_device: {location} was added to this object already; each is added once")
        if len(team.added) >= team.num_devices:
            raise UsageError(f"multicast_add_device: all {team.num_devices} devices of this object were added already")
        self._multicast_on_device((device,))
        self._call.past("cuMulticastAddDevice", team.raw[handle], device.handle)
        team.added[device.ordinal] = None

    def multicast_bind_mem(self, handle: int, offset: int, memory_handle: int, memory_offset: int, nbytes: int) -> None:
        team = self._team("multicast_bind_mem", handle)
        memory: Any = self._books.memory("multicast_bind_mem", memory_handle)
        device = self._bindable("multicast_bind_mem", team, memory)
        what = (memory.raw[memory_handle], memory_offset)
        self._bind("cuMulticastBindMem", team.raw[handle], device, offset, *what, nbytes)

    def multicast_bind_address(self, handle: int, offset: int, address: int, nbytes: int) -> None:
        team = self._team("multicast_bind_address", handle)
        mapping = self._books.mapping_at("multicast_bind_address", address)
        if address + nbytes > mapping.end:
            raise RangeError(
                f"multicast_bind_address: {nbytes} bytes at {address:#x} go beyond the mapping there, which ends at "
                f"{mapping.end:#x}; bind each mapping on its own"
            )
        device = self._bindable("multicast_bind_address", team, mapping.memory)
        self._bind("cuMulticastBindAddr", team.raw[handle], device, offset, address, nbytes)

    def multicast_unbind(self, handle: int, location: Location, offset: int, nbytes: int) -> None:
        team = self._team("multicast_unbind", handle)
        device = self._devices.device(location)
        check_numbers("cuMulticastUnbind", offset, nbytes)
        self._call.past("cuMulticastUnbind", team.raw[handle], device.handle, offset, nbytes)

    # -- where such an object is not memory ---------------------------------------------------------------------
    def mem_properties(self, handle: int) -> MemoryProperties:
        if self._multicast_seen and self._found(handle) is not None:
            raise UsageError(f"mem_properties({handle}): this is a multicast object, not memory; it is at no location")
        return super().mem_properties(handle)

    def mem_map(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        team = self._found(handle) if self._multicast_seen else None
        if team is not None:
            team.needs_team("mem_map")
        super().mem_map(address, nbytes, offset, handle)

    def mem_export(self, handle: int, kind: HandleKind) -> int:
        team = self._leaving(handle)
        try:
            return super().mem_export(handle, kind)
        except Exception:
            if team is not None:
                team.is_shared = False
            raise

    def mem_export_fabric(self, handle: int) -> bytes:
        team = self._leaving(handle)
        try:
            return super().mem_export_fabric(handle)
        except Exception:
            if team is not None:
                team.is_shared = False
            raise

    def mem_native_handle(self, handle: int) -> int:
        self._leaving(handle)  # whoever has it may add devices
        return super().mem_native_handle(handle)

    def _leaving(self, handle: int) -> CudaMulticast | None:
        """Note that an object leaves this process, before it does: others may add devices from then on.
        Returns the object if that is new."""
        team = self._found(handle) if self._multicast_seen else None
        if team is None or team.is_shared:
            return None
        team.is_shared = True
        return team

    def mem_import(self, fd: int, kind: HandleKind, nbytes: int) -> int:
        try:
            return super().mem_import(fd, kind, nbytes)
        except DriverError as error:
            raise _no_memory(f"mem_import({fd})", error) from None

    def mem_import_fabric(self, data: bytes, nbytes: int, location: Location) -> int:
        try:
            return super().mem_import_fabric(data, nbytes, location)
        except DriverError as error:
            raise _no_memory("mem_import_fabric", error) from None

    def live(self) -> LiveObjects:
        found = super().live()
        if not self._multicast_seen:
            return found
        mapped = [mapping.memory for mapping in list(self._books.mappings.values())]
        out: list[Any] = [*self._books.handles.values(), *mapped]
        teams = {memory for memory in out if isinstance(memory, CudaMulticast)}
        return replace(found, nbytes=found.nbytes - sum(team.nbytes for team in teams))

    def _accessible(self, call: str, address: int, nbytes: int, access: Access) -> list[CudaMapping]:
        due: list[Any] = super()._accessible(call, address, nbytes, access)
        if self._multicast_seen and access is Access.READ:
            for mapping in due:
                if isinstance(mapping.memory, CudaMulticast):
                    # PTX ISA: on such addresses only the multimem instructions are defined.
                    raise UsageError(
                        f"{call}: a multicast object is mapped at {mapping.address:#x}, where plain reads are "
                        f"undefined; read the memory that is bound to it"
                    )
        return due

    # -- inside -------------------------------------------------------------------------------------------------
    def _multicast_on(self) -> None:
        """Raise unless the environment allows multicast objects and the driver is new enough."""
        said = os.environ.get(_SWITCH)
        if said != "on":
            raise _off(f"{_SWITCH}=on", f"{_SWITCH} not set, which is off" if said is None else f"{_SWITCH}={said!r}",
                       f"Set {_SWITCH}=on only on a host that nobody else uses: making such an object can take it out "
                       f"of service")  # fmt: skip
        for variable, needs, forbids in _FOREIGN:
            value = os.environ.get(variable)
            if value is not None and forbids(value.strip().lower()):
                raise _off(f"an environment that allows them ({needs})", f"{variable}={value!r}",
                           f"Take {variable} out of the environment if they are wanted")  # fmt: skip
        self._multicast_known()

    def _multicast_known(self) -> None:
        """Raise unless the driver is new enough to know such objects."""
        if self._call.driver_version < MULTICAST_SINCE:
            raise _off(f"a driver of CUDA {version_text(MULTICAST_SINCE)}", version_text(self._call.driver_version),
                       "Upgrade the NVIDIA driver")  # fmt: skip

    def _multicast_on_device(self, devices: tuple[Device, ...]) -> None:
        """Raise unless one of some devices says that it can be in such an object."""
        if not any(device.attribute(MULTICAST) for device in devices):
            names = ", ".join(f"{device.name} (cuda:{device.ordinal})" for device in devices)
            raise _off("a GPU with multicast, joined to others by NVSwitch", f"{names}, which says that it has none",
                       "Copy to each GPU on its own")  # fmt: skip

    def _team_prop(self, call: str, num_devices: int, nbytes: int, kinds: HandleKind) -> Any:
        check_kinds(call, kinds, self._call.driver_version)
        if not 1 <= num_devices < 1 << 32 or not 0 <= nbytes < 1 << 63:
            raise UsageError(f"{call}: a multicast object of {nbytes} bytes for {num_devices} devices cannot be")
        prop = self._api.CUmulticastObjectProp()
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

    def _found(self, handle: int) -> CudaMulticast | None:
        memory: Any = self._books.handles.get(handle)
        return memory if isinstance(memory, CudaMulticast) else None

    def _team(self, call: str, handle: int) -> CudaMulticast:
        team = self._found(handle)
        if team is None:
            self._books.memory(call, handle)
            raise UsageError(f"{call}({handle}): this is a handle to memory, not to a multicast object")
        return team

    def _bindable(self, call: str, team: CudaMulticast, memory: Any) -> Device:
        """Return the device of memory that may be bound."""
        if isinstance(memory, CudaMulticast):
            raise UsageError(f"{call}: a multicast object cannot be bound to another one; bind memory")
        team.needs_team(call)
        kind, number = memory.place
        if kind != DEVICE or number not in team.added:
            where = self._devices.location(kind, number)
            raise UsageError(
                f"{call}: the memory is on {where}, which this process did not add to the object; it added "
                f"{', '.join(f'cuda:{ordinal}' for ordinal in team.added) or 'none'}"
            )
        if (team.kinds or team.is_shared) and not memory.kinds:
            raise UsageError(
                f"{call}: the object can leave the process and the memory cannot; create it with handle kinds"
            )
        device: Device = self._devices.all[number]
        return device

    def _bind(self, name: str, raw: int, device: Device, *arguments: int) -> None:
        newer = f"{name}_v2"
        if self._call.driver_version >= _BINDS_NAME_THE_DEVICE and self._call.has(newer):
            self._call(newer, raw, device.handle, *arguments, 0)
        else:
            self._call(name, raw, *arguments, 0)

    def _is_memory(self, raw: int) -> bool:
        """Whether an imported handle is plain memory. A guess: the driver is expected to describe only that."""
        try:
            prop = self._call("cuMemGetAllocationPropertiesFromHandle", raw)
        except DriverError as error:
            if error.code in _REFUSED:
                return False
            raise
        return read(prop, 8, UINT32) != _NOWHERE[0]


def _no_memory(call: str, error: DriverError) -> Exception:
    """Why what was imported is no memory: a guess, as in `_is_memory`, that it is a multicast object."""
    if error.call != "cuMemGetAllocationPropertiesFromHandle" or error.code not in _REFUSED:
        return error
    return ProtocolError(
        f"{call}: no memory, but something else that the driver exported, such as a multicast object ({error.name})"
    )


def _off(needs: str, have: str, remedy: str) -> UnsupportedError:
    return UnsupportedError("a multicast object", needs, have, remedy)


def _is_zero(value: str) -> bool:
    try:
        return int(value, 0) == 0
    except ValueError:
        return False


def _is_yes(value: str) -> bool:
    return value not in _NO


# What people set for other libraries because multicast does harm on their machines.
_FOREIGN = (
    ("NCCL_NVLS_ENABLE", "NCCL_NVLS_ENABLE other than 0", _is_zero),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "no TORCH_SYMM_MEM_DISABLE_MULTICAST=1", _is_yes),
    ("NVSHMEM_DISABLE_NVLS", "no NVSHMEM_DISABLE_NVLS=1", _is_yes),
)
