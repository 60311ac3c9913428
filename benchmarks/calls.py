"""What each call of virtual memory management costs above the bare one: as a driver's, and with ownership."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from vram import driver as drivers
from vram.bench.gpu import Bare, bare_calls
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.driver.protocol import Driver
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation
from vram.spec import Access, HandleKind, Location

_OPERATIONS = ("reserve", "create", "map", "set_access", "unmap", "release", "free", "export", "import")
_NBYTES = 2 << 20
_ABOVE = 5.0  # us
_FD = HandleKind.POSIX_FD


class _Slot:
    """One object on its way through all the calls; what is None was not made, or is given back."""

    def __init__(self) -> None:
        self.address: Any = None
        self.memory: Any = None
        self.mapping: Any = None
        self.fd: Any = None
        self.imported: Any = None


class _Bare:
    """A call of the bindings each, and a look at its status."""

    def __init__(self, bare: Bare) -> None:
        self._api, self._ok, self._bare = bare.api, bare.ok, bare

    def reserve(self, slot: _Slot) -> None:
        slot.address = self._ok(self._api.cuMemAddressReserve(_NBYTES, 0, 0, 0))

    def create(self, slot: _Slot) -> None:
        slot.memory = self._ok(self._api.cuMemCreate(_NBYTES, self._bare.prop, 0))

    def map(self, slot: _Slot) -> None:
        self._ok(self._api.cuMemMap(slot.address, _NBYTES, 0, slot.memory, 0))
        slot.mapping = slot.address

    def set_access(self, slot: _Slot) -> None:
        self._ok(self._api.cuMemSetAccess(slot.address, _NBYTES, self._bare.grants, 1))

    def unmap(self, slot: _Slot) -> None:
        slot.mapping = self._ok(self._api.cuMemUnmap(slot.address, _NBYTES))

    def release(self, slot: _Slot) -> None:
        slot.memory = self._ok(self._api.cuMemRelease(slot.memory))

    def free(self, slot: _Slot) -> None:
        slot.address = self._ok(self._api.cuMemAddressFree(slot.address, _NBYTES))

    def export(self, slot: _Slot) -> None:
        slot.fd = self._ok(self._api.cuMemExportToShareableHandle(slot.memory, self._bare.fd_kind, 0))

    def import_(self, slot: _Slot) -> None:
        slot.imported = self._ok(self._api.cuMemImportFromShareableHandle(slot.fd, self._bare.fd_kind))

    def close(self, fd: int) -> None:
        os.close(fd)


class _Driver:
    """The same calls of :mod:`vram.driver`."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._driver: Driver = drivers.get(location)

    def reserve(self, slot: _Slot) -> None:
        slot.address = self._driver.address_reserve(_NBYTES)

    def create(self, slot: _Slot) -> None:
        slot.memory = self._driver.mem_create(_NBYTES, self._location, _FD)

    def map(self, slot: _Slot) -> None:
        self._driver.mem_map(slot.address, _NBYTES, 0, slot.memory)
        slot.mapping = slot.address

    def set_access(self, slot: _Slot) -> None:
        self._driver.mem_set_access(slot.address, _NBYTES, Access.READ_WRITE, (self._location,))

    def unmap(self, slot: _Slot) -> None:
        slot.mapping = self._driver.mem_unmap(slot.address, _NBYTES)  # type: ignore[func-returns-value]

    def release(self, slot: _Slot) -> None:
        slot.memory = self._driver.mem_release(slot.memory)  # type: ignore[func-returns-value]

    def free(self, slot: _Slot) -> None:
        slot.address = self._driver.address_free(slot.address, _NBYTES)  # type: ignore[func-returns-value]

    def export(self, slot: _Slot) -> None:
        slot.fd = self._driver.mem_export(slot.memory, _FD)

    def import_(self, slot: _Slot) -> None:
        slot.imported = self._driver.mem_import(slot.fd, _FD, _NBYTES)

    def close(self, fd: int) -> None:
        os.close(fd)


