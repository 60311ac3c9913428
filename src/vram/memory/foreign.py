"""Memory that this library did not map: another library's here, or another process's that no descriptor brings.

Both are a :class:`ForeignRegion`: a region whose size nobody here can change and whose addresses go when its owner says
so. The pins of arrays on it keep another object alive (``keeps``): here the owner's own object, elsewhere a token
whose end its lender is told of.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, NoReturn

from ..driver.protocol import DeviceMemory, Driver, PointerInfo
from ..errors import ClosedError, DeviceLostError, UsageError
from ..lifetime import Claim, Handle, own, shielded
from ..spec import Access, HandleKind, Location, format_size
from .allocation import Memory, acquire, adopt_memory, or_else
from .capabilities import devices, foreign, legacy
from .chunks import Chunk, Chunks
from .kinds import OWN, Way, way
from .region import Region
from .reservation import AddressRange, Unmap

_MOST_KNOWN = 4096  # allocations of others whose looks are remembered


class ForeignRegion(Region):
    """Memory at addresses that are not ours to map or unmap, as a region that neither grows nor shrinks; freezing does
    nothing. `infos` are its allocations, one behind the other. Made by :func:`find_foreign` and its like."""

    __slots__ = ("infos",)

    infos: tuple[PointerInfo, ...]

    @classmethod
    def over(
        cls,
        driver: Driver,
        infos: tuple[PointerInfo, ...],
        claim: Claim,
        *,
        access: Access = Access.READ_WRITE,
        user: Location | None = None,
    ) -> ForeignRegion:
        """Make a region of allocations that `claim` keeps; it takes the claim over."""
        first, last = infos[0], infos[-1]
        nbytes = last.base + last.nbytes - first.base
        where = AddressRange(driver, nbytes, first.base)
        where.handle = claim.handle
        held = Chunks(where, claim.handle, first.location, users=() if user is None else (user,))
        row = []
        for info in infos:
            start = info.base - first.base
            undo = Unmap(where, start, info.nbytes)  # never called: there is nothing of ours to unmap
            get = partial(_adopted, driver, info)  # only what virtual memory management made is memory of its own
            row.append(Chunk(start, start + info.nbytes, info.location, claim.handle, undo, None, get))
        held.row = tuple(row)
        region = cls(claim, held, access, 1, imported=True, managed=True)
        region.infos = infos
        region._nbytes = nbytes
        return region

    @property
    def opened(self) -> Opened:
        """The parts for further regions over the same opened memory; see :class:`Opened`."""
        return Opened(self.driver, self.infos, self.handle, self.users[0])

    @property
    def made_by(self) -> str:
        """The family of calls that made it; see :class:`~vram.driver.protocol.PointerInfo`."""
        return self.infos[0].made_by

    @property
    def kinds(self) -> HandleKind:
        """How all of it can leave this process; NONE if it cannot."""
        return functools.reduce(lambda one, other: one & other, (info.kinds for info in self.infos))

    @shielded
    def freeze(self) -> None:
        """Do nothing: whoever maps it here has the rights, and whoever maps it elsewhere takes its own."""
        self.handle  # noqa: B018  (the check)

    def _alone(self) -> NoReturn:
        raise UsageError(f"{self.handle.label} belongs to others, who alone can change it; copy it: vram.copy()")


def way_of(region: Region) -> Way | None:
    """Return how a region's memory goes to another process; None if it is another library's and cannot."""
    return way(region.kinds, region.infos[0].nbytes) if isinstance(region, ForeignRegion) else OWN


class Opened(NamedTuple):
    """Memory that was opened once, for any number of regions over it: the last of them to go closes it.
    It holds no claim itself: with the last region the handle is closed, and the memory has to be opened anew."""

    driver: Driver
    infos: tuple[PointerInfo, ...]
    handle: Handle
    user: Location

    def region(self, access: Access, depends: Iterable[Handle] = ()) -> ForeignRegion:
        """Make a region with dependencies of its own, which are let go of when nothing of it is in use.
        Raises ClosedError if the last region over the memory is gone."""
        undo = partial(_leave, self.driver, self.user, abs, 0)  # there is nothing to close: it only waits for the work
        claim = own(self.handle.label, undo, depends=(*depends, self.handle))
        return ForeignRegion.over(self.driver, self.infos, claim, access=access, user=self.user)


def _leave(driver: Driver, user: Location, close: Callable[[int], object], address: int) -> None:
    """Wait for the work on a foreign region, then close what was opened."""
    with contextlib.suppress(DeviceLostError):  # it runs nothing any more
        driver.synchronize(user)
    close(address)


# -- of another library in this process -----------------------------------------------------------------------------
class _Known:
    """Known foreign memory: one attribute says whether an address is still the allocation that it was,
    everything else is remembered; regions weakly. Not reached from finalizers."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.infos: dict[tuple[str, int], PointerInfo] = {}
        self.regions: weakref.WeakValueDictionary[tuple[object, ...], ForeignRegion] = weakref.WeakValueDictionary()
        self.memories: dict[tuple[str, int], Memory] = {}

    def info(self, driver: DeviceMemory, name: str, address: int) -> PointerInfo:
        key = (name, driver.pointer_identity(address))
        found = self.infos.get(key)
        if found is None or not found.base <= address < found.base + found.nbytes:
            found = driver.pointer_info(address)
            if len(self.infos) >= _MOST_KNOWN:
                self.infos.clear()
            self.infos[key] = found
        return found


