"""The host driver keeps the contract."""

from __future__ import annotations

import pytest
from tests.contracts.driver import FullDriverContract

from vram.driver.host import HostDriver
from vram.spec import HOST, Location


class TestHostDriver(FullDriverContract):
    offers = frozenset({"HostAddressable", "CopyOnWrite", "DirectMapping", "Sealing", "Identity", "ZeroBacking"})

    @pytest.fixture
    def driver(self) -> HostDriver:
        return HostDriver()

    @pytest.fixture
    def location(self) -> Location:
        return HOST
