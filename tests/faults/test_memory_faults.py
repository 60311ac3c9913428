"""Every operation of ``vram.memory`` with every driver call failing in turn: nothing is left, nothing has changed (I4).

Once and for good; with ordinary errors and lack of memory. And releases that fail: said aloud, and what
could not be taken back is kept together with what it stands on (I1).
"""

from __future__ import annotations

import gc
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.faulty_driver import ERRORS, UNDO, FaultyDriver, work
from tests.support.samples import nths
from tests.support.stuck import take_back_what_is_stuck

from vram import lifetime
from vram.driver.host import HostDriver
from vram.errors import DriverError, RangeError, ReleaseWarning, UsageError
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation, Received, Region
from vram.spec import HOST, Access

G = 2 << 20
RW, READ = Access.READ_WRITE, Access.READ
WORK = work("mem_", "address_", "populate")


@dataclass
class Scene:
    """What there is before the operation, all of it made without faults."""

    driver: FaultyDriver
    allocation: PhysicalAllocation
    reservation: AddressReservation
    mapping: MemoryMapping
    region: Region
    imported: Region
    exported: int
    made: list[Any] = field(default_factory=list)

    def keep(self, thing: Any) -> None:
        self.made.append(thing)

    def more(self) -> list[PhysicalAllocation]:
        return [self.allocation, self.allocation]

    def mixed(self) -> list[PhysicalAllocation | Received]:
        return [Received(self.exported, G), self.allocation, Received(self.exported, G)]

    def state(self) -> object:
        """Everything that an operation which failed must leave as it was."""
        here, there = self.region, self.imported
        fresh = bytearray(4)
        self.driver.inner.copy_out(memoryview(fresh), here.address)
        return (
            self.driver.live(),
            {handle._id: handle.holders() for handle in lifetime.live()},
            len(os.listdir("/proc/self/fd")),
            [(r.nbytes, r.chunks, r.access, r.mapped, r._frozen) for r in (here, there)],
            [self.driver.inner.mem_get_access(r.address, HOST) for r in (here, there, self.mapping)],
            bytes(fresh),
        )

    def close(self) -> None:
        for thing in [*self.made, self.imported, self.region, self.mapping, self.reservation, self.allocation]:
            thing.close()


@pytest.fixture
def scene() -> Iterator[Callable[[], Scene]]:
    scenes: list[Scene] = []

    def make() -> Scene:
        driver = FaultyDriver(HostDriver())
        allocation = PhysicalAllocation.create(driver, G, HOST)
        reservation = AddressReservation.reserve(driver, 4 * G)
        mapping = MemoryMapping.map(reservation, 0, allocation)
        region = Region.create(HOST, driver=driver, capacity=16 * G, chunk=G, nbytes=3 * G - 5)
        driver.copy_in(region.address, memoryview(b"here"))
        exported = PhysicalAllocation.create(driver, G, HOST)
        imported = Region.from_allocations(driver, [exported], capacity=8 * G, access=RW)
        region.segments(0, region.nbytes)  # somebody wanted to have the memory: from now on it has handles of its own
        fd = exported.export()
        scenes.append(Scene(driver, allocation, reservation, mapping, region, imported, fd))
        exported.close()
        return scenes[-1]

    yield make
    for one in scenes:
        one.close()
    take_back_what_is_stuck()
    for one in scenes:
        assert one.driver.live() == HostDriver().live()


def outcome(act: Callable[[], object]) -> BaseException | None:
    """Return what `act` raised, interrupts included."""
    try:
        act()
    except BaseException as error:
        return error.with_traceback(None)  # which would keep the very objects that we are about to count
    return None


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "create an allocation": lambda s: s.keep(PhysicalAllocation.create(s.driver, 2 * G, HOST)),
    "import an allocation": lambda s: s.keep(PhysicalAllocation.import_(s.driver, s.exported, G)),
    "export": lambda s: s.allocation.export(),
    "identity": lambda s: s.allocation.identity(),
    "is sealed": lambda s: s.allocation.is_sealed,
    "seal": lambda s: s.allocation.seal(),
    "reserve": lambda s: s.keep(AddressReservation.reserve(s.driver, G)),
    "map": lambda s: s.keep(MemoryMapping.map(s.reservation, G, s.allocation)),
    "map privately": lambda s: s.keep(MemoryMapping.map(s.reservation, G, s.allocation, private=True)),
    "set access": lambda s: s.mapping.set_access(READ),
    "create a region": lambda s: s.keep(
        Region.create(HOST, driver=s.driver, capacity=8 * G, nbytes=3 * G + 1, chunk=G)
    ),
    "create and populate": lambda s: s.keep(Region.create(HOST, driver=s.driver, capacity=G, nbytes=1, populate=True)),
    "grow": lambda s: s.region.grow(6 * G),
    "resize": lambda s: s.region.resize(3 * G + 1),
    "shrink": lambda s: s.region.shrink(1),
    "import a region": lambda s: s.keep(Region.from_allocations(s.driver, s.more(), nbytes=7)),
    "import privately": lambda s: s.keep(Region.from_allocations(s.driver, s.more(), access=RW, private=True)),
    "import what was received": lambda s: s.keep(Region.from_allocations(s.driver, s.mixed(), access=RW)),
    "receive privately": lambda s: s.keep(Region.from_allocations(s.driver, s.mixed(), access=RW, private=True)),
    "extend by what was received": lambda s: s.imported.extend(s.mixed(), 2 * G + 5),
    "extend": lambda s: s.imported.extend(s.more(), 2 * G + 5),
    "segments": lambda s: s.region.segments(0, 2 * G),
    "populate": lambda s: s.region.populate(),
    "is frozen": lambda s: s.region.is_frozen,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
