"""Groups on GPUs: ranks in processes of their own, which take the GPUs that there are in turn."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest
from tests.support import children as processes
from tests.support import group_gpu_children as children

from vram import driver as drivers
from vram.spec import Location

pytestmark = pytest.mark.gpu
pytest.importorskip("cuda.core", reason="could not import 'cuda.core'")
# Ranks: two, and where there are more GPUs a rank for each of four.
SIZES = sorted(
    {2, max(2, min(4, drivers.get(Location("cuda")).device_count()))} if os.environ.get("VRAM_TEST_GPU") else {2}
)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_in_processes_compute_together(at: str, size: int) -> None:
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(processes.child(children.compute, rank, size, first=(at,))) for rank in range(size)
        ]
        wanted = np.maximum.reduce([children.data(rank) for rank in range(size)]).tobytes()
        for _ in range(2):
            for one in ranks:
                assert one.said() == wanted


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_is_killed_is_named_and_costs_no_context(at: str, size: int) -> None:
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(processes.child(children.outlive, rank, size, first=(at,))) for rank in range(size)
        ]
        assert [one.said() for one in ranks] == ["computed"] * size
        killed = ranks.pop(1)
        for one in ranks:
            one.tell()
        killed.kill()
        for one in ranks:
            gone, zeros = one.said()
            assert (1 in gone, zeros) == (True, [0.0] * 4)  # and perhaps one that had heard it before, and has left


@pytest.mark.parametrize("size", SIZES)
def test_tensors_are_reduced_in_a_graph_that_is_launched_again(at: str, size: int) -> None:
    pytest.importorskip("torch", reason="could not import 'torch'")
    place = os.path.dirname(at)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(processes.child(children.reduce_in_a_graph, rank, size, first=(place,)))
            for rank in range(size)
        ]
        # Five sums over all ranks, of which each multiplies what all have alike.
        wanted = [[float(size**4 * sum(rank + turn for rank in range(size)))] for turn in range(3)]
        for one in ranks:
            assert one.said() == wanted


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_dies_is_named_to_those_who_launch_a_graph(at: str, size: int) -> None:
    pytest.importorskip("torch", reason="could not import 'torch'")
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(processes.child(children.die_in_a_graph, rank, size, first=(os.path.dirname(at),)))
            for rank in range(size)
        ]
        assert [one.said() for one in ranks] == ["computed"] * size
        for one in ranks:
            one.tell()
        killed = ranks.pop(1)
        killed.kill()
        for one in ranks:
            gone, twos = one.said()
            assert (1 in gone, twos) == (True, [2.0])


@pytest.mark.parametrize("size", sorted({*SIZES, 3}))
def test_a_buffer_grows_in_place_where_all_see_it(at: str, size: int) -> None:
    """And is large enough for whole grids: also of three ranks on one GPU, which has no room for all their blocks."""
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(processes.child(children.grow, rank, size, first=(at,))) for rank in range(size)]
        for one in ranks:
            assert one.said() == (True, [size * (size + 1) // 2])


def test_what_is_large_is_handed_over_to_nccl_and_it_says_so(at: str) -> None:
    """NCCL wants a GPU for each rank: there are as many as there are GPUs, and four at most."""
    pytest.importorskip("torch", reason="could not import 'torch'")
    size = min(4, drivers.get(Location("cuda", 0)).device_count())
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(processes.child(children.hand_over_to_nccl, rank, size, first=(os.path.dirname(at),)))
            for rank in range(size)
        ]
        for one in ranks:
            same, statistics, words = one.said()
            assert same == [True, True, True]
            assert statistics == {"library": 3}
            assert "handed over to NCCL " in words
