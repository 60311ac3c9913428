"""Multicast objects: one address, and memory on every GPU of a team that what is written there goes to.

Nothing here has run on hardware. It takes a driver with :class:`~vram.driver.protocol.Multicast`, which refuses unless
the environment says ``VRAM_MULTICAST=on``.

What the driver answers with a wait for ever, or leaves undefined, is an error here before it is asked: memory bound or
addresses mapped before the team is whole, and an unbind that is not exactly a bind. What depends on what is counted
(:mod:`vram.lifetime`): a mapping needs the object and all that is bound to it, and something bound needs the object and
its memory. So in whatever order things are closed, the driver sees unmap, then unbind, then release.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..driver.protocol import Driver, Granularity
from ..errors import BusyError, RangeError, UsageError, VramError
from ..lifetime import Claim, Owned, shielded, unwinding
from ..spec import Access, HandleKind, Location, format_size
from . import capabilities, checks
from .allocation import PhysicalAllocation
from .multicast_state import MulticastState, Unbind, address_of, multicast, opened, retained, sized, team_of
from .reservation import AddressReservation, Unmap

if TYPE_CHECKING:
    from typing import Self


class MulticastObject(Owned):
    """A team of GPUs, and memory on each of them that is written together. Made by :meth:`create` or :meth:`import_`.

    In order: all devices of the team are added, here or in other processes; memory is bound and the object is mapped;
    what a GPU writes to the mapping goes to all memory bound there. Reading there is for the GPU's own multicast
    instructions; copies read the memory that is bound.
    """

    __slots__ = ("_bindings", "_team")

    def __init__(self, team: MulticastState, claim: Claim) -> None:
        self._team = team
        self._bindings: dict[tuple[str, int], Claim] = {}
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
        count, _ = team_of(driver, devices)
        size = checks.positive(nbytes, "nbytes", 1)
        return multicast(driver).multicast_granularity(count, size, checks.kinds(handle_kinds))

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
        calls = multicast(driver)
        count, named = team_of(driver, devices)
        kinds = checks.kinds(handle_kinds)
        for place in named:
            calls.multicast_check(place)
        size, least = sized(calls, count, nbytes, kinds)
        made = cls(*opened(driver, lambda: calls.multicast_create(count, size, kinds), size, count, kinds, least))
        with _closed_on_error(made):
            for place in named:
                made.add_device(place)
        return made

    @classmethod
    @shielded
    def import_(
        cls,
        driver: Driver,
        fd: int,
        nbytes: int | str,
        devices: int,
        *,
        kind: HandleKind = HandleKind.POSIX_FD,
        added_elsewhere: int = 0,
    ) -> Self:
        """Open an object that another process exported.

        Parameters
        ----------
        fd : int
            The descriptor. It is lent: it stays the caller's and may be closed afterwards.
        nbytes, devices : int
            Its size in bytes and how many devices are in its team, as its maker stated them.
        added_elsewhere : int
            How many were added by other processes already; see :meth:`added_elsewhere`.

        Raises
        ------
        ProtocolError
            If the descriptor is no such object.
        """
        calls = multicast(driver)
        checks.descriptor(fd)
        count, _ = team_of(driver, devices if type(devices) is int else 0)
        size, least = sized(calls, count, nbytes, checks.kinds(kind))
        made = cls(*opened(driver, lambda: calls.multicast_import(fd, kind, size, count), size, count, kind, least))
        made._team.is_imported = True
        with _closed_on_error(made):
            made.added_elsewhere(added_elsewhere)
        return made

    @classmethod
    @shielded
    def import_fabric(
        cls, driver: Driver, data: bytes, nbytes: int | str, devices: int, *, added_elsewhere: int = 0
    ) -> Self:
        """Open an object by the 64 bytes that :meth:`export_fabric` gave; otherwise as :meth:`import_`.

        Raises
        ------
        ProtocolError
            If the bytes name no such object.
        UnsupportedError
            If multicast is off, the driver knows no such handles (before CUDA 12.3), or this process may not use the
            IMEX channel.
        """
        calls = multicast(driver)
        wanted, kind = checks.handle_bytes(data), HandleKind.FABRIC
        count, _ = team_of(driver, devices if type(devices) is int else 0)
        size, least = sized(calls, count, nbytes, kind)
        made = cls(
            *opened(driver, lambda: calls.multicast_import_fabric(wanted, size, count), size, count, kind, least)
        )
        made._team.is_imported = True
        with _closed_on_error(made):
            made.added_elsewhere(added_elsewhere)
        return made

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def driver(self) -> Driver:
        """The driver that made it."""
        return self._team.driver

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._team.nbytes

    @property
    def handle_kinds(self) -> HandleKind:
        """How it can leave this process."""
        return self._team.kinds

    @property
    def native_handle(self) -> int:
        """What the driver's own API knows it by: a ``CUmemGenericAllocationHandle`` of CUDA's, for calls of your own.

        It is lent: good until this object is closed, and not to be released. What is added or bound with it by hand is
        not known here: say so with :meth:`added_elsewhere`.
        """
        self.handle  # noqa: B018  (the check)
        team = self._team
        found = capabilities.native(team.driver).mem_native_handle(team.driver_handle)
        team.is_lent = True
        return found

    @property
    def devices(self) -> tuple[Location, ...]:
        """The devices that this process added."""
        return tuple(self._team.added.copy().values())

    @property
    def bound(self) -> tuple[tuple[Location, int, int], ...]:
        """What this process has bound: location, offset and size in bytes of each."""
        return tuple((undo.location, undo.offset, undo.nbytes) for undo in list(self._team.bound.values()))

    @property
    def is_mapped(self) -> bool:
        """Whether it is mapped in this process."""
        return bool(self._team.mapped())

    def __repr__(self) -> str:
        team = self._team
        count = f"{len(team.added) + team.elsewhere}/{team.num_devices} devices"
        words = [format_size(team.nbytes), count, f"{len(team.bound)} bound"]
        states = {"mapped": self.is_mapped, "imported": team.is_imported, "exported": team.exported or team.fabric}
        words += [word for word, state in {**states, "closed": self.is_closed}.items() if state]
        return f"<MulticastObject {team.driver_handle:#x} {', '.join(words)}>"

    # -- the team -----------------------------------------------------------------------------------------------
    @shielded
    def add_device(self, location: Location | str) -> None:
        """Add a GPU to the team, for good.

        Raises
        ------
        UsageError
            If it is in the team, or the team is whole.
        """
        team = self._team
        using = self.handle.claim("add_device")  # another thread may close this object while the driver works
        try:
            team.add(checks.place(team.driver, location))
        finally:
            using.release()

    def added_elsewhere(self, count: int) -> None:
        """Say how many devices other processes have added by now, which the driver does not tell.

        Say it too early, and what waits for the team waits in the driver: have them tell you.
        """
        self.handle  # noqa: B018  (the check)
        self._team.say_elsewhere(count)

    # -- memory -------------------------------------------------------------------------------------------------
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
        team = self._team
        using = self.handle.claim("bind")
        try:
            team.whole("bind memory to")
            if isinstance(memory, PhysicalAllocation):
                owner, raw = memory.handle, memory.driver_handle
                if memory.driver is not team.driver:
                    raise UsageError(f"{memory!r} and {self!r} belong to different drivers")
                first, size = team.part(memory.nbytes, memory_offset, nbytes)
                start = team.span(offset, size)
                call = partial(team.calls.multicast_bind_mem, team.driver_handle, start, raw, first, size)
                self._keep(team.bind(call, owner, raw, start, size))
                return
            if nbytes is not None or memory_offset:
                raise UsageError("memory_offset and nbytes say which part of an allocation; an address says it itself")
            address, size = address_of(memory, team.least)
            start = team.span(offset, size)
            with retained(team.driver, address) as (raw, owner):
                call = partial(team.calls.multicast_bind_address, team.driver_handle, start, address, size)
                self._keep(team.bind(call, owner, raw, start, size))
        finally:
            using.release()

    def _keep(self, bound: tuple[Unbind, Claim]) -> None:
        self._bindings[bound[0].key] = bound[1]
        if self.is_closed:  # by another thread, meanwhile
            self._let_go()

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
        self.handle  # noqa: B018  (the check)
        team = self._team
        key = (team.member(checks.place(team.driver, location)), checks.size(offset, "offset"))
        claim, undo = self._bindings.get(key), team.bound.get(key)
        if claim is None or undo is None or undo.nbytes != checks.size(nbytes, "nbytes"):
            there = "; ".join(f"{size} bytes at offset {start} on {where}" for where, start, size in self.bound)
            raise RangeError(f"no {nbytes} bytes are bound at offset {offset} on {location}; bound: {there or 'none'}")
        claim.release(strict=True)
        self._bindings.pop(key, None)

    # -- addresses ----------------------------------------------------------------------------------------------
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
            Offset in bytes into the reservation. The address there must be a multiple of the granularity.
        access : Access
            What `locations` may do here.
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
        where, team = reservation._range, self._team
        using = self.handle.claim("map")
        try:
            team.whole("map")
            if where.driver is not team.driver:
                raise UsageError(f"{self!r} and {reservation!r} belong to different drivers")
            start, right = checks.size(offset, "offset"), checks.access(access)
            whose = team.whose(locations) if right is not Access.NONE else []
            claim, undo = team.map(where, start, [claim.handle for claim in list(self._bindings.values())])
            mapping = MulticastMapping(team, undo, right, claim)
            with _closed_on_error(mapping):
                if whose:
                    team.driver.mem_set_access(mapping.address, team.nbytes, right, whose)
            return mapping
        finally:
            using.release()

    # -- other processes ----------------------------------------------------------------------------------------
    @shielded
    def export(self, kind: HandleKind = HandleKind.POSIX_FD) -> int:
        """Lend a descriptor of this object: duplicate or send it, never close it. Closed with the object."""
        handle, team = self.handle, self._team
        if checks.kinds(kind) not in team.kinds or not kind or kind == HandleKind.FABRIC:
            raise checks.not_exported(f"the {handle.label}", kind, team.kinds)
        using = handle.claim("export")  # another thread may close this object while the driver works
        try:
            return team.export(kind)
        finally:
            using.release()

    @shielded
    def export_fabric(self) -> bytes:
        """Return the 64 bytes by which another machine opens this object; see :meth:`import_fabric`.

        They keep nothing alive: keep the object until it was opened there.

        Raises
        ------
        UsageError
            If it was created without FABRIC among its handle kinds.
        """
        handle, team = self.handle, self._team
        if HandleKind.FABRIC not in team.kinds:
            raise checks.not_of_the_fabric(f"the {handle.label}", team.kinds)
        using = handle.claim("export")  # another thread may close this object while the driver works
        try:
            team.fabric = team.fabric or capabilities.fabric(team.driver).mem_export_fabric(team.driver_handle)
            return team.fabric
        finally:
            using.release()

    # -- the end ------------------------------------------------------------------------------------------------
    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Unbind everything and give the object up: now, or with the last mapping of it. Idempotent.

        Parameters
        ----------
        strict : bool
            Refuse, and change nothing, while it is mapped.

        Raises
        ------
        BusyError
            Only if `strict`, naming who holds it.
        """
        if strict and not self.is_closed and self._claim.handle.is_open:
            others = list(self._claim.handle.holders())
            for own_claim in ("owner", *(claim.handle.label for claim in self._bindings.values())):
                with contextlib.suppress(ValueError):
                    others.remove(own_claim)
            if others:
                raise BusyError(f"{self._claim.handle.label} is still in use", tuple(others))
        self._let_go()
        super().close(strict=strict)

    def _let_go(self) -> None:
        while self._bindings:
            with contextlib.suppress(KeyError):  # another thread closes it as well
                self._bindings.popitem()[1].release()


