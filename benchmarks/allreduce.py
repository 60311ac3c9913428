"""All-reduces over the memory of several processes.

On the host, sums of a group's, in place and through its staging buffer, against torch's gloo. Every round has all
processes call at once, some times one after the other; what counts is the slowest of them.

On GPUs, calls in CUDA graphs, against NCCL's and torch's symmetric memory, with a process for each GPU. Every figure is
microseconds a call, of 20 calls in a graph that take several buffers in turn, of the slower rank. The graph is launched
twice, and the second time counts: it is on its way while the first one runs. With one GPU all ranks are streams of one
process on it, and there are no rivals: they want a GPU for each rank. Then no byte goes from GPU to GPU, and figures
say what the kernels cost, and nothing of NVLink. Multicast is off.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import vram
from vram import driver as drivers
from vram.arrays.numpy_on_use import np
from vram.bench.children import DEADLINE, Child, child, workplace
from vram.bench.gpu import Bare, bare_calls, ordinal_of
from vram.bench.machine import describe
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.collectives.device import Workspace
from vram.collectives.kernels import BLOCKS, Layout
from vram.collectives.routes import LIBRARY, PACKETS, PUSH, SHARES, TWO_SHOTS, Routes, Step, written
from vram.errors import InternalError, VramError
from vram.spec import Location, format_size

from .bare_exchange import BareExchange
from .graphs import Graph, Timer, graph_of
from .groups import NCCL, ONE_SHOT, Rivals, check_no_multicast, group_sizes, no_multicast, slowest

_HOST_RANKS = 4
_HOST_SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20}  # of float32
_HOST_CALLS = {"4 KiB": 200, "1 MiB": 40}
# On GPUs:
_BARE = "bare driver calls"
_CALLS = 20
_DTYPE, _ITEM = "bfloat16", 2
_SIZES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_RANKS = (2, 4)  # on one GPU
_CACHE = 128 << 20  # bytes: buffers of a graph are more than fits in the GPU's cache, where that takes no more than
_MOST_BUFFERS = 4  # of them
_PATIENCE = 20.0  # seconds
_WIDTH = 8192  # elements of a row, for what is fused
_LADDER = tuple(1 << power for power in range(10, 27))  # sizes of which a table is made
_GRIDS = (1, 4, 8, 16, 32, 64, 128)
_BATCHES = (1, 2, 16)  # rows, of what is fused
_FUSED, _APART = "vram, fused", "the all-reduce of vram, torch's add and rms_norm"
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


def on_host(quick: bool) -> Result:
    """Measure microseconds a call."""
    rounds, divisor = (2, 10) if quick else (15, 1)
    rivals = ["torch"] if importlib.util.find_spec("torch") is not None else []
    rows: list[Row] = []
    with contextlib.ExitStack() as stage:
        place = stage.enter_context(workplace())
        stage.enter_context(no_multicast())
        ranks = [stage.enter_context(child(_host_rank, str(place), rank, rivals)) for rank in range(_HOST_RANKS)]
        for one in ranks:
            one.hear()
        for name, nbytes in _HOST_SIZES.items():
            calls = _HOST_CALLS[name] // divisor
            cases: dict[str, Callable[[], float]] = {
                how: partial(_per_call, ranks, how, nbytes, calls) for how in ("buffer", "array", *rivals)
            }
            times = in_turns(cases, rounds, warm=1)
            took = {how: Figure.of([1e6 * one for one in times[how]], "us") for how in cases}
            gloo = Row(f"{name}: torch.distributed, gloo", took["torch"]) if rivals else None
            for how, what in (("buffer", "a symmetric buffer, in place"), ("array", "a numpy array")):
                case = f"{name}: {what}"
                most = 1 / 15 if nbytes == 1 << 20 and how == "buffer" else None
                rows.append(Row(case, took[how]) if gloo is None else Row.held(case, took[how], gloo, at_most=most))
            rows += [gloo] if gloo is not None else []
    notes = [f"{len(os.sched_getaffinity(0))} processors for {_HOST_RANKS} processes; the slowest of them"]
    return Result("allreduce", f"Sums of float32 over {_HOST_RANKS} processes, memory of the host", rows, notes)


def _per_call(ranks: list[Child], how: str, nbytes: int, calls: int) -> float:
    return slowest(ranks, how, nbytes, calls) / calls


def _host_rank(pipe: Connection, place: str, rank: int, rivals: list[str]) -> None:
    check_no_multicast()
    with contextlib.ExitStack() as stage:
        group = stage.enter_context(
            vram.Group("bench", rank=rank, size=_HOST_RANKS, at=str(Path(place) / "group"), timeout=DEADLINE)
        )
        calls: dict[str, Callable[[int], Callable[[], object]]] = {
            "buffer": partial(_buffer, group, stage), "array": partial(_array, group),
        }  # fmt: skip
        if rivals:
            calls["torch"] = _gloo(place, rank, stage)
        made: dict[tuple[str, int], Callable[[], object]] = {}
        pipe.send("ready")
        while True:
            how, nbytes, count = pipe.recv()
            call = made.get((how, nbytes))
            if call is None:
                call = made[how, nbytes] = calls[how](nbytes)
            call()
            group.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            pipe.send(time.perf_counter() - begin)


def _buffer(group: vram.Group, stage: contextlib.ExitStack, nbytes: int) -> Callable[[], object]:
    buffer = stage.enter_context(group.symmetric(nbytes // 4, "float32", device="host"))
    return partial(group.all_reduce, buffer)


def _array(group: vram.Group, nbytes: int) -> Callable[[], object]:
    return partial(group.all_reduce, np.zeros(nbytes // 4, np.float32))


def _gloo(place: str, rank: int, stage: contextlib.ExitStack) -> Callable[[int], Callable[[], object]]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store: Any = dist.FileStore(str(Path(place) / "store"), _HOST_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_HOST_RANKS, timeout=timedelta(seconds=DEADLINE))
    stage.callback(dist.destroy_process_group)

    def of(nbytes: int) -> Callable[[], object]:
        return partial(dist.all_reduce, torch.zeros(nbytes // 4))

    return of


def on_gpu(quick: bool, location: Location, tune: str | None = None, gpus: int | None = None) -> Result:
    """Measure microseconds a call; `tune` has a table of routes measured, written to that file and gone by."""
    with no_multicast():
        devices = drivers.get(location).device_count()
        sizes_of_groups = group_sizes(devices, gpus)  # a wrong number is said first, whatever is installed
        if importlib.util.find_spec("cuda.core") is None:
            lacking = (
                "it did not run: cuda.core, which compiles kernels, is not installed (pip install '.[collectives]' in "
                "a clone of vram)"
            )
            return Result("allreduce", "All-reduces of bfloat16 over GPUs", [], [lacking])
        if devices < 2:
            return _on_one(quick, location, tune)
        return _on_many(quick, sizes_of_groups, location, tune)


# -- on GPUs: a process for each --------------------------------------------------------------------------------------
def _on_many(quick: bool, sizes_of_groups: Sequence[int], location: Location, tune: str | None) -> Result:
    rounds, sizes = (2, _SIZES[:3]) if quick else (15, _SIZES)
    rows: list[Row] = []
    notes = ["one process for each GPU; multicast off in all columns; the slower rank, medians of rounds in turns"]
    entries: dict[tuple[int, str, str], tuple[Step, ...]] = {}
    for size in sizes_of_groups:
        with contextlib.ExitStack() as stage:
            place = stage.enter_context(workplace())
            ranks = [stage.enter_context(child(_rank, str(place), rank, size)) for rank in range(size)]
            lacking = [why for one in ranks for why in one.hear()]
            notes += [f"{size} GPUs: {why}" for why in dict.fromkeys(lacking)]
            if tune is not None:
                ask = partial(slowest, ranks)
                library = partial(slowest, ranks, "time", NCCL) if NCCL in ranks[0].ask("names", 1 << 10) else None
                entries |= _tuned(size, ask, _LADDER[:4] if quick else _LADDER, _GRIDS, rounds, library)
                slowest(ranks, "table", entries)
            for nbytes in sizes:
                names = ranks[0].ask("names", nbytes)
                for one in ranks[1:]:
                    one.ask("names", nbytes)
                cases: dict[str, Callable[[], float]] = {
                    name: partial(slowest, ranks, "time", name, nbytes) for name in names
                }
                rows += _compared(f"{size} GPUs, {format_size(nbytes)}", in_turns(cases, rounds, warm=1))
            for batch in _BATCHES[:1] if quick else _BATCHES:
                norms = (_FUSED, _APART) if NCCL in ranks[0].ask("names", 1 << 10) else (_FUSED,)
                cases = {name: partial(slowest, ranks, "norm", name, batch) for name in norms}
                what = f"{size} GPUs, {batch} x {_WIDTH}: all-reduce, residual, RMSNorm"
                rows += _compared(what, in_turns(cases, rounds, warm=1))
            cases = {name: partial(slowest, ranks, "set up", name, 64 << 20) for name in ("vram", _BARE, "torch")}
            if ONE_SHOT not in ranks[0].ask("names", 1 << 10):
                del cases["torch"]
            took = in_turns(cases, 2 if quick else 7, warm=1)
            rows += _compared(f"{size} GPUs: symmetric buffer of 64 MiB set up", took, scale=1e-3, unit="ms")
    if tune is not None:
        notes.append(_write(tune, entries, location))
    return Result("allreduce", "All-reduces of bfloat16 over GPUs, in CUDA graphs, multicast off", rows, notes)


def _compared(case: str, took: dict[str, list[float]], *, scale: float = 1.0, unit: str = "us") -> list[Row]:
    """Hold each of ours against the fastest of the others."""
    figures = {name: Figure.of(times, unit, scale=scale) for name, times in took.items()}
    others = [Row(f"{case}: {name}", one) for name, one in figures.items() if not name.startswith("vram")]
    best = min(others, key=lambda row: row.figure.median, default=None)
    rows = []
    for name, one in figures.items():
        if name.startswith("vram"):
            what = f"{case}: {name}"
            rows.append(Row(what, one) if best is None else Row.held(what, one, best))
    return rows + others


def _rank(pipe: Connection, place: str, rank: int, size: int) -> None:
    check_no_multicast()
    with contextlib.ExitStack() as stage:
        ours = _Ours(stage, place, rank, size)
        rivals = Rivals(stage, place, rank, size)
        pipe.send(rivals.lacking)
        while True:
            said = pipe.recv()
            if said[0] == "names":
                pipe.send([*ours.names, *rivals.names(said[1])])
            elif said[0] == "table":
                ours.space.routes = Routes(MappingProxyType(said[1]), "measured")
                pipe.send(0.0)
            elif said[0] == "route":
                pipe.send(ours.time_of(*said[1:]))
            elif said[0] == "norm":
                pipe.send(ours.time_norm(*said[1:]))
            elif said[0] == "set up":
                ours.group.barrier()
                ways = {"vram": ours.set_up, _BARE: ours.exchange.set_up, "torch": rivals.set_up}
                pipe.send(ways[said[1]](said[2]) * 1e6)
            elif said[1] in ours.names:
                pipe.send(ours.time(*said[1:]))
            else:
                pipe.send(rivals.time(said[1], said[2], _CALLS, _buffers(said[2])))


def _buffers(nbytes: int) -> int:
    return max(2, min(_MOST_BUFFERS, -(-_CACHE // nbytes)))


class _Ours:
    """One rank of a group on its GPU."""

    names = ("vram, in place", "vram, out of place", "vram, any array")

    def __init__(self, stage: contextlib.ExitStack, place: str, rank: int, size: int) -> None:
        location = Location("cuda", rank)
        self.bare = stage.enter_context(bare_calls(location))
        self.group = stage.enter_context(
            vram.Group("bench", rank=rank, size=size, at=str(Path(place) / "group"), timeout=DEADLINE)
        )
        self.device = f"cuda:{rank}"
        self.exchange = BareExchange(stage, self.bare, place, rank, size)
        shared = stage.enter_context(self.group.symmetric(Layout(size).nbytes, "uint8", device=self.device))
        region = shared.array.region
        self.space = stage.enter_context(
            Workspace(rank, shared.addresses, region.driver, region.location, _PATIENCE, "bench")
        )
        self.space.prepare(_DTYPE, "sum")
        self.stream = int(self.bare.ok(self.bare.api.cuStreamCreate(1)))
        stage.callback(self.bare.api.cuStreamDestroy, self.stream)
        self._timer = Timer(self.bare)
        stage.callback(self._timer.close)
        self._kept: tuple[tuple[Any, ...], contextlib.ExitStack, Graph | _TorchGraph] | None = None
        stage.callback(self._forget)
        self.group.barrier()

    def set_up(self, nbytes: int) -> float:
        """Return the seconds that it takes to make a buffer of so many bytes that all ranks know."""
        begin = time.perf_counter()
        made = self.group.symmetric(nbytes, "uint8", device=self.device)
        took = time.perf_counter() - begin
        made.close()
        return took

    def time(self, name: str, nbytes: int) -> float:
        return self._timed((name, nbytes), partial(self._graph, name, nbytes))

    def time_norm(self, name: str, batch: int) -> float:
        """The time of an all-reduce of rows, with a residual and a norm."""
        return self._timed((name, batch), partial(self._fused if name == _FUSED else self._apart, batch))

    def time_of(self, route: str, blocks: int, nbytes: int) -> float:
        """The time of a route, whatever the table says."""
        before = self.space.routes
        step = Step(None, route, blocks)
        self.space.routes = Routes(MappingProxyType({(self.group.size, _DTYPE, "sum"): (step,)}), "one route")
        try:
            name = self.names[0] if route == SHARES else self.names[2]
            return self._timed((route, blocks, nbytes), partial(self._graph, name, nbytes))
        finally:
            self.space.routes = before

    def _timed(self, key: tuple[Any, ...], make: Callable[[], AbstractContextManager[Graph | _TorchGraph]]) -> float:
        if self._kept is None or self._kept[0] != key:
            self._forget()
            stage = contextlib.ExitStack()
            self._kept = (key, stage, stage.enter_context(make()))
        graph = self._kept[2]
        graph.launch(self.stream)
        self._timer.begin(self.stream)
        graph.launch(self.stream)
        self._timer.end(self.stream)
        took = self._timer.microseconds() / _CALLS
        self.space.check()
        return took

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    @contextlib.contextmanager
    def _graph(self, name: str, nbytes: int) -> Iterator[Graph]:
        with contextlib.ExitStack() as stage:
            count = _buffers(nbytes) * (1 if "in place" in name else 2)
            if "any array" in name:
                arrays = [stage.enter_context(vram.zeros(nbytes, "uint8", device=self.device)) for _ in range(count)]
                places, rows = [one.address for one in arrays], None
            else:
                some = [
                    stage.enter_context(self.group.symmetric(nbytes, "uint8", device=self.device)) for _ in range(count)
                ]
                places, rows = [one.array.address for one in some], [one.addresses for one in some]
            half = 0 if "in place" in name else count // 2

            def work() -> None:
                for call in range(_CALLS):
                    at = call % (count - half)
                    more = () if rows is None else (rows[at], rows[at + half])
                    self.space.all_reduce(_DTYPE, "sum", places[at], places[at + half], nbytes, self.stream, *more)

            yield stage.enter_context(graph_of(self.bare, self.stream, work))
            self.group.barrier()

    @contextlib.contextmanager
    def _fused(self, batch: int) -> Iterator[Graph]:
        with contextlib.ExitStack() as stage:
            rows, residual, weight = (
                stage.enter_context(vram.zeros(count * _WIDTH * _ITEM, "uint8", device=self.device)).address
                for count in (batch, batch, 1)
            )

            def work() -> None:
                for _ in range(_CALLS):
                    self.space.all_reduce_norm(
                        _DTYPE, rows, residual, weight, rows, residual, batch, _WIDTH * _ITEM, 1e-6, self.stream
                    )

            yield stage.enter_context(graph_of(self.bare, self.stream, work))
            self.group.barrier()

    @contextlib.contextmanager
    def _apart(self, batch: int) -> Iterator[_TorchGraph]:
        import torch

        stream = torch.cuda.ExternalStream(self.stream)
        made = partial(torch.zeros, dtype=torch.bfloat16, device=self.device)
        given, out, residual, weight = (made((count, _WIDTH)) for count in (batch, batch, batch, 1))
        graph = torch.cuda.CUDAGraph()

        def behind() -> None:
            torch.nn.functional.rms_norm(residual.add_(out), (_WIDTH,), weight[0], 1e-6)

        with torch.cuda.stream(stream):
            behind()  # loads what it takes
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(_CALLS):
                self.space.all_reduce(_DTYPE, "sum", given.data_ptr(), out.data_ptr(), given.nbytes, self.stream)
                behind()
        yield _TorchGraph(torch, graph)
        torch.cuda.synchronize()
        self.group.barrier()


class _TorchGraph:
    """A graph of torch's, which is launched as ours are."""

    def __init__(self, torch: Any, graph: Any) -> None:
        self._torch, self._graph = torch, graph

    def launch(self, stream: int) -> None:
        """Put all of it on a stream."""
        with self._torch.cuda.stream(self._torch.cuda.ExternalStream(stream)):
            self._graph.replay()


