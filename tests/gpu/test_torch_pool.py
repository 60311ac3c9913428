"""A pool for torch on a real GPU: tensors that sleep and wake with their bytes, at their addresses.

A test that takes longer than ``HANGS`` seconds ends the run, with all stacks. Threads are tried in a process of their
own: torch's locks and Python's have waited for each other before (docs/decisions/torch.md).
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.torch_on_gpu import MIB, end, free_bytes

import vram
from vram.errors import AsleepError, BusyError, UsageError

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="could not import 'torch'")

HANGS = 30


@pytest.fixture(autouse=True)
def limit(pytestconfig: pytest.Config) -> Iterator[None]:
    stderr = pytestconfig.pluginmanager.get_plugin("watchdog")._stderr  # that of before pytest captured it
    faulthandler.dump_traceback_later(HANGS, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def pool() -> Iterator[vram.TorchPool]:
    made = vram.TorchPool("cuda:0")
    yield made
    end([made])


def test_tensors_sleep_and_wake_with_their_bytes(pool: vram.TorchPool) -> None:
    with pool.use("weights"):
        weights = [torch.randn(32 * MIB // 4, device="cuda:0") for _ in range(4)]
    with pool.use("kv"):
        kv = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda:0")
    before, pointers = [one.clone() for one in weights], [one.data_ptr() for one in (*weights, kv)]
    assert [pool.tag_of(one) for one in (*weights, kv)] == ["weights"] * 4 + ["kv"]
    assert {tag: one.awake for tag, one in pool.usage().items()} == {"weights": 128 * MIB, "kv": 64 * MIB}
    for _ in range(2):
        awake = free_bytes()
        slept = pool.sleep(offload=["weights"], discard=["kv"])
        assert (slept.freed, slept.nbytes) == (192 * MIB, 128 * MIB)
        assert free_bytes() >= awake + 188 * MIB  # other things of the driver's may come and go
        assert pool.usage()["kv"].asleep == 64 * MIB
        with pytest.raises(AsleepError), pool.use("kv"):
            pass
        with pytest.raises(AsleepError):
            pool.sleep(offload=["weights"])
        assert pool.wake(["weights"]).nbytes == 128 * MIB
        assert pool.wake(["kv"], fill=7).discarded == 64 * MIB
        assert [one.data_ptr() for one in (*weights, kv)] == pointers
        assert all(torch.equal(one, other) for one, other in zip(weights, before, strict=True))
        assert bool((kv == 7).all())
    assert pool.wake().nbytes == 0


def test_a_captured_graph_replays_after_waking(pool: vram.TorchPool) -> None:
    with pool.use("weights"):
        weight = torch.randn(512, 512, device="cuda:0")
        given = torch.ones(8, 512, device="cuda:0")
        found = given @ weight
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found.copy_(given @ weight)
    graph.replay()
    wanted = found.clone()
    pool.sleep(offload=["weights"])
    pool.wake()
    found.zero_()
    graph.replay()
    assert torch.equal(found, wanted)


LONG = 1 << 19  # a product over so many is cut into parts, whose sums are put together in a workspace


def products(stream: Any) -> tuple[Any, Any, Any]:
    """Return two matrices whose product takes a workspace, and the product, made on a stream."""
    with torch.cuda.stream(stream):
        one, other = torch.ones(64, LONG, device="cuda:0"), torch.ones(LONG, 64, device="cuda:0")
        made = one @ other
    stream.synchronize()
    return one, other, made


def fill_what_is_free(stream: Any) -> list[Any]:
    """Put tensors wherever torch has memory that it cached for a stream: each of sevens."""
    with torch.cuda.stream(stream):
        found = torch.cuda.memory_snapshot()
        sizes = [
            block["size"]
            for held in found
            if held["stream"] == stream.cuda_stream and held["segment_pool_id"] == (0, 0)
            for block in held["blocks"]
            if block["state"] == "inactive" and block["size"] >= MIB
        ]
        made = [torch.full((size,), 7, dtype=torch.uint8, device="cuda:0") for size in sizes]
        made += [torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda:0")]
    stream.synchronize()
    return made


def check(graph: Any, out: Any, wanted: Any, beside: list[Any]) -> None:
    """Replay a graph twice: it makes what it made, and nothing else changes."""
    for _ in range(2):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
    assert [bool((one == 7).all()) for one in beside] == [True] * len(beside)


def test_a_graph_of_the_pool_keeps_its_workspace_whatever_else_lets_go(pool: vram.TorchPool) -> None:
    """Its stream had one before, as after every warm-up, which torch took elsewhere and may let go of at any time."""
    stream = torch.cuda.Stream()
    one, other, wanted = products(stream)
    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(wanted)
    with pool.capture("graph") as number, torch.cuda.graph(graph, pool=number, stream=stream):
        torch.mm(one, other, out=out)
    with pool.use("kv"):
        kept = torch.ones(8 * MIB, device="cuda:0")
    beside = fill_what_is_free(stream)
    check(graph, out, wanted, beside)
    pool.sleep(offload=["graph"], discard=["kv"])
    pool.wake()
    torch.cuda.empty_cache()
    beside += fill_what_is_free(stream)
    check(graph, out, wanted, beside)
    assert int(kept.sum()) == 0


def test_a_graph_of_torchs_keeps_its_workspace_while_blocks_make_no_memory(pool: vram.TorchPool) -> None:
    stream = torch.cuda.Stream()
    with pool.use("kv"):
        kept = torch.ones(8 * MIB, device="cuda:0")
    one, other, wanted = products(stream)
    graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(wanted)
    with torch.cuda.graph(graph, stream=stream):
        torch.mm(one, other, out=out)
    del kept
    with pool.use("kv"):
        again = torch.ones(4 * MIB, device="cuda:0")
    assert pool.tag_of(again) == "kv"
    check(graph, out, wanted, fill_what_is_free(stream))


@pytest.mark.parametrize("cached", [False, True])
def test_a_workspace_never_sleeps(pool: vram.TorchPool, cached: bool) -> None:
    """A product in a block takes one in memory of the pool, made for it or cached; those after it need one, too."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if cached:
            with pool.use("weights"):
                torch.ones(512 * MIB, dtype=torch.uint8, device="cuda:0")
        with pool.use("weights"):
            weights = torch.ones(8, device="cuda:0")
            products(stream)
    pool.sleep(offload=["weights"])
    _, _, made = products(stream)
    assert bool((made == LONG).all())
    pool.wake()
    assert int(weights.sum()) == 8