class _Owned:
    """The same with counted ownership: what users of :mod:`vram.memory` pay."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._driver: Driver = drivers.get(location)

    def reserve(self, slot: _Slot) -> None:
        slot.address = AddressReservation.reserve(self._driver, _NBYTES)

    def create(self, slot: _Slot) -> None:
        slot.memory = PhysicalAllocation.create(self._driver, _NBYTES, self._location)

    def map(self, slot: _Slot) -> None:
        slot.mapping = MemoryMapping.map(slot.address, 0, slot.memory, access=Access.NONE)

    def set_access(self, slot: _Slot) -> None:
        slot.mapping.set_access(Access.READ_WRITE)

    def unmap(self, slot: _Slot) -> None:
        slot.mapping = slot.mapping.close()

    def release(self, slot: _Slot) -> None:
        slot.memory = slot.memory.close()

    def free(self, slot: _Slot) -> None:
        slot.address = slot.address.close()

    def export(self, slot: _Slot) -> None:
        slot.fd = slot.memory.export()

    def import_(self, slot: _Slot) -> None:
        slot.imported = PhysicalAllocation.import_(self._driver, slot.fd, _NBYTES)

    def close(self, fd: int) -> None:
        """The descriptor is the allocation's own."""


_Way = _Bare | _Driver | _Owned


def on_gpu(quick: bool, location: Location) -> Result:
    """Measure each call by itself, some in a row, the three ways in turns."""
    count, rounds = (4, 3) if quick else (16, 60)
    with bare_calls(location) as bare:
        ways: dict[str, _Way] = {"bare": _Bare(bare), "driver": _Driver(location), "owned": _Owned(location)}
        took: dict[str, dict[str, list[float]]] = {name: {} for name in ways}

        def case(name: str) -> Callable[[], float]:
            return lambda: _pass(ways[name], count, took[name])

        in_turns({name: case(name) for name in ways}, rounds)
    rows: list[Row] = []
    for operation in _OPERATIONS:
        plain, driver, owned = (took[name][operation][-rounds:] for name in ways)
        above = [ours - theirs for ours, theirs in zip(driver, plain, strict=True)]
        further = [ours - theirs for ours, theirs in zip(owned, plain, strict=True)]
        rows += [
            Row(f"{operation}: bare call", Figure.of(plain, "us", scale=1e6)),
            Row.limited(f"{operation}: vram.driver, above it", Figure.of(above, "us", scale=1e6), at_most=_ABOVE),
            Row(f"{operation}: with ownership, above it", Figure.of(further, "us", scale=1e6)),
        ]
    notes = [
        f"{count} objects of {_NBYTES >> 20} MiB at a time; differences round by round. They can be below zero where "
        f"the driver's own time varies by more than they are (export, set_access)",
        "with ownership, map and unmap also order the GPU's work; export is made once for an allocation and then kept",
    ]
    return Result("calls", "Each call of virtual memory management, above the bare binding call", rows, notes)


def _pass(way: _Way, count: int, took: dict[str, list[float]]) -> float:
    """Lead some objects through all the calls, and return the seconds in all; those of each call go into `took`."""
    slots = [_Slot() for _ in range(count)]
    sent = [_Slot() for _ in range(count)]  # apart, since to close a descriptor takes time as well
    total = 0.0

    def run(operation: str, call: Callable[[_Slot], None], over: list[_Slot]) -> None:
        nonlocal total
        begin = time.perf_counter()
        for slot in over:
            call(slot)
        spent = time.perf_counter() - begin
        took.setdefault(operation, []).append(spent / count)
        total += spent

    try:
        run("reserve", way.reserve, slots)
        run("create", way.create, slots)
        run("map", way.map, slots)
        run("set_access", way.set_access, slots)
        run("unmap", way.unmap, slots)
        run("release", way.release, slots)
        run("free", way.free, slots)
        for slot in sent:
            way.create(slot)
        run("export", way.export, sent)
        run("import", way.import_, sent)
    finally:
        for slot in (*slots, *sent):
            _give_back(way, slot)
    return total


def _give_back(way: _Way, slot: _Slot) -> None:
    if slot.mapping is not None:
        way.unmap(slot)
    if slot.memory is not None:
        way.release(slot)
    if slot.imported is not None:
        slot.memory, slot.imported = slot.imported, None
        way.release(slot)
    if slot.address is not None:
        way.free(slot)
    if slot.fd is not None:
        way.close(slot.fd)
