"""The CUDA driver keeps the contract: in CI on the stand-in, and with ``make test-gpu`` on real GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contracts.driver import FabricContract, FullDriverContract

import standin
from vram import driver as drivers
from vram.driver.protocol import Driver
from vram.spec import Location


class CudaContract(FullDriverContract):
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


@pytest.mark.standin
class TestOnTheStandin(CudaContract):
    pass


@pytest.mark.standin
class TestWhereTheFabricWorks(FabricContract):
    offers = CudaContract.offers

    @pytest.fixture(autouse=True)
    def works(self) -> Iterator[None]:
        control = standin.Standin()
        control.fabric()
        yield
        control.fabric(False)

    @pytest.fixture
    def driver(self) -> Driver:
        return drivers.get(Location("cuda"))

    @pytest.fixture
    def location(self) -> Location:
        return Location("cuda", 0)


@pytest.mark.gpu
class TestOnHardware(CudaContract):
    pass
