"""Memory that leaves the process, and memory that comes in: by file descriptor, and by the 64 bytes of the fabric."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from ...errors import DriverError, ProtocolError, UnsupportedError, UsageError
from ...spec import Access, HandleKind, Location
from ..arguments import check_access, check_size, not_exported
from ..books import duplicate
from .arguments import check_descriptor, check_fabric, check_kinds, no_channel
from .devices import DEVICE, HOST, HOST_NUMA
from .failures import INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN
from .functions import Handle
from .memory import MemoryCalls, place_in
from .objects import NOWHERE, UNCLAIMED, CudaMemory, Place

# What descriptors of other things are answered with; UNKNOWN for most of them, measured.
_FOREIGN = (INVALID_VALUE, INVALID_HANDLE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN)
_UNDESCRIBED = (INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED)  # a guess, of what is no memory


class SharingCalls(MemoryCalls):
    """A part of :class:`~vram.driver.cuda.CudaDriver`."""

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

    def _import_fabric(self, call: str, data: bytes, nbytes: int, place_of: Callable[[int], Place]) -> CudaMemory:
        """Open what 64 bytes name, as :meth:`_import`."""
        wanted = check_fabric(call, data, self._call.driver_version)
        check_size(call, nbytes, self._granule())
        memory = CudaMemory(nbytes, HandleKind.FABRIC, NOWHERE, fabric=bytes(data))
        try:
            self._obtain_fabric(call, memory, wanted)
            memory.place = place_of(memory.raw[UNCLAIMED])
        except BaseException as error:
            self._give_back(memory, error)  # in the books if it fails
            raise
        return memory

    def _obtain_fabric(self, call: str, memory: CudaMemory, wanted: Handle) -> None:
        """Have the driver open what 64 bytes name, as :meth:`_obtain`."""
        name = "cuMemImportFromShareableHandle"
        try:
            self._obtain(memory, name, ctypes.addressof(wanted), int(HandleKind.FABRIC))
        except DriverError as error:
            if error.code == NOT_PERMITTED:
                raise no_channel("opening memory by a fabric handle", error.name) from None
            if error.code == NOT_SUPPORTED:  # the manual: "If the current process cannot support the memory"
                raise UnsupportedError(
                    "opening memory by a fabric handle", "GPUs that NVLink joins to the memory's own",
                    f"the driver's answer {error.name}", "Copy it over the network instead",
                ) from None  # fmt: skip
            if error.code in _FOREIGN:
                raise ProtocolError(
                    f"{call}: the 64 bytes name no memory that a driver exported ({error.name})"
                ) from None
            raise

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

    def _import(
        self, call: str, fd: int, kind: HandleKind, nbytes: int, place_of: Callable[[int], Place] | None = None
    ) -> CudaMemory:
        """Open memory, or what another function knows the place of; its driver handle is still to be claimed."""
        if kind != HandleKind.POSIX_FD:
            check_kinds(call, kind, self._call.driver_version)
            raise UsageError(f"{call}: kind must be POSIX_FD")
        check_size(call, nbytes, self._granule())
        check_descriptor(call, fd)
        kept, memory = duplicate(fd), None
        try:
            memory = CudaMemory(nbytes, kind, NOWHERE, kept)
            self._obtain(memory, "cuMemImportFromShareableHandle", kept, int(kind))
            # The driver does not tell the size; a wrong one is refused by cuMemMap. Nor the kinds: it says NONE.
            memory.place = (place_of or self._place_of_memory)(memory.raw[UNCLAIMED])
        except BaseException as error:
            if memory is not None and memory.raw:
                self._give_back(memory, error)  # in the books if it fails
                raise
            os.close(kept)
            if isinstance(error, DriverError) and error.code in _FOREIGN:
                raise ProtocolError(f"{call}({fd}): no memory that the driver exported ({error.name})") from None
            if isinstance(error, DriverError) and error.code == INVALID_DEVICE:
                raise _hidden(f"{error.name} from the driver") from None
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
        # Since 13: CU_MEM_LOCATION_TYPE_INVISIBLE, of a GPU that this process does not see. What older drivers say of
        # memory on another machine is not known.
        if otherwise is None:
            raise _hidden(f"memory at a location of type {place[0]}")
        return otherwise


def _hidden(said: str) -> UnsupportedError:
    """Return the error for memory of a GPU that this process does not see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return UnsupportedError(
        "opening memory of a GPU", "that GPU, visible to this process",
        f"CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else said,
        "Start this process with the GPU that the memory is on among CUDA_VISIBLE_DEVICES",
    )  # fmt: skip
