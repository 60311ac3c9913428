"""Owned events: what a stream had to do at one moment, which others wait for on the device, across processes too.

An interprocess event is how one process tells another *when* its memory is ready without either of them waiting on the
processor: the one records, sends 64 bytes, and the other's stream waits. Such events are scarce (measured on an H100:
4,096 in a process, then OUT_OF_MEMORY), so who hands over often takes them from an :class:`EventPool`.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..driver.protocol import DeviceMemory, Driver
from ..errors import OutOfMemoryError, UsageError
from ..lifetime import Claim, Owned, own, shielded, unwinding
from ..spec import Location
from . import checks
from .allocation import acquire
from .capabilities import devices

if TYPE_CHECKING:
    from typing import Self

LEGACY_STREAM = 1  # CU_STREAM_LEGACY: the default stream that waits for the blocking streams of its context
_Answer = TypeVar("_Answer")


class Event(Owned):
    """A mark in the work of a stream. Made by :meth:`create`, or by :meth:`import_` of another process's.

    Recorded again it stands for the later moment, also for who was told of the earlier one. An event that was never
    recorded counts as done.
    """

    __slots__ = ("_driver", "_exported", "_interprocess", "_is_imported", "_location", "_number", "_warn_on_leak")

    def __init__(
        self, driver: Driver, location: Location, made: tuple[Claim, int],
        *, interprocess: bool, imported: bool = False, managed: bool = False,
    ) -> None:  # fmt: skip
        self._driver = driver
        self._location = location
        claim, self._number = made
        self._interprocess = interprocess
        self._is_imported = imported
        self._exported: bytes | None = None
        self._warn_on_leak = not managed
        self._claim = claim

    @classmethod
    @shielded
    def create(
        cls, driver: Driver, location: Location | str, *, interprocess: bool = False, managed: bool = False
    ) -> Self:
        """Make an event of a GPU. It measures no time.

        Parameters
        ----------
        driver : Driver
            The driver that serves `location`.
        location : Location or str
            The GPU whose streams it will be recorded on.
        interprocess : bool
            Whether other processes are to wait for it, see :meth:`export`. There are few of those.
        managed : bool
            No warning if it is garbage-collected without :meth:`close`.

        Raises
        ------
        OutOfMemoryError
            If there are no more: measured, of the interprocess kind 4,096 in a process.
        UnsupportedError
            If the driver has no events.
        """
        able, is_for_others = _events(driver), bool(interprocess)
        place = checks.place(driver, location)
        label = f"{'interprocess ' if is_for_others else ''}event on {place}"
        made = acquire(label, partial(able.event_create, place, interprocess=is_for_others), able.event_destroy)
        return cls(driver, place, made, interprocess=is_for_others, managed=managed)

    @classmethod
    @shielded
    def import_(cls, driver: Driver, handle: bytes, location: Location | str) -> Self:
        """Open another process's event by its 64 bytes.

        Its maker keeps it for as long as it is used here: what happens otherwise is undefined, says the CUDA manual.

        Parameters
        ----------
        handle : bytes
            The result of :meth:`export` there, 64 bytes.
        location : Location or str
            The GPU that the event is of.

        Raises
        ------
        ProtocolError
            If the bytes are no handle of an event.
        UsageError
            If this very process made it: the driver opens it in others only.
        UnsupportedError
            If the driver has no events that leave the process.
        """
        able, place = _events(driver), checks.place(driver, location)
        open_it = partial(able.event_import, checks.handle_bytes(handle), place)
        made = acquire(f"event of another process on {place}", open_it, able.event_destroy)
        return cls(driver, place, made, interprocess=True, imported=True)

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def driver(self) -> Driver:
        """The driver that made it."""
        return self._driver

    @property
    def location(self) -> Location:
        """The GPU that it is of."""
        return self._location

    @property
    def driver_event(self) -> int:
        """The driver's own number for it. Raises ClosedError or ForkedError when that means nothing any more."""
        self.handle  # noqa: B018  (the check)
        return self._number

    @property
    def is_interprocess(self) -> bool:
        """Whether other processes can wait for it."""
        return self._interprocess

    @property
    def is_imported(self) -> bool:
        """Whether another process made it."""
        return self._is_imported

    def __repr__(self) -> str:
        words = {"interprocess": self._interprocess, "imported": self._is_imported, "closed": self.is_closed}
        return f"<Event {self.location}{''.join(f', {word}' for word, state in words.items() if state)}>"

    # -- work ---------------------------------------------------------------------------------------------------
    def record(self, stream: int = LEGACY_STREAM) -> None:
        """Have it stand for what is on a stream now.

        Parameters
        ----------
        stream : int
            The driver's number of it, which other libraries' streams have too; 1 is the legacy default stream.

        Raises
        ------
        UsageError
            If that is no stream of the event's GPU.
        """
        number = stream_number(stream)
        self._use("record", lambda event: _events(self.driver).event_record(event, number))

    def wait(self, stream: int = LEGACY_STREAM, location: Location | str | None = None) -> None:
        """Have a stream wait, on the GPU, until what was recorded is done. Returns at once.

        Parameters
        ----------
        stream : int
            The driver's number of it.
        location : Location or str, optional
            The stream's GPU, by default the event's own. It decides which default stream 1 is, and nothing else.

        Raises
        ------
        UsageError
            If that is no stream.
        """
        number = stream_number(stream)
        place = self.location if location is None else checks.place(self.driver, location)
        self._use("wait", lambda event: _events(self.driver).stream_wait(number, event, place))

    def synchronize(self) -> None:
        """Return when what was recorded is done. However long that takes: the driver knows no deadline."""
        self._use("synchronize", _events(self.driver).event_synchronize)

    @property
    def is_done(self) -> bool:
        """Whether what was recorded is done."""
        return self._use("is_done", _events(self.driver).event_is_done)

    # -- other processes ----------------------------------------------------------------------------------------
    def export(self) -> bytes:
        """Return the 64 bytes by which another process opens it. Made at the first call and kept.

        Keep the event until the others have let go of theirs. The bytes are no secret: who has them can wait for it,
        and record it.

        Raises
        ------
        UsageError
            If it was not made with ``interprocess=True``, or another process made it.
        """
        self.handle  # noqa: B018  (the check)
        if self._exported is None:  # two threads are given the same bytes
            self._exported = self._use("export", _events(self.driver).event_export)
        return self._exported

    def _use(self, what: str, call: Callable[[int], _Answer]) -> _Answer:
        """Call the driver with the event, which another thread may close meanwhile."""
        using = self.handle.claim(what)
        try:
            return call(self._number)
        finally:
            using.release()


