"""Programs that start NCCL or torch's symmetric memory have multicast switched off, or do not start them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vram.bench import run_benchmarks
from vram.bench.machine import group_sizes
from vram.bench.no_multicast import NO_MULTICAST, check_no_multicast, no_multicast
from vram.errors import UsageError


def test_it_is_off_in_the_block_and_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    monkeypatch.delenv("NVSHMEM_DISABLE_NVLS", raising=False)
    before = dict(os.environ)
    with no_multicast():
        assert {name: os.environ[name] for name in NO_MULTICAST} == NO_MULTICAST
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", NO_MULTICAST)
def test_a_process_without_it_refuses_to_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for early in ("torch", "cupy", "nccl"):
        monkeypatch.delitem(sys.modules, early, raising=False)
    with no_multicast():
        check_no_multicast()
        monkeypatch.delenv(name)
        with pytest.raises(UsageError, match=f"{name}={NO_MULTICAST[name]} has to be set before"):
            check_no_multicast()


def test_so_does_one_that_has_imported_torch() -> None:
    code = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
from vram.bench.no_multicast import check_no_multicast
check_no_multicast()
"""
    with no_multicast():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "torch was imported before it was certain that multicast is off" in done.stderr


@pytest.mark.parametrize(("only", "device"), [(["allreduce"], "host"), ([], "cuda:0"), (["calls"], "cuda:0")])
def test_a_table_is_made_by_one_benchmark_of_a_gpu(only: list[str], device: str) -> None:
    with pytest.raises(UsageError, match="measured by one benchmark alone"):
        run_benchmarks(only, quick=True, progress=False, device=device, tune="routes.json")


@pytest.mark.parametrize(
    ("only", "device"), [(["allreduce"], "host"), ([], "cuda:0"), (["decoder", "calls"], "cuda:0")]
)
def test_how_many_gpus_is_said_to_what_goes_by_it(only: list[str], device: str) -> None:
    with pytest.raises(UsageError, match="by these benchmarks of GPUs only: allreduce, decoder"):
        run_benchmarks(only, quick=True, progress=False, device=device, gpus=2)


@pytest.mark.parametrize("gpus", [-1, 0, 1, 3, 8])
def test_more_gpus_than_there_are_is_refused(gpus: int) -> None:
    with pytest.raises(UsageError, match=f"groups of {gpus} GPUs cannot be measured here: .*number of GPUs is 2"):
        group_sizes(2, gpus)
    assert group_sizes(7, None) == [2, 4]
    assert group_sizes(3, 3) == [3]
