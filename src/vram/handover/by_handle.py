"""Memory that no descriptor stands for: what its owner says of it, and opening it once for all who use it here.

cudaMalloc memory travels as the 64 bytes of its base with offset and length, memory of a pool as the pool's descriptor
and 64 bytes. Both live as long as their maker, so they are lent and never kept.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

from .. import driver as drivers
from ..driver.protocol import DeviceMemory, Driver
from ..errors import ClosedError, ProtocolError, UnsupportedError, UsageError
from ..lifetime import Claim, Handle, close_all, own
from ..memory import Region
from ..memory.foreign import ForeignRegion, open_handle, way_of
from ..memory.kinds import BY_NUMBER, OWN, Way
from ..sharing.descriptor import HandleEntry, MemoryDescriptor, SegmentEntry
from ..sharing.mapping import ACCESS, device_name, location_of
from ..sharing.opened import Openings
from ..spec import Access, Location


def goes_by_handle(region: Region) -> bool:
    """Whether a region's memory travels by 64 bytes instead of descriptors."""
    return isinstance(region, ForeignRegion) and _way(region).by_handle


def describe_by_handle(region: Region, start: int, stop: int) -> MemoryDescriptor:
    """Describe the bytes from `start` to `stop` of such a region: its one allocation, and where in it they lie."""
    segment = SegmentEntry(region.nbytes, int(_way(region).kind))
    return MemoryDescriptor(device_name(region.location), (segment,), start, stop - start, region.nbytes)


def handle_bytes(region: Region) -> bytes:
    """Return the 64 bytes by which such a region's allocation is opened elsewhere.
    The driver refuses (INVALID_VALUE) for a pool that was not exported before, see :class:`PoolDescriptors`."""
    return _way(region).export(cast("DeviceMemory", region.driver), region.address)


def _way(region: Region) -> Way:
    return way_of(region) or OWN


class LentPools:
    """The pools that one connection exports from: numbered, each with a descriptor while it is needed.
    No number is used again, since the driver gives the number of a pool that is gone to a new one."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._known: dict[int, tuple[int, Handle, list[int]]] = {}

    def of(self, region: Region) -> tuple[int, Claim, list[int]]:
        """Return the number of a region's pool, what keeps its descriptor, and the descriptor, which is lent."""
        pool, driver = cast("ForeignRegion", region).infos[0].pool, cast("DeviceMemory", region.driver)
        known = self._known.get(pool)
        if known is not None:
            with suppress(ClosedError):
                return known[0], known[1].claim("lent memory"), known[2]
        for old, (_, handle, _) in self._known.copy().items():
            if not handle.is_open:
                del self._known[old]
        fds = [driver.pool_export(pool)]
        claim = own("descriptor of a pool that is lent", partial(close_all, fds))
        number = next(self._numbers)
        self._known[pool] = number, claim.handle, fds
        return number, claim, fds


class PoolDescriptors:
    """The descriptors of the pools that something is exported from: each exported once, closed together.
    `fds` is in the order in which the pools were first asked for."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._pools = LentPools()
        self._claims: list[Claim] = []

    def number(self, region: Region) -> int:
        """Return which of the descriptors is that of a region's pool; -1 if it is of none."""
        if not _way(region).has_pool:
            return -1
        number, claim, fds = self._pools.of(region)
        self._claims.append(claim)
        self.fds += fds[: number == len(self.fds)]
        return number

    def close(self) -> None:
        """Close them all. Idempotent."""
        while self._claims:
            self._claims.pop().release()


