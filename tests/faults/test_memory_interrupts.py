"""Ctrl-C at every point where it can come while memory is made: nothing is left that nobody owns (I4).

Python delivers an interrupt where a function begins and where a call of a C function returns. These are the two events
that a profile function sees, and what it raises goes up from there: so each such point in ``vram.memory`` is tried.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest

from vram import lifetime
from vram.driver.host import HostDriver
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation, Received, Region
from vram.spec import HOST

G = 2 << 20


class Scene:
    def __init__(self) -> None:
        self.driver = HostDriver()
        self.allocation = PhysicalAllocation.create(self.driver, G, HOST)
        self.reservation = AddressReservation.reserve(self.driver, 2 * G)
        self.region = Region.create(self.driver, HOST, capacity=8 * G, chunk=G, nbytes=2 * G)
        self.fd = self.region.segments(0, 1)[0][0].export()

    def close(self) -> None:
        for part in (self.allocation, self.reservation, self.region):
            part.close()


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "create an allocation": lambda s: PhysicalAllocation.create(s.driver, G, HOST),
    "import an allocation": lambda s: PhysicalAllocation.import_(s.driver, s.fd, G),
    "export": lambda s: s.allocation.export(),
    "reserve": lambda s: AddressReservation.reserve(s.driver, G),
    "map": lambda s: MemoryMapping.map(s.reservation, G, s.allocation),
    "create a region": lambda s: Region.create(s.driver, HOST, capacity=4 * G, chunk=G, nbytes=2 * G),
    "grow": lambda s: s.region.grow(4 * G),
    "import a region": lambda s: Region.from_allocations(s.driver, [s.allocation, s.allocation]),
    "import what was received": lambda s: Region.from_allocations(s.driver, [Received(s.fd, G), Received(s.fd, G)]),
    "segments": lambda s: s.region.segments(0, 2 * G),
    "pin": lambda s: s.region.pin(0, 2 * G),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_leaves_nothing_that_nobody_owns_i4(operation: str) -> None:
    points = 0
    for nth in itertools.count(1):
        here = Scene()
        books, fds = here.driver.live(), len(os.listdir("/proc/self/fd"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was made but never handed out is a leak like any other
            interrupted = interrupt(nth, lambda here=here: OPERATIONS[operation](here))
            gc.collect(0)
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
        here.driver.fill(here.region.address, 1, 8 * G)
        here.region.shrink(0)
        MemoryMapping.map(here.reservation, G, here.allocation).close()
        here.close()
        assert here.driver.live() == HostDriver().live()
        assert not lifetime.stuck()
        if not interrupted:
            break
        points += 1
    assert points >= 3


def interrupt(nth: int, act: Callable[[], object]) -> bool:
    """Run `act`, with an interrupt at the Nth point in ``vram.memory`` where one can come; whether it came."""
    count = itertools.count(1)

    def profile(frame: FrameType, event: str, argument: object) -> None:
        here = event in ("call", "c_return") and f"{os.sep}vram{os.sep}memory{os.sep}" in frame.f_code.co_filename
        if here and next(count) == nth:
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    made = None  # kept until the interrupts are over: they are to come while things are made, not while they are undone
    try:
        made = act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    del made
    return next(count) > nth