_known = _Known()


def look_up(driver: Driver, address: int, nbytes: int) -> tuple[PointerInfo, ...]:
    """Return the allocations that a span lies in, one behind the other, no matter which library made them.
    Raises UsageError if the driver does not know all of it, or it is of several kinds."""
    asked, at, stop = foreign(driver), address, address + max(nbytes, 1)
    found: list[PointerInfo] = []
    while at < stop:
        try:
            info = _known.info(asked, driver.name, at)
        except UsageError as error:
            if not found:
                raise
            raise UsageError(
                f"{nbytes} bytes at {address:#x} end beyond their allocation, at {at:#x}: {error}"
            ) from None
        if found and (info.made_by, info.location) != (found[0].made_by, found[0].location):
            raise UsageError(f"{nbytes} bytes at {address:#x} run from one allocation into another, at {at:#x}")
        if found and info.made_by != "vmm":
            raise UsageError(f"{nbytes} bytes at {address:#x} end beyond their allocation, at {at:#x}")
        found.append(info)
        at = info.base + info.nbytes
    return tuple(found)


@shielded
def find_foreign(
    driver: Driver, address: int, nbytes: int, *, access: Access = Access.READ_WRITE
) -> tuple[ForeignRegion, int]:
    """Return the region of the allocations that a span lies in, and where in it the span begins. The same allocations
    give the same region while it is in use. The caller keeps the owner of the memory."""
    infos = look_up(driver, address, nbytes)
    key = (driver.name, access, *(info.identity for info in infos))
    with _known.lock:
        region = _known.regions.get(key)
        if region is None or region.is_closed:
            region = _known.regions[key] = _over_window(driver, infos, access)
    return region, address - region.address


def _over_window(driver: Driver, infos: tuple[PointerInfo, ...], access: Access) -> ForeignRegion:
    first, last = infos[0], infos[-1]
    nbytes = last.base + last.nbytes - first.base
    asked = foreign(driver)
    claim, _ = acquire(
        f"memory of another library ({first.made_by}), {format_size(nbytes)} on {first.location} at {first.base:#x}",
        partial(asked.window_open, first.base, nbytes, first.location, min(access, first.access)), asked.window_close,
    )  # fmt: skip
    return ForeignRegion.over(driver, infos, claim, access=access)


def _adopted(driver: Driver, info: PointerInfo) -> tuple[Memory, Claim]:
    """Hold an allocation on its own: once, however many regions it is a part of."""
    key = (driver.name, info.identity)
    with _known.lock:
        memory = _known.memories.get(key)
        if memory is not None:
            try:
                return memory, memory.handle.claim("foreign region")
            except ClosedError:
                pass
        for old, one in _known.memories.copy().items():
            if one.handle.is_open:
                continue
            del _known.memories[old]
        memory, claim = adopt_memory(driver, info.base, info.nbytes, info.location)
        _known.memories[key] = memory
        return memory, claim


# -- of another process -----------------------------------------------------------------------------------------
@shielded
def open_handle(
    driver: Driver,
    kind: Way,
    data: bytes,
    nbytes: int | None,
    location: Location,
    *,
    depends: Iterable[Handle] = (),
    user: Location | None = None,
    pool: int = 0,
) -> ForeignRegion:
    """Open an allocation of another process by its 64 bytes, of `nbytes` in all (None: ask the driver), for the GPU
    `user`; `pool` is the driver's number of its pool, if it is of one. Raises ProtocolError for a bad or freed handle
    or a wrong size, UsageError for this process's own memory. An allocation of a pool is never to be opened twice: the
    first to be closed would unmap both."""
    able, where = devices(driver, f"memory of {kind.makes}, which goes {kind.goes}"), user or location
    enter = partial(kind.enter, able, data, nbytes, where, pool)
    what = f"{kind.makes} memory of another process"
    return _opened(driver, what, nbytes, location, depends, enter, kind.leave(able), where)


@shielded
def create_legacy(driver: Driver, nbytes: int, location: Location) -> ForeignRegion:
    """Allocate at least 1 byte by ``cuMemAlloc``, with undefined contents, for libraries that cannot share
    ``cuMemCreate``. The region owns the memory: closing it frees it."""
    able = legacy(driver)
    return _opened(
        driver, "memory of cuMemAlloc", nbytes, location, (),
        lambda: able.ipc_create(nbytes, location), able.ipc_free, location,
    )  # fmt: skip


def _opened(
    driver: Driver,
    what: str,
    nbytes: int | None,
    location: Location,
    depends: Iterable[Handle],
    enter: Callable[[], int],
    close: Callable[[int], object],
    user: Location,
) -> ForeignRegion:
    size = "" if nbytes is None else f", {format_size(nbytes)}"
    claim, address = acquire(
        f"{what}{size} on {location}", enter, partial(_leave, driver, user, close), depends=depends
    )
    with or_else(claim.release):
        real = foreign(driver).pointer_info(address).nbytes if nbytes is None else nbytes
        info = PointerInfo(address, real, location, HandleKind.NONE, "opened", 0, Access.READ_WRITE)
        return ForeignRegion.over(driver, (info,), claim, user=user)


def _after_fork_in_child() -> None:
    """Start anew: the lock may have been held by a thread that does not exist here, and the regions are inert."""
    global _known
    _known = _Known()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
