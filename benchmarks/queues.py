"""Arrays through :mod:`multiprocessing`: against a number through the same queue, and against torch's tensors."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import queue
from collections.abc import Callable
from multiprocessing import resource_sharer
from multiprocessing.connection import Connection
from typing import Any

import vram
from vram.bench.children import DEADLINE, child, queue_pair
from vram.bench.measure import Figure, Place, Result, Row, in_turns, places, timed
from vram.errors import InternalError
from vram.handover.pickling import shut_down

_NBYTES = 1 << 20


def on_host(quick: bool) -> Result:
    """Measure round trips through a pair of queues and through a pool of one worker."""
    has_torch = importlib.util.find_spec("torch") is not None
    notes = [f"arrays of {_NBYTES >> 20} MiB; the answer is a number"]
    if not has_torch:
        notes.append("torch.multiprocessing did not run: torch is not installed")
    try:
        with vram.zeros(_NBYTES, "uint8", device="host") as array:
            rows: list[Row] = []
            for place in places():
                with place.hold():  # the threads and processes that are started in here run there too
                    rows += _through_queues(place, array, has_torch, quick)
            for place in places():
                with place.hold():
                    rows += _through_pool(place, array, quick)
    finally:
        shut_down()  # the endpoint would stay for as long as this process does
        if has_torch:
            resource_sharer.stop(timeout=DEADLINE)  # by which torch hands descriptors over, and which stays as well
    return Result("queues", "The same through multiprocessing.Queue and Pool", rows, notes)


def _through_queues(place: Place, array: vram.Array, has_torch: bool, quick: bool) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    with queue_pair(context) as (there, back), child(_answer, there, back, has_torch) as other:
        other.hear()

        def round_trip(value: object) -> None:
            there.put(value)
            try:
                back.get(timeout=DEADLINE)
            except queue.Empty:
                raise InternalError(f"no answer came through a queue within {DEADLINE} s") from None

        def new_array() -> None:
            with vram.zeros(_NBYTES, "uint8", device="host") as new:
                round_trip(new)

        cases: dict[str, Callable[[], object]] = {
            "int": lambda: round_trip(1),
            "same": lambda: round_trip(array),
            "new": new_array,
        }
        if has_torch:
            import torch  # teaches the queues to pass tensors: both kinds go through the same ones

            tensor = torch.zeros(_NBYTES, dtype=torch.uint8)
            cases["torch same"] = lambda: round_trip(tensor)
            cases["torch new"] = lambda: round_trip(torch.zeros(_NBYTES, dtype=torch.uint8))
        with place.hold(other.pid):
            figures = _time(cases, quick)
    where = f"Queue, {place.name}"
    number = Row(f"a number, {where}", figures["int"])
    again = Row.held(f"the same array again, {where}", figures["same"], number, at_most=1.5)
    fresh = Row.held(f"a new array each time, {where}", figures["new"], number)
    if not has_torch:
        return [number, again, fresh]
    same = Row.held(f"torch: the same tensor again, {where}", figures["torch same"], number)
    new = Row.held(f"torch: a new tensor each time, {where}", figures["torch new"], number)
    return [
        number,
        again,
        same,
        Row.held(again.case, again.figure, same, at_most=1),
        new,
        Row.held(fresh.case, fresh.figure, new, at_most=1),
    ]


def _through_pool(place: Place, array: vram.Array, quick: bool) -> list[Row]:
    pool = multiprocessing.get_context("spawn").Pool(1)
    try:

        def apply(value: object) -> None:
            try:
                pool.apply_async(_one, (value,)).get(DEADLINE)
            except multiprocessing.TimeoutError:
                raise InternalError(f"no answer came from a pool within {DEADLINE} s") from None

        apply(array)  # its process has to start and to import first
        with place.hold(pool.apply(os.getpid)):
            figures = _time({"int": lambda: apply(1), "same": lambda: apply(array)}, quick)
    finally:
        pool.terminate()
        pool.join()
    where = f"Pool, {place.name}"
    number = Row(f"a number, {where}", figures["int"])
    return [number, Row.held(f"the same array again, {where}", figures["same"], number, at_most=1.5)]


def _time(cases: dict[str, Callable[[], object]], quick: bool) -> dict[str, Figure]:
    repeat, rounds = (3, 3) if quick else (10, 100)

    def burst(work: Callable[[], object]) -> Callable[[], float]:
        return lambda: timed(work, repeat)

    values = in_turns({name: burst(work) for name, work in cases.items()}, rounds)
    return {name: Figure.of(seconds, "us", scale=1e6) for name, seconds in values.items()}


def _answer(pipe: Connection, there: Any, back: Any, has_torch: bool) -> None:
    """The other process. Ends when its parent hangs up."""
    if has_torch:
        import torch  # noqa: F401  (otherwise the first tensor would pay for it)
    vram.zeros(1, device="host").close()
    pipe.send("ready")
    while not pipe.poll(0):
        with contextlib.suppress(queue.Empty):
            value = there.get(timeout=0.2)
            back.put(1)
            del value


def _one(value: object) -> int:
    return 1
