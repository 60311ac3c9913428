"""Memory with owners: on the host driver, over a wrapper, and where a driver has no more than it must."""

from __future__ import annotations

from typing import Any

import pytest

pytest.register_assert_rewrite(
    "vram.testing.memory",
    "vram.testing.memory_kinds",
    "vram.testing.region",
    "vram.testing.resize",
    "vram.testing.sleep",
    "vram.testing.zeros",
)

from vram.driver.host import HostDriver  # noqa: E402
from vram.driver.protocol import DirectMapping, Driver  # noqa: E402
from vram.spec import HOST, Location  # noqa: E402
from vram.testing.faults import FaultyDriver  # noqa: E402
from vram.testing.memory import MemoryContract  # noqa: E402
from vram.testing.resize import ResizeContract  # noqa: E402
from vram.testing.sleep import SleepContract  # noqa: E402


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


class PlainDriver:
    """Real memory through a driver that offers no capability: what the house must say then is tested here."""

    name = "host"

    def __init__(self) -> None:
        self._inner = HostDriver()

    def __getattr__(self, name: str) -> Any:
        if name not in vars(Driver):
            raise AttributeError(name)
        return getattr(self._inner, name)


class TestMemoryWithoutCapabilities(MemoryContract):
    offers: frozenset[str] = frozenset()

    @pytest.fixture
    def driver(self) -> Driver:
        return PlainDriver()

    @pytest.fixture
    def location(self) -> Location:
        return HOST
