"""What cuda-bindings make of the driver's pointer attributes, beside what the driver says; under each release in CI.

The library reads attributes past the bindings. A release that is wrong in more than is known here shows what else must
not be believed of it.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tests.support.raw_cuda import CudaStranger

import standin
from vram import driver as drivers
from vram.driver.cuda.attributes import attribute, attributes
from vram.errors import DriverError, UsageError
from vram.spec import HandleKind, Location

pytestmark = pytest.mark.standin

ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
WRONG = {
    "12.9.6": {ORDINAL},
    "13.3.1": {ORDINAL},
    "13.4.1": {ORDINAL},
}  # measured; 12.9.10, 13.0.3 and 13.5.0 are right
NUMBERS = tuple(number for number in range(1, 18) if number not in (4, 5))  # 4: not of a GPU; 5: no value, a token
KINDS = ("legacy", "mapped", "pooled", "pinned")


@pytest.fixture(params=[0, 1], ids="cuda:{}".format)
def stranger(request: pytest.FixtureRequest) -> Iterator[CudaStranger]:
    drivers.get(Location("cuda"))
    with CudaStranger(request.param) as made:
        yield made


def made(stranger: CudaStranger, kind: str) -> int:
    if kind == "mapped":
        return stranger.mapped((2 << 20,), HandleKind.POSIX_FD)
    if kind == "pooled":
        return stranger.pooled(4096, shareable=True)[1]
    return int(getattr(stranger, kind)(4096))


def as_number(value: Any) -> int:
    return 0 if value is None else int(value)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bindings_are_wrong_in_nothing_but_what_is_known(stranger: CudaStranger, kind: str) -> None:
    address, wrong = made(stranger, kind), set()
    library, api = ctypes.CDLL("libcuda.so.1"), stranger.api
    for number in NUMBERS:
        room = ctypes.c_uint64()
        status = library.cuPointerGetAttribute(ctypes.byref(room), number, ctypes.c_uint64(address))
        told, value = api.cuPointerGetAttribute(api.CUpointer_attribute(number), address)
        assert int(told) == status
        said = as_number(value) if status == 0 else room.value
        many, values = api.cuPointerGetAttributes(1, [api.CUpointer_attribute(number)], address)
        assert int(many) == 0
        if said != room.value or (status == 0 and as_number(values[0]) != room.value):
            wrong.add(number)
    known = WRONG.get(importlib.metadata.version("cuda-bindings"), set())
    assert wrong == (known if stranger.ordinal else set())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_past_them_is_what_the_driver_says(stranger: CudaStranger, kind: str) -> None:
    driver: Any = drivers.get(Location("cuda"))
    address = made(stranger, kind)
    asked = partial(attributes, driver.bindings, (2, ORDINAL, 14))
    memory_type, ordinal, kinds = asked(address)
    assert (memory_type, ordinal) == (1 if kind == "pinned" else 2, stranger.ordinal)
    assert kinds == (1 if kind in ("mapped", "pooled") else 0)
    assert attribute(driver.bindings, ORDINAL, address) == driver.ordinal_of(address) == stranger.ordinal


def test_an_address_that_the_driver_does_not_know(stranger: CudaStranger) -> None:
    driver: Any = drivers.get(Location("cuda"))
    assert attributes(driver.bindings, (2, ORDINAL), id(stranger)) == [0, -2]
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        attribute(driver.bindings, ORDINAL, id(stranger))


@pytest.mark.parametrize("number", [0, -1, 1 << 64, "beyond"])
def test_an_address_is_not_cut_to_64_bits(stranger: CudaStranger, number: int | str) -> None:
    driver: Any = drivers.get(Location("cuda"))
    address = number if isinstance(number, int) else stranger.legacy(4096) + (1 << 64)
    for ask in (partial(attributes, driver.bindings, (ORDINAL,)), driver.ordinal_of, driver.pointer_identity):
        with pytest.raises(UsageError):
            ask(address)


def test_faults_and_counts_reach_what_is_called_past_the_bindings(stranger: CudaStranger) -> None:
    driver: Any = drivers.get(Location("cuda"))
    control, address = standin.Standin(), stranger.legacy(4096)
    with (
        control.failing("cuPointerGetAttributes", code=999),
        pytest.raises(DriverError, match="cuPointerGetAttributes"),
    ):
        driver.pointer_info(address)
    assert driver.pointer_info(address).location.id == stranger.ordinal
