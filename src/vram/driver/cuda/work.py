"""Work of the GPU, under its primary context: copies and fills, streams and events.

Calls without a stream return when they are done. They run on the legacy default stream, which waits for the work of
other libraries that did not ask for non-blocking streams.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from ...errors import DriverError, UsageError
from ...lifetime import noted
from ...spec import Access, Location
from .. import libc
from ..arguments import check_apart, check_byte
from ..books import Books
from .bindings import Bindings, check_numbers
from .devices import DEVICE, Device, Devices
from .failures import CAPTURE_IMPLICIT, INVALID_VALUE, NOT_READY
from .foreign import Foreign
from .memory import grant, no_access
from .objects import NOWHERE, CudaMapping, Table

_LEGACY = 1  # CU_STREAM_LEGACY: valid in any context
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_DISABLE_TIMING, _INTERPROCESS = 2, 4  # CU_EVENT_*
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: for every context


class Work:
    """Copies and fills, streams and events, and memory of the host that GPUs read on their own."""

    def __init__(self, bindings: Bindings, devices: Devices, books: Books, foreign: Foreign, events: Table) -> None:
        self._call = bindings
        self._devices = devices
        self._books = books
        self._foreign = foreign
        self._lending = threading.Lock()  # no undo comes here
        self.events = events
        self.streams = Table(bindings, devices, "cuStreamDestroy", "no stream of this driver")
        self.registered = Table(bindings, devices, "cuMemHostUnregister", "nothing was registered there")

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
        return self.streams.make(device, "cuStreamCreate", _NON_BLOCKING)

    def stream_destroy(self, stream: int) -> None:
        self.streams.take_back("stream_destroy", stream)

    def stream_synchronize(self, stream: int, location: Location) -> None:
        self._devices.device(location).run(lambda: self._call("cuStreamSynchronize", stream))

    def stream_is_capturing(self, stream: int, location: Location) -> bool:
        try:
            words = f"stream_is_capturing: {stream:#x} is no stream (any more)"
            return int(self._devices.device(location).on_stream(words, "cuStreamIsCapturing", stream)) != 0
        except DriverError as error:
            if error.code == CAPTURE_IMPLICIT:  # a stream that the legacy one waits for does
                return True
            raise

    def stream_wait(self, stream: int, event: int, location: Location) -> None:
        words = f"stream_wait: {stream:#x} is no stream (any more), or {event:#x} no event"
        self._devices.device(location).on_stream(words, "cuStreamWaitEvent", stream, event, 0)

    def event_create(self, location: Location, *, interprocess: bool = False) -> int:
        device = self._devices.device(location)
        flags = _DISABLE_TIMING | (_INTERPROCESS if interprocess else 0)
        return self.events.make(device, "cuEventCreate", flags)

    def event_record(self, event: int, stream: int) -> None:
        words = f"event_record: {stream:#x} is no stream (any more) of the GPU that the event {event:#x} is of"
        self.events.device_of(event).on_stream(words, "cuEventRecord", event, stream)

    def event_is_done(self, event: int) -> bool:
        try:
            self.events.device_of(event).run(lambda: self._call("cuEventQuery", event))
        except DriverError as error:
            if error.code == NOT_READY:
                return False
            raise
        return True

    def event_synchronize(self, event: int) -> None:
        self.events.device_of(event).run(lambda: self._call("cuEventSynchronize", event))

    def event_destroy(self, event: int) -> None:
        self.events.take_back("event_destroy", event)

    # -- memory of the host that the GPU reads on its own ---------------------------------------------------------
    def host_register(self, address: int, nbytes: int, location: Location) -> None:
        device = self._devices.device(location)
        check_numbers("cuMemHostRegister", address, nbytes)
        self.registered.make(device, "cuMemHostRegister", address, nbytes, _PORTABLE, number=address)

    def host_unregister(self, address: int) -> None:
        self.registered.take_back("host_unregister", address)

    # -- inside -------------------------------------------------------------------------------------------------
    def _home_of(self, address: int, error: DriverError) -> Device | None:
        """Return the GPU whose memory an address is, if it is any's; `error` is what the question is asked for."""
        try:
            return self._devices.all[self._foreign.ordinal_of(address)]
        except UsageError:
            return None
        except DriverError as second:
            error.add_note(f"and then: {second}")
            return None

    def _under(self, stream: int) -> Device:
        ordinal = self.streams.out.get(stream)
        if ordinal is None:
            raise UsageError(f"{stream:#x} is no stream of this driver; make one with stream_create")
        return self._devices.all[ordinal]

    def _do(self, device: Device, call: str, *arguments: Any) -> None:
        """Have a device do something, and return when it is done."""

        def work() -> None:
            self._call(call, *arguments)
            self._call("cuStreamSynchronize", _LEGACY)

        device.run(work)

    def _accessible(self, call: str, address: int, nbytes: int, access: Access) -> list[Any]:
        if self._foreign.windows and nbytes > 0:
            window = self._foreign.window_over(call, address, nbytes, access)
            if window is not None:
                return [window]
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

    def _copy_between(self, destination: int, source: int, nbytes: int, writing: list[Any], reading: list[Any]) -> None:
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
        may_read = grant(self._call, Access.READ, place)
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
                    raise no_access(self._devices, error, reading[0].memory.place, [place]) from None
                raise
            self._end_loan(lent, place)

    def _end_loan(self, lent: list[CudaMapping], place: tuple[int, int]) -> None:
        # Each, whatever becomes of the others: nobody else would take back a right that the books do not know (I4).
        first: DriverError | None = None
        for mapping in lent:
            before = grant(self._call, mapping.rights.get(place, Access.NONE), place)
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


def _who(due: list[CudaMapping], access: Access) -> set[tuple[int, int]]:
    """Return the places that may do so with all of some mappings."""
    found: set[tuple[int, int]] | None = None
    for mapping in due:
        may = {place for place, right in mapping.rights.items() if right >= access}
        found = may if found is None else found & may
    return found or set()
