"""The wrapper that injects faults keeps the contract itself, with and without capabilities to forward."""

from __future__ import annotations

import pytest

from vram.driver.host import HostDriver
from vram.spec import HOST, Location
from vram.testing.driver import DriverContract
from vram.testing.faults import FaultyDriver


class PlainDriver:
    """The host driver without its capabilities: what a GPU looks like from here."""

    def __init__(self) -> None:
        self._host = HostDriver()
        for method in dir(HostDriver):
            if method.startswith(
                ("address_", "canonical", "device_", "copy", "fill", "live", "support", "synchronize", "mem_")
            ):
                setattr(self, method, getattr(self._host, method))
        del self.mem_map_private, self.mem_map_new, self.mem_map_import
        del self.mem_seal, self.mem_is_sealed, self.mem_identity, self.address_zero

    name = "host"


class TestFaultyHostDriver(DriverContract):
    offers = frozenset({"HostAddressable", "CopyOnWrite", "DirectMapping", "Sealing", "Identity", "ZeroBacking"})

    @pytest.fixture
    def driver(self) -> FaultyDriver:
        return FaultyDriver(HostDriver())

    @pytest.fixture
    def location(self) -> Location:
        return HOST


class TestFaultyPlainDriver(DriverContract):
    offers = frozenset()

    @pytest.fixture
    def driver(self) -> FaultyDriver:
        return FaultyDriver(PlainDriver())

    @pytest.fixture
    def location(self) -> Location:
        return HOST
