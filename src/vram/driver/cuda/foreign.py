"""Memory that others made, in this process or in another: what it is, and the ways in which it travels.

How an allocation was made is asked of the driver's pointer attributes, and decides everything else; no call is tried
to see whether it fails. The values of the attributes were measured, each on an H100:

============================  ======  ======  =======  =======
made with                     legacy  kinds   pool     context
============================  ======  ======  =======  =======
``cuMemAlloc``                1       0       0        its own
the same, opened elsewhere    0       0       0        its own
``cuMemCreate``               0       asked   0        0
the same, imported            0       0       0        0
``cuMemAllocAsync``           0       pool's  its own  0
============================  ======  ======  =======  =======
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...errors import (
    DeviceLostError,
    DriverError,
    OutOfMemoryError,
    ProtocolError,
    RangeError,
    UnsupportedError,
    UsageError,
)
from ...lifetime import noted
from ...spec import Access, HandleKind, Location
from ..protocol import HANDLE_BYTES, MAX_POOL_ALLOCATION, LiveObjects, PointerInfo
from .arguments import check_descriptor
from .attributes import (
    ALLOWED_HANDLE_TYPES,
    BUFFER_ID,
    CONTEXT,
    DEVICE_ORDINAL,
    IS_LEGACY_IPC_CAPABLE,
    IS_MANAGED,
    MEMORY_TYPE,
    MEMPOOL,
    attribute,
    attributes,
)
from .bindings import UINT32, Bindings, check_numbers, write
from .devices import DEVICE, Device, Devices
from .failures import (
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_VALUE,
    MAP_FAILED,
    NOT_FOUND,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    UNKNOWN,
)
from .functions import Handle
from .objects import UNCLAIMED, Counted, CudaMemory, Window
from .work import WorkCalls

_CREATED, _POINTER = "ipc of ours", "pool pointer"  # kinds of windows: what ipc_create made, a pointer of a pool
_LEGACY_STREAM, _FD = 1, int(HandleKind.POSIX_FD)
_REFUSED = (INVALID_VALUE, INVALID_HANDLE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN)
_HOST_MEMORY = 1  # CU_MEMORYTYPE_HOST
_ENABLE_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_NO_PEERS = (217, 711)  # PEER_ACCESS_UNSUPPORTED, TOO_MANY_PEERS
_NOT_A_HANDLE = (INVALID_VALUE, INVALID_HANDLE, MAP_FAILED, NOT_PERMITTED, NOT_FOUND, UNKNOWN)
_ASKED = (
    *(DEVICE_ORDINAL, MEMORY_TYPE, BUFFER_ID, IS_LEGACY_IPC_CAPABLE),
    *(ALLOWED_HANDLE_TYPES, MEMPOOL, CONTEXT, IS_MANAGED),
)


class ForeignCalls(WorkCalls):
    """A part of :class:`~vram.driver.cuda.CudaDriver`: memory and events of others."""

    def __init__(self, bindings: Bindings, devices: Devices) -> None:
        super().__init__(bindings, devices)
        self._windows: dict[int, Window] = {}
        self._numbers = itertools.count(1)
        self._pools = Counted()  # to the ordinal of the GPU
        self._pointers: dict[int, Window] = {}  # memory of imported pools, by its address here

    def live(self) -> LiveObjects:
        handles = len(self._pools.all()) + len(self._libraries)
        return self._books.live(handles=handles, mappings=len(self._windows))

    # -- what is at an address ----------------------------------------------------------------------------------
    def pointer_info(self, address: int) -> PointerInfo:
        ordinal, memory_type, identity, legacy, kinds, pool, context, managed = attributes(self._call, _ASKED, address)
        if not identity or (ordinal < 0 and not memory_type):
            raise UsageError(f"{address:#x} is no address that the driver knows")
        try:
            under = self._used(ordinal if ordinal >= 0 else None)  # unlike the attributes it wants one
            base, nbytes = under.run(lambda: self._call("cuMemGetAddressRange", address))
        except DriverError as error:
            if error.code not in (NOT_FOUND, INVALID_VALUE):
                raise
            raise UsageError(f"the memory at {address:#x} {self._why_unknown(address)} ({error.name})") from None
        made_by, ways = "vmm", HandleKind(kinds & 15)
        if pool:
            made_by, ways = "pool", HandleKind.POOL if kinds & 1 else HandleKind.NONE
        elif legacy:
            made_by, ways = "legacy", HandleKind.LEGACY_IPC
        elif managed:
            made_by = "managed"
        elif context:  # which virtual memory management has none of
            made_by = "host" if memory_type == _HOST_MEMORY else "opened"
        # Pinned memory of the host names the GPU that it was made for.
        location = Location("cuda", ordinal if ordinal >= 0 and made_by != "host" else "host")
        right = Access.READ_WRITE
        if made_by == "vmm" and ordinal >= 0:
            # Not the attribute with the flags: it speaks of the GPU whose context is current, and there may be none.
            where = self._api.CUmemLocation()
            write(where, 0, UINT32, DEVICE)
            write(where, 4, UINT32, ordinal)
            right = Access(int(self._call("cuMemGetAccess", where, address)))
        return PointerInfo(int(base), int(nbytes), location, ways, made_by, identity, right, pool)

    def _why_unknown(self, address: int) -> str:
        """Say why the driver knows no bounds of what is at an address: it does once a GPU may access it (measured)."""
        memory: Any = None
        with contextlib.suppress(RangeError):  # memory that this library did not map
            memory = self._books.mapping_at("pointer_info", address).memory
        if not isinstance(memory, CudaMemory) or memory.place[0] == DEVICE:
            return "is mapped for nobody yet; give its GPU access first"
        return (
            f"is of {self._devices.location(*memory.place)}, memory of the host that NVIDIA's driver made, and no GPU "
            f'may access it: it goes to no other process. Use device="host" for what is shared, or copy it: '
            f"vram.copy()"
        )

    def pointer_identity(self, address: int) -> int:
        try:
            return attribute(self._call, BUFFER_ID, address)
        except DriverError as error:
            if error.code != INVALID_VALUE:
                raise
            raise UsageError(f"{address:#x} is no address that the driver knows") from None

    def mem_adopt(self, address: int) -> int:
        info = self.pointer_info(address)
        if info.made_by != "vmm":
            raise UsageError(f"memory made by {info.made_by} at {address:#x} has no descriptor; copy it: vram.copy()")
        memory = CudaMemory(info.nbytes, info.kinds, (0, 0))
        try:
            self._obtain(memory, "cuMemRetainAllocationHandle", address)
            memory.place = self._place_of_memory(memory.raw[UNCLAIMED], self._devices.place(info.location))
            return self._first_handle(memory)
        except BaseException as error:
            self._give_back(memory, error)  # in the books if it fails
            raise

    # -- windows ------------------------------------------------------------------------------------------------
    def window_open(self, address: int, nbytes: int, location: Location, access: Access) -> int:
        if address <= 0 or nbytes <= 0:
            raise RangeError(f"window_open({address:#x}, {nbytes}): no memory has these numbers")
        return self._write_down(Window(address, nbytes, {self._devices.place(location): access}))

    def window_close(self, window: int) -> None:
        if self._windows.pop(window, None) is None:
            raise UsageError(f"window_close({window}): no such window; each is closed once")

    def _write_down(self, window: Window) -> int:
        number = next(self._numbers)
        self._windows[number] = window
        return number

    def _accessible(self, call: str, address: int, nbytes: int, access: Access) -> list[Any]:
        best: Window | None = None  # there may be several over the same memory, each with rights of its own
        if self._windows and nbytes > 0:
            for window in list(self._windows.values()):
                if window.address <= address and address + nbytes <= window.address + window.nbytes:
                    if window.access >= access:
                        return [window]
                    best = window
        if best is not None:
            raise UsageError(
                f"{call} of {nbytes} bytes at {address:#x}: access there is {best.access.name}; it takes {access.name}"
            )
        return super()._accessible(call, address, nbytes, access)

    def _open(self, device: Device, kind: str, nbytes: int, call: str, *arguments: Any) -> int:
        """Make or open memory under a device's context and write a window down; nothing is left if that fails (I4)."""
        window, room = Window(0, nbytes, {(DEVICE, device.ordinal): Access.READ_WRITE}, kind), ctypes.c_uint64()
        given = (ctypes.byref(room), *arguments)

        def enter() -> None:
            self._call.past(call, *given)
            window.address = room.value
            self._check_opened(window, call)

        number = next(self._numbers)
        try:
            device.run(enter)
            self._windows[number] = window
        except BaseException as error:
            if window.address:
                with noted(error):
                    self._windows[number] = window  # if it fails it stays there
                    self._take_back_window(number, window)
            raise
        return window.address

    def _check_opened(self, window: Window, call: str) -> None:
        """Raise ProtocolError unless what was opened is there and as large as its owner said (0 where nobody said).
        The driver checks nothing: a changed byte of a handle was measured to open another address without an error."""
        if window.kind == _CREATED:
            return
        if window.kind == _POINTER:
            # One winner, without a lock. Out of these only after it is gone: who opens it meanwhile would lose it.
            if self._pointers.setdefault(window.address, window) is not window:
                raise UsageError(
                    f"pool_open_pointer: this memory is open already, at {window.address:#x}; the driver does not "
                    f"count, and the first to be closed would take it away from both"
                )
            ((_, said),) = window.rights
            if (ordinal := self.ordinal_of(window.address)) != said:
                raise ProtocolError(f"{call}: the pool was said to be on cuda:{said}, and is on cuda:{ordinal}")
        try:
            base, real = (int(number) for number in self._call("cuMemGetAddressRange", window.address))
        except DriverError as error:
            if error.code not in _NOT_A_HANDLE:
                raise
            raise ProtocolError(f"{call}: the handle names no memory of its maker ({error.name})") from None
        # CUDA Driver API, "Memory Management", cuMemGetAddressRange. Measured: just what the other process allocated.
        window.nbytes = window.nbytes or max(base + real - window.address, 1)
        if not base <= window.address <= window.address + window.nbytes <= base + real:
            raise ProtocolError(
                f"{call}: {window.nbytes} bytes were said to be there, and the allocation holds "
                f"{base + real - window.address}"
            )

    def _close(self, call: str, address: int, kind: str) -> None:
        for number, window in self._windows.copy().items():
            if window.address == address and window.kind == kind and self._take_back_window(number, window):
                return
        raise UsageError(f"{call}({address:#x}): nothing was opened there, or it was closed as often already")

    def _take_back_window(self, number: int, window: Window) -> bool:
        """Whether this caller took a window out and undid what it stands for; after a failure it is in the books again.
        It leaves the books before it leaves the driver, which gives the address out again at once."""
        if self._windows.pop(number, None) is None:
            return False
        ((_, ordinal),) = window.rights
        try:
            self._devices.all[ordinal].run(lambda: self._undo(window))
        except DeviceLostError:
            return True
        except BaseException:
            if not window.is_gone:
                self._windows[number] = window
            raise
        return True

    def _undo(self, window: Window) -> None:
        """Take the memory of a window back, and then say so in it."""
        if window.kind != _POINTER:
            self._call.undo("cuMemFree" if window.kind == _CREATED else "cuIpcCloseMemHandle", window.address)
        elif self._pointers.get(window.address) is window:  # or it was open already: to free it is to free the other
            self._call.undo("cuMemFreeAsync", window.address, _LEGACY_STREAM)
            self._pointers.pop(window.address, None)
        window.is_gone = True
        if window.kind == _POINTER:
            with contextlib.suppress(DeviceLostError):
                # Its maker may free it the moment this is known.
                self._call("cuStreamSynchronize", _LEGACY_STREAM)

    # -- 64 bytes for cuMemAlloc ----------------------------------------------------------------------------------
    def ipc_export(self, address: int) -> bytes:
        info = self.pointer_info(address)
        if info.made_by != "legacy" or info.base != address:
            what = f"inside an allocation that begins at {info.base:#x}" if info.made_by == "legacy" else info.made_by
            raise UsageError(f"ipc_export({address:#x}): it takes the base of memory of cuMemAlloc; this is {what}")
        device = self._devices.device(info.location)
        return bytes_of(device.run(lambda: self._call("cuIpcGetMemHandle", address)))

    def ipc_open(self, handle: bytes, nbytes: int | None, location: Location) -> int:
        device = self._devices.device(location)
        wanted = handle_of("CUipcMemHandle", handle)
        if nbytes is not None and nbytes <= 0:
            raise ProtocolError(f"ipc_open: an allocation of {nbytes} bytes")
        try:
            return self._open(device, "ipc", nbytes or 0, "cuIpcOpenMemHandle", wanted, _ENABLE_PEERS)
        except DriverError as error:
            if error.call != "cuIpcOpenMemHandle":
                raise
            raise self._not_opened(error, "ipc_open", "an allocation of cuMemAlloc", location) from None

    def ipc_close(self, address: int) -> None:
        self._close("ipc_close", address, "ipc")

    def ipc_create(self, nbytes: int, location: Location) -> int:
        if nbytes <= 0:
            raise UsageError(f"ipc_create: {nbytes} bytes")
        call, device = "cuMemAlloc", self._devices.device(location)
        check_numbers(call, nbytes)
        try:
            return self._open(device, _CREATED, nbytes, call, nbytes)
        except OutOfMemoryError as error:
            if error.call != call:
                raise
            raise OutOfMemoryError(error.call, error.code, error.name, f"{nbytes} bytes on {location}") from None

    def ipc_free(self, address: int) -> None:
        self._close("ipc_free", address, _CREATED)

    def _not_opened(self, error: DriverError, call: str, what: str, location: Location) -> Exception:
        """Why something of another process could not be opened."""
        if error.code == INVALID_CONTEXT:
            return UsageError(
                f"{call}: this very process made it, and the driver opens {what} in other processes only; use it as "
                f"it is ({error.name})"
            )
        if error.code in _NO_PEERS:
            return UnsupportedError(
                f"opening {what} on {location}", "peer access between the two GPUs", error.name,
                "Open it on its own GPU, or copy over the host",
            )  # fmt: skip
        if error.code in _NOT_A_HANDLE:
            return ProtocolError(f"{call}: the bytes are no handle of {what}, or its maker freed it ({error.name})")
        return error

    # -- pools of others ----------------------------------------------------------------------------------------
    def pool_destroy(self, pool: int) -> None:
        if not self._take_back(self._pools, "cuMemPoolDestroy", pool):
            raise UsageError(f"pool_destroy({pool:#x}): no pool of this driver")

    def pool_export(self, pool: int) -> int:
        call, room = "cuMemPoolExportToShareableHandle", ctypes.c_int(-1)
        try:
            self._used(self._pools.get(pool)).run(lambda: self._call.past(call, ctypes.byref(room), pool, _FD, 0))
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

    def pool_import(self, fd: int, location: Location) -> int:
        device = self._devices.device(location)
        check_descriptor("pool_import", fd)
        call = "cuMemPoolImportFromShareableHandle"
        with meaning(lambda code: ProtocolError(f"pool_import({fd}): no descriptor of a pool ({code})"), call):
            return self._made(self._pools, device, "cuMemPoolDestroy", call, fd, _FD, 0)

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
        device, call = self._devices.device(info.location), "cuMemPoolExportPointer"
        words = (
            "not the base of memory of a pool that was created to leave the process, and exported before its pointers"
        )
        with meaning(lambda code: UsageError(f"pool_export_pointer({address:#x}): {words} ({code})"), call):
            return bytes_of(device.run(lambda: self._call(call, address)))

    def pool_open_pointer(self, pool: int, handle: bytes, nbytes: int) -> int:
        if nbytes <= 0:
            raise ProtocolError(f"pool_open_pointer: an allocation of {nbytes} bytes")
        _check_openable("pool_open_pointer", nbytes)
        wanted = ctypes.byref(handle_of("CUmemPoolPtrExportData", handle))
        ordinal = self._pools.get(pool)
        if ordinal is None:
            raise UsageError(f"{pool:#x} is no pool of this driver; pool_import() makes one")
        device, call = self._devices.all[ordinal], "cuMemPoolImportPointer"
        words = "pool_open_pointer: the bytes name no memory of this pool, or its maker freed it"
        with meaning(lambda code: ProtocolError(f"{words} ({code})"), call):
            return self._open(device, _POINTER, nbytes, call, pool, wanted)

    def pool_close_pointer(self, address: int) -> None:
        self._close("pool_close_pointer", address, _POINTER)

    # -- events -------------------------------------------------------------------------------------------------
    def event_export(self, event: int) -> bytes:
        call, words = "cuIpcGetEventHandle", f"event_export: {event:#x} is no event that this process made with"
        said = f"{words} interprocess=True ({{}}); its maker alone hands an event on"
        with meaning(lambda code: UsageError(said.format(code)), call, (INVALID_HANDLE, INVALID_VALUE)):
            return bytes_of(self._at(event).run(lambda: self._call(call, event)))

    def event_import(self, handle: bytes, location: Location) -> int:
        device = self._devices.device(location)
        wanted = handle_of("CUipcEventHandle", handle)
        try:
            return self._made(self._events, device, "cuEventDestroy", "cuIpcOpenEventHandle", wanted)
        except DriverError as error:
            if error.call != "cuIpcOpenEventHandle":
                raise
            raise self._not_opened(error, "event_import", "an interprocess event", location) from None