def test_a_failed_call_leaves_nothing_and_changes_nothing_i4(
    scene: Callable[[], Scene], operation: str, error: str, forever: bool
) -> None:
    calls = 0
    act = OPERATIONS[operation]
    for nth in nths():
        here = scene()
        before = here.state()
        with here.driver.inject(WORK, nth, ERRORS[error], forever=forever) as fault:
            raised = outcome(lambda here=here: act(here))
        assert raised is fault.first
        if raised is None:
            break
        assert not hasattr(raised, "__notes__")
        calls += 1
        gc.collect()
        assert here.state() == before
        act(here)  # and now it works
    assert calls or operation in ("segments", "shrink")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failure_while_unwinding_becomes_a_note_on_the_first_i4(scene: Callable[[], Scene], operation: str) -> None:
    """Everything fails from the Nth call on, releases included: the first error is the one raised, and what could not
    be taken back is kept with all that it stands on."""
    for nth in nths():
        here = scene()
        before = here.driver.live()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with here.driver.inject(WORK, nth, forever=True) as fault, here.driver.inject(UNDO, forever=True) as undo:
                raised = outcome(lambda here=here: OPERATIONS[operation](here))
        if not fault.fired:
            assert raised is None
            take_back_what_is_stuck()
            break
        assert raised is not None
        assert fault.fired[0] in str(raised)
        stuck = lifetime.stuck()
        assert len(stuck) == len(undo.fired)
        assert getattr(raised, "__notes__", []) == [
            f"could not take back {handle.label}: {name} (injected) failed: EIO (5); "
            f"it stays allocated until the process ends"
            for handle, name in zip(stuck, undo.fired, strict=True)
        ]
        assert not warned
        now = here.driver.live()
        assert now.mappings - before.mappings == undo.fired.count("mem_unmap")
        if "mem_unmap" in undo.fired and "region" in operation:
            assert now.reservations > before.reservations  # under what is still mapped
        raised = None
        assert take_back_what_is_stuck() == len(stuck)
        assert here.driver.live() == before


@pytest.mark.parametrize("forget", [False, True], ids=["closed", "forgotten"])
def test_releases_that_fail_are_reported_and_kept_i1(scene: Callable[[], Scene], forget: bool) -> None:
    for nth in itertools.count(1):
        here = scene()
        region = Region.create(HOST, driver=here.driver, capacity=4 * G, chunk=G, nbytes=3 * G, managed=True)
        address, before = region.address, here.driver.live()
        with here.driver.inject(UNDO, nth) as fault:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                if not forget:
                    region.close()  # never raises (I2)
                del region
                gc.collect()
        if not fault.fired:
            assert nth == 5  # three unmaps, of mappings that alone hold the memory; one reservation; and then none
            assert not warned
            break
        assert [warning.category for warning in warned] == [ReleaseWarning]
        assert "stays allocated until the process ends" in str(warned[0].message)
        (stuck,) = lifetime.stuck()
        now = here.driver.live()
        if fault.fired == ("mem_unmap",):  # the chunk, its memory, its addresses; the others are gone
            assert (before.mappings - now.mappings, before.handles) == (2, now.handles)
            assert before.reservations == now.reservations
            found = bytearray(1)
            here.driver.copy_out(memoryview(found), address + (3 - nth) * G)
            assert now.nbytes == before.nbytes - 2 * G
        else:
            assert (before.mappings - now.mappings, before.handles) == (3, now.handles)
            assert before.reservations == now.reservations
        assert stuck.label in str(warned[0].message)
        assert take_back_what_is_stuck() == 1


def test_nothing_is_mapped_over_a_chunk_that_could_not_be_unmapped(scene: Callable[[], Scene]) -> None:
    here = scene()
    region = here.region
    with here.driver.inject("mem_unmap"), pytest.warns(ReleaseWarning, match="mapping"):
        region.shrink(2 * G)
    assert (region.nbytes, region.chunks) == (2 * G, (G, G))
    before = here.state()
    with pytest.raises(RangeError, match="unmap"):
        region.grow(3 * G)
    assert here.state() == before
    assert take_back_what_is_stuck() == 1
    region.grow(3 * G)


def test_a_freeze_that_fails_half_way_goes_on_when_repeated(scene: Callable[[], Scene]) -> None:
    """Seals cannot be taken back: what is left is read-only as far as it goes, and never half writable."""
    for nth in itertools.count(1):
        here = scene()
        before = here.state()
        with here.driver.inject("mem_seal", nth) as fault:
            raised = outcome(here.region.freeze)
        assert (raised is None) == (not fault.fired)
        if raised is None:
            break
        if nth == 1:
            assert here.state() == before
        else:
            assert here.region.access is READ
            assert not here.region.is_frozen
            with pytest.raises(UsageError, match="frozen"):
                here.region.grow(8 * G)
        here.region.freeze()
        assert here.region.is_frozen
    assert nth == 4


def test_memory_that_cannot_be_had_now_can_be_had_later(scene: Callable[[], Scene]) -> None:
    """A chunk that only its mapping held: the handle to it is made when somebody wants one, and then kept (I4)."""
    here = scene()
    here.region.grow(4 * G)
    before = here.state()
    for call in ("mem_retain", "mem_properties"):
        with here.driver.inject(call) as fault, pytest.raises(DriverError):
            here.region.segments(3 * G, 4 * G)
        assert fault.fired
        assert here.state() == before
    (first,), _ = here.region.segments(3 * G, 4 * G)
    (again,), _ = here.region.segments(3 * G, 4 * G)
    assert first.handle is again.handle
    assert here.driver.count("mem_retain") == 6  # the first three chunks, two that came to nothing, and this one
    here.region.shrink(3 * G)
    assert first.export() >= 0  # it outlives the mapping
    first.close()
    again.close()
