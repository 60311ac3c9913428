"""What ranks on a GPU do in processes of their own: each is told the path, its rank and the size."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

import numpy as np

import vram
from vram import driver as drivers
from vram.spec import Location

__all__ = ["COUNT", "TIMEOUT", "compute", "data", "hand_over_to_nccl", "outlive", "reduce_in_a_graph"]

TIMEOUT = 60.0  # seconds: for what is to be heard at once
COUNT = 10_007


def data(rank: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return what a rank contributes."""
    return np.random.default_rng(rank).standard_normal(COUNT, np.float32)


def compute(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Sum up in place and out of place, by each route, and say what came of it."""
    with vram.Group(rank=rank, size=size, at=at, timeout=TIMEOUT, share_gpus=True) as group:
        with (
            group.symmetric(COUNT, "float32", device="cuda:0") as buffer,
            vram.zeros(COUNT, "float32", device="cuda:0") as plain,
        ):
            for array in (buffer, plain):
                where = buffer.array if array is buffer else plain
                drivers.get(Location("cuda", 0)).copy_in(where.address, memoryview(data(rank)).cast("B"))
                for _ in range(5):
                    group.all_reduce(array, "max")
                group.barrier(device="cuda:0")
                drivers.get(Location("cuda", 0)).synchronize(Location("cuda", 0))
                group.check()
                pipe.send(bytes(vram.copy(where, device="host").numpy().tobytes()))
            group.barrier()


def outlive(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Compute, and then again with a rank that is gone; say how that ended, and that the GPU works on."""
    group = vram.Group(rank=rank, size=size, at=at, timeout=TIMEOUT, share_gpus=True)
    buffer = group.symmetric(COUNT, "float32", device="cuda:0")
    group.all_reduce(buffer)
    pipe.send("computed")
    pipe.recv()
    driver = drivers.get(Location("cuda", 0))
    try:
        while True:  # until it is known
            group.all_reduce(buffer)
            driver.synchronize(Location("cuda", 0))
            group.check()
            time.sleep(0.01)
    except vram.errors.PeerGoneError as error:
        came = error.ranks
    buffer.close()
    group.close()
    with vram.zeros(4, "float32", device="cuda:0") as array:
        pipe.send((came, vram.copy(array, device="host").numpy().tolist()))


def reduce_in_a_graph(place: str, pipe: Connection, rank: int, size: int) -> None:
    """Sum tensors up as vLLM does, in a graph that is launched again with new data; say what came of each launch."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from vram.engines.torch_collectives import CustomAllreduce

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, patience = dist.FileStore(f"{place}/store", size), timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    torch.cuda.set_device(0)
    custom = CustomAllreduce(dist.group.WORLD, 0, timeout=TIMEOUT, share_gpus=True)
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


def hand_over_to_nccl(place: str, pipe: Connection) -> None:
    """Sum up over one rank by NCCL, where the table says so, also in a graph; say what came of it."""
    from vram.bench.no_multicast import NO_MULTICAST, check_no_multicast

    os.environ.update(NO_MULTICAST)
    check_no_multicast()
    import torch
    import torch.distributed as dist

    from vram.engines.nccl import Nccl

    torch.cuda.set_device(0)
    store = dist.FileStore(f"{place}/store", 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    with vram.Group(rank=0, size=1, at=f"{place}/group", timeout=TIMEOUT) as group:
        group.hand_over(Nccl())
        given = torch.arange(1 << 26, device="cuda").bfloat16()
        out = torch.zeros_like(given)
        stream = torch.cuda.current_stream()
        group.all_reduce(given, out=out, stream=stream)
        group.all_reduce(given, "max", stream=stream)
        said = [torch.equal(out, given)]
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        out.zero_()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            group.all_reduce(given, out=out, stream=side)
        graph.replay()
        torch.cuda.synchronize()
        pipe.send(([*said, torch.equal(out, given)], group.statistics(), group.explain(given.nbytes)))
    dist.destroy_process_group()
