"""The cost of each call of virtual memory management above the bare one: as a driver's, and with ownership."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from vram import driver as drivers
from vram.bench.gpu import Bare, bare_calls
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation
from vram.spec import Access, HandleKind, Location

# In the order of one pass, with the attribute of a slot that each of them sets.
_OPERATIONS = {
    "reserve": "address", "create": "memory", "map": "mapping", "set_access": "granted", "unmap": "mapping",
    "release": "memory", "free": "address", "export": "fd", "import": "imported",
}  # fmt: skip
_NBYTES = 2 << 20
_ABOVE = 5.0  # us
_FD = HandleKind.POSIX_FD


class _Slot:
    """One object on its way through all the calls; None was not made, or is given back."""

    def __init__(self) -> None:
        self.address: Any = None
        self.memory: Any = None
        self.mapping: Any = None
        self.granted: Any = None
        self.fd: Any = None
        self.imported: Any = None


_Way = Mapping[str, Callable[[_Slot], Any]]


def _bare(bare: Bare) -> _Way:
    """Return for each operation a call of the bindings, and a look at its status."""
    api, ok = bare.api, bare.ok
    return {
        "reserve": lambda slot: ok(api.cuMemAddressReserve(_NBYTES, 0, 0, 0)),
        "create": lambda slot: ok(api.cuMemCreate(_NBYTES, bare.prop, 0)),
        "map": lambda slot: ok(api.cuMemMap(slot.address, _NBYTES, 0, slot.memory, 0)) or slot.address,
        "set_access": lambda slot: ok(api.cuMemSetAccess(slot.address, _NBYTES, bare.grants, 1)),
        "unmap": lambda slot: ok(api.cuMemUnmap(slot.address, _NBYTES)),
        "release": lambda slot: ok(api.cuMemRelease(slot.memory)),
        "free": lambda slot: ok(api.cuMemAddressFree(slot.address, _NBYTES)),
        "export": lambda slot: ok(api.cuMemExportToShareableHandle(slot.memory, bare.fd_kind, 0)),
        "import": lambda slot: ok(api.cuMemImportFromShareableHandle(slot.fd, bare.fd_kind)),
        "close": lambda slot: os.close(slot.fd),
    }


def _of_driver(driver: Any, place: Location) -> _Way:
    """Return the same calls of :mod:`vram.driver`."""
    return {
        "reserve": lambda slot: driver.address_reserve(_NBYTES),
        "create": lambda slot: driver.mem_create(_NBYTES, place, _FD),
        "map": lambda slot: driver.mem_map(slot.address, _NBYTES, 0, slot.memory) or slot.address,
        "set_access": lambda slot: driver.mem_set_access(slot.address, _NBYTES, Access.READ_WRITE, (place,)),
        "unmap": lambda slot: driver.mem_unmap(slot.address, _NBYTES),
        "release": lambda slot: driver.mem_release(slot.memory),
        "free": lambda slot: driver.address_free(slot.address, _NBYTES),
        "export": lambda slot: driver.mem_export(slot.memory, _FD),
        "import": lambda slot: driver.mem_import(slot.fd, _FD, _NBYTES),
        "close": lambda slot: os.close(slot.fd),
    }


def _owned(driver: Any, place: Location) -> _Way:
    """Return the same with counted ownership: what users of :mod:`vram.memory` pay."""
    return {
        "reserve": lambda slot: AddressReservation.reserve(driver, _NBYTES),
        "create": lambda slot: PhysicalAllocation.create(driver, _NBYTES, place),
        "map": lambda slot: MemoryMapping.map(slot.address, 0, slot.memory, access=Access.NONE),
        "set_access": lambda slot: slot.mapping.set_access(Access.READ_WRITE),
        "unmap": lambda slot: slot.mapping.close(),
        "release": lambda slot: slot.memory.close(),
        "free": lambda slot: slot.address.close(),
        "export": lambda slot: slot.memory.export(),
        "import": lambda slot: PhysicalAllocation.import_(driver, slot.fd, _NBYTES),
        "close": lambda slot: None,  # the descriptor is the allocation's own
    }


def on_gpu(quick: bool, location: Location) -> Result:
    """Measure each call by itself, some in a row, the three ways in turns."""
    count, rounds = (4, 3) if quick else (16, 60)
    with bare_calls(location) as bare:
        driver = drivers.get(location)
        ways = {"bare": _bare(bare), "driver": _of_driver(driver, location), "owned": _owned(driver, location)}
        took: dict[str, dict[str, list[float]]] = {name: {} for name in ways}

        def case(name: str) -> Callable[[], float]:
            return lambda: _pass(ways[name], count, took[name])

        in_turns({name: case(name) for name in ways}, rounds)
    rows: list[Row] = []
    for operation in _OPERATIONS:
        plain, called, owned = (took[name][operation][-rounds:] for name in ways)
        above = [ours - theirs for ours, theirs in zip(called, plain, strict=True)]
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
    try:
        for operation, attribute in _OPERATIONS.items():
            over, call = sent if operation in ("export", "import") else slots, way[operation]
            if operation == "export":
                for slot in sent:
                    slot.memory = way["create"](slot)
            begin = time.perf_counter()
            for slot in over:
                setattr(slot, attribute, call(slot))
            spent = time.perf_counter() - begin
            took.setdefault(operation, []).append(spent / count)
            total += spent
    finally:
        for slot in (*slots, *sent):
            _give_back(way, slot)
    return total


def _give_back(way: _Way, slot: _Slot) -> None:
    if slot.mapping is not None:
        way["unmap"](slot)
    for memory in (slot.memory, slot.imported):
        if memory is not None:
            slot.memory = memory
            way["release"](slot)
    if slot.address is not None:
        way["free"](slot)
    if slot.fd is not None:
        way["close"](slot)
