"""What is forked while something is published: no child is why the kernel does not make it read-only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.support.carried import model, nodes, same
from tests.support.deadlines import SOON, until
from tests.support.forked import end_of, forked

import vram
from vram.arrays import weights
from vram.driver.host import HostDriver
from vram.entries.manifests import sealed_copy
from vram.entries.packing import PackedCopy
from vram.nodes.carrier import Carrier
from vram.nodes.pull import Pull

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def stage() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as found:
        yield found


def fork_after(stage: contextlib.ExitStack, patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Have a child forked whenever a function is done, each of which lives until the test is over; who they are."""
    once, children = getattr(owner, name), []

    def act(*given: Any, **named: Any) -> Any:
        done = once(*given, **named)
        children.append(stage.enter_context(forked()).pid)
        return done

    patch.setattr(owner, name, act)
    return children


def test_children_that_are_forked_while_arrays_are_copied(
    kept: vram.Keeper, stage: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = fork_after(stage, monkeypatch, PackedCopy, "fill")
    vram.publish("a", {"a": np.full(1000, 7), "b": np.full(5 << 20, 8, np.uint8)}, keeper=kept)
    assert len(children) == 1
    with vram.attach("a", keeper=kept) as lease:
        assert (lease["a"].numpy() == 7).all()
        assert (lease["b"].numpy() == 8).all()


def test_children_that_are_forked_while_a_file_is_read(
    kept: vram.Keeper, stage: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    safetensors.numpy.save_file({"w": np.full(1000, 7)}, tmp_path / "w.safetensors")
    children = fork_after(stage, monkeypatch, weights, "fill")
    vram.publish_file("w", tmp_path / "w.safetensors", device="host", keeper=kept)
    assert children
    with vram.attach("w", keeper=kept) as lease:
        assert (lease["w"].numpy() == 7).all()


def test_children_that_are_forked_while_a_replica_comes_in(
    stage: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nodes() as two:
        arrays = model(1 << 20)
        vram.publish("model", arrays, keeper=two.origin)
        with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
            children = fork_after(stage, monkeypatch, Pull, "fill")
            vram.replicate(carrier.address, "model", keeper=two.here)
        assert children
        with vram.attach("model", keeper=two.here) as lease:
            same(lease, arrays)


def test_children_that_are_forked_while_a_long_description_is_written(
    stage: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = fork_after(stage, monkeypatch, HostDriver, "copy_in")
    with sealed_copy(b"description"):
        assert children


def mapped_in(pid: int, address: int) -> bool:
    """Whether memory that can be shared is mapped in a process at an address."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= address < stop:
            return "memfd" in line
    return False


def test_what_children_do_not_have_they_have_once_it_is_sealed() -> None:
    with vram.memory.Region.create("host", capacity=4096, nbytes=4096, inherited=False) as region:
        with forked() as child:
            assert mapped_in(os.getpid(), region.address)
            assert not mapped_in(child.pid, region.address)
            region.freeze()  # with a child that lives
            assert not mapped_in(child.pid, region.address)
        with forked() as child:
            assert mapped_in(child.pid, region.address)
    with vram.memory.Region.create("host", capacity=4096, nbytes=4096) as region, forked() as child:
        assert mapped_in(child.pid, region.address)


def test_what_children_do_not_have_is_not_made_ahead() -> None:
    """What a thread makes ahead is mapped in another way, by which children have it."""
    ready = vram.prepare("host", "2MiB", chunk="2MiB")
    try:
        until(lambda: ready.ready == 2 << 20, what="the memory that is made ahead")
        with vram.memory.Region.create("host", capacity=2 << 20, nbytes=2 << 20, inherited=False) as region:
            with forked() as child:
                assert not mapped_in(child.pid, region.address)
    finally:
        ready.close()


@pytest.mark.parametrize("count", [1, 4, 5, 16])
def test_a_child_without_the_memory_attaches_and_makes_arrays(kept: vram.Keeper, count: int) -> None:
    vram.publish("a", {"a": np.ones(8 << 20, np.uint8)}, keeper=kept)
    size = count * (2 << 20)

    def work() -> int:
        some = [vram.zeros(2 << 20, "uint8", device="host") for _ in range(20)]
        for number, one in enumerate(some):
            one.numpy()[:] = number
        with vram.attach("a", keeper=kept.path, timeout=SOON) as lease:
            right = all((one.numpy() == number).all() for number, one in enumerate(some))
            return 0 if right and (lease["a"].numpy() == 1).all() else 2

    with vram.memory.Region.create("host", capacity=size, nbytes=size, inherited=False):
        assert end_of(work) == 0
