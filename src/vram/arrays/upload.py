"""Files to GPU memory, and GPU memory to new memory of the host, by several threads through a pinned ring.

One thread reads the page cache slower than the bus takes it, so there are several, each with two slots of the ring: it
reads into one while the GPU copies the other. The other way the kernel has to find each page of new memory, which one
thread does at a twentieth of the speed of the bus. Pinning memory costs some 0.4 s for a GiB, so the ring is pinned at
the first use and kept until :func:`close_rings`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import chain, zip_longest
from typing import Any, cast

from .. import driver as drivers
from ..driver.protocol import DeviceMemory, HostMemory
from ..errors import ClosedError
from ..lifetime import Handle, noted, own, shielded, unwinding, waiting
from ..memory import Region
from ..memory.chunks import destroy_streams
from ..memory.pinned import pin
from ..spec import HOST, Location
from .pieces import P, Pieces

THREADS = max(8, min(16, os.cpu_count() or 1))
SLOT = 8 << 20  # bytes; two for each thread
_Read = tuple[int, int, int, int]  # of which file, from where in it, to which address, how many bytes
_Write = tuple[int, int, int, int]  # from which address, to which file, where in it, how many bytes

_rings: dict[Location, Ring] = {}
_lock = threading.Lock()


@shielded
def ring_of(driver: Any, location: Location) -> Ring:
    """Return the ring of a GPU, made at the first call; `driver` is the one that serves `location`."""
    with _lock:
        ring = _rings.get(location)
        if ring is None:
            ring = _rings[location] = Ring(driver, location)
        return ring


def close_rings() -> None:
    """Give the pinned memory of all rings back. The next file pins anew."""
    with _lock:
        for place in list(_rings):
            _rings.pop(place).close()


class Ring:
    """Pinned memory in slots, a stream, and an event for each slot; one call at a time is served.
    Each of `threads` has two slots of `slot` bytes."""

    def __init__(self, driver: DeviceMemory, location: Location, *, threads: int = THREADS, slot: int = SLOT) -> None:
        self._driver = driver
        host = drivers.get(HOST)
        self._location = location
        self._slot = slot
        self._busy = threading.Lock()  # one file at a time; nothing in a finalizer comes here
        nbytes = threads * 2 * slot
        memory = Region.create(HOST, driver=host, capacity=nbytes, nbytes=nbytes, populate=True, managed=True)
        self._claim = own(f"pinned ring for {location}", None, depends=[memory.handle])
        self._address = address = memory.address
        memory.close()
        self._streams: list[int] = []
        self._events: list[int] = []
        try:
            keep = self._claim.handle.keep
            self._claim.handle.adopt(pin(driver, address, nbytes, location))
            keep("stream of a ring", partial(destroy_streams, driver, self._streams))
            self._streams.append(driver.stream_create(location))
            keep("events of a ring", partial(_destroy_events, driver, self._events))
            for _ in range(threads * 2):
                self._events.append(driver.event_create(location))
            self._buffer = cast("HostMemory", host).buffer(address, nbytes, readonly=False)
        except BaseException as error:
            with unwinding(error):
                self._claim.release()
            raise

    @shielded
    def close(self) -> None:
        """Unpin the memory, once the file that is on its way has arrived. Idempotent."""
        with self._busy:
            self._claim.release()

    def upload(
        self,
        fd: int,
        blocks: Iterable[tuple[int, int, int]],
        changed: Callable[[], Exception],
        *,
        into: Iterable[Handle] = (),
    ) -> None:
        """Copy pieces (file offset, address, bytes) of an open file to the GPU, and return when they are there. The
        targets' handles `into` are kept while a thread or the GPU is at them; `changed` makes a short file's error."""
        self.upload_files(((fd, *block) for block in blocks), lambda _: changed(), into=into)

    @shielded
    def upload_files(
        self, blocks: Iterable[_Read], changed: Callable[[int], Exception], *, into: Iterable[Handle] = ()
    ) -> None:
        """Do as :meth:`upload`, for pieces of several open files, each with its descriptor before it.
        `changed` takes the descriptor of the file that ends too early."""
        work = Pieces(
            (fd, start + done, address + done, min(self._slot, nbytes - done))
            for fd, start, address, nbytes in blocks
            for done in range(0, nbytes, self._slot)
        )
        self._do(work, partial(self._read_in, changed), into)

    @shielded
    def download(self, blocks: Iterable[_Write], *, into: Iterable[Handle] = ()) -> None:
        """Copy pieces (address, file, offset, bytes) of the GPU's memory to files, and return when they are there. In
        new memory of the host a page that is written costs less than one that is mapped, touched and unmapped. Threads
        work in several files at once, in each of which the kernel finds pages one by one. `into` is as for uploads."""
        rows = [
            [(source + at, fd, start + at, min(self._slot, nbytes - at)) for at in range(0, nbytes, self._slot)]
            for source, fd, start, nbytes in blocks
        ]
        self._do(Pieces(filter(None, chain.from_iterable(zip_longest(*rows)))), self._write_out, into)

    def _do(self, work: Pieces[P], run: Callable[[int, Pieces[P]], None], into: Iterable[Handle]) -> None:
        with self._busy:
            if self._claim.is_released:
                raise ClosedError(f"the ring for {self._location} was closed; ask ring_of for another")
            using = own("copies between a file and a GPU", None, depends=[self._claim.handle, *into])
            try:
                work.share_out(run, len(self._events) // 2, "vram upload")
                if work.error is not None:
                    raise work.error
            except BaseException as error:
                with noted(error):
                    self._end(work)
                raise
            else:
                self._end(work)
            finally:
                using.release()

    def _end(self, work: Pieces[P]) -> None:
        """Wait until no thread and no copy of the GPU is at a piece; only then may memory be given up.
        After an error threads stop at the next piece, and a thread that has not begun takes none."""
        work.stop()
        work.done.wait()
        work.error = None  # it keeps this frame, and so would keep itself and all that its callers hold
        self._settle()

    def _settle(self) -> None:
        """The GPU may still read the slots and write the destination: not before this may either be given up."""
        self._driver.stream_synchronize(self._streams[0], self._location)

    def _read_in(self, changed: Callable[[int], Exception], number: int, work: Pieces[_Read]) -> None:
        driver, stream = self._driver, self._streams[0]
        for turn, (fd, start, address, nbytes) in enumerate(iter(work.next, None)):
            slot = number * 2 + turn % 2
            if turn > 1:
                driver.event_synchronize(self._events[slot])
            offset = slot * self._slot
            with self._buffer[offset : offset + nbytes] as buffer:
                _read(fd, start, buffer, changed)
            if work.is_cancelled:  # nobody may be waiting any more, and the descriptor be another file's
                continue
            driver.copy_async(address, self._address + offset, nbytes, stream)
            driver.event_record(self._events[slot], stream)

    def _write_out(self, number: int, work: Pieces[_Write]) -> None:
        driver, stream = self._driver, self._streams[0]
        due: list[tuple[int, int, int, int]] = []  # a slot that is being filled, and what it is for
        for turn, (source, fd, start, nbytes) in enumerate(iter(work.next, None)):
            slot = number * 2 + turn % 2
            driver.copy_async(self._address + slot * self._slot, source, nbytes, stream)
            driver.event_record(self._events[slot], stream)
            if due:
                self._empty(*due.pop())
            due.append((slot, fd, start, nbytes))
        if due:
            self._empty(*due.pop())

    def _empty(self, slot: int, fd: int, start: int, nbytes: int) -> None:
        self._driver.event_synchronize(self._events[slot])
        offset = slot * self._slot
        with self._buffer[offset : offset + nbytes] as buffer:
            write(fd, start, buffer)


def _destroy_events(driver: DeviceMemory, events: list[int]) -> None:
    """Give events back."""
    while events:
        driver.event_destroy(events.pop())


def _read(fd: int, start: int, buffer: memoryview, changed: Callable[[int], Exception]) -> None:
    done = 0
    while done < buffer.nbytes:
        with buffer[done:] as part:
            count = waiting(os.preadv, fd, [part], start + done)
        if not count:
            raise changed(fd)
        done += count


def write(fd: int, start: int, buffer: memoryview) -> None:
    """Write a piece of a file, and have the disk begin with it: or it waits until all is to be flushed."""
    done = 0
    while done < buffer.nbytes:
        with buffer[done:] as part:
            done += waiting(os.pwrite, fd, part, start + done)
    os.posix_fadvise(fd, start, buffer.nbytes, os.POSIX_FADV_DONTNEED)  # which keeps what is not yet on the disk


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _rings.clear()  # the driver does not survive a fork, and neither do these


with suppress(AttributeError):  # other systems
    os.register_at_fork(after_in_child=_after_fork_in_child)