class EventPool(Owned):
    """An interprocess event for each stream that asks, at most `limit`: nobody knows when the last receiver has waited,
    so none is given back early. Stream numbers are reused: a stream waits for its event before it records it again."""

    __slots__ = ("_driver", "_events", "_limit", "_location", "_lock")

    _warn_on_leak = False  # its events go with it, and closing them late is harmless

    def __init__(self, driver: Driver, location: Location | str, limit: int = 32) -> None:
        _events(driver)
        if type(limit) is not int or limit < 0:
            raise UsageError(f"limit must be a number of events, 0 or more, not {limit!r}")
        self._driver = driver
        self._location = checks.place(driver, location)
        self._limit = limit
        self._events: dict[int, Event] = {}
        self._lock = threading.RLock()  # held over driver calls; never reached from a finalizer
        self._claim = own(f"events for the streams of {self._location}", None)

    def __len__(self) -> int:
        return len(self._events)

    def on(self, stream: int = LEGACY_STREAM) -> Event | None:
        """Record what is on a stream now, and return the event, which stays the pool's: wait for it, never close it.
        None if no event is left (`limit`, or the driver's own): the caller then waits for the stream instead."""
        number = stream_number(stream) or LEGACY_STREAM  # 0 is another name of that one
        self.handle  # noqa: B018  (the check, before the lock that a fork may have left locked)
        with self._lock:
            found = self._events.get(number)
            if found is not None:
                found.wait(number)
                found.record(number)
                return found
            if len(self._events) >= self._limit:
                return None
            try:
                made = Event.create(self._driver, self._location, interprocess=True, managed=True)
            except OutOfMemoryError:
                return None
            try:
                made.record(number)
                self._events[number] = made
                self.handle  # noqa: B018  (looked at last: from here on close() sees the new one)
            except BaseException as error:
                self._events.pop(number, None)
                with unwinding(error):
                    made.close()
                raise
            return made

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Give all events back; handles that were sent must not be needed any more (see :meth:`Event.export`).
        Idempotent. Never raises unless `strict`; see :meth:`vram.lifetime.Owned.close`."""
        super().close(strict=strict)
        while self._events:
            try:
                _, event = self._events.popitem()
            except KeyError:  # another thread closes it too
                return
            event.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{len(self._events)} of {self._limit} events"
        return f"<EventPool {self._location}, {state}>"


def _events(driver: Driver) -> DeviceMemory:
    return devices(driver, "events", "Its work is done when the call returns")


def stream_number(stream: Any) -> int:
    """Return the driver's number of a stream, checked for being one."""
    try:
        number = operator.index(stream)
    except TypeError:
        number = -1
    if isinstance(stream, bool) or not 0 <= number < 1 << 64:
        raise UsageError(f"stream must be the driver's number of one (1: the legacy default stream), not {stream!r}")
    return number
