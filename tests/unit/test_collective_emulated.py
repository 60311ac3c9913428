"""The kernels of groups, run on the processor: their arithmetic bit for bit, and their protocols in random orders.

One thread plays all ranks, blocks and threads (``emulated_gpu.h``), so an order is repeated by its seed. A control is
the program with a protection taken out: some order must be found in which that goes wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.emulated_kernels import Emulated, missing
from tests.support.samples import in_turns, some

from vram.collectives import host
from vram.collectives.kernels import Layout, Variant

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
TYPES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int32": np.int32,
}  # fmt: skip
SOME = [
    (2, "float32", "sum"),
    (3, "float16", "sum"),
    (4, "bfloat16", "sum"),
    (3, "int32", "min"),
    (2, "bfloat16", "max"),
]
PLAIN = ("all_reduce_packets", "all_reduce_push", "all_reduce_two_shots", "all_reduce_shares")
THREADS, BLOCKS = 32, 2  # of a block, and of a grid: few, so that a rank's threads go round several times


def aligned(data: np.ndarray[Any, Any], shift: int = 0) -> np.ndarray[Any, Any]:
    """Return a copy that begins at a multiple of 128 bytes, and so many elements after it."""
    room = np.zeros(data.nbytes + 256, np.uint8)
    start = -room.ctypes.data % 128 + shift * data.itemsize
    found = room[start : start + data.nbytes].view(data.dtype)
    found[:] = data
    return found


def fresh(random: np.random.Generator, count: int, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "int32":
        found = random.integers(-(2**31), 2**31, count, dtype=np.int32)
        found[: count // 7] = np.iinfo(np.int32).min
        return found
    found = random.standard_normal(count).astype(TYPES[dtype])
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-7, 6e-8, 65504.0], np.float32).astype(TYPES[dtype])
    found[random.integers(0, count, max(1, count // 10))] = random.choice(odd, max(1, count // 10))
    return found


def expected(sources: Sequence[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
    out = np.empty_like(sources[0])
    host.reduce(op, sources, [out])
    return out


def bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits; one pattern for all that is not a number, and one for both zeros, of which numpy's minima pick any."""
    found = values.view(np.uint32 if values.dtype.itemsize == 4 else np.uint16).copy()
    if values.dtype.kind != "i":
        found[np.isnan(values.astype(np.float32))] = 0x7FFF
        found[values.astype(np.float32) == 0] = 0
    return found


def reduce(
    ranks: Emulated, name: str, data: Sequence[np.ndarray[Any, Any]], *, shift: int = 0, blocks: int = BLOCKS
) -> list[np.ndarray[Any, Any]]:
    """Launch an all-reduce on all ranks; what comes of it is in what is returned, once they have run."""
    sources = [aligned(one, shift) for one in data]
    targets = [aligned(np.zeros_like(one), shift) for one in data]
    everywhere = [one.ctypes.data for one in (*sources, *targets)]
    for rank in range(ranks.size):
        where = (sources[rank].ctypes.data, targets[rank].ctypes.data)
        given = everywhere if name == "all_reduce_shares" else where
        ranks.launch(rank, name, blocks, THREADS, *given, data[0].nbytes)
    ranks.kept = [*getattr(ranks, "kept", []), sources, targets]  # type: ignore[attr-defined]
    return targets


@pytest.mark.parametrize(("size", "dtype", "op"), some(SOME, 1))
def test_every_way_has_the_bits_of_the_host(size: int, dtype: str, op: str) -> None:
    random = np.random.default_rng(size)
    ranks = Emulated(size, dtype, op)
    for name in (one for one in PLAIN if one in Variant(size, 0, dtype, op, (9, 0)).names()):
        for count in (1, 3, 8, 129, 1021):
            for shift in (0, 1) if name != "all_reduce_shares" else (0,):
                data = [fresh(random, count, dtype) for _ in range(size)]
                found = reduce(ranks, name, data, shift=shift)
                ranks.run(seed=count)
                wanted = bits(expected(data, op))
                for rank, one in enumerate(found):
                    assert np.array_equal(bits(one), wanted), f"{name} of {count}, rank {rank}"


