"""Addresses, physical memory and mappings: virtual memory management under the contract's rules.

The driver answers nearly every mistake with INVALID_VALUE. So the books of :mod:`..books` are kept here too: they tell
the mistakes apart, in the same words as the host driver's, before the driver is asked (invariant I10); the driver has
the last word. None of these calls needs a context, so none makes one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ...errors import AddressSpaceError, DriverError, OutOfMemoryError, ProtocolError, UnsupportedError, UsageError
from ...lifetime import noted
from ...spec import Access, AllocationFlags, HandleKind, Location
from ..arguments import check_access, check_address, check_alignment, check_size
from ..books import Books, Reservation, give_back
from ..protocol import Granularity, MemoryProperties
from .arguments import check_flags, check_kinds, no_channel
from .bindings import UINT32, Bindings, check_numbers, read, write
from .devices import DEVICE, HOST, Devices
from .failures import INVALID_DEVICE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, OUT_OF_MEMORY
from .objects import NOWHERE, UNCLAIMED, CudaMapping, CudaMemory, Place

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_REFUSED = (INVALID_VALUE, INVALID_DEVICE, NOT_PERMITTED, NOT_SUPPORTED)


class Memory:
    """Addresses, physical memory and mappings. Other parts make memory here that they obtain by other calls: a handle
    or a mapping claims what :meth:`obtain` left unclaimed, or :meth:`give_back` releases it."""

    def __init__(self, bindings: Bindings, devices: Devices, books: Books) -> None:
        self._call = bindings
        self._devices = devices
        self.books = books
        self._ways: dict[tuple[Place, HandleKind, AllocationFlags], tuple[Any, Granularity]] = {}
        self._grants: dict[tuple[Access, tuple[Location, ...]], tuple[tuple[Place, ...], tuple[Any, ...]]] = {}
        self._least = 0

    def mem_granularity(
        self, location: Location, handle_kinds: HandleKind, flags: AllocationFlags = AllocationFlags.NONE
    ) -> Granularity:
        place = self._devices.place(location)
        found = self._ways.get((place, handle_kinds, flags))
        return (found or self._way("mem_granularity", location, place, handle_kinds, flags))[1]

    # -- addresses ----------------------------------------------------------------------------------------------
    def address_reserve(self, nbytes: int, *, alignment: int = 0, address: int = 0) -> int:
        least = self.granule()
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
        self.books.reservations.add(Reservation(room.value, nbytes))
        return room.value

    def address_free(self, address: int, nbytes: int) -> None:
        reservation = self.books.reserved("address_free", address, nbytes)
        inside = len(reservation.mappings.at)
        if inside:
            raise UsageError(f"address_free({address:#x}, {nbytes}): {inside} mappings are in it; unmap them first")
        # Out of the books before it is out of the driver: the next reservation may get this very address.
        if not self.books.reservations.remove(reservation):
            raise UsageError(f"address_free({address:#x}, {nbytes}): another thread freed it")
        try:
            self._call.undo("cuMemAddressFree", address, nbytes)
        except BaseException:
            self.books.reservations.add(reservation)
            raise

    # -- physical memory ----------------------------------------------------------------------------------------
    def mem_create(
        self, nbytes: int, location: Location, handle_kinds: HandleKind, flags: AllocationFlags = AllocationFlags.NONE
    ) -> int:
        return self.first_handle(self._create("mem_create", nbytes, location, handle_kinds, flags))

    def mem_release(self, handle: int) -> None:
        memory: Any = self.books.handles.pop(handle, None)
        if memory is None:
            raise UsageError(f"mem_release({handle}): no such handle; each is released once")
        try:
            self._release(memory, handle)
        except BaseException:
            self.books.handles[handle] = memory
            raise
        memory.drop(handle)

    def mem_retain(self, address: int) -> int:
        memory: Any = self.books.mapping_at("mem_retain", address).memory
        handle, room = next(self.books.tokens), ctypes.c_uint64()
        self._call.past("cuMemRetainAllocationHandle", ctypes.byref(room), address)
        memory.raw[handle] = room.value
        memory.hold(handle)
        self.books.handles[handle] = memory
        return handle

    def mem_properties(self, handle: int) -> MemoryProperties:
        # CUDA Driver API, "Virtual Memory Management", cuMemGetAllocationPropertiesFromHandle; that what was obtained
        # is to be asked for there is said of CUmemAllocationProp::allocFlags.
        memory: Any = self.books.memory("mem_properties", handle)
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
        return int(self.books.memory("mem_native_handle", handle).raw[handle])  # type: ignore[attr-defined]

    # -- mappings -----------------------------------------------------------------------------------------------
    def mem_map(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        memory: Any = self.books.whole_memory("mem_map", nbytes, offset, handle)
        self._map("mem_map", address, memory)

    def mem_map_new(
        self, address: int, nbytes: int, location: Location, handle_kinds: HandleKind, access: Access,
        flags: AllocationFlags = AllocationFlags.NONE, *, inherited: bool = True,
    ) -> None:  # fmt: skip
        check_access("mem_map_new", access)
        memory = self._create("mem_map_new", nbytes, location, handle_kinds, flags)
        try:
            self.map_only("mem_map_new", address, memory, location, access)
        except BaseException as error:
            self.give_back(memory, error)
            raise

    def mem_unmap(self, address: int, nbytes: int) -> None:
        taken: list[Any] = self.books.take(address, nbytes)
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
            self.books.withdraw(mapping)

    def mem_set_access(self, address: int, nbytes: int, access: Access, locations: Sequence[Location]) -> None:
        check_access("mem_set_access", access)
        asked = (access, tuple(locations))
        places, grants = self._grants.get(asked) or self._granted(*asked)
        due: list[Any] = self.books.whole("mem_set_access", address, nbytes, gaps=False)
        try:
            self._call("cuMemSetAccess", address, nbytes, grants, len(grants))
            for mapping in due:
                for place in places:
                    mapping.rights[place] = access
                mapping.access = max(mapping.rights.values())
        except DriverError as error:
            raise no_access(self._devices, error, due[0].memory.place, places) from None

    def mem_get_access(self, address: int, location: Location) -> Access:
        place = self._devices.place(location)
        self.books.mapping_at("mem_get_access", address)
        return Access(int(self._call("cuMemGetAccess", self._devices.where(place), address)))

    # -- for other parts ----------------------------------------------------------------------------------------
    def granule(self) -> int:
        """The least unit of addresses: the largest of the minimums of all GPUs."""
        if not self._least:
            kinds = HandleKind.NONE
            self._least = self.books.granule = max(
                self.mem_granularity(Location("cuda", device.ordinal), kinds).minimum for device in self._devices.all
            )
        return self._least

    def obtain(self, memory: CudaMemory, call: str, *arguments: Any) -> None:
        """Have the driver make or open what `memory` stands for. Its handle is unclaimed then.
        The caller's next step is to claim it, in a block that gives it back otherwise."""
        room = ctypes.c_uint64()
        self._call.past(call, ctypes.byref(room), *arguments)
        memory.raw[UNCLAIMED] = room.value

    def first_handle(self, memory: CudaMemory) -> int:
        """Return the first handle to memory that nobody has heard of; it claims the driver's."""
        handle = next(self.books.tokens)
        memory.hold(handle)
        memory.raw[handle] = memory.raw.pop(UNCLAIMED)
        self.books.handles[handle] = memory  # type: ignore[assignment]
        return handle

    def give_back(self, memory: CudaMemory, error: BaseException) -> None:
        """Release what is unclaimed of memory, after an error; if that fails it stays in the books."""
        if UNCLAIMED in memory.raw:
            with noted(error):
                memory.users.clear()  # who began to use it came to nothing
                self.mem_release(self.first_handle(memory))

    def map_only(self, call: str, address: int, memory: CudaMemory, location: Location, access: Access) -> None:
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
            self.obtain(memory, "cuMemCreate", nbytes, int(prop.getPtr()), 0)
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                error.call, error.code, error.name, f"{nbytes} bytes on {location}: {error.args[0].partition(': ')[2]}"
            ) from None
        except DriverError as error:
            raise self._explained(error, location, place, handle_kinds, flags) from None
        return memory

    def _map(self, call: str, address: int, memory: CudaMemory) -> CudaMapping:
        """Map a whole allocation, without access."""
        books, nbytes = self.books, memory.nbytes
        least = self._least or self.granule()
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
        prop = self._call.api.CUmemAllocationProp()
        for offset, value in ((0, _PINNED), (4, int(kinds)), (8, place[0]), (12, place[1]), (24, int(flags))):
            write(prop, offset, UINT32, value)
        which = self._call.api.CUmemAllocationGranularity_flags
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
        found = places, tuple([grant(self._call, access, place) for place in places])
        if "numa" not in [location.id for location in locations]:  # that one depends on who asks
            self._grants[access, locations] = found
        return found

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


