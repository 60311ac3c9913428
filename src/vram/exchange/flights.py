"""Arrays on their way: pickled here, and not yet unpickled by anybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..memory import Pin, Region
from .handover import Lent

__all__ = ["FLIGHT_SECONDS", "Flights"]

FLIGHT_SECONDS = 600.0


class _Flight:
    """The pin of a memory that was pickled more often than it was unpickled."""

    __slots__ = ("count", "lent", "pin", "since")

    def __init__(self, lent: Lent, region: Region) -> None:
        self.lent = lent
        self.pin = _pinned(region)
        self.count = 0
        self.since = 0.0


class Flights:
    """Keeps memory until what was pickled of it has arrived.

    A flight whose sender has dropped the array ends :data:`FLIGHT_SECONDS` after the last sign of it.

    Parameters
    ----------
    late : callable
        Told the id of a memory that was lent anew while in flight, once the flight is over.
    is_known : callable
        Whether an id still stands for what was lent under it.
    """

    def __init__(self, late: Callable[[int], None], is_known: Callable[[Lent], bool]) -> None:
        self._late = late
        self._is_known = is_known
        self._flights: dict[int, _Flight] = {}
        self._lock = threading.Lock()  # never taken by a finalizer

    def begin(self, lent: Lent, region: Region) -> None:
        """One more array on this memory was pickled."""
        with self._lock:
            flight = self._flights.get(lent.id)
            if flight is None:
                flight = _Flight(lent, region)
            elif region.nbytes > flight.pin.stop:  # it has grown since
                before, flight.pin = flight.pin, _pinned(region)
                before.release()
            flight.count += 1
            flight.since = time.monotonic()
            self._flights[lent.id] = flight

    def find(self, memory: int) -> Lent | None:
        """Return what is in flight under an id, if it is."""
        flight = self._flights.get(memory)
        return None if flight is None else flight.lent

    def land(self, memory: int, times: int) -> None:
        """So many arrays on a memory arrived."""
        with self._lock:
            flight = self._flights.get(memory)
            if flight is None:
                return
            flight.count -= times
            flight.since = time.monotonic()
            if flight.count > 0:
                return
            del self._flights[memory]
        self._end(flight)

    def end_stale(self) -> None:
        """End the flights that nobody seems to wait for."""
        horizon = time.monotonic() - FLIGHT_SECONDS
        with self._lock:
            flights = tuple(self._flights.items())
            ended = [n for n, flight in flights if flight.since < horizon and not flight.lent.is_at_home]
            stale = [self._flights.pop(number) for number in ended]
        for flight in stale:
            self._end(flight)

    def end_all(self) -> None:
        """End every flight: what has not arrived is lost."""
        with self._lock:
            flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.pin.release()

    def _end(self, flight: _Flight) -> None:
        late = not self._is_known(flight.lent)
        flight.pin.release()
        if late:
            self._late(flight.lent.id)


def _pinned(region: Region) -> Pin:
    return region.pin(0, region.nbytes, "in flight to another process")