@in_turns(5)
@pytest.mark.parametrize(("size", "dtype"), some([(2, "float32"), (3, "float16"), (4, "bfloat16")], 1))
def test_no_sum_is_minus_zero(size: int, dtype: str) -> None:
    ranks = Emulated(size, dtype, "sum")
    for name in (one for one in PLAIN if one in Variant(size, 0, dtype, "sum", (9, 0)).names()):
        for zero in (0.0, -0.0):
            found = reduce(ranks, name, [np.full(67, zero, TYPES[dtype]) for _ in range(size)])
            ranks.run(seed=3)
            for one in found:
                assert not one.view(np.uint8).any(), name


def norm(
    ranks: Emulated, name: str, rows: int, width: int, random: np.random.Generator, *, in_place: bool = False
) -> list[np.ndarray[Any, Any]]:
    """Launch an all-reduce with a norm on all ranks, let them run, compare, and return what is normalized."""
    kind = TYPES[ranks.dtype]
    data = [aligned(random.standard_normal(rows * width).astype(kind)) for _ in range(ranks.size)]
    residual, weight = random.standard_normal(rows * width).astype(kind), random.standard_normal(width).astype(kind)
    sums = expected(data, "sum")
    wanted, total = host.normalize(sums, residual, weight, 1e-5)
    befores, weights = [aligned(residual) for _ in data], [aligned(weight) for _ in data]
    outs = data if in_place else [aligned(np.zeros_like(one)) for one in data]
    totals = befores if in_place else [aligned(np.zeros_like(one)) for one in data]
    epsilon = int(np.float32(1e-5).view(np.uint32))
    for rank in range(ranks.size):
        arrays = (data[rank], befores[rank], weights[rank], outs[rank], totals[rank])
        ranks.launch(
            rank, name, min(rows, BLOCKS), THREADS, *(one.ctypes.data for one in arrays), rows, weight.nbytes, epsilon
        )  # fmt: skip
    ranks.run(seed=rows)
    for rank in range(ranks.size):
        assert np.array_equal(totals[rank].view(np.uint8), total.view(np.uint8)), "the sum with the residual"
        assert np.array_equal(outs[rank].view(np.uint8), outs[0].view(np.uint8)), "all ranks alike"
        found = outs[rank].astype(np.float32)
        # The order of the squares differs: some units of the last place in 32 bits, at most one after rounding to 16.
        most = 8e-7 if ranks.dtype == "float32" else float(ml_dtypes.finfo(kind).eps)
        near = np.abs(found - wanted.astype(np.float32)) <= np.abs(found) * most + 1e-7
        assert near.all(), f"rank {rank}: {np.flatnonzero(~near)[:5]}"
    return outs


@in_turns(5)
@pytest.mark.parametrize(("size", "dtype"), some([(1, "bfloat16"), (2, "float32"), (3, "float16"), (4, "bfloat16")], 1))
def test_rows_are_summed_and_normalized(size: int, dtype: str) -> None:
    ranks = Emulated(size, dtype, "sum")
    each = 16 // np.dtype(TYPES[dtype]).itemsize
    for name in ("all_reduce_norm_packets", "all_reduce_norm_push"):
        for rows, width in ((1, each), (1, 33 * each), (5, 4 * THREADS * each), (7, 3 * each)):
            norm(ranks, name, rows, width, np.random.default_rng(rows))
            norm(ranks, name, rows, width, np.random.default_rng(width), in_place=True)
    same = [
        norm(ranks, f"all_reduce_norm_{way}", 3, 40 * each, np.random.default_rng(1))[0] for way in ("packets", "push")
    ]
    assert np.array_equal(same[0].view(np.uint8), same[1].view(np.uint8)), "both ways have the same bits"


