"""Ctrl-C at every point where it can come while memory is made, changed or taken back (I4, I12).

Each such point of ``vram.memory``, the host's driver and ``vram.lifetime`` is tried. Nothing is left that nobody owns,
and everything goes on from there. What is tried here ``test_cuda_interrupts.py`` tries on a GPU, too.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.interrupts import interrupt
from tests.support.samples import least, nths

from vram import lifetime
from vram.driver.host import HostDriver
from vram.errors import ReleaseWarning
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation, Received, Region
from vram.spec import HOST, Access, Location

G = 2 << 20


class Scene:
    def __init__(self, driver: Any = None, where: Location = HOST) -> None:
        self.driver = HostDriver() if driver is None else driver
        self.where = where
        self.allocation = PhysicalAllocation.create(self.driver, G, where)
        self.reservation = AddressReservation.reserve(self.driver, 2 * G)
        self.mapping = MemoryMapping.map(self.reservation, 0, self.allocation)
        self.region = Region.create(where, driver=self.driver, capacity=8 * G, chunk=G, nbytes=2 * G)
        self.fd = self.region.segments(0, 1)[0][0].export()

    def check(self) -> None:
        """What can be seen at any time."""
        assert not lifetime.stuck()

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


Interrupt = Callable[[int, Callable[[], object]], bool]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_leaves_nothing_that_nobody_owns_i4(operation: str) -> None:
    assert made_under_interrupts(operation, Scene, interrupt, HostDriver().live()) >= least(3)


@pytest.mark.parametrize("operation", UNDOING)
def test_what_an_interrupt_cuts_short_is_undone_all_the_same_i12(operation: str) -> None:
    assert undone_under_interrupts(operation, Scene, interrupt, HostDriver().live()) >= least(20)


def made_under_interrupts(operation: str, scene: Callable[[], Scene], come: Interrupt, empty: object) -> int:
    """Do something, with an interrupt at each point, and check that nothing is left; return how many points."""
    for nth in nths():
        here = scene()
        books, fds = here.driver.live(), len(os.listdir("/proc/self/fd"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was made but never handed out is a leak like any other
            interrupted = come(nth, lambda here=here: OPERATIONS[operation](here))
            gc.collect(0)
        here.check()
        if operation == "export":
            here.allocation.export()
            fds += 1
        here.region.resize(2 * G)
        if operation == "segments":  # a handle to memory that only its mapping held is kept until that goes
            books = replace(books, handles=here.driver.live().handles)
        assert here.driver.live() == books
        assert len(os.listdir("/proc/self/fd")) == fds
        # And everything goes on from there, over the very addresses that the interrupt left.
        here.region.grow(8 * G)
        touch(here.region)
        here.region.shrink(0)
        MemoryMapping.map(here.reservation, G, here.allocation).close()
        here.close()
        assert here.driver.live() == empty
        assert not lifetime.stuck()
        if not interrupted:
            return nth - 1
    return 0


def test_an_interrupt_in_a_seal_leaves_memory_that_is_sealed_or_as_it_was_i12() -> None:
    points, fds = 0, len(os.listdir("/proc/self/fd"))
    for nth in nths():
        here = Scene()
        before = len(os.listdir("/proc/self/fd"))
        interrupted = interrupt(nth, here.allocation.seal)
        gc.collect(0)
        lifetime.live()  # works off what was let go of in the moment of the interrupt
        assert len(os.listdir("/proc/self/fd")) == before
        address = here.reservation.address
        right = here.driver.mem_get_access(address, HOST)
        assert (right is Access.READ) is here.allocation.is_sealed
        if not here.allocation.is_sealed:
            here.driver.fill(address, 1, 64)
        here.allocation.seal()
        assert here.driver.mem_get_access(address, HOST) is Access.READ
        here.close()
        assert here.driver.live() == HostDriver().live()
        assert len(os.listdir("/proc/self/fd")) == fds
        if not interrupted:
            break
        points += 1
    assert points >= least(20)


def undone_under_interrupts(operation: str, scene: Callable[[], Scene], come: Interrupt, empty: object) -> int:
    """Take something back, with an interrupt at each point, and check that it is gone; return how many points."""
    fds = len(os.listdir("/proc/self/fd"))
    for nth in nths():
        here = scene()
        interrupted = come(nth, lambda here=here: UNDOING[operation](here))
        here.check()
        if not here.region.is_closed:  # and it works: its size, its chunks and its addresses agree
            assert here.region.nbytes in (0, 2 * G)
            assert here.region.nbytes == here.region.mapped
            here.region.grow(8 * G)
            touch(here.region)
        here.close()
        assert here.driver.live() == empty
        assert len(os.listdir("/proc/self/fd")) == fds
        assert not lifetime.stuck()
        if not interrupted:
            return nth - 1
    return 0


def test_an_undo_that_is_always_interrupted_is_given_up_and_said_i12() -> None:
    """It may not hang: after some interrupts in a row it is a leak, which is counted."""
    calls = []

    def undo() -> None:
        calls.append(None)
        raise KeyboardInterrupt

    base = lifetime.own("base", None)
    claim = lifetime.own("stubborn", undo, depends=(base.handle,))
    with pytest.warns(ReleaseWarning, match="could not take back stubborn"), pytest.raises(KeyboardInterrupt):
        claim.release()
    assert 1 < len(calls) < 20
    (stuck,) = lifetime.stuck()
    assert base.handle.holders() == ("owner", "stubborn")  # what it stands on stays (I1)
    lifetime._stuck.remove(stuck)
    stuck.drop_dependency(base.handle)
    base.release()


def touch(region: Region) -> None:
    """Write to every chunk of a region."""
    for offset in range(0, region.nbytes, G):
        region.driver.fill(region.address + offset, 1, 64)