def test_captures_inside_of_the_pool_go_on(pool: vram.TorchPool) -> None:
    graph = torch.cuda.CUDAGraph()
    with pool.use("graph"):
        given = torch.ones(1024, device="cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = given * 2
        assert pool.trim() == 0
    graph.replay()
    assert bool((found == 2).all())


def test_what_is_published_is_not_copied_and_sleeps_no_longer(pool: vram.TorchPool) -> None:
    with pool.use("weights"):
        model = torch.nn.Linear(256, 256, device="cuda:0")
    with vram.private_keeper():
        published = vram.publish("linear", dict(model.state_dict()), writable=True)
        assert published.copied == {}
        with pytest.raises(BusyError, match="exported"):
            pool.sleep(offload=["weights"])
        with vram.attach("linear") as lease:
            assert torch.equal(lease["weight"].torch(), model.weight)
            with torch.no_grad():
                model.weight.fill_(3.0)
            torch.cuda.synchronize()
            assert bool((lease["weight"].torch() == 3).all())


def test_beside_what_is_published_torch_puts_nothing_that_it_could_not_write(pool: vram.TorchPool) -> None:
    """It is read-only from then on: a kernel that wrote to another tensor in it would end the context."""
    with pool.use("weights"):
        model = torch.nn.Linear(256, 256, device="cuda:0")
        beside = torch.zeros(64, device="cuda:0")  # in one segment with the bias, and as zero as what pads it
        large = torch.ones(32 * MIB, device="cuda:0")
    with vram.private_keeper():
        state = {**model.state_dict(), "large": large}
        published = vram.publish("linear", state)
        assert set(published.copied) >= {"bias"}
        assert "large" not in published.copied
        beside.add_(1)
        address = large.data_ptr()
        del large, state
        with pool.use("weights"):
            again = [torch.full((32 * MIB,), 2.0, device="cuda:0") for _ in range(2)]
        torch.cuda.synchronize()
        assert address not in [one.data_ptr() for one in again]
        assert bool((beside == 1).all())
        with vram.attach("linear") as lease:
            assert bool((lease["large"].torch() == 1).all())
            assert torch.equal(lease["bias"].torch(), model.bias)


THREADS = """
    import faulthandler, sys, threading
    faulthandler.dump_traceback_later(20, exit=True)
    sys.setswitchinterval(1e-5)
    import torch, vram
    pool = vram.TorchPool("cuda:0")
    counts = {}

    def allocate(tag):
        for number in range(20):
            with pool.use(tag):
                kept = [torch.empty(4 << 20, dtype=torch.uint8, device="cuda:0") for _ in range(12)]
                assert {pool.tag_of(one) for one in kept} == {tag}
            del kept
            pool.close()
            counts[tag] = number + 1

    def look():
        while any(thread.is_alive() for thread in threads[:3]):
            torch.cuda.memory_stats()
            torch.cuda.memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.memory_snapshot()
            counts["looked"] = counts.get("looked", 0) + 1

    threads = [threading.Thread(target=allocate, args=(tag,)) for tag in "abc"]
    threads.append(threading.Thread(target=look))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    pool.close()
    assert pool.usage() == {}, pool.usage()
    assert counts.pop("looked")
    print(sorted(counts.items()))
"""


def test_threads_that_allocate_enter_and_look_do_not_wait_for_each_other_for_ever() -> None:
    done = run(THREADS)
    assert (done.returncode, done.stdout) == (0, "[('a', 20), ('b', 20), ('c', 20)]\n"), done.stderr


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True, text=True, timeout=HANGS - 4, env={**os.environ}, check=False,
    )  # fmt: skip


