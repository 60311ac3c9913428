"""Tensors over read-only memory of the host are copy-on-write: a write ends nobody, and nobody else sees it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vram
from vram.errors import BusyError, UsageError

torch = pytest.importorskip("torch", reason="could not import 'torch'")


@pytest.fixture(autouse=True)
def keeper() -> Iterator[None]:
    with vram.private_keeper():
        yield


def model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))


def private_kib(tensor: Any) -> int:
    """Return how much of the mapping of a tensor is this process's own, in KiB."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, stop = (int(one, 16) for one in head.split("-"))
            inside = start <= tensor.data_ptr() < stop
        elif inside and head == "Anonymous:":
            return int(line.split()[1])
    raise AssertionError("no mapping")


def test_a_model_on_leased_weights_may_train() -> None:
    vram.publish("m", model().state_dict())
    with vram.attach("m") as lease, vram.attach("m") as other:
        before = {name: array.copy() for name, array in lease.items()}
        mine = model()
        mine.load_state_dict(lease.torch(), assign=True)
        mine(torch.randn(4, 8)).sum()  # BatchNorm in training mode writes to its buffers
        for parameter in mine.parameters():
            parameter.requires_grad_(True)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        mine(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        assert mine[1].num_batches_tracked == 2
        assert any((before[name] != value.detach().numpy()).any() for name, value in mine.state_dict().items())
        for name, was in before.items():
            assert np.array_equal(lease[name].numpy(), was)
            assert np.array_equal(other.torch()[name].numpy(), was)


def test_tensors_of_one_memory_see_the_same_private_pages_while_one_lives() -> None:
    vram.publish("x", {"a": np.zeros(4, "f4"), "b": np.zeros(4, "f4")})
    with vram.attach("x") as lease:
        kept = lease.torch()["b"]
        kept_too = lease.torch()["a"].add_(1)
        assert lease["a"].torch().tolist() == lease.torch()["a"].tolist() == [1, 1, 1, 1]
        assert lease["a"].numpy().tolist() == [0, 0, 0, 0]
        lease["a"].close()
        lease["b"].close()
        del kept, kept_too
        gc.collect()
        with vram.attach("x") as again:
            assert again["a"].torch().tolist() == [0, 0, 0, 0]


def test_pages_are_shared_until_they_are_written() -> None:
    vram.publish("x", {"a": np.ones(1 << 20, "f4")})  # 4 MiB
    with vram.attach("x") as lease:
        tensor = lease["a"].torch()
        assert float(tensor.sum()) == 1 << 20
        assert private_kib(tensor) == 0
        tensor[0] = 2
        assert 0 < private_kib(tensor) <= 2048


def test_a_tensor_outlives_the_lease_and_is_what_holds_the_array() -> None:
    vram.publish("x", {"a": np.zeros(4, "f4")})
    with vram.attach("x") as lease:
        array = lease["a"]
        tensor = array.torch()
        with pytest.raises(BusyError, match="torch tensor"):
            array.close(strict=True)
    tensor += 1
    assert tensor.tolist() == [1, 1, 1, 1]
    assert vram.statistics().leases == 1
    del tensor
    gc.collect()
    assert vram.statistics().leases == 0


def test_a_written_tensor_is_published_and_sent_as_it_is() -> None:
    vram.publish("x", {"a": np.zeros(4, "f4")})
    with vram.attach("x") as lease:
        tensor = lease["a"].torch().add_(1)
        published = vram.publish("y", {"a": tensor})
        assert "private copy" in published.copied["a"]
        with vram.attach("y") as again, vram.attach("x") as first:
            assert (again["a"].numpy().tolist(), first["a"].numpy().tolist()) == ([1] * 4, [0] * 4)
        with vram.asarray(tensor, device="host") as own:
            assert own.numpy().tolist() == [1] * 4


def test_a_tensor_that_was_not_written_is_shared_in_place() -> None:
    with vram.asarray(np.ones(1 << 20, "f4"), device="host") as a, vram.asarray(np.ones(9, "f4"), device="host") as b:
        vram.publish("x", {"a": a, "b": b})
    with vram.attach("x") as lease:
        tensors = {name: array.torch() for name, array in lease.items()}
        tensors["b"][-1] = 7
        assert list(vram.publish("y", tensors).copied) == ["b"]
        ours, theirs = vram.ArrayChannel.pair()
        with ours, theirs, vram.share(tensors["a"]) as array:
            ours.send(array)
            with theirs.recv(timeout=60) as came:
                assert came.numpy().all()
        with vram.attach("y") as other:
            assert (other["b"].numpy()[-1], other["a"].numpy()[-1]) == (7, 1)


def test_consumers_of_dlpack_that_do_not_care_write_privately() -> None:
    vram.publish("x", {"a": np.zeros(4, "f4")})
    with vram.attach("x") as lease:
        tensor = torch.from_dlpack(lease["a"]).add_(1)
        assert (tensor.tolist(), lease["a"].numpy().tolist()) == ([1] * 4, [0] * 4)
        shown = np.from_dlpack(lease["a"])
        assert not shown.flags.writeable
        del tensor, shown


def test_what_was_published_in_place_is_copy_on_write_for_its_publisher_too() -> None:
    with vram.zeros(4, device="host") as array:
        vram.publish("x", {"a": array})
        tensor = array.torch().add_(1)
        with vram.attach("x") as lease:
            assert (tensor.tolist(), lease["a"].numpy().tolist()) == ([1] * 4, [0] * 4)
        del tensor


def test_i14_an_update_takes_private_pages_away_at_the_next_section() -> None:
    vram.publish("x", {"a": np.zeros(4, "f4"), "b": np.zeros(1 << 20, "f4")}, updatable=True)
    with vram.attach("x") as lease:
        tensors = lease.torch()
        tensors["a"].add_(5)
        with lease.reading() as version:
            assert tensors["a"].tolist() == [5] * 4
        with vram.update("x") as arrays:
            arrays["a"][:] = 1
            arrays["b"][:] = 1
        with lease.reading() as newer:
            assert newer == version + 1
            assert (tensors["a"].tolist(), float(tensors["b"].min())) == ([1] * 4, 1)
        assert private_kib(tensors["a"]) == 0


def test_i14_a_section_in_one_slot_keeps_its_writes_while_another_thread_enters_the_next() -> None:
    vram.publish("x", {"a": np.zeros(4, "f4")}, updatable=True, swap=True)
    seen: list[object] = []

    def enter() -> None:
        with lease.reading() as version:
            seen.append((version, lease["a"].torch().tolist()))

    with vram.attach("x") as lease:
        with lease.reading() as version:
            tensor = lease["a"].torch().add_(5)
            with vram.update("x") as arrays:
                arrays["a"][:] = 1
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
            assert (seen, tensor.tolist()) == ([(version + 1, [1] * 4)], [5] * 4)
        del tensor


def test_tensors_of_an_array_that_grows_follow_it() -> None:
    with vram.zeros((2, 2), device="host", capacity=3_000_000, chunk="2MiB") as array:
        vram.publish("x", {"a": array}, writable=True)
        with vram.attach("x", growing=True) as lease:
            few = lease["a"].torch()
            few[0, 0] = 7
            array.resize(1_000_000)
            array.numpy()[999_999] = 3
            vram.publish("x", {"a": array}, writable=True)
            lease.refresh()
            many = lease["a"].torch()
            assert (many.shape, many[0, 0], many[999_999].tolist()) == ((1_000_000, 2), 7, [3, 3])
            assert many.data_ptr() == few.data_ptr()
            del few, many
            gc.collect()


def test_a_copy_has_memory_of_its_own() -> None:
    vram.publish("x", {"a": np.zeros(4, "f4"), "b": np.arange(3)})
    with vram.attach("x") as lease:
        copies = lease.torch(writable="copy")
        copies["b"].add_(1)
        one = lease["a"].torch(writable="copy").add_(1)
        assert (copies["b"].tolist(), one.tolist()) == ([1, 2, 3], [1] * 4)
        assert (lease.torch()["b"].tolist(), lease["a"].torch().tolist()) == ([0, 1, 2], [0] * 4)
        for wrong in ("rw", True):
            for call in (lease.torch, lease["a"].torch):
                with pytest.raises(UsageError, match='writable must be "copy"'):
                    call(writable=wrong)
