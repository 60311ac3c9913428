"""Memory with owners, on GPUs: in CI on the stand-in, and with ``make test-gpu`` on real ones."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "vram.testing.memory",
    "vram.testing.memory_kinds",
    "vram.testing.region",
    "vram.testing.resize",
    "vram.testing.sleep",
    "vram.testing.zeros",
)

from vram import driver as drivers  # noqa: E402
from vram.driver.protocol import Driver  # noqa: E402
from vram.spec import Location  # noqa: E402
from vram.testing.memory import MemoryContract  # noqa: E402
from vram.testing.resize import ResizeContract  # noqa: E402
from vram.testing.sleep import SleepContract  # noqa: E402


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
