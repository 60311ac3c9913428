"""Groups of the processes of a ``torch.distributed`` group, and the all-reduces that vLLM calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection

import pytest
from tests.support import children as processes
from tests.support.deadlines import SOON
from tests.support.places import short_directory

import vram
from vram.collectives import meeting
from vram.errors import UsageError

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


# -- torch's collectives ----------------------------------------------------------------------------------------------
def reduce(place: str, pipe: Connection, rank: int, size: int) -> None:
    """Sum up as vLLM would, eagerly and compiled, and say what came of each."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from vram.engines.torch_collectives import CustomAllreduce, all_reduce, all_reduce_norm

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store, patience = dist.FileStore(f"{place}/store", size), timedelta(seconds=SOON)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    custom = CustomAllreduce(dist.group.WORLD, "cpu", max_size=1 << 16, timeout=SOON)
    mine = torch.arange(100, dtype=torch.bfloat16) * (rank + 1)
    said = [custom.custom_all_reduce(mine).tolist(), mine.tolist() == (torch.arange(100.0) * (rank + 1)).tolist()]
    out = torch.zeros(100, dtype=torch.bfloat16)
    with custom.capture():
        assert custom.all_reduce(mine, out=out) is out
    custom.register_graph_buffers()
    said.append(out.tolist())
    name = custom.name
    # The back end that compiles nothing: what is traced is what matters, and there is no compiler here.
    compiled = torch.compile(lambda x: all_reduce(x * 2, name) + 1, fullgraph=True, backend="aot_eager")
    said.append(compiled(mine).tolist())
    residual, weight = torch.linspace(-1, 1, 100, dtype=torch.bfloat16), torch.linspace(1, 2, 20, dtype=torch.bfloat16)
    rows = [one.reshape(5, 20) for one in (mine, residual)]
    fused = torch.compile(lambda x, y: all_reduce_norm(x, y, weight, 1e-5, name), fullgraph=True, backend="aot_eager")
    same = [
        [one.tolist() for one in call(*rows)]
        for call in (partial(custom.all_reduce_norm, weight=weight, epsilon=1e-5), fused)
    ]
    said += [same[0], same[0] == same[1], custom.should_normalize(rows[0]), custom.should_normalize(rows[0].t())]
    said += [
        custom.should_custom_ar(torch.zeros(1 << 15)),
        custom.should_custom_ar(torch.zeros(100, dtype=torch.int64)),
        custom.should_custom_ar(torch.zeros(10, 10).t()),
        custom.custom_all_reduce(torch.zeros(0)),
    ]
    custom.check()
    dist.barrier()  # who closes leaves the group
    custom.close()
    custom.close()
    try:
        all_reduce(mine, name)
    except UsageError as error:
        said.append(str(error))
    pipe.send(said)
    dist.destroy_process_group()


def test_tensors_are_reduced_as_vllm_asks_for_it_and_in_compiled_code(place: str) -> None:
    with (
        processes.child(reduce, 0, 2, first=(place,)) as first,
        processes.child(reduce, 1, 2, first=(place,)) as second,
    ):
        given = [torch.arange(100, dtype=torch.bfloat16) * (rank + 1) for rank in range(2)]
        total = (given[0].float() + given[1].float()).bfloat16().tolist()
        twice = ((given[0] * 2).float() + (given[1] * 2).float()).bfloat16() + 1
        for one in (first, second):
            eager, kept, out, compiled, fused, *others, closed = one.said()
            assert (eager, kept, out) == (total, True, total)
            assert compiled == twice.tolist()
            summed = (torch.tensor(total) + torch.linspace(-1, 1, 100, dtype=torch.bfloat16)).bfloat16().reshape(5, 20)
            assert torch.equal(torch.tensor(fused[1]), summed.float())
            weight = torch.linspace(1, 2, 20, dtype=torch.bfloat16)
            wanted = torch.nn.functional.rms_norm(summed, (20,), weight, 1e-5)
            torch.testing.assert_close(torch.tensor(fused[0]), wanted.float(), rtol=2**-7, atol=0)
            assert others == [True, True, False, False, False, False, None]
            assert "it was closed" in closed


def test_the_operator_is_what_torch_takes_it_for() -> None:
    from vram.engines import torch_collectives

    with pytest.raises(UsageError, match="there is no group 'nowhere'"):
        torch_collectives.all_reduce(torch.zeros(4), "nowhere")
    with torch._subclasses.FakeTensorMode():
        assert torch_collectives.all_reduce(torch.zeros(4, 3), "nowhere").shape == (4, 3)
        some = torch.zeros(4, 3)
        shapes = [one.shape for one in torch_collectives.all_reduce_norm(some, some, torch.zeros(3), 1e-5, "nowhere")]
        assert shapes == [(4, 3), (4, 3)]
