"""Memory that leaves the process, and memory that comes in, by file descriptor."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from ...errors import DriverError, ProtocolError, UnsupportedError, UsageError
from ...spec import Access, HandleKind, Location
from ..arguments import check_access, check_size
from ..books import duplicate
from .arguments import check_descriptor, check_kinds
from .bindings import UINT64, read
from .failures import INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN
from .memory import MemoryCalls
from .objects import UNCLAIMED, CudaMemory, Place

__all__ = ["SharingCalls"]

_NOT_KNOWN_YET = (0, 0)  # CU_MEM_LOCATION_TYPE_INVALID
# What descriptors of other things are answered with; UNKNOWN for most of them, measured.
_FOREIGN = (INVALID_VALUE, INVALID_HANDLE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN)


class SharingCalls(MemoryCalls):
    """A part of :class:`~vram.driver.cuda.CudaDriver`."""

    def mem_export(self, handle: int, kind: HandleKind) -> int:
        memory: Any = self._books.memory("mem_export", handle)
        if kind != HandleKind.POSIX_FD or HandleKind.POSIX_FD not in memory.kinds:
            raise UsageError(
                f"mem_export({handle}, {kind!r}): this memory was created to leave the process as {memory.kinds!r}; "
                f"ask for POSIX_FD at mem_create"
            )
        if memory.fd is not None:
            return duplicate(memory.fd)
        room, raw = ctypes.c_int(), memory.raw[handle]
        self._call.uninterrupted("cuMemExportToShareableHandle", (ctypes.byref(room), raw, int(kind), 0))
        fd = room.value
        try:
            os.set_inheritable(fd, False)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def mem_import(self, fd: int, kind: HandleKind, nbytes: int) -> int:
        memory = self._import("mem_import", fd, kind, nbytes)
        try:
            return self._first_handle(memory)
        except BaseException as error:  # an interrupt
            self._give_back(memory, error)
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

    def _import(self, call: str, fd: int, kind: HandleKind, nbytes: int) -> CudaMemory:
        """Open memory, whose driver handle is still to be claimed."""
        if kind != HandleKind.POSIX_FD:
            check_kinds(call, kind, self._call.driver_version)
            raise UsageError(f"{call}: kind must be POSIX_FD")
        check_size(call, nbytes, self._granule())
        check_descriptor(call, fd)
        kept, memory = duplicate(fd), None
        try:
            memory = CudaMemory(nbytes, kind, _NOT_KNOWN_YET, kept)
            self._obtain(memory, "cuMemImportFromShareableHandle", kept, int(kind))
            # The driver does not tell the size; a wrong one is refused by cuMemMap. Nor the kinds: it says NONE.
            memory.place = self._place_of_memory(memory.raw[UNCLAIMED])
        except BaseException as error:
            if memory is not None and memory.raw:
                self._give_back(memory, error)  # in the books if it fails
                raise
            os.close(kept)
            if isinstance(error, DriverError) and error.code in _FOREIGN:
                raise ProtocolError(f"{call}({fd}): no memory that the driver exported ({error.name})") from None
            if isinstance(error, DriverError) and error.code == INVALID_DEVICE:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                raise UnsupportedError(
                    "opening memory of a GPU", "that GPU, visible to this process",
                    f"CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else f"{error.name} from the driver",
                    "Start this process with the GPU that the memory is on among CUDA_VISIBLE_DEVICES",
                ) from None  # fmt: skip
            raise
        return memory

    def _place_of_memory(self, raw: int) -> Place:
        place = read(self._call("cuMemGetAllocationPropertiesFromHandle", raw), 8, UINT64)  # type and id, 4 bytes each
        return place & 0xFFFFFFFF, place >> 32
