"""``vram demo``: a model outlives its publisher, is shared, grown and replaced, and every byte is compared."""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text
from safetensors.numpy import load_file, save_file

import vram

from .. import driver as drivers
from ..arrays.weights import plan
from ..errors import InternalError, VramError
from ..programs import python
from ..spec import Location, format_count, format_size
from .tables import printer

DEADLINE = 120.0  # seconds for any answer of a process
ROWS, WIDTH = 4096, 384


def tell(line: str, style: str = "default") -> None:
    """Print a line with the time of day."""
    printer().print(
        Text(f"{time.strftime('%H:%M:%S')}  ", style="dim").append(line, f"not dim {style}"), soft_wrap=True
    )


def prove(holds: bool, claim: str) -> None:
    """Fail unless it holds."""
    if not holds:
        raise InternalError(f"the demo could not prove that {claim}")


class Child:
    """A process at the other end of a pipe; it is killed when the block ends, if it runs still."""

    def __init__(self, work: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()  # a reader ends then
        self.process.join(DEADLINE)
        self.process.kill()
        self.process.join()

    def ask(self, *question: Any) -> Any:
        """Send a question, if there is one, and return the answer."""
        if question:
            self.pipe.send(question)
        if not self.pipe.poll(DEADLINE):
            raise InternalError(f"process {self.process.pid} did not answer within {DEADLINE:g} s")
        try:
            return self.pipe.recv()
        except EOFError:
            raise InternalError(f"process {self.process.pid} of the demo ended without an answer") from None


def run_demo(*, device: str, weights: Path | None, workers: int) -> None:
    """Run the demonstration on a device (or ``"auto"``) with a safetensors file (or random weights)."""
    if weights is not None:
        plan(weights)  # refuses what is no such file, before anything is started
    chosen = choose_device(device)
    with ExitStack() as stage:
        file = str(weights or make_weights(Path(stage.enter_context(tempfile.TemporaryDirectory(prefix="vram-demo-")))))
        keeper = stage.enter_context(vram.private_keeper())
        tell(f"a private keeper runs: pid {vram.statistics().pid}")
        with Child(_publisher, file, chosen) as publisher:
            arrays, nbytes, seconds = publisher.ask()
            publisher.process.kill()
            publisher.process.join(DEADLINE)
            prove(publisher.process.exitcode == -signal.SIGKILL, "the publisher was killed")
        pid = publisher.process.pid
        tensors = format_count(arrays, "tensor")
        tell(f"process {pid} published {tensors}, {format_size(nbytes)}, in {seconds:.3f} s")
        tell(f"process {pid} was killed with SIGKILL; its memory was not", "red")
        crew = [stage.enter_context(Child(_reader, keeper.path, file)) for _ in range(workers)]
        _share(crew, on_host=chosen == "host")
        _grow(crew, chosen)
        _replace(crew, chosen)
        for child in crew:
            child.ask("leave")
        left = vram.statistics()
        prove(left.leases == 0, "every lease came back")
        tell(f"all readers are gone: 0 leases, {format_size(left.nbytes)} kept")
    tell("proved: memory outlived its maker, was shared without a copy, grown and replaced", "bold green")


def _share(crew: list[Child], *, on_host: bool) -> None:
    reports = [child.ask("compare") for child in crew]
    prove(all(report["same"] for report in reports), "every tensor is as in the file")
    attach, load = (statistics.median(report[key] for report in reports) for key in ("attach", "load"))
    tell(
        f"{format_count(len(crew), 'process', 'processes')} attached it and compared it byte for byte with the file: "
        f"the same; attach to first byte took {attach * 1e6:.0f} us, loading the file {load * 1e6:.0f} us"
    )
    if not on_host:
        return  # only the host's kernel counts copies, and can be asked to let somebody write
    shares = [child.ask("pss") for child in crew]
    copies = sum(share for share, _ in shares) / shares[0][1]
    prove(copies < 1.02, "the readers share one copy")
    tell(f"together they hold {copies:.2f} copies of {format_size(shares[0][1])} (PSS)")
    code = (
        "import ctypes, vram\n"
        "with vram.attach('model') as lease:\n"
        "    address = next(iter(lease.values())).address\n"
        "    libc = ctypes.CDLL(None, use_errno=True)\n"
        "    print(libc.mprotect(ctypes.c_void_p(address & ~4095), 4096, 3) and ctypes.get_errno(), flush=True)\n"
        "    ctypes.memset(address, 0, 1)\n"
    )
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=False)
    refused = (done.stdout.strip(), done.returncode) == ("13", -signal.SIGSEGV)
    prove(refused, "the kernel refused to make it writable (EACCES) and stopped the write (SIGSEGV)")
    tell("a process that tried to write to it was refused by the kernel, and stopped when it wrote anyway", "red")


