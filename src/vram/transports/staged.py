"""Over pinned memory of the host: reaches everything, at the speed of the bus.

From GPU to GPU each piece goes down on a stream of the one GPU and up on a stream of the other, and waits for nobody
but the piece before it in the same buffer: with two or more buffers both directions of the bus are busy at once. The
processor only queues. Between host and GPU the processor copies one buffer while the GPU copies another.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from .. import driver as drivers
from ..arrays import Array
from ..errors import UsageError
from ..lifetime import held, let_in, noted, own, shielded
from ..memory import Region
from ..memory.allocation import or_else
from ..memory.pinned import pin
from ..spec import HOST, Location, parse_size
from .contract import No, Yes
from .local import LocalTransport
from .places import seen

SLOTS = 4
SLOT = 4 << 20  # bytes; large enough for the bus, small enough that filling the first costs little


class StagedTransport(LocalTransport):
    """Copies between any two places of one process: through pinned buffers wherever a GPU is one of them.

    Parameters
    ----------
    src, dst : Location or str
        From where to where.
    slots : int
        How many pinned buffers, at least two.
    slot : int or str
        The bytes of each.
    """

    __slots__ = ("_ring",)

    kind = "staged"
    method = "copies through pinned memory of the host"

    @shielded
    def __init__(self, src: Location | str, dst: Location | str, *, slots: int = SLOTS, slot: int | str = SLOT) -> None:
        size = slot_of(slots, slot)
        super().__init__(src, dst)
        with or_else(self._claim.release):
            self._ring = None if self.src == self.dst == HOST else PinnedRing(self.src, self.dst, slots, size)

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether this process sees both places; see the contract."""
        return seen(src, dst)

    def _move(self, source: Array, array: Array) -> None:
        move = source.region.driver.copy if self._ring is None else self._ring.move
        move(array.address, source.address, source.nbytes)

    def _closed(self) -> None:
        super()._closed()
        if self._ring is not None:
            self._ring.close()


def slot_of(slots: int, slot: int | str) -> int:
    """Return the bytes of each of so many buffers. Raises UsageError if nothing can be copied through them."""
    size = parse_size(slot, what="slot")
    if slots < 2 or not size:
        raise UsageError(f"{slots} buffers of {size} bytes: it takes two or more, so that one fills as one empties")
    return size


class PinnedRing:
    """Pinned buffers between two places, a stream on each GPU, and two events for each buffer."""

    def __init__(self, src: Location, dst: Location, slots: int, slot: int) -> None:
        gpu = src if src != HOST else dst
        driver: Any = drivers.get(gpu)
        host: Any = drivers.get(HOST)
        self._driver, self._host = driver, host
        self._src, self._dst = src, dst
        self._slot = slot
        self._busy = threading.Lock()  # one transfer at a time; nothing in a finalizer comes here
        nbytes = slots * slot
        memory = Region.create(HOST, driver=host, capacity=nbytes, nbytes=nbytes, populate=True, managed=True)
        self._claim = own(f"pinned buffers between {src} and {dst}", None, depends=[memory.handle])
        address = memory.address
        memory.close()
        self._slots = [address + number * slot for number in range(slots)]
        self._filled: list[int] = []  # events: what the source put in is there
        self._drained: list[int] = []  # what was in is at the destination
        self._down = self._up = 0
        with or_else(self._claim.release):
            self._claim.handle.adopt(pin(driver, address, nbytes, gpu))
            if src != HOST:
                self._down = self._stream(src)
                self._filled = [self._event(src) for _ in range(slots)]
            if dst != HOST:
                self._up = self._stream(dst)
                self._drained = [self._event(dst) for _ in range(slots)]

    def close(self) -> None:
        """Unpin the memory and give the rest back, after a copy that another thread has under way."""
        with held(self._busy):
            self._claim.release()

    def move(self, destination: int, source: int, nbytes: int) -> None:
        """Copy, and return when it is done."""
        with held(self._busy):
            self._claim.handle.check()
            pieces = [(at, min(self._slot, nbytes - at)) for at in range(0, nbytes, self._slot)]
            try:
                for turn in range(len(pieces) + len(self._slots)):
                    let_in()
                    if turn >= len(self._slots):
                        self._finish(destination, turn - len(self._slots), pieces)
                    if turn < len(pieces):
                        self._begin(destination, source, turn, pieces)
            except BaseException as error:
                with noted(error):
                    self._settle()
                raise
            self._settle()

    def _begin(self, destination: int, source: int, turn: int, pieces: list[tuple[int, int]]) -> None:
        """Fill a buffer, and have the GPU at the destination empty it."""
        (at, nbytes), k, driver = pieces[turn], turn % len(self._slots), self._driver
        if self._down:
            if self._up and turn >= len(self._slots):
                driver.stream_wait(self._down, self._drained[k], self._src)
            driver.copy_async(self._slots[k], source + at, nbytes, self._down)
            driver.event_record(self._filled[k], self._down)
        else:
            self._host.copy(self._slots[k], source + at, nbytes)
        if self._up:
            if self._down:
                driver.stream_wait(self._up, self._filled[k], self._dst)
            driver.copy_async(destination + at, self._slots[k], nbytes, self._up)
            driver.event_record(self._drained[k], self._up)

    def _finish(self, destination: int, turn: int, pieces: list[tuple[int, int]]) -> None:
        """Where the processor copies, wait for the GPU before a buffer is used again; the others go on meanwhile."""
        if turn >= len(pieces) or (self._down and self._up):
            return
        (at, nbytes), k = pieces[turn], turn % len(self._slots)
        self._driver.event_synchronize((self._filled or self._drained)[k])
        if not self._up:
            self._host.copy(destination + at, self._slots[k], nbytes)

    def _settle(self) -> None:
        """The GPUs may still read or write the buffers and both sides: not before this may any be given up."""
        if self._down:
            self._driver.stream_synchronize(self._down, self._src)
        if self._up:
            self._driver.stream_synchronize(self._up, self._dst)

    def _stream(self, place: Location) -> int:
        stream: int = self._driver.stream_create(place)
        self._claim.handle.keep(f"stream on {place}", partial(self._driver.stream_destroy, stream))
        return stream

    def _event(self, place: Location) -> int:
        event: int = self._driver.event_create(place)
        self._claim.handle.keep(f"event on {place}", partial(self._driver.event_destroy, event))
        return event