def mixed(ranks: Emulated, seed: int, calls: int = 12, slow: int = -1) -> None:
    """Launch calls of every way and many sizes and grids, let them run in one order, and compare each."""
    choose = np.random.default_rng(seed)
    names = [one for one in PLAIN if one in Variant(ranks.size, 0, ranks.dtype, ranks.op, (9, 0)).names()]
    came = []
    for _ in range(calls):
        data = [fresh(choose, int(choose.integers(1, 400)), ranks.dtype)]
        data += [fresh(choose, len(data[0]), ranks.dtype) for _ in range(ranks.size - 1)]
        name, blocks = str(choose.choice(names)), int(choose.integers(1, 4))
        came.append((name, reduce(ranks, name, data, blocks=blocks), bits(expected(data, ranks.op))))
    ranks.run(seed, slow=slow)
    for number, (name, found, wanted) in enumerate(came):
        for rank, one in enumerate(found):
            assert np.array_equal(bits(one), wanted), f"call {number}, {name}, rank {rank}"


@in_turns(5)
@pytest.mark.parametrize(
    ("size", "dtype", "op"), some([(2, "float32", "sum"), (3, "bfloat16", "sum"), (4, "bfloat16", "sum")], 1)
)
def test_calls_of_every_way_one_after_the_other_in_random_orders(size: int, dtype: str, op: str) -> None:
    ranks = Emulated(size, dtype, op)
    for seed in some(range(12), 3):
        mixed(ranks, seed, slow=seed % (size + 1) - 1)
        chained(ranks, seed, slow=seed % (size + 1) - 1)


def chained(ranks: Emulated, seed: int, slow: int = -1) -> None:
    """Launch calls each of which takes what the one before it has made: by packets, and by shares, read by others."""
    choose = np.random.default_rng(seed)
    data = [fresh(choose, 150, ranks.dtype) for _ in range(ranks.size)]
    rooms = [[aligned(one), aligned(one)] for one in data]
    for turn in range(4):
        sources, targets = ([room[at] for room in rooms] for at in (turn % 2, 1 - turn % 2))
        where = [[one.ctypes.data for one in some] for some in (sources, targets)]
        for rank in range(ranks.size):
            near = (where[0][rank], where[1][rank])
            given = near if turn % 2 == 0 else (*where[0], *where[1])
            ranks.launch(rank, PLAIN[0] if turn % 2 == 0 else PLAIN[3], 2, THREADS, *given, data[0].nbytes)
        data = [expected(data, ranks.op)] * ranks.size
    ranks.run(seed, slow=slow)
    for rank, room in enumerate(rooms):
        assert np.array_equal(bits(room[0]), bits(data[0])), f"rank {rank}"


@in_turns(5)
@pytest.mark.parametrize("name", some([*PLAIN, "barrier", "all_reduce_norm_packets", "all_reduce_norm_push"], 2))
def test_who_waits_in_vain_says_for_whom_and_later_calls_do_nothing(name: str) -> None:
    ranks = Emulated(3, "bfloat16", "sum", patience=1e-3)
    data = aligned(np.ones(64, ml_dtypes.bfloat16))
    out = aligned(np.zeros(64, ml_dtypes.bfloat16))
    at, to = data.ctypes.data, out.ctypes.data
    epsilon = 0
    given = {
        "all_reduce_shares": (*[at] * 3, *[to] * 3, 128), "barrier": (),
        "all_reduce_norm_packets": (at, at, at, to, to, 1, 128, epsilon),
        "all_reduce_norm_push": (at, at, at, to, to, 1, 128, epsilon),
    }.get(name, (at, to, 128))  # fmt: skip
    for _ in range(2):
        for rank in (0, 1):  # and rank 2 never comes
            ranks.launch(rank, name, 1, THREADS, *given)
    ranks.run(seed=1)
    for rank in (0, 1):
        is_set, missed, why, call = ranks.fault(rank)
        assert (is_set, why, call) == (1, 2, 1)
        assert missed == 2 or name == "all_reduce_two_shots", "who had come is not blamed"
        assert ranks.states[rank][8:12].view(np.uint32)[0] == 1, "poisoned"
    if name != "all_reduce_two_shots":
        assert not out.view(np.uint8).any()


