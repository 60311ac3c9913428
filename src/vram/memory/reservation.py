"""Addresses without memory, and memory put behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ..driver.protocol import Driver
from ..errors import DeviceLostError, UsageError, VramError
from ..lifetime import Claim, Handle, Owned, own, shielded, take
from ..spec import Access, Location, format_size
from . import checks
from .allocation import Memory, PhysicalAllocation, or_else
from .capabilities import copy_on_write, devices

if TYPE_CHECKING:
    from typing import Self


class AddressRange:
    """A reservation's shared state, and its undo. `spans` maps the offset of what is mapped to its size; an undo that
    fails leaves its own. `workers` are devices whose work an unmap waits for."""

    __slots__ = ("address", "driver", "handle", "is_reserved", "nbytes", "spans", "workers")

    handle: Handle

    def __init__(self, driver: Driver, nbytes: int, address: int = 0) -> None:
        self.driver = driver
        self.address = address
        self.nbytes = nbytes
        self.is_reserved = False
        self.spans: dict[int, int] = {}
        self.workers: tuple[Location, ...] = ()

    def describe(self) -> str:
        """Return the label of the handle."""
        where = f" at {self.address:#x}" if self.address else ""
        return f"reservation of {format_size(self.nbytes)}{where}"

    def __call__(self) -> None:
        if self.is_reserved:
            self.driver.address_free(self.address, self.nbytes)


class AddressReservation(Owned):
    """A range of addresses that nothing else in this process will get. Made by :meth:`reserve`."""

    __slots__ = ("_range", "_warn_on_leak")

    def __init__(self, range_: AddressRange, claim: Claim, *, managed: bool = False) -> None:
        self._range = range_
        self._warn_on_leak = not managed
        self._claim = claim

    @classmethod
    @shielded
    def reserve(cls, driver: Driver, nbytes: int | str, *, alignment: int = 0, address: int = 0) -> Self:
        """Reserve addresses; no memory is behind them yet, and touching them faults.

        Parameters
        ----------
        nbytes : int or str
            Size in bytes, a positive multiple of the granularity.
        alignment : int
            A power of two that the address must be a multiple of, in bytes; 0 means the granularity.
        address : int
            Where the range should be if that is free: a wish, not a demand. 0 means anywhere.

        Raises
        ------
        AlignmentError, UsageError
            For numbers that cannot be, naming the nearest that can.
        AddressSpaceError
            If no such range is left.
        """
        numbers = checks.size(alignment, "alignment"), checks.size(address, "address")
        where = AddressRange(checks.driver_of(driver), checks.size(nbytes, "nbytes"))
        claim = own(where.describe, where)
        where.handle = claim.handle
        with or_else(claim.release):
            where.address = where.driver.address_reserve(where.nbytes, alignment=numbers[0], address=numbers[1])
            where.is_reserved = True
        return cls(where, claim)

    @property
    def driver(self) -> Driver:
        """The driver that gave it out."""
        return self._range.driver

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._range.address

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._range.nbytes

    def __repr__(self) -> str:
        where = self._range
        count = len(where.spans)
        state = ", closed" if self.is_closed else f", {count} mapping{'s' * (count != 1)}"
        return f"<AddressReservation {where.driver.name} {where.address:#x} {format_size(where.nbytes)}{state}>"


class Unmap:
    """The undo of one mapping, which another thread can wait for. Internal to this room."""

    __slots__ = ("_done", "is_idle", "is_mapped", "nbytes", "offset", "where")

    def __init__(self, where: AddressRange, offset: int, nbytes: int) -> None:
        self.where = where
        self.offset = offset
        self.nbytes = nbytes
        self.is_mapped = False
        self.is_idle = False  # whether somebody has seen to it that no device works on it any more
        # A bare lock, not an Event: setting one of those waits for its inner lock, and finalizers come here (I3).
        self._done = threading.Lock()
        self._done.acquire()

    def describe(self) -> str:
        """Return the label of the handle."""
        return f"mapping of {format_size(self.nbytes)} at {self.where.address + self.offset:#x}"

    def map(self, put: Callable[[int, int], object]) -> None:
        """Map with one driver call, which takes the address and the size, once a handle has this for its undo."""
        put(self.where.address + self.offset, self.nbytes)
        self.is_mapped = True
        self.where.spans[self.offset] = self.nbytes

    def __call__(self) -> None:
        where = self.where
        try:
            if self.is_mapped:
                if where.workers and not self.is_idle:
                    settle([where])
                where.driver.mem_unmap(where.address + self.offset, self.nbytes)
                self.is_mapped = False
                self.where.spans.pop(self.offset, None)
        finally:
            if self._done.locked():
                self._done.release()

    def strike_out(self) -> None:
        """Note that the driver has unmapped it."""
        self.is_mapped = False
        self.where.spans.pop(self.offset, None)

    def wait(self, seconds: float) -> bool:
        """Wait until it ran, in whichever thread; True if it did."""
        if not self._done.locked():
            return True
        if take(self._done, seconds):
            self._done.release()
            return True
        return False


def unmap_together(undos: Sequence[Unmap]) -> None:
    """Unmap what lies side by side with one driver call, which the undo of each then finds done; on failure each undo
    makes its own call. No device may work there, and nobody else undo any of it meanwhile."""
    first, last = undos[0], undos[-1]
    where, nbytes = first.where, last.offset + last.nbytes - first.offset
    if sum([undo.nbytes for undo in undos if undo.is_mapped]) != nbytes:
        return
    try:
        where.driver.mem_unmap(where.address + first.offset, nbytes)
    except Exception:  # noqa: BLE001  (whatever it is, the undo that meets it again says it)
        return
    for undo in undos:
        undo.strike_out()


def settle(ranges: Sequence[AddressRange], after: int | None = None) -> None:
    """Wait for the work of the devices that may use some ranges, or for an event of them: a kernel that runs on would
    fault, and lose the device."""
    if not ranges:
        return
    if after is not None:
        for driver in dict.fromkeys(where.driver for where in ranges):
            devices(driver, "events", "Leave `after` out").event_synchronize(after)
        return
    for driver, place in dict.fromkeys((where.driver, place) for where in ranges for place in where.workers):
        with suppress(DeviceLostError):  # it runs nothing any more
            driver.synchronize(place)


def put_memory(memory: Memory, private: bool) -> Callable[[int, int], object]:
    """Return the call that maps an allocation, without access yet."""
    driver = memory.driver
    call = copy_on_write(driver).mem_map_private if private else driver.mem_map
    return partial(_put, call, memory.driver_handle)


def _put(call: Callable[[int, int, int, int], object], handle: int, address: int, nbytes: int) -> None:
    call(address, nbytes, 0, handle)


class Mapped(Owned):
    """Memory or a multicast object behind a part of a reservation."""

    __slots__ = ("_access", "_memory", "_undo")

    def __init__(self, memory: Memory, undo: Unmap, claim: Claim) -> None:
        self._memory = memory
        self._undo = undo
        self._access = Access.NONE
        self._claim = claim

    @classmethod
    def _map(
        cls,
        where: AddressRange,
        start: int,
        memory: Memory,
        access: Access,
        locations: Sequence[Location | str] | None,
        needs: Iterable[Handle] = (),
        *,
        private: bool = False,
    ) -> Self:
        """Map all of it at an offset that was checked, and give locations access."""
        if where.driver is not memory.driver:
            raise UsageError(f"{memory.handle.label} and {where.handle.label} belong to different drivers")
        needs = (*needs, where.handle, memory.handle)
        undo = Unmap(where, start, memory.nbytes)
        made = cls(memory, undo, own(undo.describe, undo, depends=needs))
        with or_else(made.close):
            undo.map(put_memory(memory, private))
            if access is not Access.NONE:
                made.set_access(access, locations)
        return made

    @property
    def driver(self) -> Driver:
        """The driver that made it."""
        return self._memory.driver

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._undo.where.address + self._undo.offset

    @property
    def nbytes(self) -> int:
        """Size in bytes: that of what is mapped."""
        return self._memory.nbytes

    @property
    def access(self) -> Access:
        """The rights of the memory's own location here, as the driver has them; once closed, the last ones.

        Of a multicast object it is the first device that this process added.
        """
        if not self.is_closed:
            with suppress(VramError):  # closed meanwhile, or the device is lost, or there is no such location
                self._access = self.get_access()
        return self._access

    def get_access(self, location: Location | str | None = None) -> Access:
        """Ask the driver what a location may do here (``cuMemGetAccess``).

        Parameters
        ----------
        location : Location or str, optional
            The place whose right it is; by default the memory's own location, or the first device that this process
            added to the multicast object.

        Raises
        ------
        UsageError
            For a place that does not exist.
        """
        handle = self.handle
        place = self._named(None if location is None else (location,))[0]
        with handle.claim("get_access"):  # another thread may close this object while the driver answers
            return self.driver.mem_get_access(self.address, place)

    @shielded
    def set_access(self, access: Access, locations: Sequence[Location | str] | None = None) -> None:
        """Change what locations may do here.

        Parameters
        ----------
        access : Access
            The new right.
        locations : sequence of Location or str, optional
            The places; the others keep their rights. By default the memory's own location, or the devices that this
            process added to the multicast object.

        Raises
        ------
        AccessDeniedError
            For writing, if the memory was sealed read-only.
        """
        self.handle  # noqa: B018  (the check)
        whose = self._named(locations)
        self.driver.mem_set_access(self.address, self.nbytes, access, whose)
        if set(self._memory.homes) <= set(whose):
            self._access = access

    def _named(self, locations: Sequence[Location | str] | None) -> Sequence[Location]:
        """Return the locations that are meant."""
        memory = self._memory
        found = memory.homes if locations is None else [checks.place(memory.driver, where) for where in locations]
        if not found:
            raise UsageError("no location is named; name at least one, or leave locations out for the memory's own")
        return found

    def __repr__(self) -> str:
        memory, state = self._memory, "closed" if self.is_closed else self.access.letters
        place = ", ".join(map(str, memory.homes))
        return f"<{type(self).__name__} {place} {self.address:#x} {format_size(memory.nbytes)}, {state}>"


class MemoryMapping(Mapped):
    """An allocation behind a part of a reservation. Made by :meth:`map`; needs both for as long as it lives."""

    __slots__ = ()

    @classmethod
    @shielded
    def map(
        cls,
        reservation: AddressReservation,
        offset: int,
        allocation: PhysicalAllocation,
        *,
        access: Access = Access.READ_WRITE,
        private: bool = False,
        depends: Iterable[Handle] = (),
    ) -> Self:
        """Map a whole allocation at an offset of a reservation and make it accessible to its own location.

        Parameters
        ----------
        offset : int
            Offset in bytes into the reservation, a multiple of the granularity.
        access : Access
            The rights of the allocation's location here.
        private : bool
            Copy on write: what is written here is seen here only, and read-only memory may be written.
        depends : iterable of Handle
            Objects that must outlive the mapping besides the two, such as a lease; let go of after the unmap.

        Raises
        ------
        AlignmentError, RangeError
            If the allocation does not fit there, or something is mapped there already.
        AccessDeniedError
            For writing, not privately, to memory that was sealed read-only.
        UnsupportedError
            If the driver cannot map privately.
        """
        reservation.handle, allocation.handle  # noqa: B018  (the checks)
        where, memory = reservation._range, allocation._memory
        return cls._map(where, checks.size(offset, "offset"), memory, access, None, depends, private=private)

    @property
    def allocation(self) -> PhysicalAllocation:
        """The allocation, with a claim of its own: valid also after the mapping is closed."""
        self.handle  # noqa: B018  (the check)
        return PhysicalAllocation.of(self._memory)
