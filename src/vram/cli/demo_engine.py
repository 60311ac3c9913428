"""``vram demo engine``: what an inference engine adopts this for, told by a model that generates tokens.

The model sleeps and wakes, its process is killed and another one generates the same tokens from the same memory, and
its weights are updated in place under a reader. Every sequence of tokens is compared with the one that it has to be.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import vram

from .. import driver as drivers
from ..errors import UnsupportedError
from ..memory.sleep import SleepReport, WakeReport
from ..spec import Location, format_size, parse_size
from .engine_model import Model, Sizes, fill
from .story import DEADLINE, Child, Story, choose_device, duration, resident, start_child, wait_for_leases

PROMPT, COUNT = [1, 2, 3, 5, 8, 13, 21, 34], 16  # tokens
UPDATES = 10
HOST_SIZE, GPU_SIZE = "24MiB", "3GiB"
_OK = "bold green"


def run_engine_demo(*, device: str, size: str | None, as_json: bool) -> None:
    """Run the demonstration and print what it proved.

    Parameters
    ----------
    device : str
        ``"host"``, ``"cuda:0"``, or ``"auto"``, which prints what it chose.
    size : str, optional
        About how large the model is; by default 3 GiB on a GPU and 24 MiB on the host.
    as_json : bool
        Print the facts as JSON in the end instead of the story.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError("vram demo engine", "PyTorch", "no such package", "Install it: pip install torch")
    story = Story(as_json)
    place = choose_device(device, story)
    sizes = Sizes.of(place, parse_size(size or (HOST_SIZE if place == "host" else GPU_SIZE), what="--size"))
    view = _View(place)
    with contextlib.ExitStack() as stage:
        keeper = stage.enter_context(vram.private_keeper()).path
        pid = vram.statistics().pid
        story.tell(f"a private keeper runs: pid {pid}, {format_size(resident(pid))} resident{view.shows()}")
        directory = stage.enter_context(tempfile.TemporaryDirectory(prefix="vram-demo-"))
        with start_child(_maker, keeper, place, sizes, directory) as maker:
            tokens = _build(maker, story, view)
            _sleep(maker, tokens, story, view)
            _publish_and_die(maker, story, view)
        _attach(keeper, place, sizes, tokens, story, view)
        updated = _update(keeper, place, sizes, story)
        story.prove(wait_for_leases().leases == 0, "every lease came back")
        vram.remove("model")
        story.tell(f"the entry was removed{view.shows()}", memory=view.seen)
    if as_json:
        print(json.dumps(story.facts, indent=2))
    else:
        end = ", outlived its process, and was updated under its reader"
        story.close(f"proved: a model that slept to zero and woke{end if updated else ', and outlived its process'}")


# -- the acts ---------------------------------------------------------------------------------------------------
def _build(maker: Child, story: Story, view: _View) -> list[int]:
    built = maker.answer()
    where = "a pool for PyTorch" if view.is_gpu else "memory of vram"
    story.tell(
        f"process {maker.process.pid} made a transformer of {format_size(built['nbytes'])} in {where} in "
        f"{built['build']:.2f} s, and generated {COUNT} tokens{view.shows(maker)}",
        nbytes=built["nbytes"],
        build_seconds=built["build"],
        tokens=built["tokens"],
    )
    story.measure("build", "a transformer with random weights", built["nbytes"], built["build"])
    return list(built["tokens"])


def _sleep(maker: Child, tokens: list[int], story: Story, view: _View) -> None:
    nbytes = story.facts["nbytes"]
    for time_ in ("first", "second"):
        slept: SleepReport = maker.ask("sleep")
        story.prove(slept.freed >= nbytes, "all of the weights' memory was given back")
        story.tell(
            f"it was put to sleep in {duration(slept.seconds)}, the {time_} time: {format_size(slept.freed)} freed"
            f"{view.shows(maker)}"
        )
        woke, again = maker.ask("wake")
        story.prove(again == tokens, "it generates the same tokens when it woke")
        story.tell(f"it woke at the same addresses in {duration(woke.seconds)}, and generated the same tokens", _OK)
        story.facts[f"sleep_{time_}"] = {"freed": slept.freed, "sleep": slept.seconds, "wake": woke.seconds}
    story.measure("sleep", "to zero, the second time", slept.nbytes, slept.seconds)
    story.measure("wake", "at the same addresses, with the same tokens", woke.nbytes, woke.seconds)


def _publish_and_die(maker: Child, story: Story, view: _View) -> None:
    copied, seconds = maker.ask("publish")
    story.prove(not copied, f"nothing was copied, but {copied} was")
    story.tell(f"it was published in {duration(seconds)}, without a copy", publish_seconds=seconds)
    story.measure("publish", "without a copy", story.facts["nbytes"], seconds)
    maker.process.kill()
    maker.process.join(DEADLINE)
    story.prove(maker.process.exitcode == -signal.SIGKILL, "the process was killed")
    story.tell(f"process {maker.process.pid} was killed with SIGKILL; the model was not{view.shows()}", "red")
    story.measure("kill", "its process, with SIGKILL; the model stays", story.facts["nbytes"])


