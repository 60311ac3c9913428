"""Sums over the memory of four processes: a group's, in place and through its staging buffer, against torch's gloo.

Every round has all processes call at once, some times one after the other; what counts is the slowest of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import vram

from ..arrays.numpy_on_use import np
from .children import DEADLINE, Child, child, workplace
from .measure import Figure, Result, Row, in_turns
from .no_multicast import check_no_multicast, no_multicast

__all__ = ["measure"]

_RANKS = 4
_SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20}  # of float32
_CALLS = {"4 KiB": 200, "1 MiB": 40}


def measure(quick: bool) -> Result:
    """Measure microseconds a call."""
    rounds, divisor = (2, 10) if quick else (15, 1)
    rivals = ["torch"] if importlib.util.find_spec("torch") is not None else []
    rows: list[Row] = []
    with contextlib.ExitStack() as stage:
        place = stage.enter_context(workplace())
        stage.enter_context(no_multicast())
        ranks = [stage.enter_context(child(_rank, str(place), rank, rivals)) for rank in range(_RANKS)]
        for one in ranks:
            one.hear()
        for name, nbytes in _SIZES.items():
            calls = _CALLS[name] // divisor
            cases: dict[str, Callable[[], float]] = {
                how: partial(_ask, ranks, how, nbytes, calls) for how in ("buffer", "array", *rivals)
            }
            times = in_turns(cases, rounds, warm=1)
            took = {how: Figure.of([1e6 * one for one in times[how]], "us") for how in cases}
            gloo = Row(f"{name}: torch.distributed, gloo", took["torch"]) if rivals else None
            for how, what in (("buffer", "a symmetric buffer, in place"), ("array", "a numpy array")):
                case = f"{name}: {what}"
                most = 1 / 15 if nbytes == 1 << 20 and how == "buffer" else None
                rows.append(Row(case, took[how]) if gloo is None else Row.held(case, took[how], gloo, at_most=most))
            rows += [gloo] if gloo is not None else []
    notes = [f"{len(os.sched_getaffinity(0))} processors for {_RANKS} processes; the slowest of them"]
    return Result("allreduce", f"Sums of float32 over {_RANKS} processes, memory of the host", rows, notes)


def _ask(ranks: list[Child], how: str, nbytes: int, calls: int) -> float:
    for one in ranks:
        one.tell(how, nbytes, calls)
    slowest: float = max(one.hear() for one in ranks)
    return slowest / calls


def _rank(pipe: Connection, place: str, rank: int, rivals: list[str]) -> None:
    check_no_multicast()
    with contextlib.ExitStack() as stage:
        group = stage.enter_context(
            vram.Group("bench", rank=rank, size=_RANKS, at=str(Path(place) / "group"), timeout=DEADLINE)
        )
        calls: dict[str, Callable[[int], Callable[[], object]]] = {
            "buffer": partial(_buffer, group, stage), "array": partial(_array, group),
        }  # fmt: skip
        if rivals:
            calls["torch"] = _gloo(place, rank, stage)
        made: dict[tuple[str, int], Callable[[], object]] = {}
        pipe.send("ready")
        while True:
            try:
                how, nbytes, count = pipe.recv()
            except EOFError:
                return
            call = made.get((how, nbytes))
            if call is None:
                call = made[how, nbytes] = calls[how](nbytes)
            call()
            group.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            pipe.send(time.perf_counter() - begin)


def _buffer(group: vram.Group, stage: contextlib.ExitStack, nbytes: int) -> Callable[[], object]:
    buffer = stage.enter_context(group.symmetric(nbytes // 4, "float32", device="host"))
    return partial(group.all_reduce, buffer)


def _array(group: vram.Group, nbytes: int) -> Callable[[], object]:
    return partial(group.all_reduce, np.zeros(nbytes // 4, np.float32))


def _gloo(place: str, rank: int, stage: contextlib.ExitStack) -> Callable[[int], Callable[[], object]]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store: Any = dist.FileStore(str(Path(place) / "store"), _RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS, timeout=timedelta(seconds=DEADLINE))
    stage.callback(dist.destroy_process_group)

    def of(nbytes: int) -> Callable[[], object]:
        return partial(dist.all_reduce, torch.zeros(nbytes // 4))

    return of
