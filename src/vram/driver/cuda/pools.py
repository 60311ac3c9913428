"""Stream-ordered pools, and their memory opened in another process."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Any

from ...errors import DeviceLostError, DriverError, ProtocolError, UnsupportedError, UsageError
from ...spec import HandleKind, Location
from ..protocol import MAX_POOL_ALLOCATION, LiveObjects
from .arguments import check_descriptor, check_kinds
from .bindings import Bindings
from .devices import Devices
from .failures import INVALID_HANDLE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN
from .foreign import ForeignCalls, bytes_of, handle_of
from .objects import Counted, Window

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_POOLS_SUPPORTED = 115  # CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
_LEGACY_STREAM = 1
_REFUSED = (INVALID_VALUE, INVALID_HANDLE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN)


class PoolCalls(ForeignCalls):
    """A part of :class:`~vram.driver.cuda.CudaDriver`: Pools."""

    def __init__(self, bindings: Bindings, devices: Devices) -> None:
        super().__init__(bindings, devices)
        self._pools = Counted()  # to the ordinal of the GPU
        self._pointers: dict[int, Window] = {}  # memory of imported pools, by its address here

    def live(self) -> LiveObjects:
        known = super().live()
        return LiveObjects(known.reservations, known.handles + len(self._pools.all()), known.mappings, known.nbytes)

    # -- pools --------------------------------------------------------------------------------------------------
    def pool_destroy(self, pool: int) -> None:
        if not self._take_back(self._pools, "cuMemPoolDestroy", pool):
            raise UsageError(f"pool_destroy({pool:#x}): no pool of this driver")

    def pool_export(self, pool: int, kind: HandleKind) -> int:
        if kind != HandleKind.POSIX_FD:
            check_kinds("pool_export", kind, self._call.driver_version)
            raise UsageError("pool_export: kind must be POSIX_FD")
        call, room = "cuMemPoolExportToShareableHandle", ctypes.c_int(-1)
        try:
            self._in(pool).run(lambda: self._call.past(call, ctypes.byref(room), pool, int(kind), 0))
        except DriverError as error:
            if room.value != -1:  # it was the context that could not be left
                os.close(room.value)
            if error.code not in _REFUSED or error.call != call:
                raise
            raise UsageError(
                f"pool_export({pool:#x}): the pool was not created to leave the process ({error.name}); ask for "
                f"POSIX_FD when it is made"
            ) from None
        os.set_inheritable(room.value, False)
        return room.value

    def pool_import(self, fd: int, kind: HandleKind, location: Location) -> int:
        if kind != HandleKind.POSIX_FD:
            check_kinds("pool_import", kind, self._call.driver_version)
            raise UsageError("pool_import: kind must be POSIX_FD")
        device = self._devices.device(location)
        check_descriptor("pool_import", fd)
        call = "cuMemPoolImportFromShareableHandle"
        try:
            return self._made(self._pools, device, "cuMemPoolDestroy", call, fd, int(kind), 0)
        except DriverError as error:
            if error.code not in _REFUSED or error.call != call:
                raise
            raise ProtocolError(f"pool_import({fd}): no descriptor of a pool ({error.name})") from None

    # -- memory of a pool ---------------------------------------------------------------------------------------
    def pool_export_pointer(self, address: int) -> bytes:
        info = self.pointer_info(address)
        if info.made_by != "pool" or info.base != address:
            inside = info.made_by == "pool"
            what = f"inside an allocation that begins at {info.base:#x}" if inside else f"memory of {info.made_by}"
            raise UsageError(
                f"pool_export_pointer({address:#x}): it takes the base of memory of a pool; this is {what}"
            )
        _check_openable("pool_export_pointer", info.nbytes)
        try:
            device = self._devices.device(info.location)
            return bytes_of(self._on(device).run(lambda: self._call("cuMemPoolExportPointer", address)))
        except DriverError as error:
            if error.code not in _REFUSED or error.call != "cuMemPoolExportPointer":
                raise
            raise UsageError(
                f"pool_export_pointer({address:#x}): not the base of memory of a pool that was created to leave the "
                f"process, and exported before its first pointer ({error.name})"
            ) from None

    def pool_open_pointer(self, pool: int, handle: bytes, nbytes: int) -> int:
        if nbytes <= 0:
            raise ProtocolError(f"pool_open_pointer: an allocation of {nbytes} bytes")
        _check_openable("pool_open_pointer", nbytes)
        wanted = ctypes.byref(handle_of("CUmemPoolPtrExportData", handle))
        ordinal = self._pools.get(pool)
        if ordinal is None:
            raise UsageError(f"{pool:#x} is no pool of this driver; pool_import() makes one")
        device, call = self._devices.all[ordinal], "cuMemPoolImportPointer"
        try:
            return self._open(device, "pool pointer", nbytes, call, pool, wanted)
        except _OpenAlready as error:
            raise UsageError(
                f"pool_open_pointer: this memory is open already, at {error.args[0]:#x}; the driver does not count, "
                f"and the first to be closed would take it away from both"
            ) from None
        except DriverError as error:
            if error.code not in _REFUSED or error.call != call:
                raise
            raise ProtocolError(
                f"pool_open_pointer: the bytes name no memory of this pool, or its maker freed it ({error.name})"
            ) from None

    def pool_close_pointer(self, address: int) -> None:
        self._close("pool_close_pointer", address, "pool pointer")

    def _check_opened(self, window: Window, call: str) -> None:
        if window.kind == "pool pointer":
            # One winner, without a lock. Out of these only after it is gone: who opens it meanwhile would lose it.
            if self._pointers.setdefault(window.address, window) is not window:
                raise _OpenAlready(window.address)
            (place,) = window.rights
            ordinal = self.ordinal_of(window.address)
            if ordinal != place[1]:
                raise ProtocolError(f"{call}: the pool was said to be on cuda:{place[1]}, and is on cuda:{ordinal}")
        super()._check_opened(window, call)

    def _undo_of(self, window: Window) -> Callable[[], object]:
        if window.kind != "pool pointer":
            return super()._undo_of(window)

        def close() -> None:
            window.is_gone = True
            if self._pointers.get(window.address) is not window:
                return  # it was open already: to free it would be to free the other
            try:
                self._call.undo("cuMemFreeAsync", window.address, _LEGACY_STREAM)
            except BaseException:
                window.is_gone = False
                raise
            self._pointers.pop(window.address, None)
            with contextlib.suppress(DeviceLostError):
                # Its maker may free it the moment this is known.
                self._call("cuStreamSynchronize", _LEGACY_STREAM)

        return close

    def _in(self, pool: int) -> Any:
        # A pool of another library knows its own GPU; the driver only wants that any context is current.
        return self._used(self._pools.get(pool))


def _check_openable(call: str, nbytes: int) -> None:
    """Refuse an allocation that ends the process which opens it, inside the driver: nothing of it is sent or opened."""
    if nbytes > MAX_POOL_ALLOCATION:
        raise UnsupportedError(
            f"{call} of {nbytes} bytes in one allocation of a pool", f"at most {MAX_POOL_ALLOCATION}",
            "a driver in which a larger one crashes whoever opens it", "Copy it: vram.copy()",
        )  # fmt: skip


class _OpenAlready(Exception):
    """The driver opened the same memory a second time, at the same address."""
