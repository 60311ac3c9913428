"""Updates in place, for the case `engine`: how long a publisher waits, and weights of a trainer to a rollout process.

On the host, until a publisher may write, with a reader in one section after the other: one slot, and two. On a GPU,
against the copy itself, and what engines do with torch.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import vram
from vram import driver as drivers
from vram.bench.children import Child, child, own_keeper
from vram.bench.gpu import Bare, bare_calls, ordinal_of, torch_on
from vram.bench.machine import fitting
from vram.bench.measure import Figure, Row, in_turns
from vram.spec import Location, format_size

_SECTION = 0.01  # seconds that the reader is in each of its sections; an update is made every other one
_TENSORS = 400
_TENSOR = 41 << 20  # bytes: 16 GiB in all
_BUCKET = 512 << 20


def waits(quick: bool, keeper: str) -> list[Row]:
    """Measure it from where an update is asked for to where its block begins, nothing else of it."""
    rounds = 3 if quick else 50
    with contextlib.ExitStack() as stage:
        array = stage.enter_context(vram.zeros(4096, "uint8", device="host"))
        for name, swap in (("one", False), ("two", True)):
            vram.publish(name, {"w": array}, updatable=True, swap=swap, keeper=keeper)
            reader = stage.enter_context(child(_stay, name, keeper))
            reader.hear()
            stage.callback(reader.tell, "stop")
        took = in_turns({name: functools.partial(_begun, name, keeper) for name in ("one", "two")}, rounds)
    for name in ("one", "two"):
        vram.remove(name, keeper=keeper)
    case = f"until the block of vram.update begins, a reader in sections of {_SECTION * 1e3:g} ms"
    one = Row(case, Figure.of(took["one"], "ms", scale=1e3))
    return [
        one,
        Row.held(
            f"the same with swap=True, every {2 * _SECTION * 1e3:g} ms", Figure.of(took["two"], "ms", scale=1e3), one
        ),
    ]


def _begun(name: str, keeper: str) -> float:
    time.sleep(2 * _SECTION)
    begin = time.perf_counter()
    with vram.update(name, keeper=keeper) as arrays:
        spent = time.perf_counter() - begin
        arrays["w"].fill(1)
    return spent


def _stay(pipe: Connection, name: str, keeper: str) -> None:
    with vram.attach(name, keeper=keeper) as lease:
        pipe.send("ready")
        while not pipe.poll(0):
            with lease.reading():
                time.sleep(_SECTION)


# -- on a GPU ---------------------------------------------------------------------------------------------------------
def updates(quick: bool, location: Location, notes: list[str]) -> list[Row]:
    """Measure from when the trainer begins until the rollout process has told that it has the new weights.

    In each case that is the same weights, tensor by tensor, and one message at the end. `vram.update` writes
    where the rollout process reads; its rivals copy it into that process's own.
    """
    count, rounds = (8, 3) if quick else (_TENSORS, 15)
    nbytes = fitting(location, (2 << 20) if quick else _TENSOR, count, 3.25, notes)
    what = f"{format_size(count * nbytes)} in {count} tensors"
    torch = torch_on(location, notes)
    stalls: list[float] = []
    alone: list[float] = []
    with contextlib.ExitStack() as stage:
        bare = stage.enter_context(bare_calls(location))
        keeper = stage.enter_context(own_keeper())
        source = stage.enter_context(_source(torch, location, count, nbytes))
        weights = stage.enter_context(vram.zeros((count, nbytes), "uint8", device=location))
        arrays = {f"w{number}": weights[number] for number in range(count)}
        vram.publish("policy", arrays, keeper=keeper, updatable=True)
        rollout = stage.enter_context(child(_rollout, keeper, str(location)))
        rollout.hear()
        copies = [(array.address, address) for array, address in zip(arrays.values(), source.addresses, strict=True)]

        def update() -> float:
            rollout.ask("go")
            begin = time.perf_counter()
            with vram.update("policy", keeper=keeper):
                _copy(bare, copies, nbytes)
            alone.append(time.perf_counter() - begin)
            stalls.append(rollout.hear())
            return time.perf_counter() - begin

        cases: dict[str, Callable[[], float]] = {"copy": lambda: _plain(bare, copies, nbytes), "update": update}
        if torch is not None:
            other = stage.enter_context(child(_receive, str(location), count, nbytes))
            other.hear()
            tensors = _Tensors(torch, source.tensors, min(_BUCKET, count * nbytes), other)
            cases |= {"each": tensors.one_by_one, "bucket": tensors.by_bucket}
        took = in_turns(cases, rounds, warm=2)
        free = bare.free_bytes()
        with vram.update("policy", keeper=keeper):
            _copy(bare, copies, nbytes)
            besides = free - bare.free_bytes()
        if torch is not None:
            tensors.close()
    figures = {name: Figure.of(seconds, "ms", scale=1e3) for name, seconds in took.items()}
    copy = Row(f"device-to-device copies: {what}", figures["copy"])
    rows = [copy, Row.held(f"vram.update, until the reader is in the new version: {what}", figures["update"], copy,
                           at_most=1.15)]  # fmt: skip
    for name, (case, most) in {
        "each": ("torch IPC, tensor by tensor, and copied out", 0.2),
        "bucket": (f"torch IPC, a bucket of {format_size(_BUCKET)}, and copied out", 1.0),
    }.items():
        if name in figures:
            rival = Row(f"{case}: {what}", figures[name])
            rows += [rival, Row.held("vram.update, again", figures["update"], rival, at_most=most)]
    rows += [
        Row("vram.update, until the publisher goes on", Figure.of(alone[2:], "ms", scale=1e3)),
        Row("what the reader waited for the section", Figure.of(stalls[2:], "ms", scale=1e3)),
    ]
    notes.append(
        "weights: the reader copies one tensor out on a stream of its own in each section, one after the other; the "
        "time ends when the trainer has heard that it has entered a section of the new version. With torch's rivals it "
        "ends when the other process has all tensors copied into its own, as much memory as what is published. "
        f"Device memory that an update takes besides: {format_size(max(besides, 0))}; the bucket: its size"
    )
    return rows


def _copy(bare: Bare, copies: list[tuple[int, int]], nbytes: int) -> None:
    for target, source in copies:
        bare.ok(bare.api.cuMemcpyDtoDAsync(target, source, nbytes, 0))


def _plain(bare: Bare, copies: list[tuple[int, int]], nbytes: int) -> float:
    """Copy outside of any update: the reader is not at work."""
    begin = time.perf_counter()
    _copy(bare, copies, nbytes)
    bare.ok(bare.api.cuStreamSynchronize(0))
    return time.perf_counter() - begin


class _Source:
    """The trainer's own weights: torch's memory where torch is, so that its ways of sharing can be measured."""

    def __init__(self, tensors: list[Any], addresses: list[int]) -> None:
        self.tensors, self.addresses = tensors, addresses


@contextlib.contextmanager
def _source(torch: Any, location: Location, count: int, nbytes: int) -> Iterator[_Source]:
    if torch is None:
        with vram.zeros((count, nbytes), "uint8", device=location) as array:
            yield _Source([], [array[number].address for number in range(count)])
        return
    device = f"cuda:{ordinal_of(location)}"
    tensors = [torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device).normal_() for _ in range(count)]
    torch.cuda.synchronize()
    made = _Source(tensors, [tensor.data_ptr() for tensor in tensors])
    del tensors
    try:
        yield made
    finally:
        made.tensors.clear()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _rollout(pipe: Connection, keeper: str, device: str) -> None:
    """Read in sections, when told to, until there is a new version; say how long the section of that took to enter."""
    location = Location.parse(device)
    driver: Any = drivers.get(location)
    with vram.attach("policy", keeper=keeper) as lease, contextlib.ExitStack() as stage:
        tensors = list(lease.values())
        scratch = stage.enter_context(vram.empty(tensors[0].nbytes, "uint8", device=location))
        stream = driver.stream_create(location)
        stage.callback(driver.stream_destroy, stream)
        with lease.reading(stream=stream) as seen:
            pass
        pipe.send("ready")
        number = 0
        while True:
            pipe.recv()
            pipe.send("at work")
            before = seen
            while seen == before and not pipe.poll(0):  # it says nothing meanwhile, but may have gone
                begin = time.perf_counter()
                with lease.reading(stream=stream) as seen:
                    spent = time.perf_counter() - begin
                    if seen == before:
                        tensor = tensors[number % len(tensors)]
                        driver.copy_async(scratch.address, tensor.address, tensor.nbytes, stream)
                        number += 1
            pipe.send(spent)


class _Tensors:
    """The trainer's side of torch's ways."""

    def __init__(self, torch: Any, tensors: list[Any], bucket: int, other: Child) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        self._torch, self._tensors, self._other = torch, tensors, other
        self._reduce = reduce_tensor
        self._bucket = torch.empty(bucket, dtype=torch.uint8, device=tensors[0].device)
        other.ask("open", self._reduce(self._bucket))

    def one_by_one(self) -> float:
        begin = time.perf_counter()
        for number, tensor in enumerate(self._tensors):
            self._other.tell("tensor", number, self._reduce(tensor))
        self._other.ask("wait")
        return time.perf_counter() - begin

    def by_bucket(self) -> float:
        """Fill the bucket, say what is in it, and go on when it is copied out."""
        torch, bucket = self._torch, self._bucket
        each = self._tensors[0].nbytes
        fit = max(bucket.nbytes // each, 1)
        begin = time.perf_counter()
        for first in range(0, len(self._tensors), fit):
            some = self._tensors[first : first + fit]
            for number, tensor in enumerate(some):
                bucket[number * each : (number + 1) * each].view(torch.bfloat16).copy_(tensor)
            torch.cuda.synchronize()
            self._other.ask("bucket", first, len(some))
        return time.perf_counter() - begin

    def close(self) -> None:
        self._other.ask("close")  # it lets go of the bucket before we do
        del self._bucket
        self._tensors = []


def _receive(pipe: Connection, device: str, count: int, nbytes: int) -> None:
    """The other process of torch's ways, with weights of its own."""
    import torch

    here = f"cuda:{ordinal_of(Location.parse(device))}"
    own = [torch.empty(nbytes // 2, dtype=torch.bfloat16, device=here) for _ in range(count)]
    torch.cuda.synchronize()
    pipe.send("ready")
    bucket: Any = None
    while True:
        what, *given = pipe.recv()
        if what == "tensor":
            number, (rebuild, arguments) = given
            tensor = rebuild(*arguments)
            own[number].copy_(tensor)
            del tensor
            continue
        if what == "open":
            ((rebuild, arguments),) = given
            bucket = rebuild(*arguments)
        elif what == "bucket":
            first, some = given
            for number in range(some):
                own[first + number].copy_(bucket[number * nbytes : (number + 1) * nbytes].view(torch.bfloat16))
        elif what == "close":
            bucket = None
        torch.cuda.synchronize()
        pipe.send("done")
