"""What ranks on a GPU do in processes of their own: each is told the path, its rank and the size."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

import vram
from vram import driver as drivers
from vram.spec import Location

if TYPE_CHECKING:
    from vram.engines.torch_collectives import CustomAllreduce

TIMEOUT = 60.0  # seconds: for what is to be heard at once
COUNT = 10_007


def gpu(rank: int) -> Location:
    """Return the GPU of a rank: they take those that there are in turn."""
    return Location("cuda", rank % drivers.get(Location("cuda", 0)).device_count())


def data(rank: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return what a rank contributes."""
    return np.random.default_rng(rank).standard_normal(COUNT, np.float32)


def compute(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Sum up in place and out of place, by each route, and say what came of it."""
    here = gpu(rank)
    with vram.Group(rank=rank, size=size, at=at, timeout=TIMEOUT, share_gpus=True) as group:
        with (
            group.symmetric(COUNT, "float32", device=str(here)) as buffer,
            vram.zeros(COUNT, "float32", device=str(here)) as plain,
        ):
            for array in (buffer, plain):
                where = buffer.array if array is buffer else plain
                drivers.get(here).copy_in(where.address, memoryview(data(rank)).cast("B"))
                for _ in range(5):
                    group.all_reduce(array, "max")
                group.barrier(device=str(here))
                drivers.get(here).synchronize(here)
                group.check()
                pipe.send(bytes(vram.copy(where, device="host").numpy().tobytes()))
            group.barrier()


def outlive(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Compute, and then again with a rank that is gone; say how that ended, and that the GPU works on."""
    group = vram.Group(rank=rank, size=size, at=at, timeout=TIMEOUT, share_gpus=True)
    here = gpu(rank)
    buffer = group.symmetric(COUNT, "float32", device=str(here))
    group.all_reduce(buffer)
    pipe.send("computed")
    pipe.recv()
    driver = drivers.get(here)
    try:
        while True:  # until it is known
            group.all_reduce(buffer)
            driver.synchronize(here)
            group.check()
            time.sleep(0.01)
    except vram.errors.PeerGoneError as error:
        came = error.ranks
    buffer.close()
    group.close()
    with vram.zeros(4, "float32", device=str(here)) as array:
        pipe.send((came, vram.copy(array, device="host").numpy().tolist()))


def as_vllm_does(place: str, rank: int, size: int) -> CustomAllreduce:
    """Meet the others by gloo, and return what vLLM would sum up with, on the GPU of a rank."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from vram.engines.torch_collectives import CustomAllreduce

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, patience = dist.FileStore(f"{place}/store", size), timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    here = gpu(rank).id
    torch.cuda.set_device(here)
    return CustomAllreduce(dist.group.WORLD, here, timeout=TIMEOUT, share_gpus=True)


def reduce_in_a_graph(place: str, pipe: Connection, rank: int, size: int) -> None:
    """Sum tensors up as vLLM does, in a graph that is launched again with new data; say what came of each launch."""
    import torch
    import torch.distributed as dist

    custom = as_vllm_does(place, rank, size)
    given = torch.zeros(5000, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with custom.capture(), torch.cuda.graph(graph):
        out = given
        for _ in range(5):
            reduced = custom.custom_all_reduce(out)
            assert reduced is not None
            out = reduced
    custom.register_graph_buffers()
    came = []
    for turn in range(3):
        given.fill_(rank + turn)
        torch.cuda.synchronize()
        dist.barrier()
        graph.replay()
        torch.cuda.synchronize()
        custom.check()
        came.append(out.unique().tolist())
    pipe.send(came)
    dist.barrier()
    custom.close()
    dist.destroy_process_group()


def die_in_a_graph(place: str, pipe: Connection, rank: int, size: int) -> None:
    """Launch a graph of sums again and again until a rank is gone; say how that ended, and that the GPU works on."""
    import torch

    custom = as_vllm_does(place, rank, size)
    given = torch.ones(5000, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with custom.capture(), torch.cuda.graph(graph):
        for _ in range(20):
            custom.custom_all_reduce(given)
    custom.register_graph_buffers()
    graph.replay()
    torch.cuda.synchronize()
    custom.check()
    pipe.send("computed")
    pipe.recv()
    try:
        while True:  # until it is known
            graph.replay()
            torch.cuda.synchronize()
            custom.check()
    except vram.errors.PeerGoneError as error:
        came = error.ranks
    custom.close()
    pipe.send((came, (given + 1).unique().tolist()))


def grow(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Grow a buffer in place, where all ranks see it, and sum it up; say what came of it, and that no address moved."""
    here = gpu(rank)
    driver = drivers.get(here)
    with (
        vram.Group(rank=rank, size=size, at=at, timeout=TIMEOUT, share_gpus=True) as group,
        group.symmetric(1 << 20, "int32", device=str(here), capacity=1 << 24) as buffer,
    ):
        group.all_reduce(buffer)
        before = buffer.addresses
        buffer.resize(1 << 24)
        driver.copy_in(buffer.array.address, memoryview(np.full(1 << 24, 1 + rank, np.int32)).cast("B"))
        group.all_reduce(buffer)
        group.barrier(device=str(here))
        driver.synchronize(here)
        group.check()
        seen = np.empty(1 << 24, np.int32)
        driver.copy_out(memoryview(seen).cast("B"), buffer.array.address)
        pipe.send((before == buffer.addresses, np.unique(seen).tolist()))
        group.barrier()


def hand_over_to_nccl(place: str, pipe: Connection, rank: int, size: int) -> None:
    """Sum up by NCCL, where the table says so, also in a graph; say what came of it."""
    from benchmarks.groups import NO_MULTICAST, check_no_multicast

    os.environ.update(NO_MULTICAST)
    check_no_multicast()
    import torch
    import torch.distributed as dist

    from vram.engines.nccl import Nccl

    here = gpu(rank).id
    torch.cuda.set_device(here)
    store, device = dist.FileStore(f"{place}/store", size), torch.device("cuda", int(here))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    with vram.Group(rank=rank, size=size, at=f"{place}/group", timeout=TIMEOUT) as group:
        group.hand_over(Nccl())
        small = torch.arange(1 << 26, device="cuda") % 61  # sums of four ranks are exact in bfloat16
        given, wanted = (small + rank).bfloat16(), (small * size + size * (size - 1) // 2).bfloat16()
        out = torch.zeros_like(given)
        stream = torch.cuda.current_stream()
        group.all_reduce(given, out=out, stream=stream)
        said = [torch.equal(out, wanted)]
        group.all_reduce(given, "max", out=out, stream=stream)
        said.append(torch.equal(out, (small + size - 1).bfloat16()))
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        out.zero_()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            group.all_reduce(given, out=out, stream=side)
        graph.replay()
        torch.cuda.synchronize()
        pipe.send(([*said, torch.equal(out, wanted)], group.statistics(), group.explain(given.nbytes)))
        graph.reset()  # NCCL's end waits for that of graphs which captured it
        group.barrier()
    dist.destroy_process_group()
