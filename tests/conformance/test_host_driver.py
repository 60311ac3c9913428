"""The host driver keeps the contract."""

from __future__ import annotations

import pytest

from vram.driver.host import HostDriver
from vram.spec import HOST, Location
from vram.testing.driver import DriverContract


class TestHostDriver(DriverContract):
    offers = frozenset({"HostAddressable", "CopyOnWrite", "DirectMapping", "Sealing", "Identity", "ZeroBacking"})

    @pytest.fixture
    def driver(self) -> HostDriver:
        return HostDriver()

    @pytest.fixture
    def location(self) -> Location:
        return HOST
