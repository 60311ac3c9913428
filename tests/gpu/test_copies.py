"""Copies of arrays on a real GPU, and tensors of its own for work in place on what is leased."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest

import vram
from vram.keeper.client import close_client
from vram.keeper.private import private_socket

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="could not import 'torch'")


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with private_socket() as path:
        monkeypatch.setenv("VRAM_KEEPER", path)
        yield
        gc.collect()
        close_client(path)


def test_a_deep_copy_of_a_leased_array_is_another_array() -> None:
    vram.publish("w", {"w": torch.ones(1 << 20, device="cuda:0")}, writable=True)
    with vram.attach("w", access="rw") as lease:
        with copy.deepcopy({"a": [lease["w"]]})["a"][0] as made, copy.copy(lease["w"][:4]) as part:
            assert made.device == lease["w"].device
            made.torch().add_(1)
            part[:] = [5] * 4
            assert (made.torch().sum().item(), part.to_host().tolist()) == (2 << 20, [5] * 4)
        assert lease["w"].torch().sum().item() == 1 << 20


def test_a_model_trains_on_tensors_of_its_own() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to("cuda:0")

    vram.publish("m", model().state_dict())
    with vram.attach("m") as lease:
        before = {name: array.to_host() for name, array in lease.items()}
        mine = model()
        mine.load_state_dict(lease.torch(writable="copy"), assign=True)
        optimizer = torch.optim.SGD([p.requires_grad_() for p in mine.parameters()], lr=0.1)
        mine(torch.randn(4, 8, device="cuda:0")).square().sum().backward()
        optimizer.step()
        assert mine[1].num_batches_tracked.item() == 1
        assert all((lease[name].to_host() == was).all() for name, was in before.items())
        one = lease["0.bias"].torch(writable="copy").add_(1)
        assert (one.cpu().numpy() == before["0.bias"] + 1).all()
