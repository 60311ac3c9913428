"""Growth of many with every driver call failing in turn, and Ctrl-C at every point: all of it or nothing (I4, I12).

Two regions grow, one of them over what an earlier shrink left, and two shrink. Whatever happens, either all four have
their new sizes or all have their old ones, every byte that is to be there is there, and what is new is zero.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
from tests.contracts.region import load, store
from tests.support.deadlines import SOON
from tests.support.faulty_driver import ERRORS, FaultyDriver, work
from tests.support.interrupts import chosen, interrupt, points
from tests.support.samples import least, nths
from tests.support.stuck import take_back_what_is_stuck

from faults.test_memory_faults import outcome
from vram import Array, lifetime, resize
from vram import driver as drivers
from vram.driver.host import HostDriver
from vram.errors import DriverError
from vram.memory import Region
from vram.memory.ahead import keep_ready
from vram.memory.chunks import Kind
from vram.memory.resize import resize_regions
from vram.spec import HOST, AllocationFlags, HandleKind, Location

G = 2 << 20
GPU = Location("cuda", 0)
POINTS = 60  # of the points where an interrupt can come, so many are tried
WORK = work("mem_", "copy", "fill", "synchronize")
OLD = (2 * G, 2 * G - 5, 3 * G, G + 7)
NEW = (6 * G, 5 * G + 1, G + 1, 0)


class Scene:
    """Four regions with bytes in them."""

    def __init__(self, driver: Any, where: Location, ready: int = 0) -> None:
        self.driver = driver
        self.empty = driver.live()
        self.regions = [
            Region.create(where, driver=driver, capacity=8 * G, chunk=G, nbytes=nbytes)
            for nbytes in (2 * G, 2 * G, *OLD[2:])
        ]
        for number, region in enumerate(self.regions, 1):
            store(driver, region.address, bytes([number]) * 9)
            store(driver, region.address + region.nbytes - 3, b"end")
        self.regions[1].shrink(OLD[1])
        self.prepared = keep_ready(Kind(driver, where, HandleKind.POSIX_FD, AllocationFlags.NONE, G), ready)
        assert self.prepared.wait(SOON) is (ready > 0)
        self.books = self.look()

    def change(self) -> object:
        return resize_regions(dict(zip(self.regions, NEW, strict=True)))

    def look(self) -> object:
        """What a change that fails must leave as it was."""
        return self.driver.live(), [(region.layout, region.remains) for region in self.regions]

    def has_changed(self, is_interrupted: bool = False) -> bool:
        """Whether all have their new sizes; that some have and others have not must never be."""
        sizes = tuple(region.nbytes for region in self.regions)
        assert sizes in (OLD, NEW)
        assert [region.asleep for region in self.regions] == [None] * 4
        if sizes == OLD and not is_interrupted:
            assert self.look() == self.books
        elif sizes == NEW:
            assert [region.mapped for region in self.regions] == [6 * G, 6 * G, 2 * G, 0]
        return sizes == NEW

    def check(self, is_interrupted: bool = False) -> None:
        """Every byte is there, and it works."""
        if not self.has_changed(is_interrupted):
            self.change()
        assert self.has_changed()
        for number, region in enumerate(self.regions[:3], 1):
            assert load(self.driver, region.address, 10) == bytes([number]) * 9 + b"\0"
        one, two, three, _ = self.regions
        assert load(self.driver, one.address + 2 * G - 3, 9) == b"end" + bytes(6)
        assert all(load(self.driver, one.address + at, 9) == bytes(9) for at in range(2 * G, 6 * G, G // 4))
        assert load(self.driver, two.address + 2 * G - 3, 9) == b"end" + bytes(6)  # it came back, as always
        resize_regions(dict.fromkeys(self.regions, 8 * G))
        places = [region.address + at for region in self.regions for at in range(0, 8 * G, G)]
        for number, address in enumerate(places, 1):  # no memory is behind two of them
            store(self.driver, address + 100, bytes([number]))
        assert [load(self.driver, address + 100, 1)[0] for address in places] == list(range(1, 33))
        assert all(load(self.driver, three.address + at, 9) == bytes(9) for at in range(2 * G, 8 * G, G // 4))
        resize_regions(dict.fromkeys(self.regions, 0))

    def close(self) -> None:
        for region in self.regions:
            region.close()
        self.prepared.close()
        gc.collect(0)
        assert self.driver.live() == self.empty


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.standin)])
def scene(request: pytest.FixtureRequest) -> Callable[[], Scene]:
    def make() -> Scene:
        if request.param == "gpu":
            return Scene(FaultyDriver(drivers.get(GPU)), GPU)
        return Scene(FaultyDriver(HostDriver()), HOST)

    return make


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
def test_a_failed_call_changes_nothing_i4(scene: Callable[[], Scene], error: str, forever: bool) -> None:
    failed = 0
    for nth in nths():
        here = scene()
        with here.driver.inject(WORK, nth, ERRORS[error], forever=forever) as fault:
            raised = outcome(here.change)
        assert raised is fault.first
        assert here.has_changed() is (raised is None)
        failed += raised is not None
        here.check()
        here.close()
        assert not lifetime.stuck()
        if raised is None:
            break
    assert failed >= least(7)


AHEAD = frozenset({"mem_create", "mem_retain", "mem_properties", "fill", "fill_async", "stream_create"})


@pytest.mark.parametrize("kind", ["host", pytest.param("gpu", marks=pytest.mark.standin)])
def test_a_failed_call_puts_what_was_ready_back_i4(kind: str) -> None:
    """But for the calls that make or keep memory ahead, which fail for nobody: the next test."""
    for nth in nths():
        driver = FaultyDriver(HostDriver() if kind == "host" else drivers.get(GPU))
        here = Scene(driver, HOST if kind == "host" else GPU, 3)
        with here.driver.inject(WORK - AHEAD, nth) as fault:
            raised = outcome(here.change)
        assert (raised is not None) == bool(fault.fired)
        assert here.has_changed() is (raised is None)
        assert here.prepared.wait(SOON)
        assert here.prepared.ready == 3 * G
        here.check()
        here.close()
        assert not lifetime.stuck()
        if raised is None:
            break
    assert nth > 6


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("kind", ["host", pytest.param("gpu", marks=pytest.mark.standin)])
def test_what_fails_ahead_fails_for_nobody(kind: str, forever: bool) -> None:
    fired = set()
    for method in sorted(AHEAD):
        if kind == "host" and method in ("fill_async", "stream_create"):
            continue
        for nth in (1, 2):
            driver = FaultyDriver(HostDriver() if kind == "host" else drivers.get(GPU))
            here = Scene(driver, HOST if kind == "host" else GPU, 8)
            with driver.inject(method, nth, forever=forever) as fault:
                here.change()
                with contextlib.suppress(DriverError):
                    here.prepared.wait(SOON)
                fired.update(fault.fired)
            assert here.has_changed()
            here.check()
            here.close()
            assert not lifetime.stuck()
    assert fired >= {"mem_create", "mem_retain", "mem_properties", "fill" if kind == "host" else "fill_async"}


@pytest.mark.parametrize("ready", [0, 3])
@pytest.mark.parametrize("kind", ["host", pytest.param("gpu", marks=pytest.mark.standin)])
def test_an_interrupt_leaves_all_or_nothing_changed_i12(kind: str, ready: int) -> None:
    where = HOST if kind == "host" else GPU

    def make() -> Scene:
        return Scene(HostDriver() if kind == "host" else drivers.get(GPU), where, ready)

    here = make()
    found = points(here.change)
    here.check()
    here.close()
    assert len(found) > 100
    for nth in chosen(found, POINTS, seed=11):
        here = make()
        interrupt(nth, here.change)
        gc.collect(0)
        here.check(is_interrupted=ready > 0)  # what is ready may be less then
        here.close()
    gc.collect()
    assert not lifetime.stuck()


def test_an_interrupt_leaves_arrays_as_their_regions_are_i12() -> None:
    """The lengths of arrays change with the sizes of their regions, in front of an interrupt or behind it."""
    driver = HostDriver()

    def make() -> list[Array]:
        return [Array.create(driver, HOST, (2, G), "int8", capacity=8, chunk=G) for _ in range(3)]

    def change(arrays: list[Array]) -> None:
        resize(dict(zip(arrays, (4, 1, 0), strict=True)))

    arrays = make()
    found = points(lambda: change(arrays))
    for array in arrays:
        array.close()
    changed = set()
    for nth in chosen(found, POINTS, seed=7):
        arrays = make()
        interrupt(nth, lambda arrays=arrays: change(arrays))  # type: ignore[misc]
        gc.collect(0)
        lengths = tuple(len(array) for array in arrays)
        assert lengths in ((2, 2, 2), (4, 1, 0))
        assert tuple(array.region.nbytes // G for array in arrays) == lengths
        changed.add(lengths)
        change(arrays)
        assert [array.numpy().shape[0] for array in arrays] == [4, 1, 0]
        for array in arrays:
            array.close()
    assert changed
    assert driver.live() == HostDriver().live()


def test_what_cannot_be_unmapped_is_said_and_the_rest_has_changed_i1() -> None:
    here = Scene(FaultyDriver(HostDriver()), HOST)
    with here.driver.inject("mem_unmap"), pytest.warns(Warning, match="could not take back mapping"):
        here.change()
    assert here.has_changed()
    assert take_back_what_is_stuck() == 1
    here.check()
    here.close()


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
def test_what_cannot_be_unmapped_at_once_is_unmapped_one_by_one_i1(forever: bool) -> None:
    """One call unmaps what lies side by side. Where that fails, each chunk is tried, and each that fails is said."""
    driver = FaultyDriver(HostDriver())
    with Region.create(HOST, driver=driver, capacity=8 * G, chunk=G, nbytes=4 * G) as region:
        driver.clear()
        said = pytest.warns(Warning, match="could not take back mapping") if forever else contextlib.nullcontext()
        with driver.inject("mem_unmap", forever=forever) as fault, said:
            region.shrink(G)
        assert fault.fired
        assert driver.calls.count("mem_unmap") == 4  # one for all, and then one each
        assert region.nbytes == region.mapped == G
        assert take_back_what_is_stuck() == (3 if forever else 0)
        assert driver.live().mappings == 1
        region.grow(4 * G)
        assert load(driver, region.address + 3 * G, 9) == bytes(9)
    assert driver.live().mappings == 0