def test_out_of_memory_is_torchs_own_and_says_why(pool: vram.TorchPool) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, pool.use("kv"):
        torch.empty(free_bytes() + (64 << 30), dtype=torch.uint8, device="cuda:0")
    assert any("OutOfMemoryError" in note for note in caught.value.__notes__)
    kept: list[Any] = []

    def fail() -> None:
        with pool.use("kv"):
            kept.append(torch.ones(8, device="cuda:0"))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert pool.tag_of(kept.pop()) == "kv"


SCRIPT = """
    import sys, torch, vram
    pool = vram.TorchPool("cuda:0")
    with pool.use("weights"):
        kept = torch.ones(1 << 20, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        made = kept * 2
    pool.sleep(offload=["weights"])
    if "wake" in sys.argv:
        pool.wake()
        torch.cuda.empty_cache()
    cycle = [kept, pool, graph]
    cycle.append(cycle)
    sys.modules["kept by a module"] = cycle
    print("said", flush=True)
"""


@pytest.mark.parametrize("how", ["asleep", "wake"])
def test_the_end_of_a_process_is_quiet(how: str) -> None:
    done = run(SCRIPT, how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", "")


def test_the_memory_of_graphs_sleeps_and_is_theirs_alone(pool: vram.TorchPool) -> None:
    """As an engine captures them: one handle for all graphs, warmed up outside of the capture."""
    given = torch.ones(1024, device="cuda:0")

    def step() -> Any:
        return (torch.ones(64 * MIB // 4, device="cuda:0") * given[0] * 2).mean()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    handle, numbers, graphs, found = torch.cuda.graph_pool_handle(), [], [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with pool.capture("graph", handle) as number, torch.cuda.graph(graph, pool=number):
            found.append(step())
        numbers.append(number)
        graphs.append(graph)
    assert numbers[0] == numbers[1] != handle
    taken = pool.usage()["graph"].awake
    assert 128 * MIB <= taken < 300 * MIB  # shared, as graphs that are not replayed at once may
    assert pool.tag_of(found[0]) == "graph"
    with pool.use("graph"):
        other = torch.full((64 * MIB // 4,), 7.0, device="cuda:0")
    for value in (1.0, 3.0):
        given.fill_(value)
        for graph, one in zip(graphs, found, strict=True):
            graph.replay()
            assert float(one) == 2 * value
        assert bool((other == 7).all())
        pool.sleep(offload=["graph"])
        assert pool.usage()["graph"].awake == 0
        pool.wake()


def test_in_a_bypass_torch_allocates_as_ever(pool: vram.TorchPool) -> None:
    with pool.use("weights"):
        first = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda:0")
        with pool.bypass():
            elsewhere = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda:0")
            with pool.use("weights"):
                second = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda:0")
            third = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda:0")
        fourth = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda:0")
    assert [pool.tag_of(one) for one in (first, second, fourth)] == ["weights"] * 3
    for one in (elsewhere, third):
        with pytest.raises(UsageError, match="not of"):
            pool.tag_of(one)
    pool.sleep(discard=["weights"])
    assert int(elsewhere.sum()) == 32 * MIB
    before = free_bytes()
    del elsewhere, third, one
    torch.cuda.empty_cache()
    assert free_bytes() >= before + 60 * MIB
    pool.wake()


def test_what_a_bypass_leaves_in_torchs_cache_is_used_again(pool: vram.TorchPool) -> None:
    with pool.use("weights"):
        kept = torch.ones(8, device="cuda:0")
        before = free_bytes()
        for _ in range(20):
            with pool.bypass():
                torch.ones(64 * MIB, dtype=torch.uint8, device="cuda:0")
        assert free_bytes() >= before - 128 * MIB
        with pool.bypass():
            torch.cuda.empty_cache()
        assert free_bytes() >= before - 2 * MIB
    assert int(kept.sum()) == 8


def test_a_graph_that_is_captured_outside_of_its_block_and_by_another_thread_has_its_memory_there(
    pool: vram.TorchPool,
) -> None:
    given, found, graphs = torch.ones(1024, device="cuda:0"), [], [torch.cuda.CUDAGraph() for _ in range(2)]
    with pool.capture("graph") as number:
        pass

    def capture() -> None:
        with torch.cuda.graph(graphs[len(found)], pool=number):
            found.append(torch.ones(8 * MIB, device="cuda:0") * given[0])

    with pool.use("weights"):
        capture()
    thread = threading.Thread(target=capture)
    thread.start()
    thread.join(HANGS)
    assert not thread.is_alive()
    assert [pool.tag_of(one) for one in found] == ["graph"] * 2
    given.fill_(3.0)
    for graph, one in zip(graphs, found, strict=True):
        graph.replay()
        assert float(one.mean()) == 3
