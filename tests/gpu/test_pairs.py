"""Memory of each GPU, attached and borrowed on each other one: by the benchmark, which looks at what arrives."""

from __future__ import annotations

import itertools

import pytest
from benchmarks import run_benchmarks

from vram import driver as drivers
from vram.spec import Location

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]


def test_every_gpu_reads_what_every_other_one_keeps() -> None:
    (found,) = run_benchmarks(["pairs"], quick=True, progress=False, device="cuda:0")
    pairs = itertools.permutations(range(drivers.get(Location("cuda")).device_count()), 2)
    ways = ("bare calls", "vram.attach", "vram.borrow")
    wanted = [f"cuda:{a} on cuda:{b}, {what}: {way}" for a, b in pairs for what in ("mapped", "copied") for way in ways]
    assert [row.case for row in found.rows] == wanted
