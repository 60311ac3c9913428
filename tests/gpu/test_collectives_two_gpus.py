"""Groups over real GPUs: one process that drives several, and graphs whose arrays are registered after their capture.

With two ranks, and where there are more GPUs with one for each.

Multicast is off, and every child that starts torch sees to that before it imports it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.support import children as processes
from tests.support import two_gpus_children as children
from tests.support.deadlines import AT_ONCE
from tests.support.places import short_directory

import vram
from vram import driver as drivers
from vram.spec import Location

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]
pytest.importorskip("cuda.core", reason="could not import 'cuda.core'")
SIZES = sorted({2, drivers.get(Location("cuda")).device_count() if os.environ.get("VRAM_TEST_GPU") else 2})


@pytest.fixture
def at() -> Iterator[str]:
    with short_directory() as directory:
        yield os.path.join(directory, "group.sock")


def in_threads(at: str, act: Callable[[vram.Group], Any], size: int = 2, **given: Any) -> list[Any]:
    """Have ranks in threads of this process act; return what each returned, or the words of what it raised."""
    came: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            with vram.Group(rank=rank, size=size, at=at, timeout=AT_ONCE, **given) as group:
                came[rank] = act(group)
                group.barrier()
        except BaseException as error:
            came[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return came


def put(array: vram.Array, data: np.ndarray[Any, Any]) -> None:
    drivers.get(array.region.location).copy_in(array.address, memoryview(data).cast("B"))


def got(array: vram.Array) -> np.ndarray[Any, Any]:
    found = np.empty(array.shape, np.float32)
    drivers.get(array.region.location).copy_out(memoryview(found).cast("B"), array.address)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_one_process_drives_several_gpus(at: str, size: int) -> None:
    counts = (5, 1000, 100_003, 3_000_000, 9_000_000)
    data = {
        count: [np.random.default_rng(count + rank).standard_normal(count).astype(np.float32) for rank in range(size)]
        for count in counts
    }

    def act(group: vram.Group) -> list[str]:
        gpu, wrong = Location("cuda", group.rank), []
        driver: Any = drivers.get(gpu)
        for count in counts:
            with (
                group.symmetric(count, "float32", device=str(gpu)) as shared,
                vram.zeros(count, "float32", device=str(gpu)) as plain,
            ):
                for buffer, array in ((shared, shared.array), (plain, plain)):
                    put(array, data[count][group.rank])
                    group.barrier()
                    group.all_reduce(buffer)
                    group.barrier(device=str(gpu))
                    driver.synchronize(gpu)
                    group.check()
                    if not np.array_equal(got(array), sum(data[count], np.float32())):
                        wrong.append(f"{count} {'symmetric' if buffer is shared else 'of any array'}")
                group.barrier()
        return wrong

    assert in_threads(at, act, size) == [[]] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["cudaMalloc", "expandable segments"])
def test_graphs_reach_tensors_where_they_are_once_they_are_registered(at: str, kind: str, size: int) -> None:
    """Launched before that, too, and then again: the bits are those of a sum in the order of the ranks."""
    pytest.importorskip("torch", reason="could not import 'torch'")
    place = os.path.dirname(at)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(processes.child(children.register, rank, size, kind, first=(place,)))
            for rank in range(size)
        ]
        for one in ranks:
            wrong, whys, registered = one.said()
            assert wrong == []
            if kind == "cudaMalloc":
                # Of five calls one has a tensor that begins anywhere.
                assert whys == ("that of rank 0 is not shared: it does not begin at a multiple of 16 bytes",)
                assert registered == 4
            else:  # whether these can leave a process depends on the release of torch: all or the vram array alone
                assert registered in (1, 4), whys


@pytest.mark.parametrize("size", SIZES)
def test_vllms_way_of_capturing_registers_by_itself(at: str, size: int) -> None:
    pytest.importorskip("torch", reason="could not import 'torch'")
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(processes.child(children.as_vllm_does, rank, size, first=(os.path.dirname(at),)))
            for rank in range(size)
        ]
        for one in ranks:
            same, registered = one.said()
            assert same == [True] * 4
            assert registered == 2
