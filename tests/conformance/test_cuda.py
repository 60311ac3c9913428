"""The CUDA driver keeps the contracts: in CI on the stand-in, and with ``make test-gpu`` on real GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.contracts.driver import FabricContract, FullDriverContract
from tests.contracts.foreign import ForeignContract
from tests.contracts.memory import MemoryContract
from tests.contracts.pools import PoolContract
from tests.contracts.resize import ResizeContract
from tests.contracts.sleep import SleepContract
from tests.support.raw_cuda import CudaStranger

import standin
from vram import driver as drivers
from vram.driver.protocol import Driver
from vram.spec import Location

CUDA = Location("cuda")


def gpus() -> range:
    """Every GPU that this run is for: an ordinal of 0 is what a wrong answer looks like, too."""
    return range(drivers.get(CUDA).device_count() if os.environ.get("VRAM_TEST_GPU") else 2)


class Cuda:
    offers = frozenset({"DeviceMemory"})

    @pytest.fixture
    def driver(self) -> Driver:
        return drivers.get(CUDA)

    @pytest.fixture
    def location(self) -> Location:
        return Location("cuda", 0)


class CudaForeign(Cuda, ForeignContract, PoolContract):
    @pytest.fixture(params=gpus(), ids="cuda:{}".format)
    def location(self, request: pytest.FixtureRequest) -> Location:
        return Location("cuda", request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def elsewhere(cls) -> Callable[[], Any]:
        return partial(drivers.get, CUDA)

    @pytest.fixture
    def stranger(self, location: Location) -> Iterator[CudaStranger]:
        assert isinstance(location.id, int)
        with CudaStranger(location.id) as stranger:
            yield stranger


@pytest.mark.standin
class TestDriverOnTheStandin(Cuda, FullDriverContract):
    pass


@pytest.mark.standin
class TestWhereTheFabricWorks(Cuda, FabricContract):
    @pytest.fixture(autouse=True)
    def works(self) -> Iterator[None]:
        control = standin.Standin()
        control.fabric()
        yield
        control.fabric(False)


@pytest.mark.standin
class TestForeignOnTheStandin(CudaForeign):
    pass


@pytest.mark.standin
class TestMemoryOnTheStandin(Cuda, MemoryContract):
    pass


@pytest.mark.standin
class TestSleepOnTheStandin(Cuda, SleepContract):
    pass


@pytest.mark.standin
class TestResizeOnTheStandin(Cuda, ResizeContract):
    pass


@pytest.mark.gpu
class TestDriverOnHardware(Cuda, FullDriverContract):
    pass


@pytest.mark.gpu
class TestForeignOnHardware(CudaForeign):
    pass


@pytest.mark.gpu
class TestMemoryOnHardware(Cuda, MemoryContract):
    pass


@pytest.mark.gpu
class TestSleepOnHardware(Cuda, SleepContract):
    pass


@pytest.mark.gpu
class TestResizeOnHardware(Cuda, ResizeContract):
    pass
