"""What ranks on a GPU of their own do in processes of their own, with torch: each is told the path, rank and size."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.groups import NO_MULTICAST, check_no_multicast
from tests.support.deadlines import AT_ONCE

import vram
from vram.collectives.routes import SHARES, Routes, Step, written

COUNTS = (4096, 300_001, 6_000_000)  # of elements: in one piece of the workspace, and in several


def _torch(rank: int) -> Any:
    os.environ.update(NO_MULTICAST)
    check_no_multicast()
    import torch

    torch.cuda.set_device(rank)
    return torch


def _fresh(torch: Any, seed: int, count: int, size: int) -> list[Any]:
    """What each rank contributes, the same in all processes."""
    made = [torch.Generator().manual_seed(seed * size + rank) for rank in range(size)]
    return [torch.randn(count, generator=one).float() for one in made]


def _total(torch: Any, data: list[Any]) -> Any:
    """The sum in the order of the ranks."""
    return sum(data, torch.zeros(()))


def _routes(size: int) -> Routes:
    return Routes({(size, "float32", "sum"): (Step(None, SHARES),)}, "of the test")


def register(place: str, pipe: Connection, rank: int, size: int, kind: str) -> None:
    """Capture calls with tensors and an array of ours, launch, register, launch again; say what was wrong."""
    if kind == "expandable segments":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    torch = _torch(rank)
    wrong: list[str] = []
    with vram.Group(rank=rank, size=size, at=f"{place}/group", timeout=AT_ONCE, routes=_routes(size)) as group:
        side = torch.cuda.Stream()
        device = torch.device("cuda", rank)
        calls = [(torch.zeros(count, device=device), torch.zeros(count, device=device)) for count in COUNTS]
        room = torch.zeros(5001, device=device)
        calls.append((room[1:], torch.zeros(5000, device=device)))  # begins at no multiple of 16 bytes
        ours = vram.zeros(70_000, "float32", device=f"cuda:{rank}")
        calls.append((ours.torch(), ours.torch()))
        group.all_reduce(torch.zeros(8, device=device), stream=side)  # loads the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for source, out in calls:
                group.all_reduce(source, out=out, stream=side)

        def launch(turn: int) -> None:
            data = [_fresh(torch, 100 * turn + number, len(source), size) for number, (source, _) in enumerate(calls)]
            for (source, _), given in zip(calls, data, strict=True):
                source.copy_(given[rank])
            torch.cuda.synchronize()
            group.barrier()
            graph.replay()
            torch.cuda.synchronize()
            group.check()
            for number, ((_, out), given) in enumerate(zip(calls, data, strict=True)):
                if not torch.equal(out.cpu(), _total(torch, given)):
                    wrong.append(f"turn {turn}, call {number} of {len(out)}")

        launch(0)
        launch(1)
        whys = group.register_captured()
        for turn in range(2, 6):
            launch(turn)
        pipe.send((wrong, whys, group.statistics().get("registered", 0)))
        group.barrier()
        graph.reset()
        calls.clear()
    ours.close()


def as_vllm_does(place: str, pipe: Connection, rank: int, size: int) -> None:
    """Capture by CustomAllreduce with a table by which all goes by shares; say what came of each launch."""
    torch = _torch(rank)
    from datetime import timedelta

    import torch.distributed as dist

    from vram.engines.torch_collectives import CustomAllreduce

    table = f"{place}/routes-{rank}.json"
    with open(table, "w", encoding="utf-8") as file:
        file.write(written(_routes(size), "of the test"))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store: Any = dist.FileStore(f"{place}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=AT_ONCE))
    custom = CustomAllreduce(dist.group.WORLD, rank, dtype=torch.float32, timeout=AT_ONCE, routes=table)
    given = torch.zeros(200_000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with custom.capture(), torch.cuda.graph(graph):
        once = custom.custom_all_reduce(given)
        twice = custom.custom_all_reduce(once)
    same = []
    for turn in range(2):
        data = _fresh(torch, turn, 200_000, size)
        given.copy_(data[rank])
        torch.cuda.synchronize()
        dist.barrier()
        graph.replay()
        torch.cuda.synchronize()
        custom.check()
        total = _total(torch, data)
        same += [torch.equal(once.cpu(), total), torch.equal(twice.cpu(), _total(torch, [total] * size))]
    pipe.send((same, custom.statistics().get("registered", 0)))
    dist.barrier()
    graph.reset()
    custom.close()
    dist.destroy_process_group()
