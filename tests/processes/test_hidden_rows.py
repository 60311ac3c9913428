"""What a reader sees who maps the descriptors of an entry itself, and looks at every byte: what was published.

Decision 020. The rows beyond a slice, those that a shrink left, and other arrays of the same memory are not there,
unless ``whole=True`` said so.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vram
from vram.arrays import weights
from vram.driver import get
from vram.entries import placement
from vram.keeper.client import KeeperClient, close_client
from vram.memory import Region
from vram.spec import HOST

MIB = 1 << 20
SHOWN, SECRET = 0x5A, 0xA5

pytestmark = pytest.mark.usefixtures("kept")


def published(name: str = "n") -> Iterator[tuple[int, bytes]]:
    """As a hostile reader: (inode, all bytes) of each descriptor that the keeper hands out."""
    with KeeperClient.connect(os.environ["VRAM_KEEPER"]) as client:
        attachment = client.attach(name)
        try:
            for fd in attachment.fds:
                size = os.fstat(fd).st_size
                with mmap.mmap(fd, size, prot=mmap.PROT_READ) as raw:
                    yield os.fstat(fd).st_ino, raw[:]
        finally:
            for fd in attachment.fds:
                os.close(fd)
            attachment.fds.clear()


def seen(name: str = "n") -> dict[int, int]:
    """How often each byte but zero is there."""
    counts = sum(np.bincount(np.frombuffer(raw, "uint8"), minlength=256) for _, raw in published(name))
    return {value: int(count) for value, count in enumerate(np.asarray(counts)) if count and value}


def inodes(array: vram.Array) -> set[int]:
    found = array.region.segments(0, array.region.nbytes)[0]
    return {os.fstat(one.export()).st_ino for one in found}


def secret(rows: int = 64, width: int = 1024, **options: Any) -> vram.Array:
    """An array that is full of what nobody is to see."""
    array = vram.empty((rows, width), "uint8", device="host", **options)
    array.fill(SECRET)
    return array


# -- slices ---------------------------------------------------------------------------------------------------------
SLICES: dict[str, Callable[[vram.Array], Any]] = {
    "at the front": lambda a: a[:8],
    "in the middle": lambda a: a[8:16],
    "at the end": lambda a: a[56:],
    "a row": lambda a: a[3],
    "a numpy view": lambda a: a.numpy()[8:16],
    "all but a byte": lambda a: a.numpy().ravel()[1:],
}


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("which", SLICES)
def test_a_slice_is_published_without_the_rest(which: str, writable: bool) -> None:
    with secret() as a:
        part = SLICES[which](a)
        part[...] = SHOWN
        nbytes = part.nbytes
        receipt = vram.publish("n", {"part": part}, writable=writable)
        assert "whole=True" in receipt.copied["part"]
        assert seen() == {SHOWN: nbytes}
        assert not a.readonly, "what was copied is as free as before"
        a.fill(SECRET)
        assert seen() == {SHOWN: nbytes}
        del part


@pytest.mark.parametrize("writable", [False, True])
def test_a_slice_is_published_with_the_rest_if_that_is_said(writable: bool) -> None:
    with secret() as a:
        a[8:16].fill(SHOWN)
        receipt = vram.publish("n", {"part": a[8:16]}, writable=writable, whole=True)
        assert receipt.zero_copy
        assert seen() == {SHOWN: 8 << 10, SECRET: 56 << 10}
        assert {inode for inode, _ in published()} == inodes(a)


def test_a_part_that_is_all_of_its_memory_is_not_copied() -> None:
    """Whole chunks of a large array are memory of their own."""
    with secret(8, MIB, chunk="2MiB") as a:
        a[2:4].fill(SHOWN)
        assert vram.publish("n", {"part": a[2:4]}).zero_copy
        assert seen() == {SHOWN: 2 * MIB}


# -- rows that a shrink left ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("writable", [False, True])
def test_rows_that_a_shrink_left_are_zeroed(writable: bool) -> None:
    with secret() as a:
        a.resize(8)
        a.fill(SHOWN)
        assert vram.publish("n", {"a": a}, writable=writable).zero_copy
        assert seen() == {SHOWN: 8 << 10}
        assert {inode for inode, _ in published()} == inodes(a)


def test_rows_that_a_shrink_left_are_published_if_that_is_said() -> None:
    with secret() as a:
        a.resize(8)
        a.fill(SHOWN)
        assert vram.publish("n", {"a": a}, whole=True).zero_copy
        assert seen() == {SHOWN: 8 << 10, SECRET: 56 << 10}


def test_rows_that_somebody_else_may_be_using_are_not_zeroed_but_left_out(tmp_path: Path) -> None:
    with secret() as a:
        with vram.lend(a, at=tmp_path / "s", writable=True), vram.borrow(tmp_path / "s") as lease:
            there = lease.array.numpy()
        close_client(str(tmp_path / "s"))
        a.resize(8)
        a.fill(SHOWN)
        receipt = vram.publish("n", {"a": a})
        assert "before it was made smaller" in receipt.copied["a"]
        assert seen() == {SHOWN: 8 << 10}
        assert (there[8:] == SECRET).all()
        del there


def test_the_chunks_of_a_slice_leave_the_rest_of_an_array_alone() -> None:
    """What a shrink left behind the end is not handed out, and not touched."""
    with secret(8, MIB, chunk="2MiB") as a:
        a.resize(7)
        a[2:4].fill(SHOWN)
        assert vram.publish("n", {"part": a[2:4]}, writable=True).zero_copy
        a.resize(8)
        assert (a.numpy()[7] == SECRET).all()


def test_what_a_view_of_the_whole_capacity_wrote_is_zeroed_once_it_is_gone() -> None:
    with vram.empty((8, 1024), "uint8", device="host", capacity=64) as a:
        full = a.numpy(full=True)
        full[...] = SECRET
        full[:8] = SHOWN
        receipt = vram.publish("first", {"a": a}, writable=True)
        assert "others may be using" in receipt.copied["a"]
        assert seen("first") == {SHOWN: 8 << 10}
        assert (full[8:] == SECRET).all()
        del full
        assert vram.publish("n", {"a": a}).zero_copy
        assert seen() == {SHOWN: 8 << 10}


# -- other arrays in the same memory --------------------------------------------------------------------------------
def test_arrays_of_one_file_are_published_as_they_are_if_all_are(tmp_path: Path) -> None:
    numpy_save = pytest.importorskip("safetensors.numpy")
    made = {"a": np.full(1001, SHOWN, "uint8"), "b": np.full(77, 0x5A5A, "int16"), "c": np.full(3, SECRET, "uint8")}
    numpy_save.save_file(made, tmp_path / "w.safetensors")
    found = weights.load(tmp_path / "w.safetensors", get(HOST), HOST)
    try:
        receipt = vram.publish("n", {name: found[name] for name in "ab"})
        assert set(receipt.copied) == {"a", "b"}
        assert seen() == {SHOWN: 1001 + 154}
        assert vram.publish("all", found).zero_copy
        assert seen("all") == {SHOWN: 1001 + 154, SECRET: 3}
    finally:
        for array in found.values():
            array.close()


def test_what_is_between_arrays_is_looked_at_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """On memory that is no array's rows: zeros reveal nothing, and nobody reads gigabytes to learn that."""
    driver = get(HOST)
    region = Region.create(HOST, driver=driver, capacity=8 * MIB, nbytes=8 * MIB, managed=True)
    with region:
        a = vram.Array(region, "uint8", 1000)
        b = vram.Array(region, "uint8", 1000, offset=8 * MIB - 1000)
        a.fill(SHOWN)
        b.fill(SHOWN)
        with monkeypatch.context() as patch:
            patch.setattr(placement, "_MOST_READ", MIB)
            assert len(vram.publish("n", {"a": a, "b": b}, writable=True).copied) == 2
        assert vram.publish("n", {"a": a, "b": b}, writable=True).zero_copy
        driver.fill(region.address + 5 * MIB, SECRET, 1)
        assert len(vram.publish("n", {"a": a, "b": b}).copied) == 2
        assert seen() == {SHOWN: 2000}
        a.close()
        b.close()


def test_what_is_lent_goes_as_it_is(tmp_path: Path) -> None:
    """Whoever lends chooses who may connect: there zero copy is the contract."""
    with secret() as a, vram.lend(a[8:16], at=tmp_path / "s", writable=True), vram.borrow(tmp_path / "s") as lease:
        assert lease.array.shape == (8, 1024)
        assert inodes(lease.array) == inodes(a)
        lease.close()
    close_client(str(tmp_path / "s"))
