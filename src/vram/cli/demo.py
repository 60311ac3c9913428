"""``vram demo``: a model outlives its publisher, is shared, grown and replaced, and every byte is compared."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text
from safetensors.numpy import load_file

import vram

from .. import driver as drivers
from ..arrays.weights import plan
from ..bench.children import Child, child, workplace
from ..bench.files import write_weights
from ..errors import InternalError, VramError
from ..spec import Location, format_count, format_size
from .tables import printer

ROWS, WIDTH = 4096, 384  # of an array that grows


def run_demo(*, device: str, weights: Path | None, workers: int) -> None:
    """Run the demonstration on a device (or ``"auto"``) with a safetensors file (or random weights)."""
    if weights is not None:
        plan(weights)  # refuses what is no such file, before anything is started
    chosen = _choose(device)
    with ExitStack() as stage:
        file = weights or stage.enter_context(workplace()) / "model.safetensors"
        if weights is None:
            write_weights(file, {f"layer.{number}": 16 << 20 for number in range(6)})
        keeper = stage.enter_context(vram.private_keeper())
        tell(f"a private keeper runs: pid {vram.statistics().pid}")
        with child(_publish, file, chosen) as publisher:
            published, seconds = publisher.hear()
            os.kill(pid := publisher.pid, signal.SIGKILL)
        tensors, size = format_count(published.arrays, "tensor"), format_size(published.nbytes)
        tell(f"process {pid} published {tensors}, {size}, in {seconds:.3f} s")
        tell(f"process {pid} was killed with SIGKILL; its memory was not", "red")
        readers = [stage.enter_context(child(_read, keeper.path, file)) for _ in range(workers)]
        reports = ask(readers, "compare")
        prove(all(same for same, _ in reports), "every tensor is as in the file")
        first = statistics.median(seconds for _, seconds in reports)
        attached = f"{format_count(workers, 'process', 'processes')} attached it and compared it byte for byte"
        tell(f"{attached} with the file: the same; attach to first byte took {first * 1e6:.0f} us")
        if chosen == "host":  # only the host's kernel counts copies
            shares = ask(readers, "pss")
            copies = sum(share for share, _ in shares) / shares[0][1]
            prove(copies < 1.02, "the readers share one copy")
            tell(f"together they hold {copies:.2f} copies of {format_size(shares[0][1])} (PSS)")
        _grow(readers, chosen)
        with vram.attach("model") as lease:
            changed = {name: vram.asarray(-array.to_host(), device=chosen) for name, array in lease.items()}
        version = vram.publish("model", changed, consume=True).version
        prove(ask(readers, "upgrade") == [(True, version)] * workers, "old readers read on, and new ones see all of it")
        tell(f"version {version} was published under the readers of version 1: the old bytes stay until they upgrade")
        ask(readers, "leave")
        left = vram.statistics()
        prove(left.leases == 0, "every lease came back")
        tell(f"all readers are gone: 0 leases, {format_size(left.nbytes)} kept")
    tell("proved: memory outlived its maker, was shared without a copy, grown and replaced", "bold green")


def _grow(readers: list[Child], device: str) -> None:
    with vram.empty((0, WIDTH), "float32", device=device, capacity=1_000_000) as vectors:
        seen: list[Any] = []
        for rows in (ROWS, 16 * ROWS):
            started = time.perf_counter()
            vectors.resize(rows)
            seconds = time.perf_counter() - started
            vectors[:] = np.arange(rows, dtype="float32")[:, None]
            before, seen = seen, ask(readers, vectors)  # the descriptors travel once, the bytes never
            prove(all(right == rows for right, _ in seen), "all see every row")
            prove(all(old == new for (_, old), (_, new) in zip(before, seen, strict=False)), "growing moved nothing")
            tell(f"an array grew to {rows} rows in {seconds * 1e6:.0f} us, in place, also for all readers")


def _publish(pipe: Connection, file: Path, device: str) -> None:
    started = time.perf_counter()
    pipe.send((vram.publish_file("model", file, device=device), time.perf_counter() - started))
    pipe.recv()  # the parent kills this process while it waits here


def _read(pipe: Connection, keeper: str, file: Path) -> None:
    wanted, took = load_file(file), []
    for _ in range(5):
        started = time.perf_counter()
        with vram.attach("model", keeper=keeper) as lease:
            next(iter(lease.values()))[:1].to_host()
        took.append(time.perf_counter() - started)
    lease = vram.attach("model", keeper=keeper)
    while isinstance(question := pipe.recv()[0], vram.Array) or question != "leave":
        if isinstance(question, vram.Array):  # the same region each time
            rows = np.arange(len(question), dtype="float32")[:, None]
            pipe.send((int((question.to_host() == rows).all(axis=1).sum()), question.address))
        elif question == "compare":
            pipe.send((_is_same(lease, wanted), statistics.median(took)))
        elif question == "pss":
            pipe.send((_pss(), lease.nbytes))
        else:
            with lease.upgrade() as newer:
                is_new = _is_same(newer, {name: -array for name, array in wanted.items()})
                pipe.send((lease.is_stale() and is_new and _is_same(lease, wanted), newer.version))
    lease.close(wait=True)
    pipe.send(None)


def _is_same(lease: vram.Lease, wanted: dict[str, np.ndarray[Any, Any]]) -> bool:
    found = {name: array.to_host() for name, array in lease.items()}
    return found.keys() == wanted.keys() and all(found[name].tobytes() == wanted[name].tobytes() for name in found)


def _pss() -> int:
    """Count the bytes of shared memory mapped by this process, each page divided by the processes that map it."""
    maps = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    sizes = (re.search(r"^Pss: +(\d+) kB", one, re.MULTILINE) for one in maps if "/memfd:vram" in one)
    return sum(int(size[1]) * 1024 for size in sizes if size)


def ask(readers: list[Child], question: Any) -> list[Any]:
    """Send a question to processes and return their answers."""
    for reader in readers:
        reader.tell(question)
    return [reader.hear() for reader in readers]


def tell(line: str, style: str = "default") -> None:
    """Print a line with the time of day."""
    said = Text(f"{time.strftime('%H:%M:%S')}  ", style="dim").append(line, f"not dim {style}")
    printer().print(said, soft_wrap=True)


def prove(holds: bool, claim: str) -> None:
    """Fail unless it holds."""
    if not holds:
        raise InternalError(f"the demo could not prove that {claim}")


def _choose(device: str) -> str:
    """Return the device, or the one that ``"auto"`` stands for: the first GPU, else the host."""
    location = Location.parse("cuda:0" if device == "auto" else device)
    try:
        drivers.get(location).device_info(location)  # says why it cannot be
    except VramError as error:
        if device != "auto":
            raise
        tell(f"--device auto: chose host memory, since {error}")
        return "host"
    if device == "auto":
        tell(f"--device auto: chose {location}")
    return str(location)
