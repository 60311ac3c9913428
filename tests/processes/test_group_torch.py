"""Groups of the processes of a ``torch.distributed`` group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from tests.support import children as processes
from tests.support.deadlines import SOON

import vram
from vram.collectives import meeting
from vram.errors import UsageError
from vram.keeper.private import short_directory

torch = pytest.importorskip("torch", reason="could not import 'torch'")


@pytest.fixture
def place() -> Iterator[str]:
    with short_directory() as directory:
        yield directory


def _initialise(place: str, rank: int, size: int) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{place}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SOON),
    )


def compute(place: str, pipe: Connection, rank: int, size: int) -> None:
    """Sum tensors up with all ranks, and with those of a group of some."""
    import torch
    import torch.distributed as dist

    _initialise(place, rank, size)
    with vram.Group.from_torch(timeout=SOON) as group:
        tensor = torch.full((1000,), float(rank + 1))
        group.all_reduce(tensor)
        pipe.send((group.rank, group.size, tensor.unique().tolist()))
    last = dist.new_group([size - 2, size - 1])
    if rank >= size - 2:
        with vram.Group.from_torch(last, timeout=SOON) as group:
            tensor = torch.full((10,), float(rank))
            group.all_reduce(tensor, "max")
            pipe.send((group.rank, group.size, tensor.unique().tolist()))
    else:
        try:
            vram.Group.from_torch(last)
        except UsageError as error:
            pipe.send(str(error))
    dist.destroy_process_group()


def be_elsewhere(place: str, pipe: Connection, rank: int, size: int) -> None:
    """Say what comes of a group whose last rank says that it is on another machine."""
    import torch.distributed as dist

    _initialise(place, rank, size)
    if rank == size - 1:
        meeting._machine = lambda: "another"
    try:
        vram.Group.from_torch()
    except UsageError as error:
        pipe.send(str(error))
    dist.destroy_process_group()


def test_the_ranks_of_torch_are_those_of_the_group(place: str) -> None:
    size = 3
    with processes.child(compute, 0, size, first=(place,)) as a, processes.child(compute, 1, size, first=(place,)) as b:
        with processes.child(compute, 2, size, first=(place,)) as c:
            assert [one.said() for one in (a, b, c)] == [(rank, size, [6.0]) for rank in range(size)]
            assert a.said() == "this process is not in that group of torch's"
            assert [one.said() for one in (b, c)] == [(rank, 2, [2.0]) for rank in range(2)]


def test_ranks_on_other_machines_are_refused(place: str) -> None:
    with (
        processes.child(be_elsewhere, 0, 2, first=(place,)) as a,
        processes.child(be_elsewhere, 1, 2, first=(place,)) as b,
    ):
        assert a.said().startswith("rank 1 of torch's group is on another machine than rank 0, or of another user")
        assert b.said().startswith("rank 0 of torch's group is on another machine than rank 1, or of another user")


def test_torch_has_to_be_initialised() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        vram.Group.from_torch()