@in_turns(5)
def test_the_number_of_calls_may_wrap() -> None:
    ranks = Emulated(3, "bfloat16", "sum")
    mixed(ranks, 0)
    for begin in (2**32 - 6, 2**30 - 6):
        for state in ranks.states:
            state[:4].view(np.uint32)[0] = begin
        mixed(ranks, begin, calls=10)


def test_a_share_has_its_place_in_a_workspace() -> None:
    for size in range(1, 9):
        layout = Layout(size)
        assert layout.share_row * size >= layout.two_shots
        assert (layout.two_shots > 0) == (size > 2)


# -- arrays of graphs, which other ranks come to know later -----------------------------------------------------------
def reduce_entry(
    ranks: Emulated,
    data: Sequence[np.ndarray[Any, Any]],
    known: bool,
    piece: int,
    *,
    shift: int = 0,
    in_place: bool = False,
    blocks: int = BLOCKS,
) -> list[np.ndarray[Any, Any]]:
    """Launch what a graph holds for an array of which all ranks know, or none does, in pieces of so many bytes."""
    sources = [aligned(one, shift) for one in data]
    targets = sources if in_place else [aligned(np.zeros_like(one), shift) for one in data]
    where = [int(known), *(one.ctypes.data for one in (*sources, *targets))]
    entry = np.array(where if known else [0] * len(where), np.uint64)
    nbytes = data[0].nbytes
    for rank in range(ranks.size):
        mine = (entry.ctypes.data, sources[rank].ctypes.data, targets[rank].ctypes.data)
        for start in range(0, nbytes, piece):
            ranks.launch(rank, "all_reduce_entry", blocks, THREADS, *mine, start, min(piece, nbytes - start), nbytes)
    ranks.kept = [*getattr(ranks, "kept", []), sources, targets, entry]  # type: ignore[attr-defined]
    return targets


def calls(ranks: Emulated) -> set[int]:
    return {int(one[:4].view(np.uint32)[0]) for one in ranks.states}


@pytest.mark.parametrize(("size", "dtype", "op"), some([*SOME, (1, "float32", "sum")], 1))
def test_arrays_of_a_graph_are_reduced_in_pieces_and_at_once_when_they_are_known(
    size: int, dtype: str, op: str
) -> None:
    random = np.random.default_rng(size)
    ranks = Emulated(size, dtype, op)
    piece, before = 1280, 0
    for count in (1, 3, 129, 1021):
        for shift, known in ((0, False), (1, False), (0, True)):
            for in_place in (False, True):
                data = [fresh(random, count, dtype) for _ in range(size)]
                found = reduce_entry(ranks, data, known, piece, shift=shift, in_place=in_place)
                ranks.run(seed=count)
                wanted = bits(expected(data, op))
                for rank, one in enumerate(found):
                    assert np.array_equal(bits(one), wanted), f"{count} elements, rank {rank}, known: {known}"
                before += 1 if known else -(-data[0].nbytes // piece)
    assert calls(ranks) == {before}


@in_turns(5)
@pytest.mark.parametrize("slow", [-1, 0, 1])
def test_known_and_unknown_arrays_in_turn_with_other_calls_between(slow: int) -> None:
    """Grids that differ from call to call, and ranks that are far ahead: each call has the bits of the host."""
    ranks, random = Emulated(2, "float32", "sum"), np.random.default_rng(5)
    for seed in some(range(8), 2):
        came = []
        for turn in range(6):
            data = [fresh(random, 97 + 50 * turn, "float32") for _ in range(2)]
            if turn % 3 == 2:
                found = reduce(ranks, "all_reduce_packets", data, blocks=1 + turn % 2)
            else:
                found = reduce_entry(ranks, data, turn % 3 == 1, 512, blocks=1 + turn % 3)
            came.append((data, found))
        ranks.run(seed=seed, slow=slow)
        for data, found in came:
            for one in found:
                assert np.array_equal(bits(one), bits(expected(data, "sum")))