def _check_openable(call: str, nbytes: int) -> None:
    """Refuse an allocation that ends the process which opens it, inside the driver: nothing of it is sent or opened."""
    if nbytes > MAX_POOL_ALLOCATION:
        raise UnsupportedError(
            f"{call} of {nbytes} bytes in one allocation of a pool", f"at most {MAX_POOL_ALLOCATION}",
            "a driver in which a larger one crashes whoever opens it", "Copy it: vram.copy()",
        )  # fmt: skip


@contextlib.contextmanager
def meaning(error_of: Callable[[str], Exception], call: str, codes: Sequence[int] = _REFUSED) -> Iterator[None]:
    """Say what it means if a call is refused with certain codes; `error_of` takes the name of the code."""
    try:
        yield
    except DriverError as error:
        if error.code not in codes or error.call != call:
            raise
        raise error_of(error.name) from None


def handle_of(name: str, data: bytes) -> Handle:
    """Return the 64 bytes of a handle as the driver takes them."""
    if len(data) != HANDLE_BYTES:
        raise ProtocolError(f"a {name} has {HANDLE_BYTES} bytes, not {len(data)}")
    return Handle.from_buffer_copy(data)


def bytes_of(struct: Any) -> bytes:
    """Return the 64 bytes of a handle."""
    return ctypes.string_at(int(struct.getPtr()), HANDLE_BYTES)
