"""The host driver, the wrapper that injects faults, and a driver with no capability keep the contracts."""

from __future__ import annotations

import pytest
from tests.contracts.driver import FullDriverContract
from tests.contracts.memory import MemoryContract
from tests.contracts.resize import ResizeContract
from tests.contracts.sleep import SleepContract
from tests.support.faulty_driver import FaultyDriver, PlainDriver

from vram.driver.host import HostDriver
from vram.driver.protocol import Driver
from vram.spec import HOST, Location


class Host:
    offers = frozenset({"HostMemory"})

    @pytest.fixture
    def driver(self) -> Driver:
        return HostDriver()

    @pytest.fixture
    def location(self) -> Location:
        return HOST


class Wrapped(Host):
    """The fault injector with no fault set changes nothing."""

    @pytest.fixture
    def driver(self) -> Driver:
        return FaultyDriver(HostDriver())


class Plain(Host):
    """What the house must say where a driver offers no capability."""

    offers: frozenset[str] = frozenset()

    @pytest.fixture
    def driver(self) -> Driver:
        return FaultyDriver(PlainDriver())


class TestDriver(Host, FullDriverContract):
    pass


class TestWrappedDriver(Wrapped, FullDriverContract):
    pass


class TestPlainDriver(Plain, FullDriverContract):
    pass


class TestMemory(Host, MemoryContract):
    pass


class TestMemoryWithoutCapabilities(Plain, MemoryContract):
    pass


class TestSleep(Host, SleepContract):
    pass


class TestResize(Host, ResizeContract):
    pass
