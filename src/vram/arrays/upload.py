"""Files to GPU memory: several threads read into a pinned ring, and the GPU copies out of it meanwhile.

One thread reads the page cache slower than the bus takes it, so there are several, each with two slots of the ring: it
reads into one while the GPU copies the other. Pinning memory costs some 0.4 s for a GiB, so the ring is pinned at the
first file and kept until :func:`close_rings`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from .. import driver as drivers
from ..driver.protocol import StreamOrdered
from ..errors import ClosedError
from ..lifetime import noted, own, unwinding
from ..memory import Region
from ..spec import HOST, Location

__all__ = ["Ring", "close_rings", "ring_of"]

THREADS = 8
SLOT = 8 << 20  # bytes; two for each thread
_Block = tuple[int, int, int]  # from where in the file, to which address, how many bytes

_rings: dict[Location, Ring] = {}
_lock = threading.Lock()


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
    """Pinned memory in slots, a stream, and an event for each slot.

    Parameters
    ----------
    threads, slot : int
        How many read, and the bytes of each of their two slots.
    """

    def __init__(self, driver: StreamOrdered, location: Location, *, threads: int = THREADS, slot: int = SLOT) -> None:
        self._driver = driver
        self._location = location
        self._slot = slot
        self._busy = threading.Lock()  # one file at a time; nothing in a finalizer comes here
        nbytes = threads * 2 * slot
        host: Any = drivers.get(HOST)
        memory = Region.create(HOST, driver=host, capacity=nbytes, nbytes=nbytes, populate=True, managed=True)
        self._claim = own(f"pinned ring for {location}", None, depends=[memory.handle])
        address = memory.address
        memory.close()
        try:
            driver.host_register(address, nbytes, location)
            self._keep(f"pinned memory at {address:#x}", partial(driver.host_unregister, address))
            self._stream = driver.stream_create(location)
            self._keep("stream of a ring", partial(driver.stream_destroy, self._stream))
            self._events = []
            for _ in range(threads * 2):
                self._events.append(event := driver.event_create(location))
                self._keep("event of a ring", partial(driver.event_destroy, event))
            self._buffer = host.buffer(address, nbytes, readonly=False)
        except BaseException as error:
            with unwinding(error):
                self._claim.release()
            raise
        self._address = address

    def close(self) -> None:
        """Unpin the memory, once the file that is on its way has arrived. Idempotent."""
        with self._busy:
            self._claim.release()

    def upload(self, fd: int, blocks: Iterable[tuple[int, int, int]], changed: Callable[[], Exception]) -> None:
        """Copy pieces of an open file to addresses of the GPU's, and return when they are there.

        Parameters
        ----------
        blocks : iterable of (int, int, int)
            From where in the file, to which address, how many bytes.
        changed : callable
            Returns the error for a file that ends too early.
        """
        work = _Work(
            (start + done, address + done, min(self._slot, nbytes - done))
            for start, address, nbytes in blocks
            for done in range(0, nbytes, self._slot)
        )
        with self._busy:
            if self._claim.is_released:
                raise ClosedError(f"the ring for {self._location} was closed; ask ring_of for another")
            try:
                self._share_out(fd, work, changed)
                if work.error is not None:
                    raise work.error
            except BaseException as error:
                work.stop()
                work.error = None  # it keeps this frame, and so would keep itself and all that its callers hold
                with noted(error):
                    self._settle()
                raise
            self._settle()

    def _share_out(self, fd: int, work: _Work, changed: Callable[[], Exception]) -> None:
        """Have the pieces read, by no more threads than there are pieces, and wait for the threads."""
        count = min(len(self._events) // 2, work.pieces)
        if count == 1:  # a small tensor: not worth a thread
            self._run(0, fd, work, changed)
            return
        started: list[threading.Thread] = []
        try:
            for number in range(count):
                arguments = (number, fd, work, changed)
                thread = threading.Thread(target=self._run, args=arguments, name="vram upload", daemon=True)
                thread.start()
                started.append(thread)
            for thread in started:
                thread.join()
        except BaseException:  # an interrupt: they stop at the next piece
            work.stop()
            raise
        finally:
            for thread in started:
                thread.join()

    def _settle(self) -> None:
        """The GPU may still read the slots and write the destination: not before this may either be given up."""
        self._driver.stream_synchronize(self._stream, self._location)

    def _run(self, number: int, fd: int, work: _Work, changed: Callable[[], Exception]) -> None:
        driver, stream = self._driver, self._stream
        turn = 0
        try:
            for start, address, nbytes in iter(work.next, None):
                slot = number * 2 + turn % 2
                turn += 1
                if turn > 2:
                    driver.event_synchronize(self._events[slot])
                offset = slot * self._slot
                with self._buffer[offset : offset + nbytes] as buffer:
                    _read(fd, start, buffer, changed)
                driver.copy_async(address, self._address + offset, nbytes, stream)
                driver.event_record(self._events[slot], stream)
        except BaseException as error:  # noqa: BLE001  (raised where upload was called)
            work.fail(error)

    def _keep(self, label: str, undo: Callable[[], object]) -> None:
        self._claim.handle.adopt(own(label, undo))


class _Work:
    """Pieces that several threads take, until there are none or one of them failed."""

    def __init__(self, pieces: Iterable[_Block]) -> None:
        waiting = list(pieces)
        self.pieces = len(waiting)
        self._pieces = iter(waiting)
        self._lock = threading.Lock()
        self._stopped = False
        self.error: BaseException | None = None

    def next(self) -> _Block | None:
        with self._lock:
            return None if self._stopped else next(self._pieces, None)

    def stop(self) -> None:
        self._stopped = True

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
            self._stopped = True


def _read(fd: int, start: int, buffer: memoryview, changed: Callable[[], Exception]) -> None:
    done = 0
    while done < buffer.nbytes:
        with buffer[done:] as part:
            count = os.preadv(fd, [part], start + done)
        if not count:
            raise changed()
        done += count


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _rings.clear()  # the driver does not survive a fork, and neither do these


with suppress(AttributeError):  # other systems
    os.register_at_fork(after_in_child=_after_fork_in_child)
