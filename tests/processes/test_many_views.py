"""All arrays of a lease as numpy arrays: the same as one by one, by one view of each memory (invariants I5, I6)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.deadlines import until

import vram
from vram.arrays.views import Exporter
from vram.errors import BusyError

CONTENT: dict[str, Any] = {
    "floats": np.arange(12, dtype="float32").reshape(3, 4),
    "odd": np.arange(3, dtype="uint8"),
    "nothing": np.zeros((0, 5), "int64"),
    "number": np.array(7, "int16"),
    "brain": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "words": np.array(["a", "bcd"]),
    "when": np.array(["2026-11-23"], "datetime64[D]"),
    "yes": np.array([True, False]),
}


@pytest.fixture
def kept() -> Iterator[str]:
    with vram.private_keeper() as keeper:
        vram.publish("many", CONTENT, keeper=keeper)
        yield keeper.path


@pytest.mark.parametrize("access", ["r", "cow"])
def test_all_at_once_are_the_same_as_each_alone(kept: str, access: str) -> None:
    with vram.attach("many", access=access, keeper=kept) as lease:
        views = lease.numpy()
        assert list(views) == list(CONTENT)
        for name, view in views.items():
            alone, wanted = lease[name].numpy(), CONTENT[name]
            assert (view.dtype, view.shape, view.strides) == (alone.dtype, alone.shape, alone.strides)
            assert view.__array_interface__["data"] == alone.__array_interface__["data"]
            assert (view.dtype, view.shape) == (wanted.dtype, wanted.shape)
            assert view.tobytes() == wanted.tobytes()
        del views, view, alone


def test_s8_none_of_them_can_be_made_writable(kept: str) -> None:
    """Writing would be answered with SIGSEGV: the memory is sealed."""
    with vram.attach("many", keeper=kept) as lease:
        for view in lease.numpy().values():
            assert not view.flags.writeable
            with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
                view.flags.writeable = True
        del view


def test_i6_each_of_them_keeps_the_memory_and_all_of_them_are_one_claim(kept: str) -> None:
    lease = vram.attach("many", keeper=kept)
    views = lease.numpy()
    part = views["floats"][1:]
    roots = {id(view.base) for view in views.values() if view.nbytes}
    assert len(roots) == 1
    with pytest.raises(BusyError) as caught:
        lease.close(strict=True)
    assert len([who for who in caught.value.holders if "numpy" in who]) <= 2, "of all together, and of the empty one"
    del views
    lease.close()
    gc.collect()
    assert (part == CONTENT["floats"][1:]).all(), "still mapped"
    assert vram.statistics(keeper=kept).leases == 1
    del part
    until(lambda: vram.statistics(keeper=kept).leases == 0, what="the return of the lease")


def test_i6_what_is_attached_to_be_written_has_a_view_of_each() -> None:
    """So that whoever publishes it read-only later finds each, and takes its writable flag away."""
    with vram.private_keeper() as keeper:
        vram.publish("many", {"a": np.arange(3), "b": np.arange(4)}, writable=True, keeper=keeper)
        with vram.attach("many", access="rw", keeper=keeper) as lease:
            views = lease.numpy()
            assert [isinstance(view.base, Exporter) for view in views.values()] == [True, True]
            views["a"][0] = 9
            assert lease["a"].numpy()[0] == 9
            del views
