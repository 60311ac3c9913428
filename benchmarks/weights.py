"""A file of weights from the page cache to the GPU: against the pinned copy rate, and reading it into memory at all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import vram
from vram import driver as drivers
from vram.arrays import weights
from vram.arrays.upload import close_rings, ring_of
from vram.bench.children import own_keeper, workplace
from vram.bench.files import write_weights
from vram.bench.gpu import Bare, bare_calls
from vram.bench.machine import fitting
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.errors import InternalError
from vram.memory import Region
from vram.spec import HOST, Location, format_size

_TENSORS = 8
_TENSOR = 512 << 20
_READ = 8 << 20  # bytes at a time, in each thread
_READERS = (1, 2, 4, 8)
_REACHED = 0.85


def on_gpu(quick: bool, location: Location) -> Result:
    """Measure the copy alone, reading alone, and both as ``vram publish-file`` does them."""
    notes: list[str] = []
    with contextlib.ExitStack() as stage:
        directory = stage.enter_context(_place())
        nbytes = _affordable(quick, location, directory, notes)
        path = directory / "w.safetensors"
        write_weights(path, {f"layer.{number}.weight": nbytes for number in range(_TENSORS)})
        plan = weights.plan(path)
        bare = stage.enter_context(bare_calls(location))
        keeper = stage.enter_context(own_keeper())
        begin = time.perf_counter()
        stage.callback(close_rings)
        ring_of(drivers.get(location), location)
        pinned = Figure.of([time.perf_counter() - begin], "ms", scale=1e3)
        _check(plan, path, location)
        with _buffers(bare, path.stat().st_size) as (host, target):
            cases: dict[str, Callable[[], float]] = {"copy": lambda: _copy(bare, target, host)}
            cases |= {f"read {count}": partial(_read, path, host, count) for count in _READERS}
            cases |= {"fill": lambda: _fill(plan, location), "publish_file": lambda: _publish(path, location, keeper)}
            values = in_turns(cases, 2 if quick else 9, warm=1)
        size = path.stat().st_size
    figures = {name: Figure.of([size / 1e9 / s for s in seconds], "GB/s") for name, seconds in values.items()}
    copy = Row("pinned copy: one buffer, one cuMemcpyHtoDAsync", figures["copy"])
    reads = [Row(f"preadv into memory, {n} thread{'s' * (n > 1)}", figures[f"read {n}"]) for n in _READERS]
    best = max(reads, key=lambda row: row.figure.median)
    lower = min(copy, best, key=lambda row: row.figure.median)
    notes.append(
        f"a file of {format_size(size)} in {directory}, {_TENSORS} tensors. The limit is the lower one of the pinned "
        f"copy and the best reading: {lower.case}. Put: memory made, header checked, filled, published"
    )
    rows = [
        copy,
        *reads,
        Row.held("into a region that is there (weights.fill)", figures["fill"], lower, at_least=_REACHED),
        Row.held("vram.publish_file", figures["publish_file"], lower, at_least=_REACHED),
        Row("pinning the ring, once in a process", pinned),
    ]
    return Result("weights", f"Weights of {format_size(size)} from the page cache to the GPU", rows, notes)


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """A directory in memory where there is one that is large enough: no disk then writes while we measure."""
    shared = Path("/dev/shm")
    with contextlib.suppress(OSError):
        found = os.statvfs(shared)
        if found.f_bavail * found.f_frsize > 2 * _TENSORS * _TENSOR and os.access(shared, os.W_OK):
            with workplace(shared) as directory:
                yield directory
            return
    with workplace() as directory:
        yield directory


def _affordable(quick: bool, location: Location, directory: Path, notes: list[str]) -> int:
    """Return the bytes of a tensor, so that file, pinned memory, and three copies on the GPU have room."""
    nbytes = fitting(location, (4 << 20) if quick else _TENSOR, _TENSORS, 3.25, notes)
    nbytes = fitting(HOST, nbytes, _TENSORS, 3, notes)
    found = os.statvfs(directory)
    while nbytes * _TENSORS * 5 // 4 > found.f_bavail * found.f_frsize and nbytes > 2 << 20:
        nbytes //= 2
    return nbytes


@contextlib.contextmanager
def _buffers(bare: Bare, nbytes: int) -> Iterator[tuple[memoryview, Any]]:
    """Make pinned memory of the host and plain memory of the GPU, a whole file large each."""
    api, ok = bare.api, bare.ok
    address = int(ok(api.cuMemHostAlloc(nbytes, 0)))
    try:
        target = ok(api.cuMemAlloc(nbytes))
        try:
            with memoryview((ctypes.c_char * nbytes).from_address(address)) as whole, whole.cast("B") as host:
                yield host, target
        finally:
            api.cuMemFree(target)
    finally:
        api.cuMemFreeHost(address)


def _copy(bare: Bare, target: Any, host: memoryview) -> float:
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    begin = time.perf_counter()
    bare.ok(bare.api.cuMemcpyHtoDAsync(target, address, host.nbytes, 0))
    bare.ok(bare.api.cuStreamSynchronize(0))
    return time.perf_counter() - begin


def _read(path: Path, host: memoryview, count: int) -> float:
    """Read the whole file into memory that was touched before, in pieces that the threads take in turns."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    short: list[int] = []

    def work(first: int) -> None:
        for start in range(first * _READ, host.nbytes, count * _READ):
            with host[start : start + _READ] as part:
                if os.preadv(fd, [part], start) < part.nbytes:
                    short.append(start)

    try:
        begin = time.perf_counter()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        spent = time.perf_counter() - begin
    finally:
        os.close(fd)
    if short:
        raise InternalError(f"{path} could not be read whole: short at byte {short[0]}")
    return spent


def _fill(plan: weights.WeightsPlan, location: Location) -> float:
    with _region(plan, location) as region:
        begin = time.perf_counter()
        weights.fill(plan, region)
        return time.perf_counter() - begin


def _publish(path: Path, location: Location, keeper: str) -> float:
    begin = time.perf_counter()
    vram.publish_file("file", path, device=location, keeper=keeper)
    spent = time.perf_counter() - begin
    vram.remove("file", keeper=keeper)
    return spent


def _check(plan: weights.WeightsPlan, path: Path, location: Location) -> None:
    """Compare what arrived with the file, once, at the end of each tensor: what is measured has to be right."""
    with _region(plan, location) as region, path.open("rb") as file:
        weights.fill(plan, region)
        for start, offset, nbytes in plan.files[0].runs:
            for end in range(nbytes, 0, -max(nbytes // _TENSORS, 1)):
                count = min(4096, end)
                found = bytearray(count)
                region.driver.copy_out(memoryview(found), region.address + offset + end - count)
                if found != os.pread(file.fileno(), count, start + end - count):
                    raise InternalError(f"bytes before {offset + end} on the GPU are not those of the file")


def _region(plan: weights.WeightsPlan, location: Location) -> Region:
    driver = drivers.get(location)
    return Region.create(location, driver=driver, capacity=plan.nbytes, nbytes=plan.nbytes)
