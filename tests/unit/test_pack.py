"""Many arrays in one memory: where each lies, whose memory it is, and what is said of what is no array."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vram
from vram.errors import UsageError, VramError

MIB = 1 << 20


def some() -> dict[str, Any]:
    return {
        "bytes": np.arange(3, dtype="uint8"),
        "scalar": np.float64(2.5),
        "rows": np.arange(12, dtype="float32").reshape(3, 4)[:, ::2],  # not contiguous
        "none": np.empty((0, 7), "int16"),
        "list": [[1, 2], [3, 4]],
        "last": np.arange(1000, dtype="int64"),
    }


def test_a_thousand_small_arrays_take_one_unit_and_are_as_they_were() -> None:
    given = {f"bias/{number}": np.full(16, number, "float32") for number in range(1000)}
    packed = vram.pack(given, device="host")
    assert list(packed) == list(given)
    (region,) = {array.region for array in packed.values()}
    assert region.capacity == 2 * MIB
    assert all((packed[name].numpy() == given[name]).all() for name in given)


def test_each_is_aligned_and_beside_no_other() -> None:
    given = some()
    packed = vram.pack(given, device="host")
    end = packed["bytes"].address
    for name, array in packed.items():
        assert array.address % 256 == 0
        assert array.address >= end
        end = array.address + array.nbytes
        assert array.shape == np.shape(given[name])
        assert np.array_equal(array.numpy(), given[name])
        assert array.dtype == np.asarray(given[name]).dtype
    packed["bytes"].numpy()[...] = 255
    assert np.array_equal(packed["rows"].numpy(), given["rows"])


def test_it_is_published_where_it_is_as_one_segment() -> None:
    with vram.private_keeper():
        packed = vram.pack(some(), device="host")
        assert vram.publish("small", packed).copied == {}
        entry = vram.entry("small")
        assert (entry.segments, entry.nbytes) == (1, 2 * MIB)
        with vram.attach("small") as lease:
            assert lease["last"].numpy()[-1] == 999


def is_mapped(address: int) -> bool:
    """Whether memory of a memfd begins there in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.startswith(f"{address:x}-") and "memfd:" in line for line in lines)


def test_the_memory_goes_with_the_last_of_them_and_of_their_views() -> None:
    packed = vram.pack(some(), device="host")
    address = packed["last"].region.address
    assert is_mapped(address)
    view = packed["last"].numpy()
    for array in packed.values():
        array.close()
    assert view[999] == 999
    assert is_mapped(address)
    del view
    gc.collect()
    assert not is_mapped(address)


def test_only_arrays_without_elements_are_arrays_too() -> None:
    packed = vram.pack({"a": np.empty(0), "b": np.empty((0, 4))}, device="host")
    assert [array.shape for array in packed.values()] == [(0,), (0, 4)]


@pytest.mark.parametrize("given", [{}, [np.ones(3)], np.ones(3), None, "ab"])
def test_what_is_no_mapping_of_arrays_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="mapping of names to arrays"):
        vram.pack(given, device="host")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([object()]), "object"),
        ([[1], [2, 3]], "rows of one length"),
        (object(), "is no array"),
        (np.ma.masked_array([1, 2]), "masked array"),
    ],
)
def test_what_is_no_array_is_named_and_nothing_is_left(value: Any, said: str) -> None:
    with pytest.raises(VramError, match=f"array 'odd': .*{said}"):
        vram.pack({"good": np.ones(3), "odd": value}, device="host")


@pytest.mark.parametrize("name", ["", 3, "\ud800"])
def test_a_name_that_no_entry_could_have_is_refused(name: Any) -> None:
    with pytest.raises(UsageError):
        vram.pack({name: np.ones(3)}, device="host")


def test_an_array_that_sleeps_is_refused_and_nothing_is_left() -> None:
    with vram.zeros(4, device="host") as array:
        vram.sleep(array, to=None)
        with pytest.raises(vram.errors.AsleepError):
            vram.pack({"a": np.ones(3), "b": array}, device="host")


@pytest.mark.standin
def test_on_a_gpu_it_is_the_same() -> None:
    given = {"a": np.arange(5, dtype="float32"), "b": np.arange(6, dtype="int16")}
    there = vram.pack(given, device="cuda:0")
    again = vram.pack(there, device="cuda:0")
    assert again["b"].address - again["a"].address == 256
    assert all(np.array_equal(again[name].to_host(), given[name]) for name in given)
    back = vram.pack(there, device="host")
    assert all(np.array_equal(back[name].numpy(), given[name]) for name in given)
