"""Ordered hand-over: the work that fills memory, as events that the other process waits for (S10)."""

from __future__ import annotations

from .. import driver as drivers
from ..arrays.cuda import settle
from ..driver.foreign import InterprocessEvents
from ..errors import ProtocolError, UsageError
from ..memory import Event, EventPool, Region
from ..sharing.descriptor import EventEntry
from ..spec import Location
from .mapping import device_name, location_of

__all__ = ["Order"]

_MOST = 1024  # events of the other end: it has no use for more


class Order:
    """The events of one connection: those of its own streams, and the other end's by their numbers."""

    def __init__(self) -> None:
        self._pools: dict[Location, EventPool] = {}
        self._numbers: dict[Event, int] = {}
        self._theirs: dict[int, Event | None] = {}

    def record(self, region: Region, stream: int) -> tuple[int, EventEntry | None]:
        """Have an event stand for what is on a stream now.

        Returns
        -------
        number : int
            What it is called; 0 if there was none to be had, and the stream was waited for instead (stated, not luck).
        entry : EventEntry or None
            What the other end has to be told first, the first time.

        Raises
        ------
        UsageError
            If it is no stream of a GPU that may access the memory.
        """
        driver = region.driver
        if not isinstance(driver, InterprocessEvents):
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
                settle(region, stream)
                return 0, None
            number = self._numbers.get(event)
            if number is not None:
                return number, None
            number = self._numbers[event] = len(self._numbers) + 1
            return number, EventEntry(device_name(place), event.export())
        raise wrong or UsageError(f"{stream:#x} is no stream of a GPU that may access the memory")

    def learn(self, number: int, entry: EventEntry) -> None:
        """Open an event of the other end.

        Raises
        ------
        ProtocolError
            If it is none, or its number is known already.
        """
        if number in self._theirs or not 0 < number <= _MOST:
            raise ProtocolError(f"event {number} came, of {len(self._theirs)} that are known")
        place = location_of(entry.device)
        try:
            self._theirs[number] = Event.import_(drivers.get(place), entry.data, place)
        except UsageError:  # the other end is in this very process, where the driver opens no event of its own
            self._theirs[number] = None

    def wait(self, number: int, region: Region, stream: int | None) -> None:
        """Have a stream wait, or wait here, until the work is done that an event of the other end stands for.

        Raises
        ------
        ProtocolError
            If the other end never said which event that is.
        """
        if number not in self._theirs:
            raise ProtocolError(f"an array came with event {number}, which is not known here")
        event = self._theirs[number]
        if event is None:
            region.synchronize()
        elif stream is None:
            event.synchronize()
        else:
            try:
                event.wait(stream)
            except UsageError:  # a stream of another GPU than the event's
                event.synchronize()

    def close(self) -> None:
        """Give all events back."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._numbers.clear()
        for event in self._theirs.values():
            if event is not None:
                event.close()
        self._theirs.clear()
