"""Zeros behind what has no memory, with every driver call failing in turn, and Ctrl-C at every point (I4, I12).

Two regions grow and one shrinks. Whatever happens, either all have their new sizes or all have their old ones, every
byte that is to be there is there, and all that has no memory reads as zeros; unless the driver refuses for good to map
them, which is said, and mended by the next change.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from tests.contracts.region import load, store
from tests.contracts.zeros import reads_zero
from tests.support.faulty_driver import ERRORS, FaultyDriver, work
from tests.support.interrupts import chosen, interrupt, points
from tests.support.samples import least, nths

from faults.test_memory_faults import outcome
from vram import driver as drivers
from vram.driver.host import HostDriver
from vram.driver.protocol import HostMemory
from vram.errors import DriverError, RangeError, ReleaseWarning
from vram.memory import Region
from vram.memory.resize import resize_regions
from vram.spec import HOST, Location

G = 2 << 20
GPU = Location("cuda", 0)
POINTS = 60  # of the points where an interrupt can come, so many are tried
OLD, NEW = (2 * G, G, 6 * G), (5 * G, 3 * G + 1, G)
WORK = work("mem_", "address_zero", "synchronize")


class Scene:
    """Three regions with bytes in them and zeros behind them."""

    def __init__(self, driver: Any, where: Location) -> None:
        self.driver = driver
        self.empty = driver.live()
        self.regions = [
            Region.create(where, driver=driver, capacity=8 * G, chunk=G, nbytes=nbytes, backing="zero")
            for nbytes in OLD
        ]
        for number, region in enumerate(self.regions, 1):
            store(driver, region.address, bytes([number]) * 9)
        self.books = self.look()

    def look(self) -> object:
        return self.driver.live(), [region.layout for region in self.regions]

    def change(self) -> object:
        return resize_regions(dict(zip(self.regions, NEW, strict=True)))

    def has_changed(self) -> bool:
        sizes = tuple(region.nbytes for region in self.regions)
        assert sizes in (OLD, NEW)
        return sizes == NEW

    def covered(self) -> list[bool]:
        return [self._reads_zero(region) for region in self.regions]

    def _reads_zero(self, region: Region) -> bool:
        try:
            return reads_zero(self.driver, region, region.mapped)
        except RangeError:  # nothing is mapped there
            return False

    def check(self) -> None:
        """Every byte is there, and it works."""
        self.change()  # again, if it has come about: what is missing is mended
        assert self.has_changed()
        assert self.covered() == [True] * 3
        for number, region in enumerate(self.regions, 1):
            assert load(self.driver, region.address, 10) == bytes([number]) * 9 + b"\0"
        resize_regions(dict.fromkeys(self.regions, 8 * G))
        places = [region.address + at for region in self.regions for at in range(0, 8 * G, G)]
        for number, address in enumerate(places, 1):  # no memory is behind two of them, and zeros behind none
            store(self.driver, address + 100, bytes([number]))
        assert [load(self.driver, address + 100, 1)[0] for address in places] == list(range(1, 25))
        resize_regions(dict.fromkeys(self.regions, 0))
        assert all(reads_zero(self.driver, region, 0) for region in self.regions)

    def close(self) -> None:
        for region in self.regions:
            region.close()
        gc.collect(0)
        assert self.driver.live() == self.empty


@pytest.fixture(params=["host", "pieces", pytest.param("gpu", marks=pytest.mark.standin)])
def scene(request: pytest.FixtureRequest) -> Callable[[], Scene]:
    def make() -> Scene:
        if request.param == "gpu":
            return Scene(FaultyDriver(drivers.get(GPU)), GPU)
        return Scene(FaultyDriver(HostDriver(), hide=[HostMemory] if request.param == "pieces" else ()), HOST)

    return make


@pytest.mark.parametrize("error", ERRORS)
def test_a_call_that_fails_once_leaves_zeros_and_changes_nothing_or_all_i4(
    scene: Callable[[], Scene], error: str
) -> None:
    failed = 0
    for nth in nths():
        here = scene()
        with here.driver.inject(WORK, nth, ERRORS[error]) as fault, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            raised = outcome(here.change)
        failed += bool(fault.fired)
        if not here.has_changed():
            assert raised is not None
            assert here.look() == here.books
        if fault.fired and raised is None:  # it has come about, and only zeros are missing: that is said
            assert [one.category for one in said] == [ReleaseWarning]
        else:
            assert here.covered() == [True] * 3, (nth, fault.fired)
            assert said == []
        here.check()
        here.close()
        if not fault.fired:
            break
    assert failed >= least(4)


def test_zeros_that_the_driver_does_not_map_behind_new_memory_keep_a_region_from_growing_i4(
    scene: Callable[[], Scene],
) -> None:
    """Where memory takes a part of a large piece, the rest is mapped anew before the size is the new one."""
    here = scene()
    with Region.create(
        here.regions[0].location, driver=here.driver, capacity=1024 * G, chunk=G, nbytes=4 * G, backing="zero"
    ) as region:
        layout = region.layout
        for error in ERRORS.values():
            with here.driver.inject("mem_map", 2, error) as fault:
                raised = outcome(lambda: region.grow(5 * G))
            if not fault.fired:
                assert isinstance(here.driver, HostMemory)
                break
            assert type(raised) is type(error())
            assert (region.nbytes, region.layout) == (4 * G, layout)
            assert reads_zero(here.driver, region, 4 * G)
        region.grow(6 * G)
        assert reads_zero(here.driver, region, 4 * G)
    here.close()


def test_creation_that_fails_leaves_nothing_i4(scene: Callable[[], Scene]) -> None:
    here = scene()
    driver, where = here.driver, here.regions[0].location
    for forever, error in itertools.product((False, True), ERRORS.values()):
        for nth in nths():
            before = driver.live()
            made: list[Region] = []
            with driver.inject(WORK - {"synchronize"} | {"address_reserve"}, nth, error, forever=forever) as fault:
                with contextlib.suppress(DriverError, KeyboardInterrupt):
                    made.append(Region.create(where, driver=driver, capacity=520 * G, nbytes=G, backing="zero"))
            assert len(made) == (not fault.fired)
            for region in made:
                region.close()
            assert driver.live() == before
            if not fault.fired:
                break
    here.close()


def test_ctrl_c_at_every_point_i12(scene: Callable[[], Scene]) -> None:
    here = scene()
    found = points(here.change)
    here.close()
    came = 0
    for nth in chosen(found, POINTS, seed=1):
        here = scene()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            came += interrupt(nth, here.change).came
        gc.collect()
        try:
            here.check()
            here.close()
        except BaseException as problem:
            problem.add_note(f"interrupted at {found[nth - 1]}, point {nth}")
            raise
    assert came > least(POINTS) // 2
