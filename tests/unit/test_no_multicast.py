"""Programs that start NCCL or torch's symmetric memory have multicast switched off, or do not start them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from benchmarks import allreduce, run_benchmarks
from benchmarks.groups import NO_MULTICAST, check_no_multicast, group_sizes, no_multicast

from vram import driver as drivers
from vram.errors import UsageError
from vram.spec import Location


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave the environment as it was: tests of this process that come later make multicast objects on the stand-in."""
    before = {name: os.environ.get(name) for name in NO_MULTICAST}
    yield
    assert {name: os.environ.get(name) for name in NO_MULTICAST} == before


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
        del os.environ[name]  # by monkeypatch, its end would set what the block has set
        with pytest.raises(UsageError, match=f"{name}={NO_MULTICAST[name]} has to be set before"):
            check_no_multicast()


def test_so_does_one_that_has_imported_torch() -> None:
    code = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
from benchmarks.groups import check_no_multicast
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


@pytest.mark.parametrize("gpus", [0, 3])
def test_more_gpus_than_there_are_is_refused_before_what_is_installed(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without cuda.core the command said that it did not run, and its exit status was 0."""
    monkeypatch.setattr(drivers, "get", lambda _: SimpleNamespace(device_count=lambda: 2))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=f"groups of {gpus} GPUs cannot be measured here"):
        allreduce.on_gpu(True, Location("cuda", 0), gpus=gpus)
    (note,) = allreduce.on_gpu(True, Location("cuda", 0), gpus=2).notes
    assert "cuda.core" in note
