"""A keeper with much GPU memory: how large it is itself, and that it has nothing to do with the GPU."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import vram
from vram import driver as drivers
from vram.bench.children import own_keeper
from vram.bench.gpu import bare_calls
from vram.bench.machine import fitting
from vram.bench.measure import Figure, Result, Row
from vram.keeper.client import KeeperClient, Segment
from vram.memory import PhysicalAllocation
from vram.spec import HandleKind, Location, format_size

from .entries import rss

_ENTRIES = 64
_ENTRY = 1 << 30
_MOST = 40.0  # MiB


def on_gpu(quick: bool, location: Location) -> Result:
    """Fill a keeper with GPU memory that nobody else holds, and look at its process from outside."""
    notes: list[str] = []
    nbytes = fitting(location, (2 << 20) if quick else _ENTRY, _ENTRIES, 1.05, notes)
    with own_keeper() as keeper, bare_calls(location) as bare:
        pid = vram.statistics(keeper=keeper).pid
        empty = rss(pid)
        before = bare.free_bytes()
        _fill(keeper, location, nbytes)
        held = before - bare.free_bytes()
        full = rss(pid)
        traces = _traces(pid)
    notes.append(
        f"{_ENTRIES} entries of {format_size(nbytes)}, whose publisher has let go of them: by cuMemGetInfo "
        f"{format_size(held)} are held by the keeper's descriptors alone"
    )
    notes.append(f"of NVIDIA's user-space driver the keeper's process has {', '.join(traces) or 'nothing'}")
    return Result(
        "keeper",
        f"A keeper with {format_size(nbytes * _ENTRIES)} of GPU memory",
        [
            Row("resident, without entries", Figure.of([empty], "MiB")),
            Row.limited(f"resident, with {_ENTRIES} entries", Figure.of([full], "MiB"), at_most=_MOST),
            Row(
                "GPU memory that it keeps alive",
                Figure.of([held / 2**30], "GiB"),
                target="no CUDA context in it: neither libcuda nor /dev/nvidia-uvm",
                reached=not traces and held > 0.99 * nbytes * _ENTRIES,
            ),
        ],
        notes,
    )


def _fill(keeper: str, location: Location, nbytes: int) -> None:
    driver = drivers.get(location)
    device = driver.device_info(location).uuid
    with KeeperClient.connect(keeper, label="benchmark") as client:
        for number in range(_ENTRIES):
            with PhysicalAllocation.create(driver, nbytes, location) as memory:
                piece = Segment(memory.nbytes, HandleKind.POSIX_FD, device)
                client.publish(f"gpu/{number}", [piece], [memory.export()], manifest=bytes(200))


def _traces(pid: int) -> list[str]:
    """Return what a process that uses CUDA would have: the library, and the device of its unified memory."""
    found = []
    if "libcuda" in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
        found.append("libcuda")
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(fd).startswith("/dev/nvidia-uvm"):
                return [*found, "/dev/nvidia-uvm"]
    return found