# -- a table ----------------------------------------------------------------------------------------------------------
def _tuned(
    size: int,
    ask: Callable[..., float],
    ladder: Sequence[int],
    grids: Sequence[int],
    rounds: int,
    library: Callable[[int], float] | None = None,
) -> dict[tuple[int, str, str], tuple[Step, ...]]:
    """Return what was fastest for each size: neighbours that agree are one step."""
    layout = Layout(size)
    most = {PACKETS: layout.packets, PUSH: layout.pushed, TWO_SHOTS: layout.two_shots, SHARES: ladder[-1]}
    steps: list[Step] = []
    for nbytes in ladder:
        open_ = [(route, blocks) for route in most for blocks in grids if nbytes <= most[route]]
        cases: dict[str, Callable[[], float]] = {f"{one}": partial(ask, "route", *one, nbytes) for one in open_}
        if library is not None:
            open_.append((LIBRARY, BLOCKS))
            cases[f"{open_[-1]}"] = partial(library, nbytes)
        times = in_turns(cases, min(rounds, 3), warm=1)
        route, blocks = min(open_, key=lambda one: Figure.of(times[f"{one}"], "us").median)
        if steps and (steps[-1].route, steps[-1].blocks) == (route, blocks):
            steps.pop()
        steps.append(Step(nbytes, route, blocks))
    steps[-1] = replace(steps[-1], up_to=None)
    return {(size, dtype, "sum"): tuple(steps) for dtype in (_DTYPE, "float16")}


