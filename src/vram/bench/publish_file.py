"""``vram.publish_file`` of a file in the page cache: against sendfile into a fresh memfd, the fastest way known."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import vram

from ..errors import WaitTimeoutError
from ..spec import format_size
from .children import DEADLINE, own_keeper, workplace
from .files import write_weights
from .measure import Figure, Result, Row, in_turns, warm_memory

_FEW, _MANY = 8, 2_000


def on_host(quick: bool) -> Result:
    """Measure from the call to the published version. Starting an interpreter is not in it."""
    total = (32 << 20) if quick else (1 << 30)
    rows: list[Row] = []
    with own_keeper() as keeper, workplace() as directory:
        for count in (_FEW, _MANY):
            path = directory / f"{count}.safetensors"
            nbytes = total // count // 64 * 64
            write_weights(path, {f"layer.{number}.weight": nbytes for number in range(count)})
            rows += _compare(path, count, keeper, 2 if quick else 9)
            path.unlink()
    sizes = ", ".join(f"{count} tensors of {format_size(total // count)}" for count in (_FEW, _MANY))
    return Result(
        "publish-file",
        f"vram publish-file of a file of {format_size(total)}, in the page cache",
        rows,
        [f"files of {sizes}"],
    )


def _compare(path: Path, count: int, keeper: str, rounds: int) -> list[Row]:
    nbytes = path.stat().st_size
    cases = {"sendfile": lambda: _sendfile(path), "publish_file": lambda: _publish(path, keeper)}
    values = in_turns(cases, rounds, warm=1)
    figures = {name: Figure.of([nbytes / 1e9 / s for s in seconds], "GB/s") for name, seconds in values.items()}
    raw = Row(f"sendfile into a fresh memfd, {count} tensors", figures["sendfile"])
    return [raw, Row.held(f"vram.publish_file, {count} tensors", figures["publish_file"], raw, at_least=0.9)]


def _publish(path: Path, keeper: str) -> float:
    before = _shared()
    warm_memory(path.stat().st_size)
    begin = time.perf_counter()
    vram.publish_file("file", path, device="host", keeper=keeper)
    seconds = time.perf_counter() - begin
    vram.remove("file", keeper=keeper)
    _wait_until_freed(before + path.stat().st_size // 2)
    return seconds


def _sendfile(path: Path) -> float:
    warm_memory(path.stat().st_size)
    begin = time.perf_counter()
    with contextlib.ExitStack() as opened:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, source)
        memory = os.memfd_create("rival", os.MFD_CLOEXEC)
        opened.callback(os.close, memory)
        left = os.fstat(source).st_size
        os.ftruncate(memory, left)
        while left:
            left -= os.sendfile(memory, source, None, left)
        return time.perf_counter() - begin


def _wait_until_freed(nbytes: int) -> None:
    """The keeper frees memory in a thread of its own, which would take a core from what is measured next."""
    deadline = time.monotonic() + DEADLINE
    while _shared() > nbytes:
        if time.monotonic() > deadline:
            raise WaitTimeoutError(f"shared memory did not go back to {nbytes} bytes within {DEADLINE} s")
        time.sleep(0.005)


def _shared() -> int:
    """Return the bytes of shared memory in use on this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    return 0
