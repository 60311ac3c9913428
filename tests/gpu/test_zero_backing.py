"""Zeros behind what has no memory, and readers that follow growth, on a real GPU: with kernels that read too far."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
from tests.support.places import private_socket

import vram
from vram import driver as drivers
from vram.keeper.client import close_client
from vram.spec import Location

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="could not import 'torch'")
GPU = Location("cuda", 0)
G = 2 << 20
ROWS = 512  # of 4 KiB, in a granule


def made(rows: int, *, capacity: int = 64 * ROWS) -> vram.Array:
    return vram.zeros((rows, 1024), "float32", device="cuda:0", capacity=capacity, chunk=G, backing="zero")


def test_a_kernel_that_reads_all_of_the_capacity_reads_zeros_and_goes_on() -> None:
    with made(ROWS) as array:
        array.torch()[:] = 1.0
        whole = array.torch(full=True)
        assert whole.shape == (64 * ROWS, 1024)
        assert whole.sum().item() == ROWS * 1024
        for rows in (3 * ROWS, 64 * ROWS):
            array.resize(rows)
            assert whole.sum().item() == ROWS * 1024
            whole[rows - 1] = 2.0  # there is memory now
            assert array.torch()[rows - 1].sum().item() == 2048
            whole[rows - 1] = 0.0
        del whole
        array.resize(ROWS)
        assert array.torch(full=True).sum().item() == ROWS * 1024


def test_a_graph_that_reads_too_far_replays_while_the_array_grows() -> None:
    with made(ROWS) as array:
        array.torch()[:] = 1.0
        whole, total = array.torch(full=True), torch.zeros((), device="cuda:0")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            total.copy_(whole.sum())
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total.copy_(whole.sum())
        for rows in (2 * ROWS, 5 * ROWS, 17 * ROWS):
            graph.replay()
            event = torch.cuda.Event()
            event.record()
            array.resize(rows, after=event)
            array.torch()[:] = 1.0
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert total.item() == rows * 1024


def test_zeros_cost_one_chunk_for_all_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    driver = drivers.get(GPU)
    torch.cuda.synchronize()
    before, _ = driver.mem_info(GPU)
    started = time.perf_counter()
    arrays = [vram.empty((0, 1 << 18), "float32", device="cuda:0", capacity=64 << 10, backing="zero") for _ in range(2)]
    seconds = time.perf_counter() - started  # 64 GiB each
    used = before - driver.mem_info(GPU)[0]
    started = time.perf_counter()
    for array in arrays:
        array.resize(256)
    grown = time.perf_counter() - started
    started = time.perf_counter()
    for array in arrays:
        array.close()
    closed = time.perf_counter() - started
    with capsys.disabled():
        print(
            f"\ntwo of 64 GiB: {1e3 * seconds:.1f} ms made, {used >> 20} MiB taken, {1e3 * grown:.1f} ms grown by "
            f"256 MiB each, {1e3 * closed:.1f} ms closed"
        )
    assert used < 256 << 20


WRITES = """
import torch, vram
array = vram.zeros((512, 1024), "float32", device="cuda:0", capacity=4096, chunk="2MiB", backing="zero")
whole = array.torch(full=True)
assert whole.sum().item() == 0
whole[600] = 1.0
torch.cuda.synchronize()
"""


def test_a_write_too_far_ends_the_context_as_ever() -> None:
    done = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "illegal" in done.stderr or "CUDA error" in done.stderr, done.stderr


PUBLISHER = """
import sys
import torch, vram
array = vram.zeros((0, 1024), "float32", device="cuda:0", capacity=64 * 512, chunk="2MiB", backing="zero")
for line in sys.stdin:
    rows = int(line)
    before = len(array)
    array.resize(rows)
    array.torch()[before:] = torch.arange(before, rows, device="cuda:0", dtype=torch.float32)[:, None]
    vram.publish("grown", {"x": array}, writable=True)
    print(rows, flush=True)
"""


def test_a_reader_in_another_process_follows_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    with private_socket() as path:
        monkeypatch.setenv("VRAM_KEEPER", path)
        publisher: Any = subprocess.Popen(
            [sys.executable, "-c", PUBLISHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        def publish(rows: int) -> None:
            publisher.stdin.write(f"{rows}\n")
            publisher.stdin.flush()
            assert publisher.stdout.readline() == f"{rows}\n"

        try:
            publish(ROWS)
            with vram.attach("grown", growing=True) as lease:
                first = lease["x"].torch()
                address = lease["x"].address
                for rows in (ROWS + 1, 4 * ROWS, 40 * ROWS):
                    publish(rows)
                    assert lease.refresh() == ("x",)
                    assert lease["x"].address == address
                    assert torch.equal(
                        lease["x"].torch()[:, 5], torch.arange(rows, device="cuda:0", dtype=torch.float32)
                    )
                publisher.kill()
                publisher.wait(60)
                assert lease.refresh() == ()
                assert first.shape == (ROWS, 1024)
                assert lease["x"].torch()[40 * ROWS - 1, 0].item() == 40 * ROWS - 1
                del first
        finally:
            publisher.kill()
            publisher.communicate(timeout=60)
            close_client(path)
