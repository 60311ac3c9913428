"""The wrapper that injects faults keeps the contract itself, with and without capabilities to forward."""

from __future__ import annotations

import pytest
from tests.contracts.driver import FullDriverContract
from tests.support.faulty_driver import FaultyDriver, PlainDriver

from vram.driver.host import HostDriver
from vram.spec import HOST, Location


class TestFaultyHostDriver(FullDriverContract):
    offers = frozenset({"HostAddressable", "CopyOnWrite", "DirectMapping", "Sealing", "Identity", "ZeroBacking"})

    @pytest.fixture
    def driver(self) -> FaultyDriver:
        return FaultyDriver(HostDriver())

    @pytest.fixture
    def location(self) -> Location:
        return HOST


class TestFaultyPlainDriver(FullDriverContract):
    offers = frozenset()

    @pytest.fixture
    def driver(self) -> FaultyDriver:
        return FaultyDriver(PlainDriver())

    @pytest.fixture
    def location(self) -> Location:
        return HOST
