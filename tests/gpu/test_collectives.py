"""The kernels of groups, on real GPUs: several ranks of one process, each with a stream of its own.

Ranks take the GPUs in turn: where there are two, each one waits for and writes to memory of the other.

What they compute is compared with arithmetic in numpy bit for bit: the sum is taken in the order of the ranks in 32
bits, and rounded once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.deadlines import SOON
from tests.support.places import short_directory

import vram
from vram import driver as drivers
from vram.collectives import host, kernels
from vram.collectives.device import Workspace
from vram.collectives.kernels import BLOCKS, OPS, WIDEST_ROW, Layout
from vram.collectives.routes import LIBRARY, PACKETS, PUSH, SHARES, TWO_SHOTS, Routes, Step
from vram.errors import PeerGoneError, UsageError, WaitTimeoutError
from vram.memory import Region
from vram.spec import Location

pytestmark = pytest.mark.gpu
pytest.importorskip("cuda.core", reason="could not import 'cuda.core'")
GPU = Location("cuda", 0)
TYPES: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int32": np.int32,
}  # fmt: skip
WIDTH = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "bytes": 1}
KIB, MIB = 1 << 10, 1 << 20


class Ranks:
    """Some ranks on the GPUs that there are, in turn: their workspaces, streams and arrays."""

    def __init__(self, size: int, patience: float = SOON, routes: Routes | None = None) -> None:
        self.size = size
        self.each, self.kept = 0, list[int]()
        self.driver: Any = drivers.get(GPU)
        self.stack = contextlib.ExitStack()
        count = self.driver.device_count()
        self.gpus = [Location("cuda", rank % count) for rank in range(size)]
        addresses = self.arrays(Layout(size).nbytes)
        blocks = BLOCKS if size <= count else 64 // -(-size // count)  # those of all ranks of a GPU are on it at once
        self.streams = [self.driver.stream_create(gpu) for gpu in self.gpus]
        self.spaces = [
            self.stack.enter_context(Workspace(rank, addresses, self.driver, gpu, patience, "group", routes, blocks))
            for rank, gpu in enumerate(self.gpus)
        ]

    def rooms(self, nbytes: int) -> list[int]:
        """Return where there are so many zeros, two for each rank."""
        if nbytes > self.each:
            self.each = nbytes
            self.kept = self.arrays(nbytes, 2 * self.size)
        for address in self.kept:
            self.driver.fill(address, 0, nbytes)
        return self.kept

    def arrays(self, nbytes: int, count: int | None = None) -> list[int]:
        """Return where so many arrays are, by default one for each rank: on its GPU, and open to those of all."""
        made = []
        for number in range(self.size if count is None else count):
            gpu = self.gpus[number % self.size]
            users = dict.fromkeys([gpu, *self.gpus])
            region = self.stack.enter_context(Region.create(gpu, capacity=nbytes, nbytes=nbytes, users=users))
            self.driver.fill(region.address, 0, nbytes)
            made.append(region.address)
        return made

    def prepare(self, dtype: str, op: str) -> None:
        for space in self.spaces:
            space.prepare(dtype, op)

    def all(self, act: Callable[[int, Workspace, int], None]) -> None:
        for rank, (space, stream) in enumerate(zip(self.spaces, self.streams, strict=True)):
            act(rank, space, stream)

    def wait(self) -> None:
        for stream, gpu in zip(self.streams, self.gpus, strict=True):
            self.driver.stream_synchronize(stream, gpu)
        for space in self.spaces:
            space.check()

    def close(self) -> None:
        self.stack.close()
        for stream in self.streams:
            self.driver.stream_destroy(stream)


@contextlib.contextmanager
def context_kept(api: Any) -> Iterator[None]:
    """Have the context that is current before a block be so after it: the next test has it, too."""
    before = api.cuCtxGetCurrent()[1]
    try:
        yield
    finally:
        api.cuCtxSetCurrent(before)


@contextlib.contextmanager
def ranks(size: int, patience: float = SOON, routes: Routes | None = None) -> Iterator[Ranks]:
    made = Ranks(size, patience, routes)
    try:
        yield made
    finally:
        made.close()


# What is compiled for each rank takes its time: all types and operations for two ranks, some of each for more.
FEW = [
    (1, "float16", "sum"),
    (3, "bfloat16", "sum"),
    (3, "int32", "min"),
    (4, "float32", "sum"),
    (8, "bfloat16", "max"),
]
EACH = [*((2, dtype, op) for dtype in TYPES for op in OPS), *FEW]


@pytest.fixture(params=[1, 2, 3, 4, 8], ids="{} ranks".format)
def some(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks(request.param) as made:
        yield made


def put(address: int, data: np.ndarray[Any, Any]) -> None:
    drivers.get(GPU).copy_in(address, memoryview(np.ascontiguousarray(data).view(np.uint8).reshape(-1)))


def got(address: int, count: int, dtype: str) -> np.ndarray[Any, Any]:
    found = np.empty(count * WIDTH[dtype], np.uint8)
    drivers.get(GPU).copy_out(memoryview(found), address)
    return found.view(TYPES.get(dtype, np.uint8))


def expected(sources: list[np.ndarray[Any, Any]], op: str) -> np.ndarray[Any, Any]:
    first = sources[0]
    wide = first.dtype if first.dtype.itemsize == 4 else np.dtype(np.float32)
    total = first.astype(wide)
    combine = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op]
    with np.errstate(all="ignore"):
        for one in sources[1:]:
            total = combine(total, one.astype(wide))
        if op == "sum" and wide.kind == "f":
            total = total + wide.type(0)  # no sum is -0.0
        elif wide.kind == "f":  # -0.0 is less than 0.0 (PTX ISA, min), of which numpy says that they are the same
            wanted = op == "min"
            has_wanted = np.any([(one == 0) & (np.signbit(one.astype(wide)) == wanted) for one in sources], axis=0)
            zero = wide.type(0.0)
            total = np.where(total == 0, np.where(has_wanted == wanted, -zero, zero), total).astype(wide)
        return total.astype(first.dtype)


def bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bits; one pattern for all that is not a number."""
    found = values.view(np.uint32 if values.dtype.itemsize == 4 else np.uint16).copy()
    if values.dtype.kind != "i":
        found[np.isnan(values.astype(np.float32))] = 0x7FFF
    return found


