"""``copy.copy`` and ``copy.deepcopy`` of arrays: memory of its own, wherever the original is, as numpy's are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import vram
from vram.errors import ClosedError, UsageError

PLACES = ["host", pytest.param("cuda:0", marks=pytest.mark.standin)]
both = pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])


@both
@pytest.mark.parametrize("place", PLACES)
def test_a_copy_has_memory_of_its_own_and_room_to_grow(place: str, duplicate: Callable[[Any], Any]) -> None:
    with vram.asarray(np.arange(6).reshape(3, 2), device=place, capacity=5) as a:
        with duplicate(a) as b, duplicate(a[1:]) as c:
            b[0] = 9
            assert (b.copy()[0].tolist(), c.copy().tolist()) == ([9, 9], [[2, 3], [4, 5]])
            assert (str(b.device), b.capacity, b.dtype, c.capacity) == (place, (5, 2), a.dtype, (2, 2))
            b.resize(5)
        assert a.copy().tolist() == [[0, 1], [2, 3], [4, 5]]


@both
@pytest.mark.parametrize("access", ["r", "rw", "cow"])
def test_a_copy_of_a_leased_array_changes_nobody_elses(access: str, duplicate: Callable[[Any], Any]) -> None:
    with vram.private_keeper():
        vram.publish("x", {"w": np.zeros(4, "f4")}, writable=True)
        with vram.attach("x", access=access) as lease, vram.attach("x") as other:
            if access == "cow":
                lease["w"][1] = 3
            with duplicate(lease["w"]) as made:
                assert made[:2].numpy().tolist() == lease["w"].numpy()[:2].tolist()
                made.numpy()[0] = 7
            assert not lease["w"].numpy()[0]
            assert not other["w"].numpy().any()


def test_a_module_that_contains_arrays_is_copied_with_them() -> None:
    class Module:
        def __init__(self) -> None:
            self.weights = {"w": vram.zeros(2, device="host")}
            self.tied = self.weights["w"]

    module = Module()
    other = copy.deepcopy(module)
    other.tied[0] = 1
    assert other.weights["w"] is other.tied
    assert module.tied.numpy().tolist() == [0, 0]
    for one in (module, other):
        one.tied.close()


def test_what_owns_a_resource_is_not_copied() -> None:
    with vram.private_keeper():
        vram.publish("x", {"w": np.zeros(4)})
        with vram.attach("x") as lease:
            for owner in (lease, lease["w"].region):
                with pytest.raises(UsageError, match="cannot be pickled or copied"):
                    copy.deepcopy(owner)
            closed = lease["w"]
            closed.close()
            with pytest.raises(ClosedError):
                copy.copy(closed)
