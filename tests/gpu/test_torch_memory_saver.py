"""torch_memory_saver's interface on a real GPU; its own tests run by ``make test-engines``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.torch_on_gpu import MIB, end, free_bytes

from vram.engines.torch_memory_saver import TorchMemorySaver
from vram.errors import AsleepError, OutOfMemoryError

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="could not import 'torch'")


@pytest.fixture
def saver() -> Iterator[TorchMemorySaver]:
    made = TorchMemorySaver()
    made.hook_mode = "torch"
    yield made
    end(made._ensure_initialized().pools.values())


def test_each_kind_of_backup_brings_the_bytes_back(saver: TorchMemorySaver, tmp_path: Path) -> None:
    saver.set_disk_backup_dir(str(tmp_path))
    tensors = []
    for options in ({"enable_cpu_backup": True}, {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
                    {"enable_disk_backup": True}):  # fmt: skip
        with saver.region("weights", **options):  # type: ignore[arg-type]
            tensors.append(torch.randn(40 * MIB // 4, device="cuda"))
    wanted = [one.cpu() for one in tensors]
    for _ in range(2):
        before = free_bytes()
        saver.pause("weights")
        assert free_bytes() >= before + 116 * MIB
        backups = [saver.get_cpu_backup(one, zero_copy=True) for one in tensors]
        assert [None if one is None else torch.equal(one, wanted[at]) for at, one in enumerate(backups)] == [
            True,
            True,
            None,
        ]
        saver.resume("weights")
        assert all(torch.equal(one.cpu(), other) for one, other in zip(tensors, wanted, strict=True))
    assert not list(tmp_path.iterdir())


def test_resuming_without_memory_leaves_all_paused_and_whole(saver: TorchMemorySaver) -> None:
    size = 8 << 30
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.full((MIB,), 5, dtype=torch.uint8, device="cuda")
    with saver.region("kv"):
        kv = [torch.full((size,), 1, dtype=torch.uint8, device="cuda") for _ in range(2)]
    saver.pause()
    other = torch.empty(free_bytes() - size - size // 2, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        with pytest.raises(OutOfMemoryError):
            saver.resume()
        with pytest.raises(AsleepError):
            saver.pause("kv")
    del other
    torch.cuda.empty_cache()
    saver.resume()
    assert int(weights.min()) == 5
    assert int(kv[1][0]) == 0