def _attach(keeper: str, place: str, sizes: Sizes, tokens: list[int], story: Story, view: _View) -> None:
    with start_child(_engine, keeper, place, sizes) as engine:
        said = engine.answer()
        story.prove(said["tokens"] == tokens, "another process generates the same tokens")
        story.tell(
            f"process {engine.process.pid} attached it in {duration(said['attach'])}, had its first token after "
            f"{duration(said['first'])} ({said['start']:.1f} s of which Python and PyTorch took before, not counted), "
            f"and generated the same tokens{view.shows(engine)}",
            _OK,
            attach_seconds=said["attach"],
            first_token_seconds=said["first"],
            start_seconds=said["start"],
        )
        story.measure("attach", "another process, to its first token", story.facts["nbytes"], said["first"])
        with start_child(_engine, keeper, place, sizes) as other:
            story.prove(other.answer()["tokens"] == tokens, "a third process generates the same tokens")
            story.tell(
                f"process {other.process.pid} did so, too, beside it: two engines, one copy of the model"
                f"{view.shows(other)}"
            )
            other.ask("stop")
        engine.ask("stop")


def _update(keeper: str, place: str, sizes: Sizes, story: Story) -> bool:
    """Update another model in place under its reader; return whether that can be done here."""
    with contextlib.ExitStack() as stage:
        trainer = stage.enter_context(start_child(_trainer, keeper, place, sizes))
        first = trainer.answer()
        if isinstance(first, str):
            story.tell(f"(not shown: updates in place. {first})", updates=0)
            trainer.ask("stop")
            return False
        reader = stage.enter_context(start_child(_reader, keeper, place, sizes))
        expected = {1: first}
        seen = dict([reader.answer()])
        seconds, waited = 0.0, 0.0
        for number in range(UPDATES):
            waits, writes, tokens = trainer.ask("update")
            waited, seconds = max(waited, waits), seconds + writes
            expected[number + 2] = tokens
            version, tokens = reader.answer()
            seen[version] = tokens
        sections, stray = reader.ask("stop")
        trainer.ask("stop")
        story.prove(len({tuple(tokens) for tokens in expected.values()}) == UPDATES + 1, "each version has its tokens")
        story.prove(seen == expected, "every sequence of tokens is of one version, and of the one that was said")
        story.prove(stray == 0, "no section of the reader mixed two versions")
        story.tell(
            f"the weights were updated in place {UPDATES} times under a process that generated {sections} sequences "
            f"meanwhile: each of exactly one version; {duration(seconds / UPDATES)} to write, at most "
            f"{duration(waited)} for the reader to leave",
            _OK,
            updates=UPDATES,
            sections=sections,
            update_seconds=seconds / UPDATES,
            waited_seconds=waited,
        )
        story.measure(
            "update", f"in place, {UPDATES} times under a reader; each", story.facts["nbytes"], seconds / UPDATES
        )
    vram.remove("policy")
    return True


# -- the children -----------------------------------------------------------------------------------------------
@dataclass
class _Held:
    """A model's memory in the process that made it, and what it does with it."""

    weights: Mapping[str, Any]
    cache: Any
    to_publish: Mapping[str, Any]
    sleep: Callable[[], SleepReport]
    wake: Callable[[], WakeReport]


def _hold(place: str, sizes: Sizes, directory: str) -> _Held:
    """Make the memory: on a GPU in a pool for PyTorch, on the host as arrays that PyTorch sees as tensors."""
    torch = _torch(place)
    dtype = getattr(torch, sizes.dtype)
    if place == "host":
        arrays = {name: vram.empty(shape, sizes.dtype, device="host") for name, shape in sizes.shapes().items()}
        return _Held(
            {name: array.torch() for name, array in arrays.items()},
            torch.zeros(sizes.cache, dtype=dtype),
            arrays,
            lambda: vram.sleep(arrays.values(), to=directory),
            lambda: vram.wake(arrays.values()),
        )
    pool = vram.TorchPool(place)
    with pool.use("weights"):
        weights = {name: torch.empty(shape, dtype=dtype, device=place) for name, shape in sizes.shapes().items()}
    with pool.use("kv"):
        cache = torch.zeros(sizes.cache, dtype=dtype, device=place)
    for tensor in weights.values():
        pool.tag_of(tensor)
    return _Held(weights, cache, weights, lambda: pool.sleep(offload=["weights"], discard=["kv"]), lambda: pool.wake())


def _torch(place: str) -> Any:
    import torch

    if place == "host":
        torch.set_num_threads(1)  # two processes work at a time
    else:
        torch.cuda.init()
    return torch


