"""Memory with owners, on GPUs: in CI on the stand-in, and with ``make test-gpu`` on real ones."""

from __future__ import annotations

import pytest
from tests.contracts.memory import MemoryContract
from tests.contracts.resize import ResizeContract
from tests.contracts.sleep import SleepContract

from vram import driver as drivers
from vram.driver.protocol import Driver
from vram.spec import Location


class CudaMemory(MemoryContract):
    offers = frozenset(
        {
            "DirectMapping",
            "Fabric",
            "Foreign",
            "InterprocessEvents",
            "LegacyIpc",
            "Multicast",
            "NativeHandles",
            "Pools",
            "StreamOrdered",
        }
    )

    @pytest.fixture
    def driver(self) -> Driver:
        return drivers.get(Location("cuda"))

    @pytest.fixture
    def location(self) -> Location:
        return Location("cuda", 0)


class CudaSleep(SleepContract):
    offers = CudaMemory.offers
    driver = CudaMemory.driver
    location = CudaMemory.location


class CudaResize(ResizeContract):
    offers = CudaMemory.offers
    driver = CudaMemory.driver
    location = CudaMemory.location


@pytest.mark.standin
class TestOnTheStandin(CudaMemory):
    pass


@pytest.mark.standin
class TestSleepOnTheStandin(CudaSleep):
    pass


@pytest.mark.standin
class TestResizeOnTheStandin(CudaResize):
    pass


@pytest.mark.gpu
class TestOnHardware(CudaMemory):
    pass


@pytest.mark.gpu
class TestSleepOnHardware(CudaSleep):
    pass


@pytest.mark.gpu
class TestResizeOnHardware(CudaResize):
    pass
