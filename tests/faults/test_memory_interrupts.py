"""Ctrl-C at points of the calls that make memory, change it or take it back (I4, I12), on the host and the stand-in.

Nothing is left that nobody owns, and everything goes on from there.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.support.interrupts import interrupt
from tests.support.samples import nths

from vram import driver, lifetime
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation, Received, Region
from vram.spec import HOST, Access, Location

G = 2 << 20


class Scene:
    def __init__(self, where: Location) -> None:
        self.driver = driver.get(where)
        self.where = where
        self.allocation = PhysicalAllocation.create(self.driver, G, where)
        self.reservation = AddressReservation.reserve(self.driver, 2 * G)
        self.mapping = MemoryMapping.map(self.reservation, 0, self.allocation)
        self.region = Region.create(where, driver=self.driver, capacity=8 * G, chunk=G, nbytes=2 * G)
        self.fd = self.region.segments(0, 1)[0][0].export()

    def close(self) -> None:
        for part in (self.mapping, self.allocation, self.reservation, self.region):
            part.close()


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "create an allocation": lambda s: PhysicalAllocation.create(s.driver, G, s.where),
    "import an allocation": lambda s: PhysicalAllocation.import_(s.driver, s.fd, G),
    "export": lambda s: s.allocation.export(),
    "reserve": lambda s: AddressReservation.reserve(s.driver, G),
    "map": lambda s: MemoryMapping.map(s.reservation, G, s.allocation),
    "create a region": lambda s: Region.create(s.where, driver=s.driver, capacity=4 * G, chunk=G, nbytes=2 * G),
    "grow": lambda s: s.region.grow(4 * G),
    "import a region": lambda s: Region.from_allocations(s.driver, [s.allocation, s.allocation]),
    "import what was received": lambda s: Region.from_allocations(s.driver, [Received(s.fd, G), Received(s.fd, G)]),
    "segments": lambda s: s.region.segments(0, 2 * G),
    "pin": lambda s: s.region.pin(0, 2 * G),
    "set access": lambda s: s.mapping.set_access(Access.READ),
}
UNDOING: dict[str, Callable[[Scene], object]] = {
    "shrink": lambda s: s.region.shrink(0),
    "close a region": lambda s: s.region.close(),
    "close a mapping": lambda s: s.mapping.close(),
    "close an allocation": lambda s: (s.mapping.close(), s.allocation.close()),
    "close a reservation": lambda s: (s.mapping.close(), s.reservation.close()),
    "close all": lambda s: s.close(),
}


WHERE = [HOST, pytest.param(Location("cuda", 0), marks=pytest.mark.standin)]


@pytest.mark.parametrize("where", WHERE, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_leaves_nothing_that_nobody_owns_i4(operation: str, where: Location) -> None:
    Scene(where).close()  # a context, and what is read once
    empty = driver.get(where).live()
    for nth in nths():
        here = Scene(where)
        books, fds = here.driver.live(), descriptors(where)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was made but never handed out is a leak like any other
            came, _ = interrupt(nth, lambda here=here: OPERATIONS[operation](here))
            gc.collect(0)
        if operation == "export":
            here.allocation.export()
            fds += where == HOST
        here.region.resize(2 * G)
        if operation == "segments":  # a handle to memory that only its mapping held is kept until that goes
            books = replace(books, handles=here.driver.live().handles)
        assert here.driver.live() == books
        assert descriptors(where) == fds
        # And everything goes on from there, over the very addresses that the interrupt left.
        here.region.grow(8 * G)
        touch(here.region)
        here.region.shrink(0)
        MemoryMapping.map(here.reservation, G, here.allocation).close()
        here.close()
        assert here.driver.live() == empty
        assert not lifetime.stuck()
        if not came:
            break
    assert nth > 3


@pytest.mark.parametrize("where", WHERE, ids=str)
@pytest.mark.parametrize("operation", UNDOING)
def test_what_an_interrupt_comes_upon_is_undone_i12(operation: str, where: Location) -> None:
    Scene(where).close()
    gc.collect()
    empty, fds = driver.get(where).live(), descriptors(where)
    for nth in nths():
        here = Scene(where)
        came, _ = interrupt(nth, lambda here=here: UNDOING[operation](here))
        if not here.region.is_closed:  # and it works: its size, its chunks and its addresses agree
            assert here.region.nbytes in (0, 2 * G)
            assert here.region.nbytes == here.region.mapped
            here.region.grow(8 * G)
            touch(here.region)
        here.close()
        assert here.driver.live() == empty
        assert descriptors(where) == fds
        assert not lifetime.stuck()
        if not came:
            break
    assert nth > 3


def descriptors(where: Location) -> int:
    """Return how many there are, on the host: the stand-in has some of its own open for a while."""
    return len(os.listdir("/proc/self/fd")) if where == HOST else 0


def touch(region: Region) -> None:
    """Write to every chunk of a region."""
    for offset in range(0, region.nbytes, G):
        region.driver.fill(region.address + offset, 1, 64)
