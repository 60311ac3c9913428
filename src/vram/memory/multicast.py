"""Multicast objects: one address, and memory on every GPU of a team that writes to it reach.

Nothing here has run on hardware. The driver refuses unless the environment says ``VRAM_MULTICAST=on``.

Calls that the driver answers with a wait for ever, or leaves undefined, are errors here before it is called: memory
bound or addresses mapped before the team is whole, and an unbind that is not exactly a bind. Dependencies are counted
(:mod:`vram.lifetime`): the handle of a :class:`MulticastObject` undoes nothing, but needs the driver's object and each
binding; a mapping needs that handle; a binding needs the driver's object and its memory. So in whatever order things
are closed, the driver sees unmap, then unbind, then release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from ..driver.protocol import DeviceMemory, Driver, Granularity
from ..errors import BusyError, RangeError, UsageError
from ..lifetime import Claim, Handle, own, shielded, stuck
from ..spec import Access, HandleKind, Location, format_size
from . import capabilities, checks
from .allocation import Exportable, Memory, PhysicalAllocation, acquire, retain_memory
from .reservation import AddressReservation, Mapped

if TYPE_CHECKING:
    from typing import Self


class MulticastObject(Exportable):
    """A team of GPUs, and memory on each of them that is written together. Made by :meth:`create` or :meth:`import_`.

    In order: all devices of the team are added, here or in other processes; memory is bound and the object is mapped;
    what a GPU writes to the mapping goes to all memory bound there. Reading there is for the GPU's own multicast
    instructions; copies read the memory that is bound. :meth:`close` unbinds everything and gives the object up: now,
    or with the last mapping of it.
    """

    __slots__ = ("_bound", "_calls", "_count", "_elsewhere", "_least", "_original")

    def __init__(self, memory: Memory, claim: Claim, original: Handle, count: int, least: int) -> None:
        self._memory = memory
        memory.homes = ()  # the devices that this process adds
        self._calls = _calls(memory.driver)
        self._original = original  # the driver's object
        self._count = count
        self._least = least  # the granularity
        self._elsewhere = 0
        self._bound: dict[tuple[Location, int, int], Handle] = {}  # which unbinds it
        self._claim = claim

    @staticmethod
    def granularity(
        driver: Driver, devices: int | Sequence[Location | str], nbytes: int | str, handle_kinds: HandleKind
    ) -> Granularity:
        """Return what the size, offsets, sizes bound and addresses of an object made so must be multiples of.

        No object is made for it, so this works while multicast is off, too.

        Raises
        ------
        UnsupportedError
            If the driver or every device lacks multicast.
        """
        calls, (count, _) = _calls(driver), _team_of(driver, devices)
        return calls.multicast_granularity(count, checks.positive(nbytes, "nbytes", 1), checks.kinds(handle_kinds))

    @classmethod
    @shielded
    def create(
        cls,
        driver: Driver,
        devices: int | Sequence[Location | str],
        nbytes: int | str,
        *,
        handle_kinds: HandleKind = HandleKind.POSIX_FD,
    ) -> Self:
        """Make an object.

        Parameters
        ----------
        devices : int, or sequence of Location or str
            How many there will be in the team; or which, if this process adds them all, which is then done.
        nbytes : int or str
            Size in bytes: how much memory can be bound for each device. A positive multiple of :meth:`granularity`.
        handle_kinds : HandleKind
            How it must be able to leave this process. If any, only memory that can leave it too can be bound.

        Raises
        ------
        UnsupportedError
            If multicast is off, or the driver or a device lacks it; each with its own words.
        """
        calls, (count, named) = _calls(driver), _team_of(driver, devices)
        for place in named:
            calls.multicast_check(place)
        made = cls._open(driver, count, nbytes, handle_kinds, lambda n: calls.multicast_create(count, n, handle_kinds))
        with ExitStack() as undo:
            undo.push(made)
            for place in named:
                made.add_device(place)
            undo.pop_all()
        return made

    @classmethod
    @shielded
    def import_(cls, driver: Driver, fd: int, nbytes: int | str, devices: int) -> Self:
        """Open an object that another process exported; then say how many devices were :meth:`added_elsewhere`.

        Parameters
        ----------
        fd : int
            The descriptor. It is lent: it stays the caller's and may be closed afterwards.
        nbytes, devices : int
            Its size in bytes and how many devices are in its team, as its maker stated them.

        Raises
        ------
        ProtocolError
            If the descriptor is no such object.
        """
        call = partial(_calls(driver).multicast_import, fd)
        return cls._open(driver, devices, nbytes, HandleKind.POSIX_FD, call)

    @classmethod
    @shielded
    def import_fabric(cls, driver: Driver, data: bytes, nbytes: int | str, devices: int) -> Self:
        """Open an object by the 64 bytes that :meth:`export_fabric` gave; otherwise as :meth:`import_`.

        Raises
        ------
        ProtocolError
            If the bytes name no such object.
        UnsupportedError
            If multicast is off, the driver knows no such handles (before CUDA 12.3), or this process may not use the
            IMEX channel.
        """
        call = partial(_calls(driver).multicast_import_fabric, checks.handle_bytes(data))
        return cls._open(driver, devices, nbytes, HandleKind.FABRIC, call)

    @classmethod
    def _open(
        cls, driver: Driver, devices: int, nbytes: int | str, kinds: HandleKind, call: Callable[[int], int]
    ) -> Self:
        """Make or import an object with one driver call, which takes its size."""
        count, _ = _team_of(driver, devices if type(devices) is int else str(devices))
        least = cls.granularity(driver, count, nbytes, kinds).minimum
        size = checks.positive(nbytes, "nbytes", least)
        label = f"multicast object of {format_size(size)} for {count} devices"
        original, raw = acquire(label, partial(call, size), driver.mem_release)
        with original:  # taken back here, unless the next handle has come to need it
            claim = own(label, None, depends=(original.handle,))
        memory = Memory(driver, raw, size, Location(driver.name), kinds, claim.handle)  # on whichever device
        return cls(memory, claim, original.handle, count, least)

    # -- the team -----------------------------------------------------------------------------------------------
    @property
    def devices(self) -> tuple[Location, ...]:
        """The devices that this process added."""
        return self._memory.homes

    @shielded
    def add_device(self, location: Location | str) -> None:
        """Add a GPU to the team, for good.

        Raises
        ------
        UsageError
            If it is in the team, or the team is whole.
        """
        memory = self._memory
        with self.handle.claim("add_device"), memory.lock:  # another thread may close this while the driver works
            place = checks.place(memory.driver, location)
            if place in memory.homes:
                raise UsageError(f"{place} was added to the {memory.handle.label} already; each is added once")
            if self._added >= self._count:
                raise UsageError(f"cannot add {place}: all devices of the {memory.handle.label} were added already")
            self._calls.multicast_add_device(memory.driver_handle, place)
            memory.homes += (place,)

    def added_elsewhere(self, count: int) -> None:
        """Say how many devices other processes, or calls with :attr:`native_handle`, have added by now.

        The driver does not tell. Said too early, what waits for the team waits in the driver: have them tell you.
        """
        here, label = len(self._memory.homes), self.handle.label
        if type(count) is not int or not 0 <= count <= self._count - here:
            raise UsageError(
                f"{count!r} devices of the {label} cannot have been added elsewhere: {here} were added here; 0 to "
                f"{self._count - here}"
            )
        self._elsewhere = count

    @property
    def _added(self) -> int:
        return len(self._memory.homes) + self._elsewhere

    def _check_whole(self, verb: str) -> None:
        if self._added < self._count:
            raise UsageError(
                f"cannot {verb} the {self.handle.label}: {self._added} of {self._count} devices were added, and until "
                f"the last was the driver would wait for ever; call add_device() for the others, or added_elsewhere() "
                f"when other processes have added theirs"
            )

    # -- memory -------------------------------------------------------------------------------------------------
    @property
    def bound(self) -> tuple[tuple[Location, int, int], ...]:
        """The memory that this process has bound: location, offset and size in bytes of each."""
        return () if self.is_closed else tuple(self._bound)

    @shielded
    def bind(
        self,
        memory: PhysicalAllocation | tuple[int, int],
        offset: int | str = 0,
        *,
        memory_offset: int | str = 0,
        nbytes: int | str | None = None,
    ) -> None:
        """Have writes at an offset go to memory, too. It is kept alive as long as it is bound.

        Parameters
        ----------
        memory : PhysicalAllocation, or tuple of int
            An allocation; or an address and a size in bytes, within one mapping of this driver.
        offset : int or str
            Where, in bytes. This and the numbers below, the address and its size are multiples of the granularity.
        memory_offset, nbytes : int or str
            Which part of an allocation, in bytes: from where, and how much. By default all of it from there.

        Raises
        ------
        UsageError
            If the team is not whole, the memory is on none of its devices, or cannot leave the process though the
            object can.
        AlignmentError, RangeError
            If it does not fit there, or memory of the same device is bound there already.
        """
        team, least = self._memory, self._least
        call: Callable[..., None]
        what: tuple[int, ...]
        with ExitStack() as held:  # another thread may close the object or the memory while the driver works
            held.enter_context(self.handle.claim("bind"))
            self._check_whole("bind memory to")
            start = checks.aligned(checks.size(offset, "offset"), "offset", least)
            if isinstance(memory, PhysicalAllocation):
                first = checks.aligned(checks.size(memory_offset, "memory_offset"), "memory_offset", least)
                part = max(memory.nbytes - first, least) if nbytes is None else nbytes
                size = checks.positive(part, "nbytes", least)
                if first + size > memory.nbytes:
                    raise RangeError(
                        f"bytes {first} to {first + size} are not within the {memory.nbytes} of {memory!r}"
                    )
                if memory.driver is not team.driver:
                    raise UsageError(f"{memory!r} and {self!r} belong to different drivers")
                call, what = self._calls.multicast_bind_mem, (memory.driver_handle, first)
                source = PhysicalAllocation.of(memory, "bind")
            elif isinstance(memory, tuple) and [type(part) for part in memory] == [int, int]:
                if nbytes is not None or memory_offset:
                    raise UsageError("memory_offset and nbytes are for an allocation; an address says its part itself")
                call, what = self._calls.multicast_bind_address, (checks.aligned(memory[0], "address", least),)
                size = checks.positive(memory[1], "the size", least)
                retained = retain_memory(team.driver, memory[0], size, Location(team.driver.name))
                source = PhysicalAllocation(*retained, managed=True)
            else:
                raise UsageError(f"memory must be a PhysicalAllocation or an address and a size, not {memory!r:.80}")
            held.enter_context(source)
            held.enter_context(team.lock)
            self._check_fits(source, start, size)
            where = team.driver_handle, source.location, start, size
            call(*where, *what)
            label = f"binding of {format_size(size)} on {source.location} at offset {start}"
            undo = partial(self._calls.multicast_unbind, *where)
            self._bound[where[1:]] = team.handle.keep(label, undo, depends=(self._original, source.handle))

    def _check_fits(self, memory: PhysicalAllocation, start: int, nbytes: int) -> None:
        place, stop, label = memory.location, start + nbytes, self.handle.label
        if place not in self.devices:
            names = ", ".join(map(str, self.devices)) or "none"
            raise UsageError(f"{place} has no memory in the {label}: the devices that this process added are {names}")
        if self.handle_kinds and not memory.handle_kinds:
            raise UsageError(
                f"the {memory.handle.label} cannot leave this process and the {label} can, which takes only memory "
                f"that can too; create it with handle_kinds=HandleKind.POSIX_FD"
            )
        if stop > self.nbytes:
            raise RangeError(f"{nbytes} bytes at offset {start} do not fit the {label}, which has {self.nbytes} bytes")
        for other, first, size in self._bound:
            if other == place and first < stop and start < first + size:
                raise RangeError(
                    f"cannot bind {nbytes} bytes on {place} at offset {start}: bytes {first} to {first + size} of it "
                    f"are bound, or could not be unbound; unbind them first"
                )

    @shielded
    def unbind(self, location: Location | str, offset: int | str, nbytes: int | str) -> None:
        """Undo one :meth:`bind`, named exactly as it was: anything else is undefined in the driver, an error here.

        Raises
        ------
        RangeError
            If nothing was bound just so; says what was.
        BusyError
            While the object is mapped: close the mapping first.
        """
        team = self._memory
        with self.handle.claim("unbind"), team.lock:
            wanted = checks.place(team.driver, location), checks.size(offset, "offset"), checks.size(nbytes, "nbytes")
            handle = self._bound.get(wanted)
            if handle is None or not handle.is_open:  # the driver could not unbind it
                there = "; ".join(f"{size} bytes at offset {start} on {where}" for where, start, size in self.bound)
                raise RangeError(f"no {nbytes} bytes are bound at {offset} on {location}; bound: {there or 'none'}")
            if mapped := self._mapped():
                raise BusyError(f"{handle.label} is still in use", mapped)
            team.handle.drop_dependency(handle)
            if handle not in stuck():
                del self._bound[wanted]

    # -- addresses ----------------------------------------------------------------------------------------------
    @property
    def is_mapped(self) -> bool:
        """Whether it is mapped in this process."""
        return bool(self._mapped())

    def _mapped(self) -> tuple[str, ...]:
        """Return the labels of the mappings, which all hold the handle, as do verbs while they are called."""
        return tuple(label for label in self._memory.handle.holders() if label.startswith("mapping"))

    @shielded
    def map(
        self,
        reservation: AddressReservation,
        offset: int | str = 0,
        *,
        access: Access = Access.READ_WRITE,
        locations: Sequence[Location | str] | None = None,
    ) -> MulticastMapping:
        """Map the whole object at an offset of a reservation and make it accessible.

        Parameters
        ----------
        offset : int or str
            Offset in bytes into the reservation. The address there is a multiple of the granularity: reserve with that
            alignment.
        access : Access
            The rights of `locations` here.
        locations : sequence of Location or str, optional
            By default the devices that this process added.

        Raises
        ------
        UsageError
            If the team is not whole.
        AlignmentError, RangeError
            If it does not fit there, or something is mapped there already.
        """
        reservation.handle  # noqa: B018  (the check)
        where, least = reservation._range, self._least
        with self.handle.claim("map"), self._memory.lock:
            self._check_whole("map")
            start = checks.size(offset, "offset")
            checks.aligned(where.address + start, "the address there,", least)
            return MulticastMapping._map(where, start, self._memory, access, locations)

    def __repr__(self) -> str:
        words = [f"{self._added}/{self._count} devices", f"{len(self.bound)} bound"]
        states = {"mapped": self.is_mapped, "exported": self._memory.has_left, "closed": self.is_closed}
        words += [word for word, state in states.items() if state]
        return f"<MulticastObject {self._memory.driver_handle:#x} {format_size(self.nbytes)}, {', '.join(words)}>"


class MulticastMapping(Mapped):
    """A multicast object behind a part of a reservation. Made by :meth:`MulticastObject.map`."""

    __slots__ = ()


def _calls(driver: Driver) -> DeviceMemory:
    return capabilities.devices(driver, "a multicast object", "Write to each memory on its own")


def _team_of(driver: Driver, devices: int | Sequence[Location | str]) -> tuple[int, tuple[Location, ...]]:
    """Return how many devices a team has, and those that were named."""
    if type(devices) is int and 0 < devices < 1 << 32:
        return devices, ()
    if isinstance(devices, (int, str)) or not isinstance(devices, Sequence) or not devices:
        raise UsageError(f"devices must be how many there are in the team, 1 or more, or their locations: {devices!r}")
    places = tuple(checks.place(driver, where) for where in devices)
    if len(set(places)) < len(places):
        raise UsageError(f"devices names one twice: {', '.join(map(str, places))}; each is in a team once")
    return len(places), places
