"""Ordered hand-over: the work that fills memory, as events that the other process waits for (S10)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from .. import driver as drivers
from ..arrays.streams import stream_synchronize
from ..driver.protocol import DeviceMemory
from ..errors import PeerGoneError, ProtocolError, UsageError
from ..lifetime import Handle, waiting
from ..memory import Event, EventPool, Region
from ..sharing.descriptor import EventEntry
from ..sharing.mapping import device_name, location_of
from ..spec import Location

_SHORTEST, _LONGEST = 20e-6, 2e-3  # seconds between two looks at an event
_MOST = 1024  # events of the other end: it has no use for more


def wait_for(entries: Sequence[EventEntry], stream: int | None) -> Iterator[Handle]:
    """Have a stream wait for events of another process; without a stream wait here.
    Yields the handle of each event that the stream waits for: the caller keeps it until that may be over."""
    for entry in entries:
        place = location_of(entry.device)
        try:
            event = Event.import_(drivers.get(place), entry.data, place)
        except UsageError:  # this very process lends it
            continue
        with event:
            if stream is not None:
                with suppress(UsageError):  # no stream (any more), which nothing can be ordered after: here then
                    event.wait(stream)
                    yield event.handle
                    continue
            event.synchronize()


class StreamEvents:
    """The events of one connection: those of its own streams, and the other end's by their numbers."""

    def __init__(self) -> None:
        self._pools: dict[Location, EventPool] = {}
        self._numbers: dict[Event, int] = {}
        self.told: set[int] = set()  # numbers that the other end knows
        self._theirs: dict[int, Event | Location] = {}  # a place, where the other end is in this very process

    def record(self, region: Region, stream: int) -> tuple[int, EventEntry | None]:
        """Have an event stand for what is on a stream now; return its number (0: none was to be had, and the stream was
        waited for), and its entry if the other end has to be told first, after which the number is put into `told`."""
        driver = region.driver
        if not isinstance(driver, DeviceMemory):
            return 0, None  # memory of the host: what is written is there
        wrong: UsageError | None = None
        for place in region.users:  # an event is recorded on streams of its own GPU only
            pool = self._pools.get(place)
            if pool is None:
                pool = self._pools[place] = EventPool(driver, place)
            try:
                event = pool.on(stream)
            except UsageError as error:
                wrong = error
                continue
            if event is None:
                stream_synchronize(region, stream)
                return 0, None
            number = self._numbers.setdefault(event, len(self._numbers) + 1)
            return number, None if number in self.told else EventEntry(device_name(place), event.export())
        raise wrong or UsageError(f"{stream:#x} is no stream of a GPU that may access the memory")

    def learn(self, number: int, entry: EventEntry) -> None:
        """Open an event of the other end. Raises ProtocolError if it is none, or its number is known already."""
        if number in self._theirs or not 0 < number <= _MOST:
            raise ProtocolError(f"event {number} came, of {len(self._theirs)} that are known")
        place = location_of(entry.device)
        driver = drivers.get(place)
        if not isinstance(driver, DeviceMemory):
            raise ProtocolError(f"event {number} came of {place}, where there are none")
        try:
            self._theirs[number] = Event.import_(driver, entry.data, place)
        except UsageError:  # the other end is in this very process, where the driver opens no event of its own
            self._theirs[number] = place

    def wait(self, number: int, region: Region, stream: int | None, check: Callable[[], object]) -> None:
        """Have a stream (of the GPU that works on `region` here) wait for an event of the other end, or wait here.
        `check` is polled meanwhile and raises if there is no use: the event of a killed process may never be done."""
        if number not in self._theirs:
            raise ProtocolError(f"an array came with event {number}, which is not known here")
        event = self._theirs[number]
        if isinstance(event, Location):
            drivers.get(event).synchronize(event)
            return
        if stream is not None:
            with suppress(UsageError):  # no stream (any more): here then
                event.wait(stream, region.users[0])
                return
        pause = _SHORTEST
        while not event.is_done:
            try:
                check()
            except PeerGoneError:
                if not event.is_done:  # nor was it before that
                    raise
            waiting(time.sleep, pause)
            pause = min(2 * pause, _LONGEST)

    def synchronize(self) -> None:
        """Return when all work is done that events of this end stand for."""
        for event in list(self._numbers):
            event.synchronize()

    def close(self) -> None:
        """Give all events back."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._numbers.clear()
        self.told.clear()
        for event in self._theirs.values():
            if isinstance(event, Event):
                event.close()
        self._theirs.clear()