def _write(tune: str, entries: dict[tuple[int, str, str], tuple[Step, ...]], location: Location) -> str:
    routes = Routes(MappingProxyType(entries), tune)
    Path(tune).write_text(written(routes, describe(location)), encoding="utf-8")
    return f"a table of routes is in {tune} (digest {routes.digest}): VRAM_ROUTES={tune}, or Group(routes=...)"


# -- all ranks on one GPU, by streams of one process ------------------------------------------------------------------
def _on_one(quick: bool, location: Location, tune: str | None) -> Result:
    rounds, sizes = (3, _SIZES[:4]) if quick else (15, _SIZES[:6])
    rows: list[Row] = []
    notes = [
        "ONE GPU: all ranks are streams of one process on it. No byte goes from GPU to GPU: figures are of the kernels "
        "and of this GPU's memory, not of NVLink, and no rival runs like this",
        "multicast off",
    ]
    entries: dict[tuple[int, str, str], tuple[Step, ...]] = {}
    with contextlib.ExitStack() as outer:
        bare = outer.enter_context(bare_calls(location))
        device = bare.ok(bare.api.cuDeviceGet(ordinal_of(location)))
        attribute = bare.api.CUdevice_attribute(_MULTIPROCESSORS)
        processors = int(bare.ok(bare.api.cuDeviceGetAttribute(attribute, device)))
        for size in _RANKS:
            with contextlib.ExitStack() as stage:
                # All blocks of all ranks have to be on the GPU at once.
                some = _Streams(stage, bare, location, size, min(BLOCKS, processors // size))
                if tune is not None:
                    grids = [one for one in _GRIDS if one <= some.blocks]
                    entries |= _tuned(size, some.time_of, _LADDER[:3] if quick else _LADDER[:11], grids, rounds)
                for nbytes in sizes:
                    cases: dict[str, Callable[[], float]] = {
                        f"vram, {how}": partial(some.time, nbytes, in_place=how == "in place")
                        for how in ("in place", "out of place")
                    }
                    took = in_turns(cases, rounds, warm=1)
                    rows += _compared(f"{size} ranks on one GPU, {format_size(nbytes)}", took)
                rows += _fused(some, size, rounds, notes)
    if tune is not None:
        notes.append(_write(tune, entries, location))
    return Result("allreduce", "All-reduces of bfloat16 over ranks on ONE GPU, in CUDA graphs", rows, notes)


def _fused(some: _Streams, size: int, rounds: int, notes: list[str]) -> list[Row]:
    """An all-reduce with a residual and a norm: against the same all-reduce, and torch's kernels for the rest."""
    rows: list[Row] = []
    for batch in _BATCHES:
        cases: dict[str, Callable[[], float]] = {_FUSED: partial(some.time_norm, batch)}
        try:
            cases[_APART] = partial(some.time_apart, batch)
            some.time_apart(batch)
        except (ImportError, VramError) as error:
            del cases[_APART]
            if batch == 1 and size == _RANKS[0]:
                notes.append(f"torch's kernels did not run: {error}")
        took = in_turns(cases, rounds, warm=1)
        what = f"{size} ranks on one GPU, {batch} x {_WIDTH}: all-reduce, residual, RMSNorm"
        rows += _compared(what, took)
    return rows


class _Streams:
    """Ranks as streams of this process, on one GPU."""

    def __init__(self, stage: contextlib.ExitStack, bare: Bare, location: Location, size: int, blocks: int) -> None:
        self._bare, self._location, self._stage = bare, location, stage
        self.blocks, self._size = blocks, size
        driver: Any = drivers.get(location)
        shared = [self._array(Layout(size).nbytes) for _ in range(size)]
        self._routes = Routes()
        self._spaces = [
            stage.enter_context(Workspace(rank, shared, driver, location, _PATIENCE, "bench", self._routes, blocks))
            for rank in range(size)
        ]
        for space in self._spaces:
            space.prepare(_DTYPE, "sum")
        self._streams = [int(bare.ok(bare.api.cuStreamCreate(1))) for _ in range(size)]
        for stream in self._streams:
            stage.callback(bare.api.cuStreamDestroy, stream)
        self._timers = [Timer(bare) for _ in range(size)]
        for timer in self._timers:
            stage.callback(timer.close)
        self._rooms: dict[int, list[list[int]]] = {}
        self._apart: dict[int, list[Any]] = {}
        self._keep: list[Any] = []
        self._kept: tuple[object, contextlib.ExitStack, list[Graph]] | None = None
        stage.callback(self._forget)
        stage.callback(self._apart.clear)

    def _array(self, nbytes: int) -> int:
        array = self._stage.enter_context(vram.zeros(nbytes, "uint8", device=self._location))
        return array.address

    def _room(self, nbytes: int) -> list[list[int]]:
        """Return places of so many bytes: of each buffer and its result, by rank."""
        if nbytes not in self._rooms:
            count = 2 * _buffers(nbytes)
            self._rooms[nbytes] = [[self._array(nbytes) for _ in range(self._size)] for _ in range(count)]
        return self._rooms[nbytes]

    def time(self, nbytes: int, *, in_place: bool) -> float:
        room = self._room(nbytes)
        half = len(room) // 2

        def call(rank: int, number: int, stream: int) -> None:
            rows = room[number % half]
            outs = rows if in_place else room[number % half + half]
            self._spaces[rank].all_reduce(_DTYPE, "sum", rows[rank], outs[rank], nbytes, stream, rows, outs)

        return self._timed((nbytes, in_place), call)

    def time_of(self, _what: str, route: str, blocks: int, nbytes: int) -> float:
        step = Step(None, route, blocks)
        for space in self._spaces:
            space.routes = Routes(MappingProxyType({(self._size, _DTYPE, "sum"): (step,)}), "one route")
        try:
            room = self._room(nbytes)
            half = len(room) // 2

            def call(rank: int, number: int, stream: int) -> None:
                rows = room[number % half]
                self._spaces[rank].all_reduce(_DTYPE, "sum", rows[rank], rows[rank], nbytes, stream, rows, rows)

            return self._timed((route, blocks, nbytes), call)
        finally:
            for space in self._spaces:
                space.routes = self._routes

    def time_norm(self, batch: int) -> float:
        nbytes = batch * _WIDTH * _ITEM
        room, weight = self._room(nbytes), self._room(_WIDTH * _ITEM)[0]
        half = len(room) // 2

        def call(rank: int, number: int, stream: int) -> None:
            rows, outs = room[number % half], room[number % half + half]
            self._spaces[rank].all_reduce_norm(
                _DTYPE,
                rows[rank],
                outs[rank],
                weight[rank],
                rows[rank],
                outs[rank],
                batch,
                _WIDTH * _ITEM,
                1e-6,
                stream,
            )

        return self._timed(("norm", batch), call)

    def time_apart(self, batch: int) -> float:
        import torch

        if not torch.cuda.is_available():
            raise ImportError(f"torch {torch.__version__} sees no GPU")
        if batch not in self._apart:
            self._apart[batch] = self._torch_graphs(torch, batch)
        graphs = self._apart[batch]

        def launch(rank: int, stream: int) -> None:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                graphs[rank].replay()

        return self._launched(launch)

    def _torch_graphs(self, torch: Any, batch: int) -> list[Any]:
        """Capture the all-reduces, and torch's kernels after each of them."""
        made = partial(torch.zeros, dtype=torch.bfloat16, device=f"cuda:{ordinal_of(self._location)}")
        tensors = [[made((batch, _WIDTH)) for _ in range(3)] for _ in range(self._size)]
        weight = made(_WIDTH)
        self._keep.append((tensors, weight))
        torch.nn.functional.rms_norm(tensors[0][2].add_(tensors[0][1]), (_WIDTH,), weight, 1e-6)  # loads what it takes
        torch.cuda.synchronize()
        graphs = []
        for rank, stream in enumerate(self._streams):
            given, out, residual = tensors[rank]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.ExternalStream(stream), capture_error_mode="thread_local"):
                for _ in range(_CALLS):
                    self._spaces[rank].all_reduce(
                        _DTYPE, "sum", given.data_ptr(), out.data_ptr(), batch * _WIDTH * _ITEM, stream
                    )
                    residual.add_(out)
                    torch.nn.functional.rms_norm(residual, (_WIDTH,), weight, 1e-6)
            graphs.append(graph)
        return graphs

    def _timed(self, key: object, call: Callable[[int, int, int], None]) -> float:
        """Return microseconds a call of the slower rank, of calls in a graph for each."""
        if self._kept is None or self._kept[0] != key:
            self._forget()
            stage = contextlib.ExitStack()
            graphs = []
            for rank, stream in enumerate(self._streams):
                work = partial(_calls, call, rank, stream)
                graphs.append(stage.enter_context(graph_of(self._bare, stream, work)))
            self._kept = (key, stage, graphs)
        graphs = self._kept[2]
        return self._launched(lambda rank, stream: graphs[rank].launch(stream))

    def _launched(self, launch: Callable[[int, int], None]) -> float:
        for rank, (stream, timer) in enumerate(zip(self._streams, self._timers, strict=True)):
            launch(rank, stream)
            timer.begin(stream)
            launch(rank, stream)
            timer.end(stream)
        took = max(timer.microseconds() for timer in self._timers) / _CALLS
        for space in self._spaces:
            space.check()
        if not took:
            raise InternalError("a graph of calls took no time")
        return took

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None


def _calls(call: Callable[[int, int, int], None], rank: int, stream: int) -> None:
    for number in range(_CALLS):
        call(rank, number, stream)
