"""Groups whose ranks are on several GPUs, in one process or in several, on the stand-in: it runs no kernels."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support import children as processes
from tests.support import group_gpus_children as children
from tests.support.deadlines import SOON
from tests.support.group_gpus_children import read, write
from tests.support.threads import race

import standin
import vram
from vram import driver as drivers
from vram.collectives.device import Workspace
from vram.collectives.routes import SHARES, Routes, Step
from vram.errors import OutOfMemoryError, PeerError, UsageError, VramError
from vram.spec import Location

pytestmark = pytest.mark.standin
SWITCHES = ("VRAM_MULTICAST", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[standin.Standin]:
    """Multicast is off unless a test says otherwise, and no test makes a call that never returns on hardware."""
    for switch in SWITCHES:
        monkeypatch.delenv(switch, raising=False)
    found = standin.Standin()
    found.clear()
    yield found
    hung = found.would_hang()
    found.clear()
    assert hung == 0


def in_threads(at: str, act: Callable[[vram.Group], Any], size: int = 2, **given: Any) -> list[Any]:
    """Have ranks in threads of this process act, and return what each returned, or raised: its type and its words."""

    def run(rank: int) -> Any:
        try:
            with vram.Group(rank=rank, size=size, at=at, timeout=SOON, **given) as group:
                came = act(group)
                group.barrier()
                return came
        except VramError as error:
            return (type(error), str(error))  # not the error, which keeps what it was raised in

    return race(*(functools.partial(run, rank) for rank in range(size)))


# -- one process that drives several GPUs -----------------------------------------------------------------------------
def test_one_process_drives_several_gpus_with_a_rank_for_each(at: str) -> None:
    """Memory of each GPU is seen by the other one's rank, also what it grows by, and after its own rank is done."""

    def act(group: vram.Group) -> Any:
        mine, other = group.rank, 1 - group.rank
        buffer = group.symmetric(1024, "float32", device=f"cuda:{mine}", capacity=4 * MIB)
        with buffer:
            assert buffer.array.device == Location("cuda", mine)
            assert len(set(buffer.addresses)) == 2
            write(buffer.array, np.full(1024, mine + 1, np.float32))
            group.barrier()
            seen = [float(read(buffer.peers[other])[0])]
            group.barrier()
            buffer.resize(2 * MIB)
            data = read(buffer.array)
            data[-1] = 7 + mine
            write(buffer.array, data)
            group.barrier()
            found = read(buffer.peers[other])
            seen += [float(found[0]), float(found[-1]), len(found)]
            group.barrier()
        return seen

    assert in_threads(at, act) == [[2.0, 2.0, 8.0, 2 * MIB], [1.0, 1.0, 7.0, 2 * MIB]]


@pytest.mark.parametrize("call", ["symmetric", "all_reduce"])
def test_a_gpu_given_twice_is_refused_on_every_rank_and_both_are_named(at: str, call: str) -> None:
    def act(group: vram.Group) -> Any:
        device = f"cuda:{group.rank // 2}"  # ranks 0 and 1
        with vram.zeros(8, "float32", device=device) as array:
            said = []
            for _ in range(2):  # and the group can go on
                try:
                    if call == "symmetric":
                        group.symmetric(8, "float32", device=device)
                    else:
                        group.all_reduce(array)
                except UsageError as error:
                    said.append(str(error))
            return said

    for said in in_threads(at, act, size=3):
        assert len(said) == 2
        for words in said:
            assert re.search(r"ranks 0 and 1 of the group are both on GPU-.*cuda:\{rank\}.*share_gpus=True", words)


def test_ranks_that_say_so_share_a_gpu_and_all_have_to_say_it(at: str) -> None:
    def act(group: vram.Group) -> Any:
        with group.symmetric(8, "float32", device="cuda:0") as buffer:
            write(buffer.array, np.full(8, group.rank + 1, np.float32))
            group.barrier()
            seen = read(buffer.peers[1 - group.rank]).tolist()
            group.barrier()
            return seen

    assert in_threads(at, act, share_gpus=True) == [[2.0] * 8, [1.0] * 8]
    came: list[Any] = [None, None]

    def run(rank: int) -> None:
        with vram.Group(rank=rank, size=2, at=at, timeout=SOON, share_gpus=rank == 0) as group:
            try:
                act(group)
            except UsageError as error:
                came[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert all("do not agree" in words and "that ranks share" in words for words in came)


# -- GPUs that cannot reach each other --------------------------------------------------------------------------------
def test_gpus_that_are_no_peers_are_named_on_every_rank(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAM_STANDIN_NO_PEER", "1")
    monkeypatch.setenv("VRAM_STANDIN_DEVICES", "3")
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(processes.child(children.meet, rank, 3, first=(at,))) for rank in range(3)]
        for rank, one in enumerate(ranks):
            kind, words, after = one.said()
            assert kind == "UnsupportedError"
            other = 0 if rank else 1
            assert f"a group of rank {rank} on cuda:{rank} and rank {other} on GPU-" in words
            assert "no peers, says the driver" in words
            assert 'device="host"' in words
            assert after == [0.0] * 4, "the rank works on, on its own GPU and with the group on the host"


# -- arrays that graphs were captured with ----------------------------------------------------------------------------
def registered(at: str, kind: str, size: int = 2) -> list[tuple[tuple[str, ...], int, list[list[set[float]]]]]:
    """Have ranks capture two calls and register them; return reasons, how many are reached, and what is seen there."""
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(processes.child(children.met_in_capture, rank, size, kind, first=(at,)))
            for rank in range(size)
        ]
        came = []
        for one in ranks:
            whys, count, launched = one.said()
            assert launched == ["all_reduce_entry"] * 2
            came.append((whys, count, [one.said() for _ in launched]))
        for one in ranks:
            assert one.said() == "done"
        return came


