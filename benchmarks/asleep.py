"""Leases that sleep and wake, and entries on disk: against the bare calls, and plain writes and reads."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import vram
from vram import driver as drivers
from vram.bench.children import own_keeper, workplace
from vram.bench.machine import fitting
from vram.bench.measure import Figure, Result, Row, in_turns, timed, warm_memory
from vram.keeper.client import KeeperClient
from vram.open_files import close_fds
from vram.spec import HOST, Access, HandleKind, Location, format_size

_SEGMENTS, _LEASES = 32, 100
_PIECE = 64 << 20  # bytes of a plain write or read
_DISK = 4 << 30  # bytes of a GPU's memory that are saved


def on_host(quick: bool) -> Result:
    """Measure all of it on the host, the disk included."""
    nbytes = (64 << 20) if quick else (2 << 30)
    with own_keeper() as keeper:
        rows = [*_lease(HOST, nbytes, keeper, quick), *_process(keeper, quick), *_disk(HOST, nbytes, keeper, quick)]
    return Result("asleep", f"Leases asleep, {format_size(nbytes)} in {_SEGMENTS} segments", rows, [])


def on_gpu(quick: bool, location: Location) -> Result:
    """Measure sleep and wake of memory of a GPU, and its way to disk and back."""
    notes: list[str] = []
    nbytes = fitting(location, (64 << 20) if quick else (64 << 30), 1, 1.05, notes)
    with own_keeper() as keeper:
        rows = [*_lease(location, nbytes, keeper, quick), *_process(keeper, quick)]
        rows += _disk(location, min(nbytes, _DISK), keeper, quick)
    return Result("asleep", f"Leases asleep, {format_size(nbytes)} in {_SEGMENTS} segments", rows, notes)


def _lease(location: Location, nbytes: int, keeper: str, quick: bool) -> Iterator[Row]:
    """Compare one lease with the calls of the driver that it takes."""
    with vram.empty(nbytes, "uint8", device=location, chunk=-(-nbytes // _SEGMENTS)) as array:
        vram.publish("w", {"w": array}, keeper=keeper)
    with vram.attach("w", keeper=keeper) as lease, _bare(location, keeper) as (unmap, map_again):
        cases: dict[str, Callable[[], float]] = {
            "unmap": unmap, "map": map_again, "sleep": partial(timed, lease.sleep), "wake": partial(timed, lease.wake),
        }  # fmt: skip
        found = in_turns(cases, 3 if quick else 20)
    figures = {name: Figure.of(values, "ms", scale=1e3) for name, values in found.items()}
    for ours, bare, what in (("sleep", "unmap", "unmap and release"), ("wake", "map", "import, map, set access")):
        raw = Row(f"bare calls: {what}", figures[bare])
        yield raw
        yield Row.held(f"lease.{ours}", figures[ours], raw, at_most=1.3)
    vram.remove("w", keeper=keeper)


@contextlib.contextmanager
def _bare(location: Location, keeper: str) -> Iterator[tuple[Callable[[], float], Callable[[], float]]]:
    """Map the entry by calls of the driver alone; yield what unmaps it and what maps it again, in seconds."""
    driver = drivers.get(location)
    with KeeperClient.connect(keeper) as client:
        leased = client.attach("w")
        sizes = [segment.size for segment in leased.segments]
        total = sum(sizes)
        address = driver.address_reserve(total)
        handles: list[int] = []

        def map_all() -> None:
            at = address
            for fd, size in zip(leased.fds, sizes, strict=True):
                handles.append(driver.mem_import(fd, HandleKind.POSIX_FD, size))
                driver.mem_map(at, size, 0, handles[-1])
                at += size
            driver.mem_set_access(address, total, Access.READ, [location])

        def unmap_all() -> None:
            at = address
            for size in sizes:
                driver.mem_unmap(at, size)
                at += size
            while handles:
                driver.mem_release(handles.pop())

        map_all()
        try:
            yield partial(timed, unmap_all), partial(timed, map_all)
        finally:
            unmap_all()
            driver.address_free(address, total)
            close_fds(leased.fds)


def _process(keeper: str, quick: bool) -> list[Row]:
    """Measure a process with many leases, all of which go and come."""
    count = 5 if quick else _LEASES
    for number in range(count):
        vram.publish(f"of/{number}", {"x": vram.zeros(1 << 20, "uint8", device="host")}, keeper=keeper)
    with contextlib.ExitStack() as held:
        for number in range(count):
            held.enter_context(vram.attach(f"of/{number}", keeper=keeper))
        values = in_turns({"both": lambda: timed(vram.detach_all) + timed(vram.reattach_all)}, 2 if quick else 9)
    for number in range(count):
        vram.remove(f"of/{number}", keeper=keeper)
    return [Row.limited(f"detach_all and reattach_all, {count} leases", Figure.of(values["both"], "s"), at_most=0.2)]


def _disk(location: Location, nbytes: int, keeper: str, quick: bool) -> Iterator[Row]:
    """Compare an entry that is written and brought back with writes and reads of as many bytes."""
    with vram.zeros(nbytes, "uint8", device=location) as array:
        array.fill(1)
        vram.publish("w", {"w": array}, keeper=keeper)
    with workplace() as place:
        cases = {
            "write": lambda: _write(place / "plain", nbytes),
            "save": lambda: _save(place / "w.safetensors", nbytes, keeper),
            "read": lambda: _read(place / "plain", nbytes),
            "publish": lambda: _publish(place / "w.safetensors", nbytes, location, keeper),
        }
        found = in_turns(cases, 2 if quick else 5, warm=1)
    figures = {name: Figure.of([nbytes / 1e9 / s for s in values], "GB/s") for name, values in found.items()}
    written, read = Row("plain write and flush", figures["write"]), Row("plain read into memory", figures["read"])
    yield written
    yield Row.held("vram.save", figures["save"], written, at_least=0.9)
    yield read
    yield Row.held("vram.publish_file of that", figures["publish"], read, at_least=0.9)


def _save(path: Path, nbytes: int, keeper: str) -> float:
    """Time a save into a new file, as the plain write has one: what is replaced would be freed meanwhile."""
    path.unlink(missing_ok=True)
    warm_memory(nbytes)
    return timed(lambda: vram.save("w", path, keeper=keeper))


def _write(path: Path, nbytes: int) -> float:
    path.unlink(missing_ok=True)
    warm_memory(nbytes)
    data = memoryview(bytearray(_PIECE))
    begin = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        for at in range(0, nbytes, _PIECE):
            file.write(data[: min(_PIECE, nbytes - at)])
        os.fsync(file.fileno())
    return time.perf_counter() - begin


def _read(path: Path, nbytes: int) -> float:
    warm_memory(nbytes)
    begin = time.perf_counter()
    data = memoryview(bytearray(nbytes))
    with open(path, "rb", buffering=0) as file:
        at = 0
        while at < nbytes:
            at += file.readinto(data[at:])
    return time.perf_counter() - begin


def _publish(path: Path, nbytes: int, location: Location, keeper: str) -> float:
    warm_memory(nbytes)
    seconds = timed(lambda: vram.publish_file("again", path, device=location, keeper=keeper))
    vram.remove("again", keeper=keeper)
    return seconds
