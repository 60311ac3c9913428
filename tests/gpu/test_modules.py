"""A module of torch on a GPU: published, moved into published memory, and made again on it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

import vram

torch = pytest.importorskip("torch", reason="could not import 'torch'")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are not ours
LAYERS, WIDTH = 32, 2048  # 512 MiB


@pytest.fixture(autouse=True)
def keeper() -> Iterator[None]:
    with vram.private_keeper():
        yield
        gc.collect()
        torch.cuda.empty_cache()


def make() -> Any:
    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    module.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)
    return module


def answer(module: Any) -> Any:
    with torch.no_grad():
        return module(torch.ones(2, WIDTH, device="cuda:0")) + module.table


@pytest.mark.parametrize("consume", [False, True])
def test_a_module_is_shared_on_a_gpu(consume: bool) -> None:
    published = make().to("cuda:0")
    nbytes = sum(one.nbytes for one in published.parameters())
    wanted = answer(published)
    torch.cuda.synchronize()
    vram.publish("m", published, consume=consume)
    assert torch.equal(answer(published), wanted)
    before = torch.cuda.mem_get_info(0)[0]
    with vram.attach("m") as lease:
        made = lease.module(make)
        tensors = lease.torch()
    assert made.table.device == torch.device("cuda:0")
    assert {name: one.data_ptr() for name, one in made.state_dict().items()} == {
        name: one.data_ptr() for name, one in tensors.items()
    }
    assert torch.equal(answer(made), wanted)
    assert before - torch.cuda.mem_get_info(0)[0] < nbytes // 4, "it is in memory once more"
    if consume:
        assert torch.cuda.memory_allocated(0) < nbytes // 4, "the publisher has its own copy still"