def _tokens(model: Model) -> list[int]:
    return list(model.generate(PROMPT, COUNT))


def _maker(pipe: Connection, keeper: str, place: str, sizes: Sizes, directory: str) -> None:
    _torch(place)
    started = time.perf_counter()
    held = _hold(place, sizes, directory)
    fill(held.weights, 0)
    build = time.perf_counter() - started
    model = Model(sizes, held.weights, held.cache)
    nbytes = sum(tensor.nbytes for tensor in held.weights.values())
    pipe.send({"nbytes": nbytes, "build": build, "tokens": _tokens(model)})
    while True:
        (question,) = pipe.recv()
        if question == "sleep":
            pipe.send(held.sleep())
        elif question == "wake":
            woke = held.wake()
            pipe.send((woke, _tokens(model)))
        else:
            started = time.perf_counter()
            # whole: a pool gives small tensors one piece of memory together, in which there is nothing else.
            published = vram.publish("model", held.to_publish, whole=True, keeper=keeper)
            pipe.send((published.copied, time.perf_counter() - started))


def _engine(pipe: Connection, keeper: str, place: str, sizes: Sizes) -> None:
    started = time.perf_counter()
    cache = _cache(place, sizes)
    ready = time.perf_counter()
    with vram.attach("model", keeper=keeper) as lease:
        attached = time.perf_counter()
        tokens = Model(sizes, lease.torch(), cache).generate(PROMPT, COUNT)
        all_of_them = [next(tokens)]
        first = time.perf_counter()
        all_of_them += tokens
        pipe.send({"start": ready - started, "attach": attached - ready, "first": first - ready, "tokens": all_of_them})
        pipe.recv()
    pipe.send("stopped")


def _cache(place: str, sizes: Sizes) -> Any:
    torch = _torch(place)
    return torch.zeros(sizes.cache, dtype=getattr(torch, sizes.dtype), device="cpu" if place == "host" else place)


def _trainer(pipe: Connection, keeper: str, place: str, sizes: Sizes) -> None:
    held = _hold(place, sizes, "")
    fill(held.weights, 1)
    model = Model(sizes, held.weights, held.cache)
    try:
        vram.publish("policy", held.to_publish, updatable=True, whole=True, keeper=keeper)
    except UnsupportedError as error:
        pipe.send(str(error))
        pipe.recv()
        pipe.send("stopped")
        return
    pipe.send(_tokens(model))
    version = 1
    while pipe.recv() == ("update",):
        version += 1
        started = time.perf_counter()
        with vram.update("policy", timeout=DEADLINE, keeper=keeper) as arrays:
            entered = time.perf_counter()
            fill({name: array.torch() for name, array in arrays.items()}, version)
            written = time.perf_counter()
        pipe.send((entered - started, written - entered, _tokens(model)))
    pipe.send("stopped")


def _reader(pipe: Connection, keeper: str, place: str, sizes: Sizes) -> None:
    with vram.attach("policy", keeper=keeper) as lease:
        counts = _read(pipe, lease, Model(sizes, lease.torch(), _cache(place, sizes)))
    pipe.recv()
    pipe.send(counts)


def _read(pipe: Connection, lease: vram.Lease, model: Model) -> tuple[int, int]:
    """Generate until something is asked, each sequence inside a section, and say what the first of each version is.

    Returns how many there were, and how many differ from the first of their version.
    """
    seen: dict[int, list[int]] = {}
    sections = stray = 0
    while not pipe.poll():
        with lease.reading(timeout=DEADLINE) as version:
            tokens = _tokens(model)
        sections += 1
        stray += seen.get(version, tokens) != tokens
        if version not in seen:
            seen[version] = tokens
            pipe.send((version, tokens))
    return sections, stray


# -- the props --------------------------------------------------------------------------------------------------
class _View:
    """What somebody else says of the memory that is used: ``nvidia-smi`` of a GPU, the kernel of a process."""

    def __init__(self, place: str) -> None:
        self.is_gpu = place != "host"
        self.seen: list[int] = []
        self._uuid = ""
        if self.is_gpu:
            location = Location.parse(place)
            self._uuid = str(drivers.get(location).device_info(location).uuid)

    def shows(self, child: Child | None = None) -> str:
        """Return what to say of it now, behind a line."""
        if not self.is_gpu:
            if child is None or child.process.pid is None:
                return ""
            self.seen.append(resident(child.process.pid))
            return f" ({format_size(self.seen[-1])} resident)"
        command = ["nvidia-smi", f"--id={self._uuid}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True).stdout
            self.seen.append(int(said) << 20)
        except (OSError, ValueError, subprocess.SubprocessError):
            return " (nvidia-smi says nothing here)"
        return f" (nvidia-smi: {format_size(self.seen[-1])} used)"
