"""Programs that start NCCL or torch's symmetric memory have multicast switched off, or do not start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from benchmarks.groups import NO_MULTICAST, check_no_multicast, no_multicast

from vram.errors import UsageError


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
