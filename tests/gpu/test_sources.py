"""Every source of memory that this machine has, by every way to another process: the table of docs/sharing.md as tests.

Each row runs in processes of its own, since some allocators want an environment of theirs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from benchmarks.sources import ELSEWHERE, SOURCES, WAYS

from vram import driver as drivers
from vram.spec import Location

# These lie on the host, to which every GPU is another; all other sources lie on cuda:0.
ON_THE_HOST = {source.name for source in SOURCES if "host" in source.name or "CPU" in source.name} | {
    "vram array on cuda:numa:0",
    "numpy view of a vram array",
    "numpy array",
    "multiprocessing.shared_memory",
}
# What is sure of a source wherever it runs: how it goes. Other libraries' allocators may change with their releases.
SURE = {
    "vram array on a GPU": "by file descriptor",
    "a pool with a handle type": "by its pool's file descriptor and a 64-byte handle",
    "PyTorch, default allocator": "by a 64-byte handle",
    "CuPy, default pool": "by a 64-byte handle",
    "Numba device array": "by a 64-byte handle",
    "vram array on the host": "by file descriptor",
    "numpy view of a vram array": "by file descriptor",
}


AT_ONCE = 8  # each of them imports torch or its like in several processes, for most of its time


def run(source: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.sources", "cuda:0", source.name],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **source.environment},
    )  # fmt: skip


def is_installed(source: Any) -> bool:
    return not source.package or importlib.util.find_spec(source.package) is not None


@pytest.fixture(scope="module")
def done(request: pytest.FixtureRequest) -> dict[str, subprocess.CompletedProcess[str]]:
    """What came of each row that is tested here."""
    wanted = [item.callspec.params["source"] for item in request.session.items if item.path == request.path]
    wanted = [source for source in wanted if is_installed(source)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip([source.name for source in wanted], pool.map(run, wanted), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_it_goes_as_explained_or_says_why_not(source: Any, done: dict[str, subprocess.CompletedProcess[str]]) -> None:
    if not is_installed(source):
        pytest.skip(f"{source.package} is not installed here")
    ended, name = done[source.name], source.name
    assert ended.returncode == 0, ended.stderr[-2000:]
    row = json.loads(ended.stdout.splitlines()[-1])
    assert row.pop("source") == name
    route = row.pop("route")
    if name in SURE:
        assert route.startswith(f"goes {SURE[name]};"), route
    assert set(row) == set(WAYS)
    assert not any("WRONG" in cell for cell in row.values()), row
    elsewhere = row[ELSEWHERE]
    if not route.startswith("goes "):
        assert elsewhere.startswith("no: "), row
    elif name not in ON_THE_HOST and drivers.get(Location("cuda")).device_count() < 2:
        assert elsewhere == "did not run: it takes two GPUs", row
    elif "its pool's" in route:
        assert elsewhere == "no: cuda:1, where memory of a pool on cuda:0 is not opened", row
    else:
        assert elsewhere == "works", row
    if not route.startswith("goes "):
        assert all(row[way].startswith("no: ") for way in ("lend and borrow", "channel", "queue")), row
        return
    assert row["lend and borrow"] == row["channel"] == "works", row
    if "a publish copies it" in route:
        assert row["publish"].startswith("copied: "), row
        assert row["queue"].startswith("no: "), row
    else:
        assert row["publish"] == row["queue"] == "works", row
    assert (row["64-byte handle"] == "works") is ("by a 64-byte handle;" in route), row
