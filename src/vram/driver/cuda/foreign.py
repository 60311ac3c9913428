"""Memory that others made, in this process or in another: what it is, and windows over it.

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
from typing import Any

from ...errors import DeviceLostError, DriverError, ProtocolError, RangeError, UsageError
from ...lifetime import noted
from ...spec import Access, HandleKind, Location
from ..books import Books
from ..protocol import PointerInfo
from .attributes import BUFFER_ID, DEVICE_ORDINAL, INFO, attribute, attributes
from .bindings import Bindings
from .devices import DEVICE, Device, Devices
from .failures import INVALID_HANDLE, INVALID_VALUE, MAP_FAILED, NOT_FOUND, NOT_PERMITTED, UNKNOWN
from .objects import CudaMemory, Window

OPENED, CREATED, POINTER = "ipc", "ipc of ours", "pool pointer"  # kinds of windows that are opened here
_LEGACY_STREAM = 1
_HOST_MEMORY = 1  # CU_MEMORYTYPE_HOST
NOT_A_HANDLE = (INVALID_VALUE, INVALID_HANDLE, MAP_FAILED, NOT_PERMITTED, NOT_FOUND, UNKNOWN)


class Foreign:
    """Attributes of any address, and windows over memory of others. A window that was opened here has a kind, which
    says how it is closed."""

    def __init__(self, bindings: Bindings, devices: Devices, books: Books) -> None:
        self._call = bindings
        self._devices = devices
        self._books = books
        self._numbers = itertools.count(1)
        self.windows: dict[int, Window] = {}
        self.pointers: dict[int, Window] = {}  # memory of imported pools, by its address here

    # -- what is at an address ----------------------------------------------------------------------------------
    def pointer_info(self, address: int) -> PointerInfo:
        ordinal, memory_type, identity, legacy, kinds, pool, context, managed = attributes(self._call, INFO, address)
        if not identity or (ordinal < 0 and not memory_type):
            raise UsageError(f"{address:#x} is no address that the driver knows")
        try:
            under = self._devices.used(ordinal if ordinal >= 0 else None)  # unlike the attributes it wants one
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
            right = Access(int(self._call("cuMemGetAccess", self._devices.where((DEVICE, ordinal)), address)))
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

    def ordinal_of(self, address: int) -> int:
        try:
            ordinal = attribute(self._call, DEVICE_ORDINAL, address)
        except DriverError as error:
            if error.code != INVALID_VALUE:
                raise
            raise UsageError(f"{address:#x} is no address that the driver knows ({error.name})") from None
        if ordinal < 0:
            raise UsageError(f"{address:#x} is memory of the host, of no GPU")
        return ordinal

    # -- windows ------------------------------------------------------------------------------------------------
    def window_open(self, address: int, nbytes: int, location: Location, access: Access) -> int:
        if address <= 0 or nbytes <= 0:
            raise RangeError(f"window_open({address:#x}, {nbytes}): no memory has these numbers")
        number = next(self._numbers)
        self.windows[number] = Window(address, nbytes, {self._devices.place(location): access})
        return number

    def window_close(self, window: int) -> None:
        if self.windows.pop(window, None) is None:
            raise UsageError(f"window_close({window}): no such window; each is closed once")

    def window_over(self, call: str, address: int, nbytes: int, access: Access) -> Window | None:
        """Return a window that gives some access to a span; None if none is over it. Raises UsageError for too little
        access: there may be several over the same memory, each with rights of its own."""
        best: Window | None = None
        for window in list(self.windows.values()):
            if window.address <= address and address + nbytes <= window.address + window.nbytes:
                if window.access >= access:
                    return window
                best = window
        if best is not None:
            raise UsageError(
                f"{call} of {nbytes} bytes at {address:#x}: access there is {best.access.name}; it takes {access.name}"
            )
        return None

    # -- memory that is opened here -----------------------------------------------------------------------------
    def open(self, device: Device, kind: str, nbytes: int, call: str, *arguments: Any) -> int:
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
            self.windows[number] = window
        except BaseException as error:
            if window.address:
                with noted(error):
                    self.windows[number] = window  # if it fails it stays there
                    self._take_back_window(number, window)
            raise
        return window.address

    def _check_opened(self, window: Window, call: str) -> None:
        """Raise ProtocolError unless what was opened is there and as large as its owner said (0 where nobody said).
        The driver checks nothing: a changed byte of a handle was measured to open another address without an error."""
        if window.kind == CREATED:
            return
        if window.kind == POINTER:
            # One winner, without a lock. Out of these only after it is gone: who opens it meanwhile would lose it.
            if self.pointers.setdefault(window.address, window) is not window:
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
            if error.code not in NOT_A_HANDLE:
                raise
            raise ProtocolError(f"{call}: the handle names no memory of its maker ({error.name})") from None
        # CUDA Driver API, "Memory Management", cuMemGetAddressRange. Measured: just what the other process allocated.
        window.nbytes = window.nbytes or max(base + real - window.address, 1)
        if not base <= window.address <= window.address + window.nbytes <= base + real:
            raise ProtocolError(
                f"{call}: {window.nbytes} bytes were said to be there, and the allocation holds "
                f"{base + real - window.address}"
            )

    def close(self, call: str, address: int, kind: str) -> None:
        """Close one window that :meth:`open` opened."""
        for number, window in self.windows.copy().items():
            if window.address == address and window.kind == kind and self._take_back_window(number, window):
                return
        raise UsageError(f"{call}({address:#x}): nothing was opened there, or it was closed as often already")

    def _take_back_window(self, number: int, window: Window) -> bool:
        """Whether this caller took a window out and undid what it stands for; after a failure it is in the books again.
        It leaves the books before it leaves the driver, which gives the address out again at once."""
        if self.windows.pop(number, None) is None:
            return False
        ((_, ordinal),) = window.rights
        try:
            self._devices.all[ordinal].run(lambda: self._undo(window))
        except DeviceLostError:
            return True
        except BaseException:
            if not window.is_gone:
                self.windows[number] = window
            raise
        return True

    def _undo(self, window: Window) -> None:
        """Take the memory of a window back, and then say so in it."""
        if window.kind != POINTER:
            self._call.undo("cuMemFree" if window.kind == CREATED else "cuIpcCloseMemHandle", window.address)
        elif self.pointers.get(window.address) is window:  # or it was open already: to free it is to free the other
            self._call.undo("cuMemFreeAsync", window.address, _LEGACY_STREAM)
            self.pointers.pop(window.address, None)
        window.is_gone = True
        if window.kind == POINTER:
            with contextlib.suppress(DeviceLostError):
                # Its maker may free it the moment this is known.
                self._call("cuStreamSynchronize", _LEGACY_STREAM)
