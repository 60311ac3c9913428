"""Some of the arrays of an entry, by patterns of their names: the rest is neither shown nor mapped."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import vram
from vram.errors import NotFoundError, UsageError

pytestmark = pytest.mark.usefixtures("kept")
LAYERS = 4


def publish(**options: Any) -> None:
    """Publish two arrays for each layer, each in memory of its own, and a norm."""
    arrays = {f"layers.{n}.{part}": vram.zeros((512, 1024), device="host") for n in range(LAYERS) for part in "ab"}
    for number, array in enumerate(arrays.values()):
        array[:] = number
    arrays["norm"] = vram.zeros(1024, device="host")
    vram.publish("model", arrays, **options)


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["layers.0.*"], ["layers.0.a", "layers.0.b"]),
        (("norm", "layers.[23].b"), ["layers.2.b", "layers.3.b", "norm"]),
        ({"layers.1.a", "layers.1.?"}, ["layers.1.a", "layers.1.b"]),
        (["*"], [*[f"layers.{n}.{part}" for n in range(LAYERS) for part in "ab"], "norm"]),
    ],
)
def test_the_arrays_that_match_are_there_and_no_other_memory(only: Any, names: list[str]) -> None:
    publish()
    with vram.attach("model", only=only) as lease:
        assert list(lease) == names
        assert lease.nbytes == 2 * 1024 * 1024 * len(names)
        wanted = {f"layers.{n}.{part}": float(2 * n + (part == "b")) for n in range(LAYERS) for part in "ab"}
        assert {name: array[0, 0] for name, array in lease.numpy().items() if name != "norm"} == {
            name: value for name, value in wanted.items() if name in names
        }
        if "layers.0.b" not in names:
            with pytest.raises(NotFoundError, match=r"layers\.0\.b"):
                lease["layers.0.b"]


def test_arrays_that_are_packed_into_one_memory_are_chosen_as_well() -> None:
    vram.publish("packed", {name: np.full(8, number) for number, name in enumerate("abc")})
    with vram.attach("packed", only=["b"]) as lease:
        assert {name: array.tolist() for name, array in lease.numpy().items()} == {"b": [1] * 8}


def test_a_name_is_itself_before_it_is_a_pattern() -> None:
    vram.publish("odd", {"x[0]": np.zeros(4), "x0": np.ones(4)})
    with vram.attach("odd", only=["x[0]"]) as lease:
        assert list(lease) == ["x[0]"]


@pytest.mark.parametrize("swap", [False, True])
def test_updates_are_seen_of_some_as_of_all(swap: bool) -> None:
    publish(updatable=True, swap=swap)
    with vram.attach("model", only=["layers.3.*"]) as lease:
        with vram.update("model") as arrays:
            for array in arrays.values():
                array[:] = 7
        with lease.reading():
            assert {name: float(array.numpy().max()) for name, array in lease.items()} == {
                "layers.3.a": 7.0,
                "layers.3.b": 7.0,
            }
        del arrays, array


def test_an_upgrade_has_the_same_arrays_of_the_newest_version() -> None:
    publish()
    with vram.attach("model", only=["norm"]) as lease:
        publish()
        with lease.upgrade() as newest:
            assert (list(newest), newest.version) == (["norm"], lease.version + 1)
        with pytest.raises(UsageError, match="upgrade"):
            lease.refresh()


def test_an_array_of_some_is_handed_on_by_its_name() -> None:
    import pickle

    publish()
    with vram.attach("model", only=["layers.2.b"]) as lease:
        again = pickle.loads(pickle.dumps(lease["layers.2.b"]))
        assert again.numpy()[0, 0] == 5.0
        del again


def test_it_is_awaited_as_well() -> None:
    async def attached() -> list[str]:
        with await vram.aio.attach("model", only=["norm"]) as lease:
            return list(lease)

    publish()
    assert asyncio.run(attached()) == ["norm"]


def test_a_pattern_without_an_array_is_named_and_nothing_is_held() -> None:
    publish()
    with pytest.raises(NotFoundError, match=r"no array like 'layer\.0\.\*'; it has 'layers\.0\.a'"):
        vram.attach("model", only=["norm", "layer.0.*"])
    assert vram.entry("model").leases == 0


@pytest.mark.parametrize("only", ["norm", [], [1], {"norm": 1}, 3])
def test_what_is_no_list_of_patterns_is_refused(only: Any) -> None:
    publish()
    with pytest.raises(UsageError, match="only"):
        vram.attach("model", only=only)
    with pytest.raises(UsageError, match="growing=True"):
        vram.attach("model", only=["norm"], growing=True)