def _grow(crew: list[Child], device: str) -> None:
    with vram.empty((0, WIDTH), "float32", device=device, capacity=1_000_000) as vectors:
        known = set()
        for rows in (ROWS, 16 * ROWS):
            started = time.perf_counter()
            vectors.resize(rows)
            seconds = time.perf_counter() - started
            vectors[:] = np.arange(rows, dtype="float32")[:, None]
            seen = [child.ask("look", vectors) for child in crew]  # the descriptors travel once, the bytes never
            prove(all(right == rows for right, _ in seen), "all see every row")
            known.add((vectors.address, *(address for _, address in seen)))
            prove(len(known) == 1, "growing moved nothing")
            tell(f"an array grew to {rows} rows in {seconds * 1e6:.0f} us, in place, also for all readers")


def _replace(crew: list[Child], device: str) -> None:
    with vram.attach("model") as lease:
        changed = {name: vram.asarray(-array.to_host(), device=device) for name, array in lease.items()}
    version = vram.publish("model", changed, consume=True).version
    reports = [child.ask("upgrade") for child in crew]
    prove(all(report["stale"] and report["old"] for report in reports), "old readers read on undisturbed")
    prove(all(report["new"] == version for report in reports), "new readers see the new version, all of it")
    tell(f"version {version} was published under the readers of version 1: the old bytes stay until they upgrade")


def _publisher(pipe: Connection, file: str, device: str) -> None:
    started = time.perf_counter()
    published = vram.publish_file("model", file, device=device)
    pipe.send((published.arrays, published.nbytes, time.perf_counter() - started))
    pipe.recv()  # the parent kills this process while it waits here


def _reader(pipe: Connection, keeper: str, file: str) -> None:
    lease, wanted = vram.attach("model", keeper=keeper), load_file(file)
    while True:
        question, *rest = pipe.recv()
        if question == "compare":
            pipe.send({"same": _same(lease, wanted), "attach": _time(keeper), "load": _time(keeper, file)})
        elif question == "pss":
            pipe.send((_pss(), lease.nbytes))
        elif question == "look":
            (held,) = rest  # the same region each time
            right = int((held.to_host() == np.arange(len(held), dtype="float32")[:, None]).all(axis=1).sum())
            pipe.send((right, held.address))
        elif question == "upgrade":
            with lease.upgrade() as newer:
                new = newer.version if _same(newer, {name: -array for name, array in wanted.items()}) else None
            pipe.send({"stale": lease.is_stale(), "old": _same(lease, wanted), "new": new})
        else:
            break
    lease.close()
    vram.statistics(keeper=keeper)  # answered after the lease came back
    pipe.send("left")


def _time(keeper: str, file: str = "") -> float:
    """Return the median seconds of five attaches, up to the first byte, or of loading the file five times."""
    took = []
    for _ in range(5):
        started = time.perf_counter()
        if file:
            load_file(file)
        else:
            with vram.attach("model", keeper=keeper) as lease:
                next(iter(lease.values()))[:1].to_host()
        took.append(time.perf_counter() - started)
    return statistics.median(took)


def _same(lease: vram.Lease, wanted: dict[str, np.ndarray[Any, Any]]) -> bool:
    found = {name: array.to_host() for name, array in lease.items()}
    return found.keys() == wanted.keys() and all(
        found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes() for name, array in wanted.items()
    )


def _pss() -> int:
    """Count the bytes of shared memory mapped by this process, each page divided by the processes that map it."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = "/memfd:vram" in line
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def choose_device(device: str) -> str:
    """Return the device, or the one that ``"auto"`` stands for: the first GPU, else the host."""
    if device != "auto":
        if device != "host":
            place = Location.parse(device)
            drivers.get(place).device_info(place)  # says why it cannot be
        return device
    location = Location("cuda", 0)
    try:
        info = drivers.get(location).device_info(location)
    except VramError as error:
        tell(f"--device auto: chose host memory, since for {error}")
        return "host"
    tell(f"--device auto: chose {location}, {info.name}")
    return str(location)


def make_weights(directory: Path) -> Path:
    """Write a file of random weights with the shapes of a small transformer, 87 MiB."""
    numbers, shapes = np.random.default_rng(0), {"embeddings": (30522, WIDTH)}
    for layer in range(6):
        shapes |= {f"{layer}.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value", "output")}
        shapes |= {f"{layer}.up": (4 * WIDTH, WIDTH), f"{layer}.down": (WIDTH, 4 * WIDTH), f"{layer}.norm": (WIDTH, 1)}
    file = directory / "model.safetensors"
    save_file({name: numbers.standard_normal(shape, dtype="float32") for name, shape in shapes.items()}, file)
    return file