@pytest.mark.parametrize("kind", ["ours", "cudaMalloc"])
def test_arrays_of_graphs_are_reached_where_they_are_once_they_are_registered(at: str, kind: str) -> None:
    """Of the table of each rank: sources of all ranks, then results of all, by this process's addresses."""
    for whys, count, seen in registered(at, kind):
        assert whys == ()
        assert count == 2
        assert seen == [[{0.0}, {10.0}, {1.0}, {11.0}], [{2.0}, {12.0}, {3.0}, {13.0}]]


def test_what_no_rank_can_reach_is_copied_and_said_on_all_ranks(at: str) -> None:
    for whys, count, seen in registered(at, "odd"):
        assert whys == ("that of rank 0 is not shared: it does not begin at a multiple of 16 bytes",)
        assert (count, seen) == (0, [[], []])


def test_one_array_that_cannot_be_reached_leaves_that_call_to_be_copied_on_all_ranks(at: str) -> None:
    for whys, count, seen in registered(at, "one of a pool"):
        assert len(whys) == 1
        assert whys[0].startswith("that of rank 1 is not shared: ")
        assert count == 1
        assert seen == [[], [{2.0}, {12.0}, {3.0}, {13.0}]]


def test_what_one_rank_cannot_open_is_copied_on_all_and_the_rank_is_named(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            if rank:
                monkeypatch.setenv("VRAM_STANDIN_FAIL", "cuIpcOpenMemHandle:1:2")
            child = processes.child(children.met_in_capture, rank, 2, "cudaMalloc", first=(at,))
            ranks.append(stack.enter_context(child))
        for one in ranks:
            whys, count, _ = one.said()
            assert len(whys) == 1
            assert whys[0].startswith("rank 1 cannot open that of rank 0: ")
            assert count == 1
            assert [one.said(), one.said()] == [[], [{2.0}, {12.0}, {3.0}, {13.0}]]
            assert one.said() == "done"


def test_ranks_that_captured_different_calls_hear_it(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(group: vram.Group) -> Any:
        if group.rank:
            group._gpu().captured = SimpleNamespace(met=[None], close=lambda: None)  # type: ignore[assignment]
        with pytest.raises(UsageError, match=r"called register \(\d calls of graphs\)"):
            group.register_captured()

    assert in_threads(at, act) == [None, None]


def test_a_group_on_the_host_has_nothing_to_register(at: str) -> None:
    assert in_threads(at, lambda group: group.register_captured()) == [(), ()]


def test_a_rank_that_cannot_write_its_table_leaves_graphs_as_they_were_on_all_ranks_i4(
    at: str, monkeypatch: pytest.MonkeyPatch, control: standin.Standin
) -> None:
    """And registering once more, when it can, is good for all: what was met is still known."""
    written: dict[int, list[tuple[int, bool]]] = {0: [], 1: []}
    one_at_a_time, write = threading.Lock(), Workspace.write_entry
    fails = [True]

    def write_entry(self: Workspace, entry: int, row: Any) -> None:
        if self.rank == 1 and row and fails[0]:
            raise OutOfMemoryError("cuMemcpyHtoD", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        write(self, entry, row)
        written[self.rank].append((entry, row is not None))

    monkeypatch.setattr(Workspace, "write_entry", write_entry)
    monkeypatch.setattr(Workspace, "prepare", lambda *_: None)
    monkeypatch.setattr(Workspace, "_launch", lambda *_, **__: None)

    def act(group: vram.Group) -> Any:
        gpu = Location("cuda", group.rank)
        driver: Any = drivers.get(gpu)
        stream = driver.stream_create(gpu)
        try:
            with vram.zeros(3000, "float32", device=str(gpu)) as array:
                group.all_reduce(array, stream=stream)
                with one_at_a_time:
                    control.capture(stream)
                    group.all_reduce(array, stream=stream)
                    group.all_reduce(array, stream=stream)
                    control.capture(0)
                group.barrier()  # while another rank captures, this one cannot wait for its GPU
                with pytest.raises((PeerError, OutOfMemoryError), match="CUDA_ERROR_OUT_OF_MEMORY"):
                    group.register_captured()
                assert "registered" not in group.statistics()
                group.barrier()
                fails[0] = False
                group.barrier()
                assert group.register_captured() == ()
                group.barrier()
                return group.statistics()["registered"]
        finally:
            driver.stream_destroy(stream)

    routes = Routes({(2, "float32", "sum"): (Step(None, SHARES),)}, "of the test")
    assert in_threads(at, act, routes=routes) == [2, 2]
    again = [(0, True), (1, True)]
    assert written == {0: [*again, (0, False), (1, False), *again], 1: [(0, False), (1, False), *again]}
