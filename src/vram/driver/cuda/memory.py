"""Addresses, memory, mappings, and how memory leaves and comes: virtual memory management under the contract's rules.

The driver answers nearly every mistake with INVALID_VALUE. So the books of :mod:`..books` are kept here too: they tell
the mistakes apart, in the same words as the host driver's, before the driver is asked (invariant I10); the driver has
the last word. None of these calls needs a context, so none makes one.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...errors import (
    AddressSpaceError,
    DriverError,
    OutOfMemoryError,
    ProtocolError,
    UnsupportedError,
    UsageError,
)
from ...lifetime import noted
from ...spec import Access, AllocationFlags, HandleKind, Location
from ..arguments import check_access, check_address, check_alignment, check_size, not_exported
from ..books import Books, Reservation, duplicate, give_back
from ..protocol import DeviceInfo, Granularity, MemoryProperties
from .arguments import check_descriptor, check_fabric, check_flags, check_kinds, no_channel
from .bindings import UINT32, Bindings, check_numbers, read, write
from .devices import DEVICE, HOST, HOST_NUMA, Devices
from .failures import (
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    UNKNOWN,
)
from .functions import Handle
from .objects import NOWHERE, UNCLAIMED, CudaMapping, CudaMemory, Place

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_REFUSED = (INVALID_VALUE, INVALID_DEVICE, NOT_PERMITTED, NOT_SUPPORTED)
# The status for a descriptor that is no memory; UNKNOWN for most of them, measured.
_FOREIGN = (INVALID_VALUE, INVALID_HANDLE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN)
_UNDESCRIBED = (INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED)  # a guess, of what is no memory


class MemoryCalls:
    """A part of :class:`~vram.driver.cuda.CudaDriver`."""

    def __init__(self, bindings: Bindings, devices: Devices) -> None:
        self._call = bindings
        self._api = bindings.api
        self._devices = devices
        self._books = Books()
        self._ways: dict[tuple[Place, HandleKind, AllocationFlags], tuple[Any, Granularity]] = {}
        self._grants: dict[tuple[Access, tuple[Location, ...]], tuple[tuple[Place, ...], tuple[Any, ...]]] = {}
        self._least = 0

    # -- devices ------------------------------------------------------------------------------------------------
    def device_count(self) -> int:
        return len(self._devices.all)

    def device_info(self, location: Location) -> DeviceInfo:
        device = self._devices.device(location)
        return DeviceInfo(device.uuid, device.name, device.total_bytes)

    def mem_granularity(
        self, location: Location, handle_kinds: HandleKind, flags: AllocationFlags = AllocationFlags.NONE
    ) -> Granularity:
        return self._way("mem_granularity", location, self._devices.place(location), handle_kinds, flags)[1]

    # -- addresses ----------------------------------------------------------------------------------------------
    def address_reserve(self, nbytes: int, *, alignment: int = 0, address: int = 0) -> int:
        least = self._granule()
        check_size("address_reserve", nbytes, least)
        check_alignment("address_reserve", alignment, least)
        check_address("address_reserve", address, alignment or least, "")
        check_numbers("cuMemAddressReserve", nbytes, alignment, address)
        room = ctypes.c_uint64()
        try:
            self._call.past("cuMemAddressReserve", ctypes.byref(room), nbytes, alignment, address, 0)
        except DriverError as error:
            if error.code in (OUT_OF_MEMORY, INVALID_VALUE):
                raise AddressSpaceError(
                    "cuMemAddressReserve", error.code, error.name,
                    f"no range of {nbytes} bytes of addresses is left; ask for less",
                ) from None  # fmt: skip
            raise
        self._books.reservations.add(Reservation(room.value, nbytes))
        return room.value

    def address_free(self, address: int, nbytes: int) -> None:
        reservation = self._books.reserved("address_free", address, nbytes)
        inside = len(reservation.mappings.at)
        if inside:
            raise UsageError(f"address_free({address:#x}, {nbytes}): {inside} mappings are in it; unmap them first")
        # Out of the books before it is out of the driver: the next reservation may get this very address.
        if not self._books.reservations.remove(reservation):
            raise UsageError(f"address_free({address:#x}, {nbytes}): another thread freed it")
        try:
            self._call.undo("cuMemAddressFree", address, nbytes)
        except BaseException:
            self._books.reservations.add(reservation)
            raise

    # -- physical memory ----------------------------------------------------------------------------------------
    def mem_create(
        self,
        nbytes: int,
        location: Location,
        handle_kinds: HandleKind,
        flags: AllocationFlags = AllocationFlags.NONE,
    ) -> int:
        return self._first_handle(self._create("mem_create", nbytes, location, handle_kinds, flags))

    def mem_release(self, handle: int) -> None:
        memory: Any = self._books.handles.pop(handle, None)
        if memory is None:
            raise UsageError(f"mem_release({handle}): no such handle; each is released once")
        try:
            self._release(memory, handle)
        except BaseException:
            self._books.handles[handle] = memory
            raise
        memory.drop(handle)

    def mem_retain(self, address: int) -> int:
        memory: Any = self._books.mapping_at("mem_retain", address).memory
        handle, room = next(self._books.tokens), ctypes.c_uint64()
        self._call.past("cuMemRetainAllocationHandle", ctypes.byref(room), address)
        memory.raw[handle] = room.value
        memory.hold(handle)
        self._books.handles[handle] = memory
        return handle

    def mem_properties(self, handle: int) -> MemoryProperties:
        # CUDA Driver API, "Virtual Memory Management", cuMemGetAllocationPropertiesFromHandle; that what was obtained
        # is to be asked for there is said of CUmemAllocationProp::allocFlags.
        memory: Any = self._books.memory("mem_properties", handle)
        if memory.place == NOWHERE:
            raise UsageError(f"mem_properties({handle}): this is a multicast object, which is at no place, not memory")
        prop = self._call("cuMemGetAllocationPropertiesFromHandle", memory.raw[handle])
        place, kinds = place_in(prop), HandleKind(read(prop, 4, UINT32))
        if memory.is_imported:  # of which it says no handle kind (measured); where it is was asked when it came
            place, kinds = memory.place, memory.kinds
        # It never says a size.
        where, flags = self._devices.location(*place), AllocationFlags(read(prop, 24, UINT32))
        return MemoryProperties(where, kinds, memory.nbytes, flags)

    def mem_native_handle(self, handle: int) -> int:
        return int(self._books.memory("mem_native_handle", handle).raw[handle])  # type: ignore[attr-defined]

    # -- mappings -----------------------------------------------------------------------------------------------
    def mem_map(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        memory: Any = self._books.whole_memory("mem_map", nbytes, offset, handle)
        self._map("mem_map", address, memory)

    def mem_map_new(
        self,
        address: int,
        nbytes: int,
        location: Location,
        handle_kinds: HandleKind,
        access: Access,
        flags: AllocationFlags = AllocationFlags.NONE,
        *,
        inherited: bool = True,
    ) -> None:
        check_access("mem_map_new", access)
        memory = self._create("mem_map_new", nbytes, location, handle_kinds, flags)
        try:
            self._map_only("mem_map_new", address, memory, location, access)
        except BaseException as error:
            self._give_back(memory, error)
            raise

    def mem_unmap(self, address: int, nbytes: int) -> None:
        taken: list[Any] = self._books.take(address, nbytes)
        try:
            for mapping in taken:
                # First what may fail alone: memory stays until the unmap, and whoever tries again goes on from there.
                self._release(mapping.memory, mapping)
            # One call over whole mappings and the gaps between them: measured to work.
            self._call.undo("cuMemUnmap", address, nbytes)
        except BaseException:
            give_back(taken)
            raise
        for mapping in taken:
            self._books.withdraw(mapping)

    def mem_set_access(self, address: int, nbytes: int, access: Access, locations: Sequence[Location]) -> None:
        check_access("mem_set_access", access)
        asked = (access, tuple(locations))
        places, grants = self._grants.get(asked) or self._granted(*asked)
        due: list[Any] = self._books.whole("mem_set_access", address, nbytes, gaps=False)
        try:
            self._call("cuMemSetAccess", address, nbytes, grants, len(grants))
            self._write_rights(due, places, access)
        except DriverError as error:
            raise self._no_access(error, due[0].memory.place, places) from None

    def mem_get_access(self, address: int, location: Location) -> Access:
        place = self._devices.place(location)
        self._books.mapping_at("mem_get_access", address)
        where = self._api.CUmemLocation()
        write(where, 0, UINT32, place[0])
        write(where, 4, UINT32, place[1])
        return Access(int(self._call("cuMemGetAccess", where, address)))

    # -- other processes ----------------------------------------------------------------------------------------
    def mem_export(self, handle: int, kind: HandleKind) -> int:
        memory: Any = self._books.memory("mem_export", handle)
        if kind != HandleKind.POSIX_FD or HandleKind.POSIX_FD not in memory.kinds:
            raise not_exported(f"mem_export({handle})", kind, memory.kinds)
        if memory.fd is not None:
            return duplicate(memory.fd)
        room, raw = ctypes.c_int(), memory.raw[handle]
        self._call.past("cuMemExportToShareableHandle", ctypes.byref(room), raw, int(kind), 0)
        os.set_inheritable(room.value, False)
        return room.value

    def mem_import(self, fd: int, kind: HandleKind, nbytes: int) -> int:
        return self._first_handle(self._import("mem_import", fd, kind, nbytes))

    def mem_export_fabric(self, handle: int) -> bytes:
        memory: Any = self._books.memory("mem_export_fabric", handle)
        if HandleKind.FABRIC not in memory.kinds:
            remedy = "Ask for it at creation: handle_kinds=HandleKind.FABRIC, which may be together with POSIX_FD"
            raise not_exported(f"mem_export_fabric({handle})", HandleKind.FABRIC, memory.kinds, remedy)
        if memory.fabric:
            return bytes(memory.fabric)
        room, raw = Handle(), memory.raw[handle]
        try:
            self._call.past("cuMemExportToShareableHandle", ctypes.addressof(room), raw, int(HandleKind.FABRIC), 0)
        except DriverError as error:
            if error.code != NOT_PERMITTED:
                raise
            raise no_channel("exporting memory as FABRIC", error.name) from None
        return bytes(room)

    def mem_import_fabric(self, data: bytes, nbytes: int, location: Location) -> int:
        near: Place = (DEVICE, self._devices.device(location).ordinal)
        place_of = partial(self._place_of_memory, otherwise=near)
        return self._first_handle(self._import_fabric("mem_import_fabric", data, nbytes, place_of))

    def mem_map_import(
        self,
        address: int,
        nbytes: int,
        fd: int,
        kind: HandleKind,
        access: Access,
        *,
        private: bool,
        location: Location | None = None,
        until: float | None = None,  # its memory has no seals to wait for
    ) -> None:
        if private:
            raise UnsupportedError(
                "a private mapping", "memory that is copied on write", "the cuda driver, which has none",
                "Map it with Access.READ, or copy it into memory of your own",
            )  # fmt: skip
        check_access("mem_map_import", access)
        memory = self._import("mem_map_import", fd, kind, nbytes)
        try:
            where = self._devices.location(*memory.place)
            if location is not None and memory.place != self._devices.place(location):
                raise ProtocolError(f"mem_map_import({fd}): the memory is on {where}, not on {location} as was said")
            self._map_only("mem_map_import", address, memory, where, access)
        except BaseException as error:
            self._give_back(memory, error)
            raise

    # -- inside -------------------------------------------------------------------------------------------------
    def _create(
        self, call: str, nbytes: int, location: Location, handle_kinds: HandleKind, flags: AllocationFlags
    ) -> CudaMemory:
        """Make memory, whose driver handle is still to be claimed."""
        place = self._devices.place(location)
        prop, granularity = self._way(call, location, place, handle_kinds, flags)
        if nbytes <= 0 or nbytes % granularity.minimum or nbytes >> 64:
            check_size(call, nbytes, granularity.minimum)
            check_numbers("cuMemCreate", nbytes)
        memory = CudaMemory(nbytes, handle_kinds, place)
        try:
            self._obtain(memory, "cuMemCreate", nbytes, int(prop.getPtr()), 0)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                error.call, error.code, error.name, f"{nbytes} bytes on {location}: {error.args[0].partition(': ')[2]}"
            ) from None
        except DriverError as error:
            raise self._explained(error, location, place, handle_kinds, flags) from None
        return memory

    def _map(self, call: str, address: int, memory: CudaMemory) -> CudaMapping:
        """Map a whole allocation, without access."""
        books, nbytes = self._books, memory.nbytes
        least = self._least or self._granule()
        if address < 0 or address % least:
            check_address(call, address, least)
        mapping = CudaMapping(address, memory, books.reservation_at(call, address, nbytes))
        books.claim(call, mapping)
        try:
            raw = next(iter(list(memory.raw.values())), None)
            if raw is None:
                raise UsageError("the memory was released while this call began")
            self._call.past("cuMemMap", address, nbytes, 0, raw, 0)
        except BaseException as error:
            books.withdraw(mapping)
            if memory.is_imported and isinstance(error, DriverError) and error.code in _REFUSED:
                raise ProtocolError(
                    f"{call}: the memory that was imported cannot be mapped as the {nbytes} bytes that its owner said "
                    f"it has ({error.name})"
                ) from None
            raise
        mapping.is_settled = True
        mapping.token.append(None)
        return mapping

    def _map_only(self, call: str, address: int, memory: CudaMemory, location: Location, access: Access) -> None:
        """Map memory whose driver handle is unclaimed: the mapping claims it, and gives it back when it goes.
        After a failure the caller gives back a handle that is still unclaimed."""
        memory.hold(UNCLAIMED)  # so that a failure closes no descriptor before its handle is released
        mapping = self._map(call, address, memory)
        memory.raw[mapping] = memory.raw.pop(UNCLAIMED)
        memory.drop(UNCLAIMED)
        try:
            if access is not Access.NONE:
                self.mem_set_access(address, memory.nbytes, access, (location,))
        except BaseException as error:
            with noted(error):
                self.mem_unmap(address, memory.nbytes)
            raise

    def _import_fabric(self, call: str, data: bytes, nbytes: int, place_of: Callable[[int], Place]) -> CudaMemory:
        """Open what 64 bytes name, as :meth:`_import`."""
        wanted = check_fabric(call, data, self._call.driver_version)
        check_size(call, nbytes, self._granule())
        memory = CudaMemory(nbytes, HandleKind.FABRIC, NOWHERE, fabric=bytes(data))
        return self._open_shared(memory, ctypes.addressof(wanted), place_of, partial(_no_fabric, call))

    def _import(
        self, call: str, fd: int, kind: HandleKind, nbytes: int, place_of: Callable[[int], Place] | None = None
    ) -> CudaMemory:
        """Open memory, or what another function knows the place of; its driver handle is still to be claimed."""
        if kind != HandleKind.POSIX_FD:
            check_kinds(call, kind, self._call.driver_version)
            raise UsageError(f"{call}: kind must be POSIX_FD")
        check_size(call, nbytes, self._granule())
        check_descriptor(call, fd)
        memory = CudaMemory(nbytes, kind, NOWHERE, duplicate(fd))
        refused = partial(_no_memory, f"{call}({fd})")
        return self._open_shared(memory, memory.fd or 0, place_of or self._place_of_memory, refused)

    def _open_shared(
        self, memory: CudaMemory, wanted: int, place_of: Callable[[int], Place],
        refused: Callable[[DriverError], Exception],
    ) -> CudaMemory:  # fmt: skip
        """Have the driver open what a descriptor or the address of 64 bytes stands for."""
        name = "cuMemImportFromShareableHandle"
        try:
            self._obtain(memory, name, wanted, int(memory.kinds))
            # The driver does not tell the size; a wrong one is refused by cuMemMap. Nor the kinds: it says NONE.
            memory.place = place_of(memory.raw[UNCLAIMED])
        except BaseException as error:
            self._give_back(memory, error)  # in the books if it fails
            memory.drop(None)
            if isinstance(error, DriverError) and error.call == name:
                raise refused(error) from None
            raise
        return memory

    def _place_of_memory(self, raw: int, otherwise: Place | None = None) -> Place:
        """Return where the driver says that memory is; `otherwise`, or UnsupportedError, if not here."""
        try:
            place = place_in(self._call("cuMemGetAllocationPropertiesFromHandle", raw))
        except DriverError as error:
            if error.code not in _UNDESCRIBED:
                raise
            raise ProtocolError(
                f"no memory, but something else that the driver exported, such as a multicast object ({error.name})"
            ) from None
        if place[0] in (DEVICE, HOST, HOST_NUMA):
            return place
        # Since 13: CU_MEM_LOCATION_TYPE_INVISIBLE, of a GPU that this process does not see. The answer of older drivers
        # for memory on another machine is not known.
        if otherwise is None:
            raise _hidden(f"memory at a location of type {place[0]}")
        return otherwise

    def _granule(self) -> int:
        """The least unit of addresses: the largest of the minimums of all GPUs."""
        if not self._least:
            kinds = HandleKind.NONE
            self._least = self._books.granule = max(
                self.mem_granularity(Location("cuda", device.ordinal), kinds).minimum for device in self._devices.all
            )
        return self._least

    def _obtain(self, memory: CudaMemory, call: str, *arguments: Any) -> None:
        """Have the driver make or open what `memory` stands for. Its handle is unclaimed then.
        The caller's next step is to claim it, in a block that gives it back otherwise."""
        room = ctypes.c_uint64()
        self._call.past(call, ctypes.byref(room), *arguments)
        memory.raw[UNCLAIMED] = room.value

    def _first_handle(self, memory: CudaMemory) -> int:
        """Return the first handle to memory that nobody has heard of; it claims the driver's."""
        handle = next(self._books.tokens)
        memory.hold(handle)
        memory.raw[handle] = memory.raw.pop(UNCLAIMED)
        self._books.handles[handle] = memory  # type: ignore[assignment]
        return handle

    def _give_back(self, memory: CudaMemory, error: BaseException) -> None:
        """Release what is unclaimed of memory, after an error; if that fails it stays in the books."""
        if UNCLAIMED in memory.raw:
            with noted(error):
                memory.users.clear()  # who began to use it came to nothing
                self.mem_release(self._first_handle(memory))

    def _release(self, memory: CudaMemory, user: object) -> None:
        """Release the driver handle of a user, unless another thread has done so."""
        raw = memory.raw.pop(user, None)
        if raw is None:
            return
        try:
            self._call.undo("cuMemRelease", raw)
        except BaseException:
            memory.raw[user] = raw
            raise

    def _write_rights(self, due: Sequence[Any], places: Sequence[Place], access: Access) -> None:
        for mapping in due:
            for place in places:
                mapping.rights[place] = access
            mapping.access = max(mapping.rights.values())

    def _way(
        self, call: str, location: Location, place: Place, kinds: HandleKind, flags: AllocationFlags
    ) -> tuple[Any, Granularity]:
        """Return what describes memory of a kind to the driver, and its granularity. Found out once, since making
        memory comes by here each time: "of a given allocation specification", says cuMemGetAllocationGranularity, so it
        is asked with the very properties that the memory is made with."""
        found = self._ways.get((place, kinds, flags))
        if found is not None:
            return found
        check_kinds(call, kinds, self._call.driver_version)
        device = self._devices.all[place[1]] if place[0] == DEVICE else None
        check_flags(f"{call} on {location}", flags, device, self._call.driver_version)
        if place[0] == HOST and kinds:
            raise UnsupportedError(
                f"memory on {location} that leaves the process as {kinds.name}",
                "a NUMA node of the host: the driver shares no other memory of it", str(location),
                'Use "cuda:numa" or device="host"; PhysicalAllocation takes handle_kinds=HandleKind.NONE',
            )  # fmt: skip
        prop = self._api.CUmemAllocationProp()
        for offset, value in ((0, _PINNED), (4, int(kinds)), (8, place[0]), (12, place[1]), (24, int(flags))):
            write(prop, offset, UINT32, value)
        which = self._api.CUmemAllocationGranularity_flags
        asked = (which.CU_MEM_ALLOC_GRANULARITY_MINIMUM, which.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        try:
            least, best = (int(self._call("cuMemGetAllocationGranularity", prop, one)) for one in asked)
        except DriverError as error:
            raise self._explained(error, location, place, kinds, flags) from None
        return self._ways.setdefault((place, kinds, flags), (prop, Granularity(least, best)))

    def _granted(self, access: Access, locations: tuple[Location, ...]) -> tuple[tuple[Place, ...], tuple[Any, ...]]:
        """Return places, and what tells the driver of their right; found out once, as :meth:`_way`."""
        if not locations:
            raise UsageError("mem_set_access: no location was named")
        places = tuple([self._devices.place(location) for location in locations])
        found = places, tuple([self._grant(access, place) for place in places])
        if "numa" not in [location.id for location in locations]:  # that one depends on who asks
            self._grants[access, locations] = found
        return found

    def _grant(self, access: Access, place: Place) -> Any:
        grant = self._api.CUmemAccessDesc()
        for offset, value in ((0, place[0]), (4, place[1]), (8, int(access))):
            write(grant, offset, UINT32, value)
        return grant

    def _explained(
        self, error: DriverError, location: Location, place: Place, kinds: HandleKind, flags: AllocationFlags
    ) -> Exception:
        """Why memory could not be made: what the device lacks, if it is that."""
        if error.code not in _REFUSED:
            return error
        if HandleKind.FABRIC in kinds:
            return no_channel(f"memory on {location} that can be exported as FABRIC", error.name)
        if place[0] != DEVICE:
            return UsageError(f"{error.call}: no memory can be had on {location} ({error.name}); is there such a node?")
        device = self._devices.all[place[1]]
        wanted = [("virtual memory management", 102)]
        wanted += [("memory that can be exported as POSIX_FD", 103)] if HandleKind.POSIX_FD in kinds else []
        with noted(error):
            for what, attribute in wanted:
                if device.attribute(attribute):
                    continue
                return UnsupportedError(
                    f"{what} on {location}", "a device that has it", f"{device.name}, which says that it has not"
                )
        if flags:
            return UnsupportedError(
                f"memory on {location} with {flags!r}", "a driver and a device that take these flags together",
                f"{device.name}, for which the driver says {error.name}", "Leave flags out, or ask for one at a time",
            )  # fmt: skip
        return error

    def _no_access(self, error: DriverError, home: Place, places: Sequence[Place]) -> Exception:
        """Why a place cannot be given access: the GPUs are not peers, or the driver's own answer."""
        if error.code not in _REFUSED:
            return error
        with noted(error):
            for kind, number in places:
                reason = self.peer_refusal(number, home[1]) if kind == home[0] == DEVICE else ""
                if reason:
                    return UnsupportedError(
                        f"access of cuda:{number} to memory on cuda:{home[1]}", "peer access between the two", reason,
                        "Copy over the host: vram.asarray(array.to_host(), device=...)",
                    )  # fmt: skip
                if kind == DEVICE or (kind, number) == home:
                    continue
                return UsageError(
                    f"mem_set_access: {self._devices.location(kind, number)} cannot be given access to memory on "
                    f"{self._devices.location(*home)} ({error.name}); name GPUs, or the NUMA node of the memory"
                )
        return error

    def peer_refusal(self, device: int, memory_of: int) -> str:
        """Return why a GPU cannot access another's memory; empty if it can."""
        if device == memory_of:
            return ""
        one, other = self._devices.all[device], self._devices.all[memory_of]
        if int(self._call("cuDeviceCanAccessPeer", one.handle, other.handle)):
            return ""
        return f"no peers, says the driver: {one.name} (cuda:{device}) and {other.name} (cuda:{memory_of})"


def place_in(prop: Any) -> Place:
    """Return where the memory is that a CUmemAllocationProp of the driver describes."""
    return read(prop, 8, UINT32), read(prop, 12, UINT32)


def _no_memory(call: str, error: DriverError) -> Exception:
    """Why the driver opens no memory by a descriptor."""
    if error.code in _FOREIGN:
        return ProtocolError(f"{call}: no memory that the driver exported ({error.name})")
    return _hidden(f"{error.name} from the driver") if error.code == INVALID_DEVICE else error


def _no_fabric(call: str, error: DriverError) -> Exception:
    """Why the driver opens no memory by 64 bytes."""
    if error.code == NOT_PERMITTED:
        return no_channel("opening memory by a fabric handle", error.name)
    if error.code == NOT_SUPPORTED:  # the manual: "If the current process cannot support the memory"
        return UnsupportedError(
            "opening memory by a fabric handle", "GPUs that NVLink joins to the memory's own",
            f"the driver's answer {error.name}", "Copy it over the network instead",
        )  # fmt: skip
    if error.code in _FOREIGN:
        return ProtocolError(f"{call}: the 64 bytes name no memory that a driver exported ({error.name})")
    return error


def _hidden(said: str) -> UnsupportedError:
    """Return the error for memory of a GPU that this process does not see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return UnsupportedError(
        "opening memory of a GPU", "that GPU, visible to this process",
        f"CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else said,
        "Start this process with the GPU that the memory is on among CUDA_VISIBLE_DEVICES",
    )  # fmt: skip
