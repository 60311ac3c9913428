"""Somebody else's array as memory: found without a copy, or refused with what to do."""

from __future__ import annotations

import array as standard
import ctypes
import importlib.util
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from vram import driver
from vram.arrays import Array
from vram.arrays.sources import as_source
from vram.arrays.views import find
from vram.errors import UnsupportedError, UsageError
from vram.spec import HOST


class Offers:
    """Something with an array's protocols as properties of its class."""

    def __init__(self, source: np.ndarray) -> None:
        self.source = source

    @property
    def __array_interface__(self) -> dict[str, object]:
        return self.source.__array_interface__


class Capsules:
    def __init__(self, source: np.ndarray, device: int = 1) -> None:
        self.source, self.device = source, device

    def __dlpack__(self, **keywords: object) -> object:
        return self.source.__dlpack__(**keywords)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


class CapsulesOrArray(Capsules):
    """A library that cannot say its type in DLPack to numpy, but can make a numpy array."""

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("no word for it")

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return self.source


DATA = np.arange(12, dtype="int32").reshape(3, 4)
KINDS: dict[str, Callable[[np.ndarray], object]] = {
    "numpy": lambda data: data,
    "memoryview": memoryview,
    "interface": Offers,
    "dlpack": Capsules,
    "dlpack refused": CapsulesOrArray,
    "memmap": lambda data: data.view(np.memmap),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_is_found_without_a_copy(kind: str) -> None:
    data = DATA.copy()
    source = as_source(KINDS[kind](data))
    assert source.address == data.ctypes.data
    assert (source.nbytes, source.dtype, source.shape, source.contiguous) == (48, np.dtype("int32"), (3, 4), True)
    assert source.view.tobytes() == data.tobytes()
    assert find(source.address, source.nbytes) is None


def test_other_buffers() -> None:
    for value, dtype, count in (
        (bytearray(b"abc"), "uint8", 3),
        (b"abc", "uint8", 3),
        (standard.array("d", [1, 2]), "float64", 2),
        ((ctypes.c_int16 * 5)(), "int16", 5),
    ):
        source = as_source(value)
        assert (source.dtype, source.shape) == (np.dtype(dtype), (count,))


def test_what_is_not_contiguous_says_so() -> None:
    for view in (DATA.T, DATA[:, ::2], DATA[::-1]):
        source = as_source(view)
        assert not source.contiguous
    assert as_source(DATA[1:]).contiguous
    assert as_source(DATA[:0]).nbytes == 0
    assert as_source(np.float32(3)).shape == ()


def test_our_arrays_are_sources() -> None:
    with Array.create(driver.get(HOST), HOST, (3, 4), "bfloat16") as array:
        array.fill(2)
        source = as_source(array)
        assert (source.address, source.dtype, source.shape) == (array.address, array.dtype, array.shape)
        assert find(source.address, source.nbytes) == (array.region, 0)
        assert source.view.tobytes() == array.numpy().tobytes()
        del source


def test_extended_types() -> None:
    data = np.ones(4, ml_dtypes.float8_e4m3fn)
    assert as_source(data).dtype == data.dtype
    assert as_source(data).nbytes == 4


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1, 2, 3], "is no array"),
        (3.5, "is no array"),
        ("text", "is no array"),
        (None, "is no array"),
        (object(), "is no array"),
        ({"a": 1}, "is no array"),
        (np.array([object()]), "Python objects"),
        (np.array(["a", None], dtype=object), "Python objects"),
        (np.ma.masked_array([1, 2], [0, 1]), "masked array"),
        (Capsules(DATA, device=10), "DLPack type 10"),
        (type("Gpu", (), {"__cuda_array_interface__": {}})(), "no CUDA array interface"),
        (type("Liar", (), {"__dlpack_device__": lambda self: 1 / 0})(), "does not tell"),
        (
            type("Liar", (), {"__dlpack_device__": lambda self: (1, 0), "__dlpack__": lambda self, **k: 7})(),
            "cannot be seen|is no array",
        ),
        (type("Liar", (), {"__array_interface__": {"shape": "x"}})(), "cannot be seen"),
        (type("Liar", (), {"__array__": lambda self, *a, **k: 7})(), "cannot be seen"),
    ],
)
def test_what_is_no_array_of_the_host(value: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        as_source(value)


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="torch is installed: its absence is not tested"
)
def test_without_torch_the_extra_is_named() -> None:
    with Array.create(driver.get(HOST), HOST, 3, "float32") as array:
        with pytest.raises(UnsupportedError, match=r"pip install '\.\[torch\]' in a clone"):
            array.torch()
