"""Files of weights, put and shown: what is said of them, and what is in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.memfds import READ_ONLY, make_memfd

import vram
from vram.keeper.client import Segment, client

pytestmark = pytest.mark.usefixtures("kept")
GRANULE = 2 << 20


def put(directory: Path, metadata: dict[str, str] | None, meta: dict[str, str] | None = None) -> dict[str, str]:
    """Put a small file that says this of itself; return what readers are told."""
    path = directory / "m.safetensors"
    save_file({"x": np.arange(4), "y": np.ones((2, 3), "float16")}, path, metadata=metadata)
    vram.publish_file("n", path, device="host", meta=meta)
    return vram.entry("n").meta


def test_what_the_file_says_of_itself_goes_along(tmp_path: Path) -> None:
    said = put(tmp_path, {"format": "pt", "ほ": "\n"}, {"config": "v1"})
    assert set(said) == {"config", "source", "__metadata__"}
    assert json.loads(said["__metadata__"]) == {"format": "pt", "ほ": "\n"}
    with vram.attach("n", expect={"source": "m.safetensors", "config": "v1"}) as lease:
        assert lease.meta == said
        assert lease["x"].numpy().tolist() == [0, 1, 2, 3]
        assert lease["y"].numpy().tolist() == [[1, 1, 1]] * 2
    assert set(put(tmp_path, None)) == {"source"}


def test_what_the_user_says_is_not_replaced(tmp_path: Path) -> None:
    mine = {"__metadata__": "mine", "source": "here"}
    assert put(tmp_path, {"format": "pt"}, mine) == mine


def test_a_file_that_says_too_much_is_cut_at_whole_items(tmp_path: Path) -> None:
    long = {"config": "x" * 5000, "format": "pt", "license": "y" * 300, "notes": "z" * 900}
    said = put(tmp_path, long)["__metadata__"]
    assert json.loads(said) == {"format": "pt", "license": "y" * 300, "...": "2 more"}
    assert json.loads(put(tmp_path, {"config": "x" * 5000})["__metadata__"]) == {"...": "1 more"}
    many = {str(number): "x" for number in range(3000)}
    said = put(tmp_path, many)["__metadata__"]
    assert 1000 < len(said) <= 1024
    assert json.loads(said).pop("...") == f"{3000 - len(json.loads(said)) + 1} more"


@pytest.mark.parametrize("mine", [{"k": "v" * 4095}, {str(number): "" for number in range(512)}])
def test_what_is_added_never_takes_the_users_room(tmp_path: Path, mine: dict[str, str]) -> None:
    assert put(tmp_path, {"format": "pt"}, mine) == mine


def test_tensors_without_a_byte_are_an_entry(tmp_path: Path) -> None:
    save_file({"x": np.zeros((0, 4), "float32")}, tmp_path / "m")
    assert vram.publish_file("n", tmp_path / "m", device="host").nbytes == 0
    with vram.attach("n") as lease:
        assert lease["x"].shape == (0, 4)


@pytest.mark.parametrize("writable", [False, True])
def test_thousands_of_tensors_are_put_and_shown(tmp_path: Path, writable: bool) -> None:
    tensors = {f"layer.{number}.weight": np.full(number % 7, number, "int32") for number in range(3000)}
    save_file(tensors, tmp_path / "m")
    published = vram.publish_file("n", tmp_path / "m", device="host", writable=writable)
    assert (published.arrays, published.zero_copy) == (3000, True)
    shown = vram.entry("n").arrays
    assert shown is not None
    assert {a.name: (a.dtype, a.shape, a.nbytes) for a in shown} == {
        name: ("int32", tensor.shape, tensor.nbytes) for name, tensor in tensors.items()
    }
    assert sum(array.nbytes for array in shown) == published.nbytes
    with vram.attach("n", access="rw" if writable else "r") as lease:
        assert all(np.array_equal(lease[name].numpy(), tensor) for name, tensor in tensors.items())
        assert lease["layer.6.weight"].readonly is not writable


def test_showing_leaves_no_lease_and_maps_nothing_of_the_entry() -> None:
    vram.publish("n", {"x": np.arange(3), "y": np.zeros((2, 0))})
    for _ in range(3):
        assert vram.entry("n").arrays == (
            vram.info.ArrayInfo("x", "int64", (3,), 24),
            vram.info.ArrayInfo("y", "float64", (2, 0), 0),
        )
    assert vram.statistics().leases == 0
    (listed,) = vram.list_entries()
    assert listed.arrays is None


def test_s7_an_entry_that_nobody_can_read_is_shown_all_the_same(kept: vram.Keeper) -> None:
    fd = make_memfd(GRANULE, seals=READ_ONLY)
    try:
        client(kept.path).publish("n", [Segment(GRANULE)], [fd], manifest=b"garbage")
        client(kept.path).publish("long", [Segment(GRANULE)], [fd], manifest_fd=fd)
    finally:
        os.close(fd)
    for name in ("n", "long"):
        shown = vram.entry(name)
        assert shown.version > 0
        assert shown.arrays is None
    assert vram.statistics().leases == 0


def test_what_is_only_left_to_its_readers_has_no_arrays_to_show() -> None:
    vram.publish("n", {"x": np.arange(3)})
    with vram.attach("n"):
        vram.remove("n")
        shown = vram.entry("n")
        assert (shown.version, shown.retired, shown.arrays) == (0, 1, None)
