"""What a multicast object, what is bound to it and its mappings share. Internal to this room; see :mod:`.multicast`."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ..driver.protocol import Driver, Multicast
from ..errors import AlignmentError, ClosedError, RangeError, UnsupportedError, UsageError
from ..lifetime import Claim, Handle, own, unwinding
from ..spec import HandleKind, Location, format_size, round_up
from . import checks
from .reservation import AddressRange, Unmap, map_at


class Release:
    """The undo of one object."""

    __slots__ = ("driver", "driver_handle", "nbytes", "num_devices")

    def __init__(self, driver: Driver, nbytes: int, num_devices: int) -> None:
        self.driver = driver
        self.driver_handle: int | None = None
        self.nbytes = nbytes
        self.num_devices = num_devices

    def describe(self) -> str:
        """What the handle is called."""
        return f"multicast object of {format_size(self.nbytes)} for {self.num_devices} devices"

    def __call__(self) -> None:
        if self.driver_handle is not None:
            self.driver.mem_release(self.driver_handle)


class Unbind:
    """The undo of one binding. As long as the driver may have it, it stays in the books and keeps others out."""

    __slots__ = ("_is_bound", "key", "location", "nbytes", "offset", "team")

    def __init__(self, team: MulticastState, location: Location, device: str, offset: int, nbytes: int) -> None:
        self.team = team
        self.location = location
        self.key = (device, offset)
        self.offset = offset
        self.nbytes = nbytes
        self._is_bound = False

    def describe(self) -> str:
        """What the handle is called."""
        return f"binding of {format_size(self.nbytes)} on {self.location} at offset {self.offset}"

    def bind(self, call: Callable[[], object]) -> None:
        """Make the driver call."""
        call()
        self._is_bound = True

    def __call__(self) -> None:
        team = self.team
        if self._is_bound:
            team.calls.multicast_unbind(team.driver_handle, self.location, self.offset, self.nbytes)
        if team.bound.get(self.key) is self:
            team.bound.pop(self.key, None)


class MulticastState:
    """What an object, its bindings and its mappings share. It refers to the counted handle without a claim."""

    def __init__(
        self, driver: Driver, raw: int, nbytes: int, num_devices: int, kinds: HandleKind, least: int, handle: Handle
    ) -> None:
        self.driver = driver
        self.calls = multicast(driver)
        self.driver_handle = raw
        self.nbytes = nbytes
        self.num_devices = num_devices
        self.kinds = kinds
        self.least = least  # the granularity
        self.handle = handle
        self.is_imported = False
        self.added: dict[str, Location] = {}  # by this process
        self.elsewhere = 0
        self.bound: dict[tuple[str, int], Unbind] = {}
        self.mappings: dict[Unmap, Handle] = {}
        self.exported: dict[HandleKind, int] = {}
        self.fabric = b""  # the 64 bytes, once somebody asked for them
        self.is_lent = False  # the driver's own handle
        self.lock = threading.RLock()  # never reached from a finalizer (I3)

    def whole(self, verb: str) -> None:
        """Refuse what waits in the driver until the last device was added."""
        count = len(self.added) + self.elsewhere
        if count < self.num_devices:
            raise UsageError(
                f"cannot {verb} the {self.handle.label}: {count} of {self.num_devices} devices were added, and until "
                f"the last was the driver would wait for ever; call add_device() for the others, or added_elsewhere() "
                f"when other processes have added theirs"
            )

    def add(self, place: Location) -> None:
        """Add a device with one driver call."""
        device = self.driver.device_info(place).uuid
        with self.lock:
            if device in self.added:
                raise UsageError(f"{place} was added to the {self.handle.label} already; each is added once")
            if len(self.added) + self.elsewhere >= self.num_devices:
                raise UsageError(f"cannot add {place}: all devices of the {self.handle.label} were added already")
            self.calls.multicast_add_device(self.driver_handle, place)
            self.added[device] = place

    def say_elsewhere(self, count: int) -> None:
        """Write down how many devices other processes have added."""
        most = self.num_devices - len(self.added)
        if type(count) is not int or not 0 <= count <= most:
            raise UsageError(
                f"{count!r} devices cannot have been added elsewhere: the team is of {self.num_devices}, and "
                f"{len(self.added)} were added here; 0 to {most}"
            )
        if count and not (self.is_imported or self.exported or self.fabric or self.is_lent):
            raise UsageError(f"nobody else can have added devices: this {self.handle.label} was never exported")
        self.elsewhere = count

    def member(self, location: Location) -> str:
        """Return which device of the team a location is."""
        device = ""
        with contextlib.suppress(UsageError):  # memory of the host is on none
            device = self.driver.device_info(location).uuid
        if device not in self.added:
            names = ", ".join(map(str, self.added.values())) or "none"
            raise UsageError(
                f"{location} has no memory in the {self.handle.label}: the devices that this process added are {names}"
            )
        return device

    def span(self, offset: int | str, nbytes: int) -> int:
        """Return the offset of memory that is to be bound."""
        start = checks.aligned(checks.size(offset, "offset"), "offset", self.least)
        checks.aligned(nbytes, "the size of the memory,", self.least)
        if start + nbytes > self.nbytes:
            last = self.nbytes - nbytes
            raise RangeError(
                f"{nbytes} bytes at offset {start} do not fit the {self.handle.label}, which has {self.nbytes} bytes; "
                + (f"the last offset is {last}" if last >= 0 else "make it larger")
            )
        return start

    def part(self, whole: int, offset: int | str, nbytes: int | str | None) -> tuple[int, int]:
        """Return where the part of an allocation of `whole` bytes begins that is to be bound, and its size."""
        first = checks.aligned(checks.size(offset, "memory_offset"), "memory_offset", self.least)
        size = max(whole - first, self.least) if nbytes is None else checks.positive(nbytes, "nbytes", self.least)
        if first + size > whole:
            raise RangeError(f"bytes {first} to {first + size} are not within the {whole} bytes of the allocation")
        return first, size

    def book(self, undo: Unbind) -> None:
        """Write down a span of one device that is about to be bound."""
        with self.lock:
            for other in list(self.bound.values()):
                apart = other.offset + other.nbytes <= undo.offset or undo.offset + undo.nbytes <= other.offset
                if other.key[0] != undo.key[0] or apart:
                    continue
                raise RangeError(
                    f"cannot bind {undo.nbytes} bytes on {undo.location} at offset {undo.offset}: bytes "
                    f"{other.offset} to {other.offset + other.nbytes} of this device are bound, or could not be "
                    f"unbound; unbind them first"
                )
            self.bound[undo.key] = undo

    def mapped(self) -> list[Handle]:
        """Return the mappings that there are."""
        for undo in [undo for undo in tuple(self.mappings) if not undo.is_mapped]:
            self.mappings.pop(undo, None)
        return list(self.mappings.values())

    def whose(self, locations: Sequence[Location | str] | None) -> list[Location]:
        """Return who is to be given access; by default the devices that this process added."""
        whose = list(self.added.values())
        if locations is not None:
            whose = [checks.place(self.driver, location) for location in locations]
        if not whose:
            raise UsageError("nobody would be given access: name locations, or add a device in this process")
        return whose

    def bind(
        self, call: Callable[[], object], owner: Handle, raw: int, start: int, nbytes: int
    ) -> tuple[Unbind, Claim]:
        """Bind with one driver call, and return the undo and the first claim on it.
        The handle `owner` keeps the memory alive, which the driver knows as `raw`."""
        properties = self.driver.mem_properties(raw)
        device = self.member(properties.location)
        if self.kinds and not properties.handle_kinds:
            raise UsageError(
                f"the {owner.label} cannot leave this process and the {self.handle.label} can, which takes only memory "
                f"that can too; create it with handle_kinds=HandleKind.POSIX_FD"
            )
        undo = Unbind(self, properties.location, device, start, nbytes)
        claim = own(undo.describe, undo, depends=(self.handle, owner))
        try:
            self.book(undo)
            undo.bind(call)
            for mapping in self.mapped():
                with contextlib.suppress(ClosedError):  # unmapped by another thread
                    mapping.depend(claim.handle)
        except BaseException as error:
            with unwinding(error):
                claim.release()
            raise
        return undo, claim

    def map(self, where: AddressRange, offset: int, bindings: Iterable[Handle]) -> tuple[Claim, Unmap]:
        """Map with one driver call; `bindings` and the object stay until that is undone."""
        if (where.address + offset) % self.least:
            first = round_up(where.address, self.least) - where.address
            raise AlignmentError(
                f"the address {where.address + offset:#x}, at offset {offset}, is not a multiple of the granularity, "
                f"{self.least}; offset {first} is, and {self.least} each further. Or reserve with "
                f"alignment={self.least}"
            )
        if offset + self.nbytes > where.nbytes:
            raise RangeError(
                f"{self.nbytes} bytes at offset {offset} do not fit a reservation of {where.nbytes} bytes; reserve more"
            )
        claim, undo = map_at(where, offset, self.nbytes, self._put, (where.handle, self.handle, *bindings))
        self.mappings[undo] = claim.handle
        return claim, undo

    def _put(self, address: int, nbytes: int) -> None:
        self.driver.mem_map(address, nbytes, 0, self.driver_handle)

    def export(self, kind: HandleKind) -> int:
        """Return a descriptor that is closed with the object."""
        with self.lock:
            fd = self.exported.get(kind)
            if fd is None:
                with self.handle.claim("export"):  # another thread may close this object while the driver works
                    fd = self.driver.mem_export(self.driver_handle, kind)
                    self.handle.keep(f"exported descriptor of the {self.handle.label}", partial(os.close, fd))
                self.exported[kind] = fd
            return fd


def opened(
    driver: Driver, call: Callable[[], int], nbytes: int, num_devices: int, kinds: HandleKind, least: int
) -> tuple[MulticastState, Claim]:
    """Make or import an object with one driver call, and return it with the first claim on it."""
    release = Release(driver, nbytes, num_devices)
    claim = own(release.describe, release)
    try:
        release.driver_handle = raw = call()
        return MulticastState(driver, raw, nbytes, num_devices, kinds, least, claim.handle), claim
    except BaseException as error:
        with unwinding(error):
            claim.release()
        raise


def multicast(driver: Driver) -> Multicast:
    """Return the driver as one with multicast objects."""
    if not isinstance(driver, Multicast):
        name = getattr(driver, "name", None) or f"{driver!r:.40} for a"
        raise UnsupportedError(
            "a multicast object", "GPUs joined by NVSwitch", f"the {name} driver, which has none",
            "Write to each memory on its own",
        )  # fmt: skip
    return driver


def team_of(driver: Driver, devices: int | Sequence[Location | str]) -> tuple[int, tuple[Location, ...]]:
    """Return how many devices a team has, and those that were named."""
    if type(devices) is int and devices > 0:
        return devices, ()
    if isinstance(devices, (int, str)) or not isinstance(devices, Sequence) or not devices:
        raise UsageError(f"devices must be how many there are in the team, 1 or more, or their locations: {devices!r}")
    places = tuple(checks.place(driver, where) for where in devices)
    if len({driver.device_info(place).uuid for place in places}) < len(places):
        raise UsageError(f"devices names one twice: {', '.join(map(str, places))}; each is in a team once")
    return len(places), places


def sized(calls: Multicast, count: int, nbytes: int | str, kinds: HandleKind) -> tuple[int, int]:
    """Return the size of an object, and its granularity."""
    size = checks.positive(nbytes, "nbytes", 1)
    least = calls.multicast_granularity(count, size, kinds).minimum
    return checks.aligned(size, "nbytes", least), least


def address_of(memory: object, least: int) -> tuple[int, int]:
    """Return the address and size of memory that was named so."""
    if not isinstance(memory, tuple) or [type(part) for part in memory] != [int, int]:
        raise UsageError(f"memory must be a PhysicalAllocation or an address and a size in bytes, not {memory!r:.80}")
    address, nbytes = memory
    return checks.aligned(address, "address", least), checks.positive(nbytes, "the size of the memory,", least)


@contextlib.contextmanager
def retained(driver: Driver, address: int) -> Iterator[tuple[int, Handle]]:
    """Hold the memory at an address, for this block and whatever then depends on its handle."""
    raw = driver.mem_retain(address)
    owner = own(f"memory at {address:#x}", partial(driver.mem_release, raw))
    try:
        yield raw, owner.handle
    finally:
        owner.release()
