"""Memory of others and the ways in which it travels: the CUDA driver keeps the contract on every GPU, in CI on the
stand-in, which has two, and with ``make test-gpu`` on those of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.contracts.foreign import ForeignContract
from tests.contracts.pools import PoolContract
from tests.support.raw_cuda import CudaStranger

from vram import driver as drivers
from vram.driver.protocol import Driver
from vram.spec import Location

CUDA = Location("cuda")


def gpus() -> range:
    """Every GPU that this run is for: an ordinal of 0 is what a wrong answer looks like, too."""
    return range(drivers.get(CUDA).device_count() if os.environ.get("VRAM_TEST_GPU") else 2)


class CudaForeign(ForeignContract, PoolContract):
    offers = frozenset({"Foreign", "InterprocessEvents", "LegacyIpc", "Pools"})

    @pytest.fixture
    def driver(self) -> Driver:
        return drivers.get(CUDA)

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
class TestOnTheStandin(CudaForeign):
    pass


@pytest.mark.gpu
class TestOnHardware(CudaForeign):
    pass
