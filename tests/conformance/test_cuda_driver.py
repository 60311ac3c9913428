"""The CUDA driver keeps the contract: in CI on the stand-in, and with ``make test-gpu`` on real GPUs."""

from __future__ import annotations

import pytest

from vram import driver as drivers
from vram.driver.protocol import Driver
from vram.spec import Location
from vram.testing.driver import DriverContract


class CudaContract(DriverContract):
    offers = frozenset(
        {"DirectMapping", "Foreign", "InterprocessEvents", "LegacyIpc", "Multicast", "Pools", "StreamOrdered"}
    )

    @pytest.fixture
    def driver(self) -> Driver:
        return drivers.get(Location("cuda"))

    @pytest.fixture
    def location(self) -> Location:
        return Location("cuda", 0)


@pytest.mark.standin
class TestOnTheStandin(CudaContract):
    pass


@pytest.mark.gpu
class TestOnHardware(CudaContract):
    pass
