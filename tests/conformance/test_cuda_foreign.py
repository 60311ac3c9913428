"""Memory of others and the ways in which it travels: the CUDA driver keeps the contract, in CI on the stand-in, and
with ``make test-gpu`` on real GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from strangers import CudaStranger
from vram import driver as drivers
from vram.driver.protocol import Driver
from vram.spec import Location
from vram.testing.foreign import ForeignContract, Stranger

HERE = Location("cuda", 0)


class CudaForeign(ForeignContract):
    offers = frozenset({"Foreign", "InterprocessEvents", "LegacyIpc", "Pools"})

    @pytest.fixture
    def driver(self) -> Driver:
        return drivers.get(HERE)

    @pytest.fixture
    def location(self) -> Location:
        return HERE

    @pytest.fixture(scope="class")
    @classmethod
    def elsewhere(cls) -> Callable[[], Any]:
        return partial(drivers.get, HERE)

    @pytest.fixture
    def stranger(self, driver: Driver) -> Iterator[Stranger]:
        with CudaStranger() as stranger:
            yield stranger


@pytest.mark.standin
class TestOnTheStandin(CudaForeign):
    pass


@pytest.mark.gpu
class TestOnHardware(CudaForeign):
    pass
