"""Updates in place on a real GPU, with torch: its tensors, its streams, its graphs, and memory of a pool of ours."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
from tests.support.places import private_socket

import vram
from vram.errors import UsageError
from vram.keeper.client import close_client

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="could not import 'torch'")
LARGE = 64 << 20  # elements: its copies take long enough to be under way


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with private_socket() as path:
        monkeypatch.setenv("VRAM_KEEPER", path)
        yield
        gc.collect()
        close_client(path)


@pytest.mark.usefixtures("kept")
def test_work_on_streams_of_torch_is_waited_for() -> None:
    vram.publish("w", {"w": torch.ones(LARGE, device="cuda:0")}, updatable=True)
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    with vram.attach("w") as lease:
        shown = lease["w"].torch()
        for value in range(2, 12):
            found = torch.zeros(LARGE, device="cuda:0")
            torch.cuda.synchronize()
            with lease.reading(stream=theirs) as version, torch.cuda.stream(theirs):
                for _ in range(8):
                    found.copy_(shown)
            with vram.update("w", stream=ours) as arrays, torch.cuda.stream(ours):
                for _ in range(8):
                    arrays["w"].torch().fill_(value)
            assert (version, found.min().item(), found.max().item()) == (value - 1, value - 1, value - 1)
        del shown, found, arrays


@pytest.mark.usefixtures("kept")
def test_a_graph_is_captured_outside_of_sections_and_launched_inside() -> None:
    vram.publish("w", {"w": torch.ones(1000, device="cuda:0")}, updatable=True)
    with vram.attach("w") as lease:
        shown, found, stream = lease["w"].torch(), torch.zeros(1000, device="cuda:0"), torch.cuda.Stream()
        lease.reading()  # the page is made, and nothing is waited for
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            with pytest.raises(UsageError, match="captures a graph"):
                lease.reading(stream=stream)
            with pytest.raises(UsageError, match="captures a graph"):
                vram.update("w", stream=stream).__enter__()
            found.copy_(shown)
        for value in (2, 3):
            with vram.update("w") as arrays:
                arrays["w"].torch().fill_(value)
            with lease.reading(stream=stream) as version, torch.cuda.stream(stream):
                graph.replay()
            assert (version, found.unique().tolist()) == (value, [value])
        del shown, found, graph, arrays


@pytest.mark.usefixtures("kept")
def test_a_graph_is_captured_for_each_of_two_slots() -> None:
    vram.publish("w", {"w": torch.ones(1000, device="cuda:0")}, updatable=True, swap=True)
    with vram.attach("w") as lease:
        found, stream, graphs = torch.zeros(1000, device="cuda:0"), torch.cuda.Stream(), []
        lease.reading()  # the page is made, and nothing is waited for
        for slot in lease.slots:
            graphs.append(torch.cuda.CUDAGraph())
            shown = slot["w"].torch()
            with torch.cuda.graph(graphs[-1], stream=stream):
                found.copy_(shown)
        for value in range(2, 7):
            with vram.update("w", stream=stream) as arrays, torch.cuda.stream(stream):
                arrays["w"].torch().fill_(value)
            with lease.reading(stream=stream) as version, torch.cuda.stream(stream):
                graphs[lease.slot].replay()
            assert (version, lease.torn, found.unique().tolist()) == (value, False, [value])
        with lease.reading(stream=stream) as version:  # and nobody waits for who stays inside
            with vram.update("w", timeout=0) as arrays:
                arrays["w"].torch().fill_(7)
            with torch.cuda.stream(stream):
                graphs[lease.slot].replay()
        assert (version, found.unique().tolist()) == (6, [6])
        del shown, found, graphs, arrays, slot


@pytest.mark.usefixtures("kept")
def test_work_on_streams_of_torch_is_waited_for_before_its_slot_is_written() -> None:
    vram.publish("w", {"w": torch.ones(LARGE, device="cuda:0")}, updatable=True, swap=True)
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    with vram.attach("w") as lease:
        for value in range(2, 12):
            found = torch.zeros(LARGE, device="cuda:0")
            torch.cuda.synchronize()
            with lease.reading(stream=theirs) as version, torch.cuda.stream(theirs):
                shown = lease["w"].torch()
                for _ in range(8):
                    found.copy_(shown)
                with vram.update("w", stream=ours) as arrays, torch.cuda.stream(ours):
                    arrays["w"].torch().fill_(value)
            assert (version, found.min().item(), found.max().item()) == (value - 1, value - 1, value - 1)
        del shown, found, arrays


@pytest.mark.usefixtures("kept")
def test_tensors_of_a_pool_are_updated_where_they_are() -> None:
    pool = vram.TorchPool("cuda:0")
    with pool.use("weights"):
        weights = {name: torch.full((32 << 20,), 1, dtype=torch.uint8, device="cuda:0") for name in ("a", "b")}
    receipt = vram.publish("w", weights, updatable=True)
    assert receipt.copied == {}
    with vram.attach("w") as lease:
        with vram.update("w") as arrays:
            assert [array.address for array in arrays.values()] == [one.data_ptr() for one in weights.values()]
            for one in weights.values():
                one.fill_(2)
        with lease.reading() as version:
            assert version == 2
            assert [int(array.to_host().max()) for array in lease.values()] == [2, 2]
        del arrays
    vram.remove("w")
    del weights, one
    gc.collect()
    pool.close()
    torch.cuda.empty_cache()
    pool.trim()
    vram.memory.trim()


# -- copies -----------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("kept")
def test_a_deep_copy_of_a_leased_array_is_another_array() -> None:
    vram.publish("w", {"w": torch.ones(1 << 20, device="cuda:0")}, writable=True)
    with vram.attach("w", access="rw") as lease:
        with copy.deepcopy({"a": [lease["w"]]})["a"][0] as made, copy.copy(lease["w"][:4]) as part:
            assert made.device == lease["w"].device
            made.torch().add_(1)
            part[:] = [5] * 4
            assert (made.torch().sum().item(), part.to_host().tolist()) == (2 << 20, [5] * 4)
        assert lease["w"].torch().sum().item() == 1 << 20


@pytest.mark.usefixtures("kept")
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
