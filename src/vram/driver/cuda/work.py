"""Work of the GPU, under its primary context: copies and fills, streams and events, kernels on anybody's stream.

Calls without a stream return when they are done. They run on the legacy default stream, which waits for the work of
other libraries that did not ask for non-blocking streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from ...errors import DeviceLostError, DriverError, UnsupportedError, UsageError
from ...lifetime import noted
from ...spec import Access, Location
from .. import libc
from ..arguments import check_apart, check_byte
from .attributes import DEVICE_ORDINAL, attribute
from .bindings import Bindings, check_numbers
from .devices import DEVICE, Device, Devices
from .failures import CAPTURE_IMPLICIT, INVALID_HANDLE, INVALID_VALUE, NOT_READY
from .memory import MemoryCalls
from .objects import NOWHERE, Counted, CudaMapping

_LEGACY = 1  # CU_STREAM_LEGACY: valid in any context
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_DISABLE_TIMING, _INTERPROCESS = 2, 4  # CU_EVENT_*
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for every context

_COMPUTE_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: which one, and 64 bytes for its value, of which this one takes the first number."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_DEPENDENT = (_Attribute * 1)(_Attribute(_PROGRAMMATIC, 0, (ctypes.c_uint * 16)(1)))


class WorkCalls(MemoryCalls):
    """A part of :class:`~vram.driver.cuda.CudaDriver`."""

    def __init__(self, bindings: Bindings, devices: Devices) -> None:
        super().__init__(bindings, devices)
        self._lending = threading.Lock()  # no undo comes here
        # By the driver's numbers: to the ordinal of the GPU.
        self._streams: dict[int, int] = {}
        self._events: dict[int, int] = {}
        self._registered: dict[int, int] = {}
        self._libraries: dict[int, int] = {}

    def mem_info(self, location: Location) -> tuple[int, int]:
        free, total = self._devices.device(location).run(lambda: self._call("cuMemGetInfo"))
        return int(free), int(total)

    # -- done when they return ----------------------------------------------------------------------------------
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        reading = self._accessible("copy", source, nbytes, Access.READ)
        writing = self._accessible("copy", destination, nbytes, Access.READ_WRITE)
        check_apart(destination, source, nbytes)
        if not nbytes:
            return
        both = _who(reading, Access.READ) & _who(writing, Access.READ_WRITE)
        if any(place[0] != DEVICE for place in both):
            ctypes.memmove(destination, source, nbytes)
            return
        device = self._worker(both)
        if device is None:
            self._copy_between(destination, source, nbytes, writing, reading)
            return
        self._do(device, "cuMemcpyDtoDAsync", destination, source, nbytes, _LEGACY)

    def copy_in(self, destination: int, source: memoryview) -> None:
        nbytes = source.nbytes
        due = self._accessible("copy_in", destination, nbytes, Access.READ_WRITE)
        with libc.lent("copy_in", source, writable=False) as start:
            if nbytes:
                self._transfer("cuMemcpyHtoDAsync", due, Access.READ_WRITE, destination, start, nbytes)

    def copy_out(self, destination: memoryview, source: int) -> None:
        nbytes = destination.nbytes
        due = self._accessible("copy_out", source, nbytes, Access.READ)
        with libc.lent("copy_out", destination, writable=True) as start:
            if nbytes:
                self._transfer("cuMemcpyDtoHAsync", due, Access.READ, start, source, nbytes)

    def fill(self, address: int, value: int, nbytes: int) -> None:
        check_byte(value)
        due = self._accessible("fill", address, nbytes, Access.READ_WRITE)
        if not nbytes:
            return
        who = _who(due, Access.READ_WRITE)
        if any(place[0] != DEVICE for place in who):
            ctypes.memset(address, value, nbytes)
            return
        self._do(self._needed("fill", address, who), "cuMemsetD8Async", address, value, nbytes, _LEGACY)

    def synchronize(self, location: Location) -> None:
        place = self._devices.place(location)
        # Memory of the host can be worked on by any GPU. A GPU without a context has no work.
        due = self._devices.all if place[0] != DEVICE else (self._devices.all[place[1]],)
        for device in due:
            if device.is_used:
                device.run(lambda: self._call("cuCtxSynchronize"))

    # -- in the order of a stream -------------------------------------------------------------------------------
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

    def copy_async(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        def copy() -> None:
            try:
                self._call("cuMemcpyAsync", destination, source, nbytes, stream)
            except DriverError as error:
                # That call wants both sides within reach of one GPU. Asked afterwards, since it is seldom so.
                if error.code != INVALID_VALUE:
                    raise
                there, here = self._home_of(destination, error), self._home_of(source, error)
                if there is None or here is None or there is here:
                    raise
                self._call("cuMemcpyPeerAsync", destination, there.context, source, here.context, nbytes, stream)

        self._under(stream).run(copy)

    def fill_async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self._under(stream).run(lambda: self._call("cuMemsetD8Async", address, value, nbytes, stream))

    def stream_create(self, location: Location) -> int:
        device = self._devices.device(location)
        return self._made(self._streams, device, "cuStreamDestroy", "cuStreamCreate", _NON_BLOCKING)

    def stream_destroy(self, stream: int) -> None:
        if not self._take_back(self._streams, "cuStreamDestroy", stream):
            raise UsageError(f"stream_destroy({stream:#x}): no stream of this driver")

    def stream_synchronize(self, stream: int, location: Location) -> None:
        self._devices.device(location).run(lambda: self._call("cuStreamSynchronize", stream))

    def stream_is_capturing(self, stream: int, location: Location) -> bool:
        try:
            words = f"stream_is_capturing: {stream:#x} is no stream (any more)"
            return int(self._on_stream(self._devices.device(location), words, "cuStreamIsCapturing", stream)) != 0
        except DriverError as error:
            if error.code == CAPTURE_IMPLICIT:  # a stream that the legacy one waits for does
                return True
            raise

    def stream_wait(self, stream: int, event: int, location: Location) -> None:
        words = f"stream_wait: {stream:#x} is no stream (any more), or {event:#x} no event"
        self._on_stream(self._devices.device(location), words, "cuStreamWaitEvent", stream, event, 0)

    def event_create(self, location: Location, *, interprocess: bool = False) -> int:
        device = self._devices.device(location)
        flags = _DISABLE_TIMING | (_INTERPROCESS if interprocess else 0)
        return self._made(self._events, device, "cuEventDestroy", "cuEventCreate", flags)

    def event_record(self, event: int, stream: int) -> None:
        words = f"event_record: {stream:#x} is no stream (any more) of the GPU that the event {event:#x} is of"
        self._on_stream(self._at(event), words, "cuEventRecord", event, stream)

    def event_is_done(self, event: int) -> bool:
        try:
            self._at(event).run(lambda: self._call("cuEventQuery", event))
        except DriverError as error:
            if error.code == NOT_READY:
                return False
            raise
        return True

    def event_synchronize(self, event: int) -> None:
        self._at(event).run(lambda: self._call("cuEventSynchronize", event))

    def event_destroy(self, event: int) -> None:
        if not self._take_back(self._events, "cuEventDestroy", event):
            raise UsageError(f"event_destroy({event:#x}): no event of this driver")

    # -- memory of the host that the GPU reads on its own ---------------------------------------------------------
    def host_register(self, address: int, nbytes: int, location: Location) -> None:
        device = self._devices.device(location)
        check_numbers("cuMemHostRegister", address, nbytes)
        call = "cuMemHostRegister"
        self._made(self._registered, device, "cuMemHostUnregister", call, address, nbytes, _PORTABLE, number=address)

    def host_unregister(self, address: int) -> None:
        if not self._take_back(self._registered, "cuMemHostUnregister", address):
            raise UsageError(f"host_unregister({address:#x}): nothing was registered there")

    # -- kernels ------------------------------------------------------------------------------------------------
    def capability(self, location: Location) -> tuple[int, int]:
        device = self._devices.device(location)
        major, minor = (device.attribute(number) for number in _COMPUTE_CAPABILITY)
        return major, minor

    def kernels_load(self, code: bytes, location: Location) -> int:
        device = self._devices.device(location)
        room = ctypes.create_string_buffer(code, len(code))
        at = ctypes.addressof(room)  # the driver keeps a copy
        nothing = 0
        return self._made(
            self._libraries, device, "cuLibraryUnload", "cuLibraryLoadData",
            at, nothing, nothing, nothing, nothing, nothing, nothing,
        )  # fmt: skip

    def kernels_unload(self, library: int) -> None:
        if not self._take_back(self._libraries, "cuLibraryUnload", library):
            raise UsageError(f"kernels_unload({library:#x}): no kernels of this driver")

    def kernel(self, library: int, name: str) -> int:
        ordinal = self._libraries.get(library)
        if ordinal is None:
            raise UsageError(f"kernel({library:#x}, {name!r}): no kernels of this driver")
        found = ctypes.c_uint64()
        room = ctypes.create_string_buffer(name.encode())
        at, text = ctypes.addressof(found), ctypes.addressof(room)

        def load() -> None:
            self._call.past("cuLibraryGetKernel", at, library, text)
            self._call.past("cuKernelGetFunction", at, found.value)
            # Where code is loaded when it is first launched (the default), that waits for what runs on the GPU.
            with contextlib.suppress(UnsupportedError):
                self._call.past("cuFuncLoad", found.value)

        self._devices.all[ordinal].run(load)
        return found.value

    def launch(
        self,
        kernel: int,
        blocks: int,
        threads: int,
        arguments: Sequence[int],
        stream: int,
        location: Location,
        *,
        dependent: bool = False,
    ) -> None:
        count = len(arguments)
        values = (ctypes.c_uint64 * count)(*arguments)
        first = ctypes.addressof(values)
        places = (ctypes.c_uint64 * count)(*range(first, first + 8 * count, 8))
        config = _Config(
            (blocks, 1, 1), (threads, 1, 1), 0, stream, _DEPENDENT if dependent else None, 1 if dependent else 0
        )
        at = ctypes.addressof(config)

        def launch() -> None:
            try:
                self._call.past("cuLaunchKernelEx", at, kernel, ctypes.addressof(places), 0)
            except DriverError as error:
                if error.code != INVALID_HANDLE:
                    raise
                raise UsageError(f"launch: {stream:#x} is no stream (any more) of the GPU {location}") from None

        self._devices.device(location).run(launch)

    def launch_copy(self, destination: int, source: int, nbytes: int, stream: int, location: Location) -> None:
        words = f"launch_copy: {stream:#x} is no stream (any more) of the GPU {location}"
        self._on_stream(self._devices.device(location), words, "cuMemcpyAsync", destination, source, nbytes, stream)

    # -- inside -------------------------------------------------------------------------------------------------
    def _home_of(self, address: int, error: DriverError) -> Device | None:
        """Return the GPU whose memory an address is, if it is any's; `error` is what the question is asked for."""
        try:
            return self._devices.all[self.ordinal_of(address)]
        except UsageError:
            return None
        except DriverError as second:
            error.add_note(f"and then: {second}")
            return None

    def _made(
        self,
        books: dict[int, int] | Counted,
        device: Device,
        undo: str,
        call: str,
        *arguments: Any,
        number: int | None = None,
    ) -> int:
        """Make something under a device's context and write it down; nothing is left if any of that fails (I4).
        The books have it under `number`, by default what the driver puts out."""
        room, made = ctypes.c_uint64(), 0
        given = arguments if number is not None else (ctypes.byref(room), *arguments)

        def make() -> None:
            nonlocal made
            self._call.past(call, *given)
            made = room.value if number is None else number

        try:
            device.run(make)
            books[made] = device.ordinal
        except BaseException as error:
            if made:
                with noted(error):
                    books[made] = device.ordinal  # if it fails it stays there
                    self._take_back(books, undo, made)
            raise
        return made

    def _take_back(self, books: dict[int, int] | Counted, call: str, number: int) -> bool:
        """Whether this caller took back what the driver knows by a number; after a failure it is in the books again.
        It leaves the books before it leaves the driver, which gives the number out again at once."""
        ordinal, is_gone = books.pop(number, None), False
        if ordinal is None:
            return False

        def undo() -> None:
            nonlocal is_gone
            self._call.undo(call, number)
            is_gone = True

        try:
            self._devices.all[ordinal].run(undo)
        except DeviceLostError:
            return True
        except BaseException:
            if not is_gone:  # or it was the context that could not be left
                books[number] = ordinal
            raise
        return True

    def _on_stream(self, under: Device, words: str, call: str, *arguments: Any) -> Any:
        """Make a call under a context; what it says of a handle that it does not know is a mistake, in such words."""
        try:
            return under.run(lambda: self._call(call, *arguments))
        except DriverError as error:
            if error.code != INVALID_HANDLE or error.call != call:
                raise
            raise UsageError(words) from None

    def _under(self, stream: int) -> Device:
        ordinal = self._streams.get(stream)
        if ordinal is None:
            raise UsageError(f"{stream:#x} is no stream of this driver; make one with stream_create")
        return self._devices.all[ordinal]

    def _at(self, event: int) -> Device:
        # An event of another library knows its own context; the driver only wants that any is current.
        return self._used(self._events.get(event))

    def _used(self, ordinal: int | None) -> Device:
        """Return a GPU to work under; where it does not matter which, one that has a context already if any has."""
        if ordinal is None:
            return next((device for device in self._devices.all if device.is_used), self._devices.all[0])
        return self._devices.all[ordinal]

    def _do(self, device: Device, call: str, *arguments: Any) -> None:
        """Have a device do something, and return when it is done."""

        def work() -> None:
            self._call(call, *arguments)
            self._call("cuStreamSynchronize", _LEGACY)

        device.run(work)

    def _accessible(self, call: str, address: int, nbytes: int, access: Access) -> list[Any]:
        due: list[Any] = self._books.accessible(call, address, nbytes, access)
        if access is Access.READ and any(mapping.memory.place == NOWHERE for mapping in due):
            # PTX ISA: on the addresses of a multicast object only the multimem instructions are defined.
            raise UsageError(
                f"{call}: a multicast object is mapped at {address:#x}, where plain reads are undefined; read the "
                f"memory that is bound to it"
            )
        return due

    def _transfer(
        self, call: str, due: list[CudaMapping], access: Access, destination: int, source: int, nbytes: int
    ) -> None:
        who = _who(due, access)
        if any(place[0] != DEVICE for place in who):  # memory of the host: the CPU may touch it
            ctypes.memmove(destination, source, nbytes)
            return
        self._do(self._needed(call, due[0].address, who), call, destination, source, nbytes, _LEGACY)

    def _worker(self, who: set[tuple[int, int]]) -> Device | None:
        ordinals = sorted(number for kind, number in who if kind == DEVICE)
        return self._devices.all[ordinals[0]] if ordinals else None

    def _needed(self, call: str, address: int, who: set[tuple[int, int]]) -> Device:
        device = self._worker(who)
        if device is None:
            raise UsageError(f"{call} at {address:#x}: no GPU may access all of it; give one access to the whole span")
        return device

    def _copy_between(
        self, destination: int, source: int, nbytes: int, writing: list[CudaMapping], reading: list[CudaMapping]
    ) -> None:
        """Copy between memories that no GPU may access both of: a GPU gets the right to read for as long as it takes.
        Without that the driver refuses (INVALID_VALUE, measured between two H200 with NVLink), peers or not."""
        there = self._needed("copy", destination, _who(writing, Access.READ_WRITE))
        here = self._needed("copy", source, _who(reading, Access.READ))
        if not all(isinstance(mapping, CudaMapping) for mapping in reading):
            # Of memory that others mapped nobody may lend rights; these calls made it reachable by context instead.
            call = "cuMemcpyPeerAsync"
            self._do(there, call, destination, there.context, source, here.context, nbytes, _LEGACY)
            return
        place = (DEVICE, there.ordinal)
        may_read = self._grant(Access.READ, place)
        with self._lending:  # so that nobody takes back what another copy still needs
            lent: list[CudaMapping] = []
            try:
                for mapping in reading:
                    # Past the books: nobody else may count on a right that goes again.
                    lent.append(mapping)
                    self._call("cuMemSetAccess", mapping.address, mapping.nbytes, (may_read,), 1)
                self._do(there, "cuMemcpyDtoDAsync", destination, source, nbytes, _LEGACY)
            except BaseException as error:
                with noted(error):
                    self._end_loan(lent, place)
                if isinstance(error, DriverError):
                    raise self._no_access(error, _place_of(reading[0]), [place]) from None
                raise
            self._end_loan(lent, place)

    def _end_loan(self, lent: list[CudaMapping], place: tuple[int, int]) -> None:
        # Each, whatever becomes of the others: nobody else would take back a right that the books do not know (I4).
        first: DriverError | None = None
        for mapping in lent:
            before = self._grant(mapping.rights.get(place, Access.NONE), place)
            try:
                self._call("cuMemSetAccess", mapping.address, mapping.nbytes, (before,), 1)
            except DriverError as error:
                if first is None:
                    first = error
                else:
                    first.add_note(f"and then: {error}")
        if first is not None:
            try:
                raise first
            finally:
                del first  # which keeps this frame, and those of all callers with what they hold


def _place_of(mapping: CudaMapping) -> tuple[int, int]:
    memory: Any = mapping.memory
    return memory.place  # type: ignore[no-any-return]


def _who(due: list[CudaMapping], access: Access) -> set[tuple[int, int]]:
    """Return the places that may do so with all of some mappings."""
    found: set[tuple[int, int]] | None = None
    for mapping in due:
        may = {place for place, right in mapping.rights.items() if right >= access}
        found = may if found is None else found & may
    return found or set()
