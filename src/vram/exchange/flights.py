"""Arrays on their way: pickled here, and not yet unpickled by anybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..lifetime import Claim
from ..memory import Pin, Region
from .handover import Lent

__all__ = ["FLIGHT_SECONDS", "ORPHAN_SECONDS", "Flights"]

FLIGHT_SECONDS = 600.0
ORPHAN_SECONDS = 10.0  # for whoever takes the place of a process that died to unpickle what was meant for it


class _Flight:
    """A memory that one thread pickled more often than it was unpickled since.

    While it has its pin the owner cannot shrink the memory. A claim alone keeps the memory, of whatever size.
    """

    __slots__ = ("by", "claim", "count", "lent", "pin", "since", "who")

    def __init__(self, lent: Lent, by: int, who: Callable[[int], str]) -> None:
        self.lent = lent
        self.by = by
        self.who = who
        self.pin: Pin | None = None
        self.claim: Claim | None = None  # in place of the pin
        self.count = 0
        self.since = 0.0

    def __str__(self) -> str:
        """Say who holds it and what to do, for the BusyError of a shrink."""
        return (
            f"in flight to another process (pickled, and {max(self.count, 1)} times not yet unpickled). "
            f"{self.who(self.by)}"
        )

    def keep(self, region: Region) -> None:
        """Pin all that a region has by now."""
        if self.pin is not None and region.nbytes <= self.pin.stop:
            return
        before, self.pin = self.pin, region.pin(0, region.nbytes, self)
        if before is not None:
            before.release()
        if self.claim is not None:
            self._let_go_of_claim()

    def loosen(self) -> None:
        """Keep the memory, and let its owner shrink it."""
        if self.pin is not None:
            self.claim = self.lent.memory.claim("in flight to another process")
            self.pin.release()
            self.pin = None

    def release(self) -> None:
        """Keep nothing."""
        if self.pin is not None:
            self.pin.release()
        if self.claim is not None:
            self._let_go_of_claim()

    def _let_go_of_claim(self) -> None:
        claim, self.claim = self.claim, None
        if claim is not None:
            claim.release()


class Flights:
    """Keeps memory until what was pickled of it has arrived.

    A flight whose sender has dropped the array ends :data:`FLIGHT_SECONDS` after the last sign of it. One that was
    meant for a process which died ends :data:`ORPHAN_SECONDS` after that, and lets its owner shrink it at once.

    For whom a pickle is nobody can know. What one thread pickles goes the same way, mostly: a queue of multiprocessing
    has a thread of its own to pickle. So flights are told apart by the thread that pickled them, and who has unpickled
    one is expected to unpickle the others.

    Parameters
    ----------
    late : callable
        Told the id of a memory that was lent anew while in flight, once the flight is over.
    lent : callable
        Returns what an id stands for; None, or something else, if no longer for what was lent under it.
    who : callable
        Returns what to say of who is to unpickle what the thread of a number pickled.
    """

    def __init__(
        self, late: Callable[[int], None], lent: Callable[[int], Lent | None], who: Callable[[int], str]
    ) -> None:
        self._late = late
        self._lent = lent
        self._who = who
        self._flights: dict[tuple[int, int], _Flight] = {}  # by memory and thread
        self._orphans: dict[_Flight, float] = {}  # those whose readers died, and when they end
        self._lock = threading.Lock()  # never taken by a finalizer

    def begin(self, lent: Lent, region: Region, by: int) -> None:
        """One more array on this memory was pickled, by the thread of this number."""
        flight: _Flight | None = None
        is_counted = False
        try:
            with self._lock:
                flight = self._flights.get((lent.id, by))
                if flight is None:
                    flight = _Flight(lent, by, self._who)
                flight.keep(region)
                if self._orphans:
                    self._orphans.pop(flight, None)
                flight.since = time.monotonic()
                flight.count += 1  # from here on no interrupt comes before all is noted (I12)
                self._flights[lent.id, by] = flight
                is_counted = True
        except BaseException:
            if is_counted:
                self.land(lent.id, [1], by)
            elif flight is not None and not flight.count:
                flight.release()
            raise

    def find(self, memory: int) -> Lent | None:
        """Return what is in flight under an id, if it is."""
        with self._lock:
            return next((flight.lent for (number, _), flight in self._flights.items() if number == memory), None)

    def land(self, memory: int, times: list[int], by: int = 0) -> None:
        """Arrays on a memory arrived; 0 for `by` is whoever pickled it.

        Parameters
        ----------
        times : list of int
            How many, as one number. The list is emptied in the step that counts them: after an interrupt it says
            whether that was done (I12).
        """
        over: _Flight | None = None
        try:
            with self._lock:
                if not by:
                    by = next((thread for number, thread in self._flights if number == memory), 0)
                flight = self._flights.get((memory, by))
                if flight is None or not times:
                    return
                flight.since = time.monotonic()
                if self._orphans:
                    self._orphans.pop(flight, None)
                flight.count -= times[0]
                del times[:]
                if flight.count <= 0:
                    del self._flights[memory, by]
                    over = flight
        finally:
            if over is not None:
                try:
                    self._end(over)
                except BaseException:  # an interrupt: its pin knows the flight, so nothing else would let go of it
                    self._end(over)
                    raise

    def orphan(self, by: int) -> None:
        """All who unpickled what a thread pickled are gone, and the last of them did not take its leave."""
        until = time.monotonic() + ORPHAN_SECONDS
        with self._lock:
            for (_, thread), flight in self._flights.items():
                if thread == by:
                    flight.loosen()
                    self._orphans[flight] = until

    def end_stale(self) -> float:
        """End the flights that nobody seems to wait for; return in how many seconds to look again."""
        now = time.monotonic()
        horizon = now - FLIGHT_SECONDS
        with self._lock:
            ended = [key for key, flight in self._flights.items() if self._is_over(flight, now, horizon)]
            stale = [self._flights.pop(key) for key in ended]
            for flight in stale:
                self._orphans.pop(flight, None)
            soon = min(self._orphans.values(), default=now + FLIGHT_SECONDS) - now
        for flight in stale:
            self._end(flight)
        return min(FLIGHT_SECONDS / 10, max(soon, 0.0))

    def _is_over(self, flight: _Flight, now: float, horizon: float) -> bool:
        if self._orphans and self._orphans.get(flight, now + 1.0) <= now:
            return True
        if flight.since >= horizon:
            return False
        if flight.lent.is_at_home:  # then whoever comes late finds it all the same; its size is its owner's again
            flight.loosen()
            return False
        return True

    def end_all(self) -> None:
        """End every flight: what has not arrived is lost."""
        with self._lock:
            flights, self._flights = self._flights, {}
            self._orphans.clear()
        for flight in flights.values():
            flight.release()

    def _end(self, flight: _Flight) -> None:
        late = self._lent(flight.lent.id) is not flight.lent
        flight.release()
        if late:
            self._late(flight.lent.id)