def fresh(random: np.random.Generator, count: int, dtype: str) -> np.ndarray[Any, Any]:
    """Random elements, with odd ones among them."""
    if dtype == "int32":
        found = random.integers(-(2**31), 2**31, count, dtype=np.int32)
        found[:: max(1, count // 7)] = np.iinfo(np.int32).min
        return found
    found = random.standard_normal(count).astype(TYPES[dtype])
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-7, 6e-8, 65504.0], np.float32).astype(TYPES[dtype])
    where = random.integers(0, count, max(1, count // 10))
    found[where] = random.choice(odd, len(where))
    found[random.integers(0, count, max(1, count // 20))] = TYPES[dtype](0)
    return found


def reduce_all(
    some: Ranks, count: int, dtype: str, op: str, *, shift: int = 0, in_place: bool = False, shared: bool = False
) -> None:
    """All-reduce fresh elements, `shift` elements from where the arrays begin, and compare."""
    random = np.random.default_rng(count * 31 + shift)
    nbytes, at = count * WIDTH[dtype], shift * WIDTH[dtype]
    rooms = some.rooms(nbytes + 64)
    sources = [address + at for address in rooms[: some.size]]
    targets = sources if in_place else [address + at for address in rooms[some.size :]]
    data = [fresh(random, count, dtype) for _ in range(some.size)]
    for address, one in zip(sources, data, strict=True):
        put(address, one)
    some.prepare(dtype, op)
    rows = (sources, targets) if shared else (None, None)
    some.all(lambda rank, space, stream: space.all_reduce(
        dtype, op, sources[rank], targets[rank], nbytes, stream, *rows
    ))  # fmt: skip
    some.wait()
    wanted = bits(expected(data, op))
    for rank in range(some.size):
        around = got(targets[rank] - at, nbytes + 64, "bytes")
        found = bits(around[at : at + nbytes].view(TYPES[dtype]))
        assert np.array_equal(found, wanted), f"rank {rank}: {np.flatnonzero(found != wanted)[:10]}"
        # Nothing beyond the end, or before the beginning.
        assert not around[:at].any()
        assert not around[at + nbytes :].any()


@pytest.mark.parametrize(("some", "dtype", "op"), EACH, indirect=["some"])
def test_small_arrays_of_any_size_and_place(some: Ranks, dtype: str, op: str) -> None:
    for count in (1, 2, 3, 5, 8, 1021, 2048, 4099):
        reduce_all(some, count, dtype, op)
        reduce_all(some, count, dtype, op, in_place=True)
    for shift in (1, 2, 3, 5):
        reduce_all(some, 1021, dtype, op, shift=shift)


@pytest.mark.parametrize(("some", "dtype", "op"), EACH, indirect=["some"])
def test_larger_arrays_by_every_route(some: Ranks, dtype: str, op: str) -> None:
    # Few blocks where there are many ranks: all of them have to be on this one GPU at once.
    for nbytes in (40 * KIB, 100 * KIB) if some.size > 2 else (40 * KIB, 100 * KIB, 1 * MIB, 5 * MIB):
        count = nbytes // WIDTH[dtype] - 3
        reduce_all(some, count, dtype, op)
        reduce_all(some, count, dtype, op, in_place=True)
        reduce_all(some, count, dtype, op, in_place=True, shift=1)
        reduce_all(some, count, dtype, op, shared=True)


@pytest.mark.parametrize("part", [1, 8, 1021])
@pytest.mark.parametrize(
    ("some", "dtype", "op"), [(2, "float32", "sum"), (3, "bfloat16", "sum"), (8, "bfloat16", "max")], indirect=["some"]
)
def test_a_reduce_scatter_gives_each_rank_its_part(some: Ranks, dtype: str, op: str, part: int) -> None:
    random = np.random.default_rng(3)
    nbytes = part * WIDTH[dtype]
    data = [fresh(random, part * some.size, dtype) for _ in range(some.size)]
    rows = some.arrays(nbytes * some.size)
    outs = some.arrays(nbytes)
    for address, one in zip(rows, data, strict=True):
        put(address, one)
    some.prepare(dtype, op)
    some.all(lambda rank, space, stream: space.reduce_scatter(dtype, op, rows, outs[rank], nbytes, stream))
    some.wait()
    wanted = bits(expected(data, op))
    for rank in range(some.size):
        assert np.array_equal(bits(got(outs[rank], part, dtype)), wanted[rank * part : (rank + 1) * part])


@pytest.mark.parametrize("nbytes", [1, 15, 4096, 4099, 3 * 16 * KIB + 7])
def test_parts_of_all_ranks_are_gathered_exchanged_and_broadcast(some: Ranks, nbytes: int) -> None:
    random = np.random.default_rng(nbytes)
    data = [random.integers(0, 256, nbytes * some.size, np.uint8) for _ in range(some.size)]
    rows = some.arrays(nbytes * some.size)
    outs = some.arrays(nbytes * some.size)
    for address, one in zip(rows, data, strict=True):
        put(address, one)
    some.all(lambda _rank, space, _stream: space.prepare("int32", "sum"))
    some.all(lambda rank, space, stream: space.fetch(rows, outs[rank], nbytes, stream))
    some.wait()
    for rank in range(some.size):
        gathered = got(outs[rank], nbytes * some.size, "bytes").reshape(some.size, nbytes)
        assert all(np.array_equal(gathered[other], data[other][:nbytes]) for other in range(some.size))
    some.all(lambda rank, space, stream: space.fetch(rows, outs[rank], nbytes, stream, offset=rank * nbytes))
    some.wait()
    for rank in range(some.size):
        exchanged = got(outs[rank], nbytes * some.size, "bytes").reshape(some.size, nbytes)
        mine = slice(rank * nbytes, (rank + 1) * nbytes)
        assert all(np.array_equal(exchanged[other], data[other][mine]) for other in range(some.size))
    root = some.size - 1
    some.all(lambda rank, space, stream: space.fetch(rows, rows[rank], nbytes, stream, root=root))
    some.wait()
    for rank in range(some.size):
        assert np.array_equal(got(rows[rank], nbytes, "bytes"), data[root][:nbytes])


def test_thousands_of_calls_of_changing_sizes_and_routes() -> None:
    random = np.random.default_rng(11)
    with ranks(2) as two:
        room = two.arrays(MIB, 4)
        both = (room[:2], room[2:])
        two.prepare("int32", "sum")
        two.prepare("float32", "sum")

        def reduce(dtype: str, count: int, *, shared: bool) -> None:
            two.all(lambda rank, space, stream: space.all_reduce(
                dtype, "sum", room[rank], room[2 + rank], count * 4, stream, *(both if shared else ())
            ))  # fmt: skip

        for _ in range(150):
            for _ in range(20):
                dtype = str(random.choice(["int32", "float32"]))
                count = int(random.integers(1, MIB // 4 if random.random() < 0.2 else 4 * KIB))
                reduce(dtype, count, shared=random.random() < 0.3)
            two.wait()
            data = [random.integers(-1000, 1000, count).astype(TYPES[dtype]) for _ in range(2)]
            for address, one in zip(room, data, strict=False):
                put(address, one)
            reduce(dtype, count, shared=bool(random.random() < 0.5))
            two.wait()
            wanted = bits(expected(data, "sum"))
            for rank in range(2):
                assert np.array_equal(bits(got(room[2 + rank], count, dtype)), wanted)


def test_a_rank_that_does_not_come_is_named_and_costs_no_context() -> None:
    with ranks(2, patience=0.2) as two:
        two.prepare("float32", "sum")
        room = two.arrays(MIB, 1)[0]
        first, stream = two.spaces[0], two.streams[0]
        first.all_reduce("float32", "sum", room, room, 4096, stream)
        two.driver.stream_synchronize(stream, GPU)
        with pytest.raises(WaitTimeoutError, match=r"rank 1 did not come within 0\.2 s in call 1"):
            first.check()
        with pytest.raises(WaitTimeoutError):
            first.all_reduce("float32", "sum", room, room, 4096, stream)
        assert not got(room, 1024, "float32").any()
    with ranks(2) as again:
        reduce_all(again, 1000, "float32", "sum")


@pytest.mark.parametrize("nbytes", [4096, 64 * KIB, MIB])
def test_kernels_stop_when_the_host_says_so(nbytes: int) -> None:
    with ranks(2) as two:
        two.prepare("float32", "sum")
        room = two.arrays(MIB, 1)[0]
        first, stream = two.spaces[0], two.streams[0]
        first.all_reduce("float32", "sum", room, room, nbytes, stream, *(([room] * 2,) * 2 if nbytes == MIB else ()))
        first.stop()
        two.driver.stream_synchronize(stream, GPU)
        with pytest.raises(PeerGoneError, match="rank 1 was waited for") as caught:
            first.check()
        assert caught.value.ranks == (1,)


def test_a_barrier_holds_a_stream_back() -> None:
    with ranks(2) as two:
        room = two.arrays(4096, 1)[0]
        two.spaces[0].prepare("int32", "sum")
        two.spaces[1].prepare("int32", "sum")
        two.spaces[0].barrier(two.streams[0])
        two.driver.fill_async(room, 1, 4096, two.streams[0])
        event = two.driver.event_create(GPU)
        two.driver.event_record(event, two.streams[0])
        assert not two.driver.event_is_done(event)
        two.spaces[1].barrier(two.streams[1])
        two.wait()
        assert two.driver.event_is_done(event)
        two.driver.event_destroy(event)
        assert got(room, 4, "int32")[0] == 0x01010101


def test_graphs_are_launched_again_with_new_data() -> None:
    api = pytest.importorskip("cuda.bindings.driver")

    def call(name: str, *arguments: Any) -> Any:
        status, *out = getattr(api, name)(*arguments)
        assert int(status) == 0, (name, status)
        return out[0] if out else None

    random = np.random.default_rng(5)
    with ranks(2) as two, context_kept(api):
        rooms = two.arrays(MIB, 8)
        two.prepare("bfloat16", "sum")
        two.prepare("int32", "max")
        reduce_all(two, 10, "bfloat16", "sum")
        graphs = []
        mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        plans = [("bfloat16", "sum", 4096), ("bfloat16", "sum", 300_000), ("int32", "max", 20_000)]
        for rank, stream in enumerate(two.streams):
            call("cuCtxSetCurrent", two.driver.devices.device(two.gpus[rank]).context)
            call("cuStreamBeginCapture", stream, mode)
            for turn in range(21):
                dtype, op, nbytes = plans[turn % 3]
                row = rooms[2 * (turn % 3) : 2 * (turn % 3) + 2]
                two.spaces[rank].all_reduce(dtype, op, row[rank], rooms[6 + rank] + turn % 3 * 300_032, nbytes, stream)
            graph = call("cuStreamEndCapture", stream)
            graphs.append(call("cuGraphInstantiate", graph, 0))
            call("cuGraphDestroy", graph)
        for _ in range(20):
            data = []
            for number, (dtype, _, nbytes) in enumerate(plans):
                data.append([fresh(random, nbytes // WIDTH[dtype], dtype) for _ in range(2)])
                for rank in range(2):
                    put(rooms[2 * number + rank], data[-1][rank])
            for graph, stream in zip(graphs, two.streams, strict=True):
                call("cuGraphLaunch", graph, stream)
            two.wait()
            for number, (dtype, op, _) in enumerate(plans):
                wanted = bits(expected(data[number], op))
                for rank in range(2):
                    assert np.array_equal(bits(got(rooms[6 + rank] + number * 300_032, len(wanted), dtype)), wanted)
        for graph in graphs:
            call("cuGraphExecDestroy", graph)


def test_what_there_are_no_kernels_for_is_refused() -> None:
    with ranks(1) as one, pytest.raises(UsageError, match="no sum of float64 on GPUs"):
        one.spaces[0].prepare("float64", "sum")


# -- routes by a table ------------------------------------------------------------------------------------------------
def only(route: str, size: int, dtype: str, op: str = "sum", blocks: int = 16) -> Routes:
    """A table that knows one route, in grids that fit on one GPU beside those of the other ranks."""
    return Routes(MappingProxyType({(size, dtype, op): (Step(None, route, blocks),)}), "a test")


@pytest.mark.parametrize(
    ("size", "dtype", "route"),
    [
        (4, "bfloat16", TWO_SHOTS),
        (4, "bfloat16", PUSH),
        (4, "bfloat16", SHARES),
        (3, "float32", TWO_SHOTS),
        (2, "bfloat16", PUSH),
    ],
)
def test_every_route_of_a_table_has_the_same_bits(size: int, dtype: str, route: str) -> None:
    with ranks(size, 10, only(route, size, dtype)) as some:
        for nbytes in (4 * KIB, 100 * KIB, 500 * KIB):
            for count in (nbytes // WIDTH[dtype], nbytes // WIDTH[dtype] - 3):
                reduce_all(some, count, dtype, "sum", shared=route == SHARES)
                reduce_all(some, count, dtype, "sum", shared=route == SHARES, in_place=True)
            if route != SHARES:
                reduce_all(some, nbytes // WIDTH[dtype], dtype, "sum", shift=1)
        assert set(some.spaces[0].counts) == {f"all_reduce_{route}"}
        if route == TWO_SHOTS:
            reduce_all(some, 3 * MIB // WIDTH[dtype], dtype, "sum")


# -- an all-reduce with a residual and a norm -------------------------------------------------------------------------
def norm_all(some: Ranks, rows: int, width: int, dtype: str, *, in_place: bool = False) -> None:
    """Sum up, add a residual and normalize fresh rows; compare with numpy, and with torch where it is."""
    random = np.random.default_rng(rows * 31 + width)
    kind, nbytes = TYPES[dtype], rows * width * WIDTH[dtype]
    data = [random.standard_normal(rows * width).astype(kind) for _ in range(some.size)]
    residual, weight = random.standard_normal(rows * width).astype(kind), random.standard_normal(width).astype(kind)
    given = some.arrays(nbytes)
    befores, weights = some.arrays(nbytes), some.arrays(weight.nbytes)
    outs = given if in_place else some.arrays(nbytes)
    totals = befores if in_place else some.arrays(nbytes)
    for rank, one in enumerate(data):
        put(given[rank], one)
        put(befores[rank], residual)
        put(weights[rank], weight)
    some.prepare(dtype, "sum")
    some.all(lambda rank, space, stream: space.all_reduce_norm(
        dtype, given[rank], befores[rank], weights[rank], outs[rank], totals[rank], rows, weight.nbytes, 1e-5, stream
    ))  # fmt: skip
    some.wait()
    wanted, total = host.normalize(expected(data, "sum"), residual, weight, 1e-5)
    first = got(outs[0], rows * width, dtype)
    for rank in range(some.size):
        assert np.array_equal(bits(got(totals[rank], rows * width, dtype)), bits(total)), "the sum with the residual"
        assert np.array_equal(bits(got(outs[rank], rows * width, dtype)), bits(first)), "all ranks alike"
    # The order of the squares differs: some units of the last place in 32 bits, at most one after rounding to 16.
    most = 2e-6 if dtype == "float32" else float(ml_dtypes.finfo(kind).eps)
    np.testing.assert_allclose(first.astype(np.float32), wanted.astype(np.float32), rtol=most, atol=1e-7)
    with contextlib.suppress(ImportError):
        import torch

        as_torch = torch.from_numpy(total.astype(np.float32)).to(getattr(torch, dtype)).cuda().reshape(rows, width)
        scale = torch.from_numpy(weight.astype(np.float32)).to(as_torch.dtype).cuda()
        theirs = torch.nn.functional.rms_norm(as_torch, (width,), scale, 1e-5).float().cpu().numpy().reshape(-1)
        np.testing.assert_allclose(first.astype(np.float32), theirs, rtol=2 * most, atol=1e-7)


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, "bfloat16"), (2, "bfloat16"), (2, "float16"), (3, "float32"), (4, "bfloat16")]
)
def test_rows_are_summed_and_normalized(size: int, dtype: str) -> None:
    each = 16 // WIDTH[dtype]
    steps = (Step(32 * KIB, PACKETS, 16), Step(None, PUSH, 16))  # all ranks at once on one GPU
    with ranks(size, 10, Routes(MappingProxyType({(size, dtype, "sum"): steps}))) as some:
        # A row alone, rows of packets, rows that are pushed, more than at once; widths that threads do not divide.
        for rows, width in ((1, 8192 // (WIDTH[dtype] // 2)), (2, each), (3, 513 * each), (9, 4096), (70, 1000)):
            norm_all(some, rows, width, dtype)
            norm_all(some, rows, width, dtype, in_place=True)
        norm_all(some, 2, WIDEST_ROW // WIDTH[dtype], dtype)
        assert {"all_reduce_norm_packets", "all_reduce_norm_push"} == set(some.spaces[0].counts)


def test_a_group_normalizes_tensors_and_refuses_what_overlaps() -> None:
    torch = pytest.importorskip("torch", reason="could not import 'torch'")
    with short_directory() as place, vram.Group(rank=0, size=1, at=os.path.join(place, "group")) as group:
        x, residual = (torch.randn(5, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        weight = torch.randn(512, dtype=torch.bfloat16, device="cuda")
        total = x + residual
        wanted = torch.nn.functional.rms_norm(total, (512,), weight, 1e-6)
        stream = torch.cuda.current_stream()
        out, into = torch.empty_like(x), torch.empty_like(x)
        group.all_reduce_norm(x, residual, weight, out=out, total=into, stream=stream)
        torch.testing.assert_close(out, wanted, rtol=2**-6, atol=0)
        assert torch.equal(into, total)
        with pytest.raises(UsageError, match="a result overlaps another array"):
            group.all_reduce_norm(x, residual, weight, out=residual, stream=stream)
        with pytest.raises(UsageError, match="a result overlaps another array"):
            group.all_reduce_norm(x, residual, weight, total=x, stream=stream)
        with pytest.raises(UsageError, match="the residual is"):
            group.all_reduce_norm(x, residual[:4], weight, stream=stream)
        group.all_reduce_norm(x, residual, weight, stream=stream)
        torch.cuda.synchronize()
        assert torch.equal(x, out)
        assert torch.equal(residual, total)
        assert group.statistics() == {"all_reduce_norm_packets": 2}


# -- arrays of graphs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("size", "dtype", "op"), [(2, "bfloat16", "sum"), (3, "float32", "sum"), (2, "int32", "max")])
def test_entries_of_arrays_are_looked_up_when_a_kernel_runs(size: int, dtype: str, op: str) -> None:
    """Through the workspace, where they are, and through it again; in place, out of place, and beginning anywhere."""
    with ranks(size, 10) as some:
        some.prepare(dtype, op)
        entry = 0
        assert {space.new_entry() for space in some.spaces} == {entry}
        for count in (3, 5000, 4_500_001):  # of the last there are several pieces
            nbytes = count * WIDTH[dtype]
            for shift, known in ((0, False), (1, False), (0, True), (0, False)):
                for in_place in (True, False) if count < 10_000 else (False,):
                    random = np.random.default_rng(count + shift)
                    at = shift * WIDTH[dtype]
                    rooms = [address + at for address in some.rooms(nbytes + 64)]
                    sources, outs = rooms[:size], rooms[:size] if in_place else rooms[size:]
                    data = [fresh(random, count, dtype) for _ in range(size)]
                    for address, one in zip(sources, data, strict=True):
                        put(address, one)
                    for space in some.spaces:
                        space.write_entry(entry, (*sources, *outs) if known else None)
                    for rank, (space, stream) in enumerate(zip(some.spaces, some.streams, strict=True)):
                        space.all_reduce_entry(dtype, op, entry, sources[rank], outs[rank], nbytes, stream)
                    some.wait()
                    wanted = bits(expected(data, op))
                    for rank in range(size):
                        found = bits(got(outs[rank], count, dtype))
                        assert np.array_equal(found, wanted), f"{count}, rank {rank}, known {known}, shift {shift}"


# -- copy engines -----------------------------------------------------------------------------------------------------
def test_large_gathers_and_broadcasts_are_copies_in_graphs_as_well() -> None:
    api = pytest.importorskip("cuda.bindings.driver")
    nbytes = 5 * MIB + 4
    random = np.random.default_rng(6)
    with ranks(2, 10) as two, context_kept(api):
        rows = two.arrays(nbytes, 2)
        outs = two.arrays(2 * nbytes, 2)
        two.prepare("int32", "sum")
        data = [random.integers(0, 256, nbytes, np.uint8) for _ in range(2)]
        for address, one in zip(rows, data, strict=True):
            put(address, one)
        two.all(lambda rank, space, stream: space.fetch(rows, outs[rank], nbytes, stream))
        two.wait()
        for rank in range(2):
            assert np.array_equal(got(outs[rank], 2 * nbytes, "bytes"), np.concatenate(data))
        two.all(lambda rank, space, stream: space.fetch(rows, rows[rank], nbytes, stream, root=1))
        two.wait()
        assert np.array_equal(got(rows[0], nbytes, "bytes"), data[1])
        graphs = []
        for rank, (space, stream) in enumerate(zip(two.spaces, two.streams, strict=True)):
            api.cuCtxSetCurrent(two.driver.devices.device(two.gpus[rank]).context)
            assert not int(
                api.cuStreamBeginCapture(stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)[0]
            )
            for _ in range(3):
                space.fetch(rows, outs[rank], nbytes, stream)
            status, graph = api.cuStreamEndCapture(stream)
            assert not int(status)
            status, made = api.cuGraphInstantiate(graph, 0)
            assert not int(status)
            graphs.append(made)
            api.cuGraphDestroy(graph)
        for _ in range(5):
            data = [random.integers(0, 256, nbytes, np.uint8) for _ in range(2)]
            for address, one in zip(rows, data, strict=True):
                put(address, one)
            for made, stream in zip(graphs, two.streams, strict=True):
                assert not int(api.cuGraphLaunch(made, stream)[0])
            two.wait()
            for rank in range(2):
                assert np.array_equal(got(outs[rank], 2 * nbytes, "bytes"), np.concatenate(data))
        for made in graphs:
            api.cuGraphExecDestroy(made)
        assert two.spaces[0].counts["copies"] == 5
        assert "fetch" not in two.spaces[0].counts


# -- libraries --------------------------------------------------------------------------------------------------------
def test_what_the_table_gives_to_a_library_goes_there_and_is_counted() -> None:
    came: list[tuple[int, int, str, int]] = []

    class Other:
        name = "another"

        def all_reduce(self, source: Any, target: Any, op: str, stream: int) -> None:
            came.append((source.address, target.address, op, stream))

    routes = Routes(MappingProxyType({(1, "float32", "sum"): (Step(4096, PACKETS), Step(None, LIBRARY))}))
    with (
        short_directory() as place,
        vram.Group(rank=0, size=1, at=os.path.join(place, "group"), routes=routes) as group,
    ):
        with vram.zeros(2048, "float32", device="cuda:0") as array, vram.zeros(64, "float32", device="cuda:0") as small:
            group.all_reduce(array)
            group.hand_over(Other())
            group.all_reduce(array)
            group.all_reduce(small)
            group.all_reduce(array, "max")
            assert came == [(array.address, array.address, "sum", 1)]
            assert group.statistics() == {"all_reduce_packets": 3, LIBRARY: 1}
            assert "handed over to another" in group.explain(8192, "float32")


# -- a rank that is held up -------------------------------------------------------------------------------------------
SWEEP = "    sweep(run, peers[RANK], count, 0);\n"


def test_a_rank_that_is_held_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    program = kernels._program()
    assert SWEEP in program
    program = program.replace(SWEEP, f"    if (RANK == 1) __nanosleep(300000);\n{SWEEP}")
    monkeypatch.setattr(kernels, "_program", lambda: program)
    with ranks(2, patience=0.5) as two:
        two.prepare("int32", "sum")
        room = two.arrays(64 * KIB, 16)
        for number, address in enumerate(room):
            put(address, np.full(4096, number + 1, np.int32))
        outs = two.arrays(64 * KIB, 16)
        for rank, (space, stream) in enumerate(zip(two.spaces, two.streams, strict=True)):
            for call in range(8):
                at = 2 * call + rank
                space.all_reduce("int32", "sum", room[at], outs[at], 16 * KIB, stream)
        two.wait()
        for call in range(8):
            for rank in range(2):
                assert (got(outs[2 * call + rank], 4096, "int32") == 4 * call + 3).all()