class Imports:
    """Memory that was opened over one connection, by the other end's id (S6): each once, and counted.
    A second lease on it gets a region of its own over the opened memory, which is closed with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # never taken by a finalizer
        self._opened = Openings()
        self._pools: dict[Hashable, tuple[int, Handle]] = {}

    def open(
        self,
        key: Hashable,
        memory: MemoryDescriptor,
        entry: HandleEntry,
        pool: tuple[Hashable, int] | None,
        *,
        access: Access,
        depends: Sequence[Handle],
        user: Location | None = None,
    ) -> ForeignRegion:
        """Return a region over checked memory that the other end calls `key`, opened once; `pool` is the pool's key and
        lent descriptor. Raises ProtocolError for wrong bytes, UnsupportedError for own or unreachable memory."""
        home = location_of(memory.device)
        where = home if user is None else user
        driver = drivers.get(where)
        (segment,) = memory.segments
        kind = BY_NUMBER[segment.kind]
        open_it = partial(open_handle, driver, kind, entry.data, segment.nbytes, home, user=where)
        try:
            if kind.at_home and where != home:
                raise UnsupportedError(
                    f"memory of another process's pool for {where}", f"{home}, which it is on",
                    f"{where}, where memory of a pool on {home} is not opened",
                    f'Leave device= out, or copy it: vram.copy(..., device="{where}")',
                )  # fmt: skip
            if not kind.has_pool:
                return self._opened.region((key, where), segment.nbytes, access, depends, open_it)
            if pool is None:
                raise ProtocolError("memory of a pool came without the pool's descriptor")
            number, claim = self._imported(driver, *pool, home)
            try:
                open_it = partial(open_it, pool=number, depends=(claim.handle,))
                return _pointers.region((number, entry.data), segment.nbytes, access, depends, open_it)
            finally:
                claim.release()  # what was opened keeps its own
        except UsageError as error:
            raise UnsupportedError(
                "borrowing memory in the process that made it", "another process", f"this one ({error})",
                "Use the array as it is here",
            ) from None  # fmt: skip

    def _imported(self, driver: Driver, whose: Hashable, fd: int, home: Location) -> tuple[int, Claim]:
        """Return a pool with a claim on it: the one that is imported, or one more import."""
        if not isinstance(driver, DeviceMemory):
            raise ProtocolError("memory of a pool on a place that has none")
        with self._lock:
            for old, one in self._pools.copy().items():
                if not one[1].is_open:
                    del self._pools[old]
            known = self._pools.get(whose)
            if known is not None:
                with suppress(ClosedError):
                    return known[0], known[1].claim("opening a pointer")
            number = driver.pool_import(fd, home)
            claim = own("pool of another process", partial(driver.pool_destroy, number))
            self._pools[whose] = number, claim.handle
            return number, claim


# The memory of other processes' pools that is open here, by the driver's word for the pool, for all connections: the
# driver does not count pointers (measured), so the first free of one opened twice would unmap both.
_pointers = Openings()
_imports: weakref.WeakKeyDictionary[object, Imports] = weakref.WeakKeyDictionary()
_imports_lock = threading.Lock()  # never taken by a finalizer


def open_leased(
    connection: object,
    key: tuple[str, int],
    memory: MemoryDescriptor,
    entry: HandleEntry,
    pool_fd: int | None,
    access: str,
    depends: tuple[Handle, ...],
    user: Location | None,
) -> ForeignRegion:
    """Return a region over memory of the version `key`, leased over a connection; see :meth:`Imports.open`.
    Raises UnsupportedError for ``access="cow"``."""
    if access == "cow":
        raise UnsupportedError(
            "a private mapping", "memory that is copied on write", f"memory of {memory.device}, which is not",
            'Borrow it with access="r" and copy: vram.copy(...)',
        )  # fmt: skip
    pool = None if pool_fd is None else ((*key, "pool", entry.pool), pool_fd)
    with _imports_lock:
        opened = _imports.setdefault(connection, Imports())
    return opened.open((*key, entry.memory), memory, entry, pool, access=ACCESS[access], depends=depends, user=user)


def _after_fork_in_child() -> None:
    global _imports, _imports_lock
    _imports, _imports_lock = weakref.WeakKeyDictionary(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
