"""Export and import of memory, pools and events: each way out of a process is another function of the driver.

Memory that comes by a descriptor or the fabric becomes a handle in the books, like memory that was made here. Memory of
``cuMemAlloc`` or of a pool, whose 64 bytes open an address, becomes a window (:mod:`.foreign`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ...errors import DriverError, OutOfMemoryError, ProtocolError, UnsupportedError, UsageError
from ...spec import Access, HandleKind, Location
from ..arguments import check_access, check_size, not_exported
from ..books import duplicate
from ..protocol import HANDLE_BYTES, MAX_POOL_ALLOCATION
from .arguments import check_descriptor, check_fabric, check_kinds, no_channel
from .bindings import Bindings, check_numbers
from .devices import DEVICE, HOST, HOST_NUMA, Devices
from .failures import (
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    UNKNOWN,
)
from .foreign import CREATED, NOT_A_HANDLE, OPENED, POINTER, Foreign
from .functions import Handle
from .memory import Memory, place_in
from .objects import NOWHERE, UNCLAIMED, Counted, CudaMemory, Place, Table

_FD = int(HandleKind.POSIX_FD)
# The status for what is no memory, pool or event of the driver; UNKNOWN for most descriptors, measured.
_REFUSED = (INVALID_VALUE, INVALID_HANDLE, NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN)
_UNDESCRIBED = (INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED)  # a guess, of what is no memory
_ENABLE_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_NO_PEERS = (217, 711)  # PEER_ACCESS_UNSUPPORTED, TOO_MANY_PEERS


class Sharing:
    """Export and import: descriptors and the fabric, memory to adopt, IPC handles, pools, and events of others."""

    def __init__(self, bindings: Bindings, devices: Devices, memory: Memory, foreign: Foreign, events: Table) -> None:
        self._call = bindings
        self._devices = devices
        self._memory = memory
        self._foreign = foreign
        self._events = events
        self.pools = Table(bindings, devices, "cuMemPoolDestroy", "no pool of this driver", Counted())

    # -- memory of the books ------------------------------------------------------------------------------------
    def mem_export(self, handle: int, kind: HandleKind) -> int:
        memory: Any = self._memory.books.memory("mem_export", handle)
        if kind != HandleKind.POSIX_FD or HandleKind.POSIX_FD not in memory.kinds:
            raise not_exported(f"mem_export({handle})", kind, memory.kinds)
        if memory.fd is not None:
            return duplicate(memory.fd)
        room, raw = ctypes.c_int(), memory.raw[handle]
        self._call.past("cuMemExportToShareableHandle", ctypes.byref(room), raw, int(kind), 0)
        os.set_inheritable(room.value, False)
        return room.value

    def mem_import(self, fd: int, kind: HandleKind, nbytes: int) -> int:
        return self._memory.first_handle(self.import_as("mem_import", fd, kind, nbytes))

    def mem_export_fabric(self, handle: int) -> bytes:
        memory: Any = self._memory.books.memory("mem_export_fabric", handle)
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
        return self._memory.first_handle(self.import_fabric_as("mem_import_fabric", data, nbytes, place_of))

    def mem_map_import(
        self, address: int, nbytes: int, fd: int, kind: HandleKind, access: Access, *, private: bool,
        location: Location | None = None, until: float | None = None,  # its memory has no seals to wait for
    ) -> None:  # fmt: skip
        if private:
            raise UnsupportedError(
                "a private mapping", "memory that is copied on write", "the cuda driver, which has none",
                "Map it with Access.READ, or copy it into memory of your own",
            )  # fmt: skip
        check_access("mem_map_import", access)
        memory = self.import_as("mem_map_import", fd, kind, nbytes)
        try:
            where = self._devices.location(*memory.place)
            if location is not None and memory.place != self._devices.place(location):
                raise ProtocolError(f"mem_map_import({fd}): the memory is on {where}, not on {location} as was said")
            self._memory.map_only("mem_map_import", address, memory, where, access)
        except BaseException as error:
            self._memory.give_back(memory, error)
            raise

    def mem_adopt(self, address: int) -> int:
        info = self._foreign.pointer_info(address)
        if info.made_by != "vmm":
            raise UsageError(f"memory made by {info.made_by} at {address:#x} has no descriptor; copy it: vram.copy()")
        memory = CudaMemory(info.nbytes, info.kinds, (0, 0))
        try:
            self._memory.obtain(memory, "cuMemRetainAllocationHandle", address)
            memory.place = self._place_of_memory(memory.raw[UNCLAIMED], self._devices.place(info.location))
            return self._memory.first_handle(memory)
        except BaseException as error:
            self._memory.give_back(memory, error)  # in the books if it fails
            raise

    # -- inside, and for multicast objects ----------------------------------------------------------------------
    def import_as(
        self, call: str, fd: int, kind: HandleKind, nbytes: int, place_of: Callable[[int], Place] | None = None
    ) -> CudaMemory:
        """Open memory, or what another function knows the place of; its driver handle is still to be claimed."""
        if kind != HandleKind.POSIX_FD:
            check_kinds(call, kind, self._call.driver_version)
            raise UsageError(f"{call}: kind must be POSIX_FD")
        check_size(call, nbytes, self._memory.granule())
        check_descriptor(call, fd)
        memory = CudaMemory(nbytes, kind, NOWHERE, duplicate(fd))
        refused = partial(_no_memory, f"{call}({fd})")
        return self._open_shared(memory, memory.fd or 0, place_of or self._place_of_memory, refused)

    def import_fabric_as(self, call: str, data: bytes, nbytes: int, place_of: Callable[[int], Place]) -> CudaMemory:
        """Open what 64 bytes name, as :meth:`import_as`."""
        wanted = check_fabric(call, data, self._call.driver_version)
        check_size(call, nbytes, self._memory.granule())
        memory = CudaMemory(nbytes, HandleKind.FABRIC, NOWHERE, fabric=bytes(data))
        return self._open_shared(memory, ctypes.addressof(wanted), place_of, partial(_no_fabric, call))

    def _open_shared(
        self, memory: CudaMemory, wanted: int, place_of: Callable[[int], Place],
        refused: Callable[[DriverError], Exception],
    ) -> CudaMemory:  # fmt: skip
        """Have the driver open what a descriptor or the address of 64 bytes stands for."""
        name = "cuMemImportFromShareableHandle"
        try:
            self._memory.obtain(memory, name, wanted, int(memory.kinds))
            # The driver does not tell the size; a wrong one is refused by cuMemMap. Nor the kinds: it says NONE.
            memory.place = place_of(memory.raw[UNCLAIMED])
        except BaseException as error:
            self._memory.give_back(memory, error)  # in the books if it fails
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

    # -- 64 bytes for cuMemAlloc ----------------------------------------------------------------------------------
    def ipc_export(self, address: int) -> bytes:
        info = self._foreign.pointer_info(address)
        if info.made_by != "legacy" or info.base != address:
            what = f"inside an allocation that begins at {info.base:#x}" if info.made_by == "legacy" else info.made_by
            raise UsageError(f"ipc_export({address:#x}): it takes the base of memory of cuMemAlloc; this is {what}")
        device = self._devices.device(info.location)
        return _bytes_of(device.run(lambda: self._call("cuIpcGetMemHandle", address)))

    def ipc_open(self, handle: bytes, nbytes: int | None, location: Location) -> int:
        device = self._devices.device(location)
        wanted = _handle_of("CUipcMemHandle", handle)
        if nbytes is not None and nbytes <= 0:
            raise ProtocolError(f"ipc_open: an allocation of {nbytes} bytes")
        try:
            return self._foreign.open(device, OPENED, nbytes or 0, "cuIpcOpenMemHandle", wanted, _ENABLE_PEERS)
        except DriverError as error:
            raise _not_opened(
                error, "ipc_open", "cuIpcOpenMemHandle", "an allocation of cuMemAlloc", location
            ) from None

    def ipc_close(self, address: int) -> None:
        self._foreign.close("ipc_close", address, OPENED)

    def ipc_create(self, nbytes: int, location: Location) -> int:
        if nbytes <= 0:
            raise UsageError(f"ipc_create: {nbytes} bytes")
        call, device = "cuMemAlloc", self._devices.device(location)
        check_numbers(call, nbytes)
        try:
            return self._foreign.open(device, CREATED, nbytes, call, nbytes)
        except OutOfMemoryError as error:
            if error.call != call:
                raise
            raise OutOfMemoryError(error.call, error.code, error.name, f"{nbytes} bytes on {location}") from None

    def ipc_free(self, address: int) -> None:
        self._foreign.close("ipc_free", address, CREATED)

    # -- pools of others ----------------------------------------------------------------------------------------
    def pool_destroy(self, pool: int) -> None:
        self.pools.take_back("pool_destroy", pool)

    def pool_export(self, pool: int) -> int:
        call, room = "cuMemPoolExportToShareableHandle", ctypes.c_int(-1)
        try:
            self.pools.device_of(pool).run(lambda: self._call.past(call, ctypes.byref(room), pool, _FD, 0))
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
        with _meaning(lambda code: ProtocolError(f"pool_import({fd}): no descriptor of a pool ({code})"), call):
            return self.pools.make(device, call, fd, _FD, 0)

    # -- memory of a pool ---------------------------------------------------------------------------------------
    def pool_export_pointer(self, address: int) -> bytes:
        info = self._foreign.pointer_info(address)
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
        with _meaning(lambda code: UsageError(f"pool_export_pointer({address:#x}): {words} ({code})"), call):
            return _bytes_of(device.run(lambda: self._call(call, address)))

    def pool_open_pointer(self, pool: int, handle: bytes, nbytes: int) -> int:
        if nbytes <= 0:
            raise ProtocolError(f"pool_open_pointer: an allocation of {nbytes} bytes")
        _check_openable("pool_open_pointer", nbytes)
        wanted = ctypes.byref(_handle_of("CUmemPoolPtrExportData", handle))
        ordinal = self.pools.out.get(pool)
        if ordinal is None:
            raise UsageError(f"{pool:#x} is no pool of this driver; pool_import() makes one")
        device, call = self._devices.all[ordinal], "cuMemPoolImportPointer"
        words = "pool_open_pointer: the bytes name no memory of this pool, or its maker freed it"
        with _meaning(lambda code: ProtocolError(f"{words} ({code})"), call):
            return self._foreign.open(device, POINTER, nbytes, call, pool, wanted)

    def pool_close_pointer(self, address: int) -> None:
        self._foreign.close("pool_close_pointer", address, POINTER)

    # -- events -------------------------------------------------------------------------------------------------
    def event_export(self, event: int) -> bytes:
        call, words = "cuIpcGetEventHandle", f"event_export: {event:#x} is no event that this process made with"
        said = f"{words} interprocess=True ({{}}); its maker alone hands an event on"
        with _meaning(lambda code: UsageError(said.format(code)), call, (INVALID_HANDLE, INVALID_VALUE)):
            return _bytes_of(self._events.device_of(event).run(lambda: self._call(call, event)))

    def event_import(self, handle: bytes, location: Location) -> int:
        device = self._devices.device(location)
        wanted = _handle_of("CUipcEventHandle", handle)
        try:
            return self._events.make(device, "cuIpcOpenEventHandle", wanted)
        except DriverError as error:
            raise _not_opened(
                error, "event_import", "cuIpcOpenEventHandle", "an interprocess event", location
            ) from None


def _no_memory(call: str, error: DriverError) -> Exception:
    """Why the driver opens no memory by a descriptor."""
    if error.code in _REFUSED:
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
    if error.code in _REFUSED:
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


def _not_opened(error: DriverError, call: str, name: str, what: str, location: Location) -> Exception:
    """Why something of another process could not be opened."""
    if error.call != name:
        return error
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
    if error.code in NOT_A_HANDLE:
        return ProtocolError(f"{call}: the bytes are no handle of {what}, or its maker freed it ({error.name})")
    return error


def _check_openable(call: str, nbytes: int) -> None:
    """Refuse an allocation that ends the process which opens it, inside the driver: nothing of it is sent or opened."""
    if nbytes > MAX_POOL_ALLOCATION:
        raise UnsupportedError(
            f"{call} of {nbytes} bytes in one allocation of a pool", f"at most {MAX_POOL_ALLOCATION}",
            "a driver in which a larger one crashes whoever opens it", "Copy it: vram.copy()",
        )  # fmt: skip


@contextlib.contextmanager
def _meaning(error_of: Callable[[str], Exception], call: str, codes: Sequence[int] = _REFUSED) -> Iterator[None]:
    """Say what it means if a call is refused with certain codes; `error_of` takes the name of the code."""
    try:
        yield
    except DriverError as error:
        if error.code not in codes or error.call != call:
            raise
        raise error_of(error.name) from None


def _handle_of(name: str, data: bytes) -> Handle:
    """Return the 64 bytes of a handle as the driver takes them."""
    if len(data) != HANDLE_BYTES:
        raise ProtocolError(f"a {name} has {HANDLE_BYTES} bytes, not {len(data)}")
    return Handle.from_buffer_copy(data)


def _bytes_of(struct: Any) -> bytes:
    """Return the 64 bytes of a handle."""
    return ctypes.string_at(int(struct.getPtr()), HANDLE_BYTES)