class MulticastMapping(Owned):
    """A multicast object behind a part of a reservation. Made by :meth:`MulticastObject.map`."""

    __slots__ = ("_access", "_team", "_undo")

    def __init__(self, team: MulticastState, undo: Unmap, access: Access, claim: Claim) -> None:
        self._team = team
        self._undo = undo
        self._access = access
        self._claim = claim

    @property
    def driver(self) -> Driver:
        """The driver that made it."""
        return self._team.driver

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._undo.where.address + self._undo.offset

    @property
    def nbytes(self) -> int:
        """Size in bytes: that of the object."""
        return self._team.nbytes

    @property
    def access(self) -> Access:
        """What this process's first device may do here, as the driver says; once closed, what was last allowed."""
        with contextlib.suppress(VramError, StopIteration):  # the device is lost, or none was added
            if not self.is_closed:
                self._access = self.driver.mem_get_access(self.address, next(iter(self._team.added.values())))
        return self._access

    @shielded
    def get_access(self, location: Location | str | None = None) -> Access:
        """Ask the driver what a location may do here; by default the first device that this process added.

        Raises
        ------
        UsageError
            If no location is named, and no device was added in this process.
        """
        handle = self.handle
        place = self._team.whose(None if location is None else (location,))[0]
        using = handle.claim("get_access")  # another thread may close this object while the driver answers
        try:
            return self.driver.mem_get_access(self.address, place)
        finally:
            using.release()

    @shielded
    def set_access(self, access: Access, locations: Sequence[Location | str] | None = None) -> None:
        """Change what locations may do here; by default the devices that this process added."""
        self.handle  # noqa: B018  (the check)
        right = checks.access(access)
        self.driver.mem_set_access(self.address, self.nbytes, right, self._team.whose(locations))
        self._access = right

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else self.access.letters
        return f"<MulticastMapping {self.address:#x} {format_size(self.nbytes)}, {state}>"


@contextlib.contextmanager
def _closed_on_error(made: Owned) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with unwinding(error):
            made.close()
        raise
