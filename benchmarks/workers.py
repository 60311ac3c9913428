"""Many workers on one model: how many copies of it there are, and how long a worker needs to have all of it."""

from __future__ import annotations

import contextlib
import json
import mmap
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors.numpy import load_file

import vram
from vram.bench.children import child, own_keeper, workplace
from vram.bench.files import write_weights
from vram.bench.measure import Figure, Result, Row
from vram.spec import format_size

_Arrays: TypeAlias = "Mapping[str, np.ndarray[Any, Any]]"
_WAYS = {
    "vram": "attached",
    "mapped": "file mapping (mmap, as safetensors with torch)",
    "loaded": "safetensors.numpy.load_file",
}


def on_host(quick: bool) -> Result:
    """Measure the proportional share of the memory that every worker has read all of, summed over the workers."""
    workers, tensors, nbytes = (3, 8, 1 << 20) if quick else (8, 100, 1 << 20)
    total = tensors * nbytes
    with own_keeper() as keeper, workplace() as directory, contextlib.ExitStack() as stage:
        path = directory / "model.safetensors"
        write_weights(path, {f"layer.{number}.weight": nbytes for number in range(tensors)})
        vram.publish_file("model", path, device="host", keeper=keeper)
        crew = [stage.enter_context(child(_reader, str(path), keeper)) for _ in range(workers)]
        for worker in crew:
            worker.hear()
        ready: dict[str, Figure] = {}
        copies: dict[str, Figure] = {}
        for way in _WAYS:
            # One after the other: what is measured is the way, not two cores under eight processes.
            ready[way] = Figure.of([worker.ask("load", way) for worker in crew], "ms", scale=1e3)
            for worker in crew:
                worker.ask("touch")
            shares = [worker.ask("share") for worker in crew]
            copies[way] = Figure.of([sum(shares) / total], "copies")
            for worker in crew:
                worker.ask("drop")
    held = {way: Row(f"{words}: copies", copies[way]) for way, words in _WAYS.items()}
    mapped = Row(f"{_WAYS['mapped']}: all tensors there", ready["mapped"])
    loaded = Row(f"{_WAYS['loaded']}: all tensors there", ready["loaded"])
    ours = held["vram"]
    notes = [
        f"{workers} workers, {tensors} tensors of {format_size(nbytes)}, every byte read by each. Copies: the PSS of "
        f"the entry's mappings (of private memory: of what came with loading), summed over the workers, over its size"
    ]
    if mapped.figure.median < ready["vram"].median:
        notes.append(f"wins in time: {_WAYS['mapped']}, as long as the file is in the page cache and may be kept")
    notes.append(
        "a mapped file is one copy too, and needs no keeper; but it is the file: who writes to it changes it under its "
        "readers, who truncates it kills them, and what is not in a file of this format cannot be shared like that"
    )
    reached = abs(ours.figure.median - 1) < 0.005
    return Result(
        "workers",
        f"{workers} workers on one model",
        [
            Row(ours.case, ours.figure, None, "", "1.00 copies", reached),
            held["mapped"],
            held["loaded"],
            mapped,
            loaded,
            Row.held("attached: all tensors there", ready["vram"], mapped),
        ],
        notes,
    )


# -- a worker ---------------------------------------------------------------------------------------------------
def _reader(pipe: Connection, path: str, keeper: str) -> None:
    vram.attach("model", keeper=keeper).close()  # connects, once a process; and imports
    pipe.send("ready")
    while True:
        (_, way) = pipe.recv()
        pages = {"vram": "/memfd:", "mapped": path, "loaded": ""}[way]
        before = _pss(pages)
        with contextlib.ExitStack() as stage:
            begin = time.perf_counter()
            if way == "vram":
                arrays: Mapping[str, np.ndarray[Any, Any]] = stage.enter_context(
                    vram.attach("model", keeper=keeper)
                ).numpy()
            elif way == "mapped":
                arrays = stage.enter_context(_mapped(path))
            else:
                arrays = load_file(path)
            pipe.send(time.perf_counter() - begin)
            pipe.recv()
            for array in arrays.values():
                array.max()
            pipe.send("touched")
            pipe.recv()
            pipe.send(_pss(pages) - before)
            del arrays, array
            pipe.recv()
        pipe.send("dropped")


@contextlib.contextmanager
def _mapped(path: str) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Map a file as safetensors does where it does not copy: every tensor is a view of it."""
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = memoryview(memory)
    start = 8 + int.from_bytes(view[:8], "little")
    places = {name: entry["data_offsets"] for name, entry in json.loads(bytes(view[8:start])).items()}
    yield {name: np.frombuffer(view[start + begin : start + end], "uint8") for name, (begin, end) in places.items()}


def _pss(pages: str) -> int:
    """Return this process's proportional share, in bytes, of the mappings of a file, or of private memory."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            name = words[5] if len(words) > 5 else ""
            counted = name.startswith(pages) if pages else not name.startswith("/")
        elif counted and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total