def grant(bindings: Bindings, access: Access, place: Place) -> Any:
    """Return what tells the driver of a place's right."""
    found = bindings.api.CUmemAccessDesc()
    for offset, value in ((0, place[0]), (4, place[1]), (8, int(access))):
        write(found, offset, UINT32, value)
    return found


def no_access(devices: Devices, error: DriverError, home: Place, places: Sequence[Place]) -> Exception:
    """Why a place cannot be given access: the GPUs are not peers, or the driver's own answer."""
    if error.code not in _REFUSED:
        return error
    with noted(error):
        for kind, number in places:
            reason = devices.peer_refusal(number, home[1]) if kind == home[0] == DEVICE else ""
            if reason:
                return UnsupportedError(
                    f"access of cuda:{number} to memory on cuda:{home[1]}", "peer access between the two", reason,
                    "Copy over the host: vram.asarray(array.to_host(), device=...)",
                )  # fmt: skip
            if kind == DEVICE or (kind, number) == home:
                continue
            return UsageError(
                f"mem_set_access: {devices.location(kind, number)} cannot be given access to memory on "
                f"{devices.location(*home)} ({error.name}); name GPUs, or the NUMA node of the memory"
            )
    return error


def place_in(prop: Any) -> Place:
    """Return where the memory is that a CUmemAllocationProp of the driver describes."""
    return read(prop, 8, UINT32), read(prop, 12, UINT32)
