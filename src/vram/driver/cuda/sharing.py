"""Memory that leaves the process, and memory that comes in, by file descriptor."""

from __future__ import annotations

import os
from typing import Any

from ...errors import DriverError, ProtocolError, UnsupportedError, UsageError
from ...spec import HandleKind
from ..books import duplicate
from .bindings import UINT32, read
from .failures import INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN, noted
from .memory import MemoryCalls, check_kinds, check_size
from .objects import CudaMemory

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
        fd = int(self._call("cuMemExportToShareableHandle", memory.raw[handle], self._handle_type(kind), 0))
        try:
            os.set_inheritable(fd, False)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def mem_import(self, fd: int, kind: HandleKind, nbytes: int) -> int:
        if kind != HandleKind.POSIX_FD:
            check_kinds("mem_import", kind)
            raise UsageError("mem_import: kind must be POSIX_FD")
        check_size("mem_import", nbytes, self._granule())
        try:
            os.fstat(fd)
        except (OSError, OverflowError):
            raise UsageError(f"mem_import({fd}): this is no open file descriptor") from None
        kept = duplicate(fd)
        try:
            raw = int(self._call("cuMemImportFromShareableHandle", kept, self._handle_type(kind)))
        except BaseException as error:
            os.close(kept)
            if isinstance(error, DriverError) and error.code in _FOREIGN:
                raise ProtocolError(f"mem_import({fd}): no memory that the driver exported ({error.name})") from None
            if isinstance(error, DriverError) and error.code == INVALID_DEVICE:
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                raise UnsupportedError(
                    "opening memory of a GPU", "that GPU, visible to this process",
                    f"CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else f"{error.name} from the driver",
                    "Start this process with the GPU that the memory is on among CUDA_VISIBLE_DEVICES",
                ) from None  # fmt: skip
            raise
        memory = CudaMemory(nbytes, kind, _NOT_KNOWN_YET, kept)
        handle = self._new_handle(memory, raw)
        try:
            # The driver does not tell the size; a wrong one is refused by cuMemMap. Nor the kinds: it says NONE.
            prop = self._call("cuMemGetAllocationPropertiesFromHandle", raw)
            memory.place = (read(prop, 8, UINT32), read(prop, 12, UINT32))
        except BaseException as error:
            with noted(error):
                self.mem_release(handle)
            raise
        return handle

    def _handle_type(self, kind: HandleKind) -> Any:
        return self._api.CUmemAllocationHandleType(int(kind))
