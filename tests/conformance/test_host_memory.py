"""Memory with owners: on the host driver, over a wrapper, and where a driver has no more than it must."""

from __future__ import annotations

import pytest
from tests.contracts.memory import MemoryContract
from tests.contracts.resize import ResizeContract
from tests.contracts.sleep import SleepContract
from tests.support.faulty_driver import FaultyDriver, PlainDriver

from vram.driver.host import HostDriver
from vram.driver.protocol import DirectMapping, Driver
from vram.spec import HOST, Location


class TestHostMemory(MemoryContract):
    offers = frozenset({"HostAddressable", "CopyOnWrite", "Sealing", "Identity", "ZeroBacking"})

    @pytest.fixture
    def driver(self) -> Driver:
        return HostDriver()

    @pytest.fixture
    def location(self) -> Location:
        return HOST


class TestMemoryOverAWrapper(TestHostMemory):
    """The fault injector with no fault set changes nothing."""

    @pytest.fixture
    def driver(self) -> Driver:
        return FaultyDriver(HostDriver())


class TestHostSleep(SleepContract):
    offers = TestHostMemory.offers
    driver = TestHostMemory.driver
    location = TestHostMemory.location


class TestSleepOverAWrapper(TestHostSleep):
    driver = TestMemoryOverAWrapper.driver


class TestHostResize(ResizeContract):
    offers = TestHostMemory.offers
    driver = TestHostMemory.driver
    location = TestHostMemory.location


class TestResizeOverAWrapper(TestHostResize):
    driver = TestMemoryOverAWrapper.driver


class TestResizeStepByStep(TestHostResize):
    @pytest.fixture
    def driver(self) -> Driver:
        return FaultyDriver(HostDriver(), hide=[DirectMapping])


class TestMemoryStepByStep(TestHostMemory):
    """Where the driver cannot map in the call that makes or opens: memory first, then the mapping, then access."""

    @pytest.fixture
    def driver(self) -> Driver:
        return FaultyDriver(HostDriver(), hide=[DirectMapping])


class TestMemoryWithoutCapabilities(MemoryContract):
    offers: frozenset[str] = frozenset()

    @pytest.fixture
    def driver(self) -> Driver:
        return PlainDriver()

    @pytest.fixture
    def location(self) -> Location:
        return HOST
