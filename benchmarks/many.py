"""One entry of many small arrays: published, attached and looked at; against one array of their size, and a file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

import vram
from vram.bench.children import own_keeper, workplace
from vram.bench.files import write_weights
from vram.bench.measure import Figure, Result, Row, in_turns, places
from vram.spec import format_size

_COUNT = 1_000
_BYTES = 4096  # of each array


def on_host(quick: bool) -> Result:
    """Measure the publication and the attach of an entry of 1,000 arrays, all of them looked at."""
    count, rounds = (20, 3) if quick else (_COUNT, 30)
    nbytes = count * _BYTES
    with contextlib.ExitStack() as stage:
        keeper = stage.enter_context(own_keeper())
        file = stage.enter_context(workplace()) / "w.safetensors"
        write_weights(file, {f"layer.{number}": _BYTES for number in range(count)})
        # Published again and again, each time as what it is by then: read-only. The seal is not measured.
        memory = stage.enter_context(vram.zeros((count, _BYTES), "uint8", device="host"))
        parts = {f"layer.{number}": memory[number] for number in range(count)}
        copied = {name: np.zeros(_BYTES, "uint8") for name in parts}
        shared, one = "rows of a vram array, shared", "one array of their size, shared"
        theirs = f"{count} arrays of {format_size(_BYTES)}"
        publish: dict[str, Callable[[], float]] = {
            one: partial(_publish, "one", {"w": memory}, keeper),
            shared: partial(_publish, "parts", parts, keeper),
            "numpy's, copied": partial(_publish, "copied", copied, keeper),
        }
        look: dict[str, Callable[[], float]] = {
            one: partial(_look, "one", keeper),
            shared: partial(_look, "parts", keeper),
            "safetensors: the file opened": partial(_look_at_file, file),
        }
        pid = vram.statistics(keeper=keeper).pid
        with places()[0].hold(pid):
            rows = [
                *_rows("publish", theirs, in_turns(publish, rounds), one),
                *_rows("attach, touch all", theirs, in_turns(look, rounds), one),
            ]
    notes = [f"{format_size(nbytes)} in all; touched is the first byte of each array, through numpy. All on one core"]
    return Result("many", f"{theirs}, in one entry", rows, notes)


def _rows(verb: str, theirs: str, values: Mapping[str, list[float]], one: str) -> list[Row]:
    base = Row(f"{verb}: {one}", Figure.of(values[one], "us", scale=1e6))
    rest = [name for name in values if name != one]
    return [
        base,
        *(Row.held(f"{verb}: {theirs}, {name}", Figure.of(values[name], "us", scale=1e6), base) for name in rest),
    ]


def _publish(name: str, arrays: Mapping[str, Any], keeper: str) -> float:
    begin = time.perf_counter()
    vram.publish(name, arrays, keeper=keeper, whole=True)
    return time.perf_counter() - begin


def _look(name: str, keeper: str) -> float:
    begin = time.perf_counter()
    with vram.attach(name, keeper=keeper) as lease:
        _touch(lease)
        return time.perf_counter() - begin


def _look_at_file(path: Path) -> float:
    begin = time.perf_counter()
    with safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118  (it has no iterator)
            _ = file.get_tensor(name).reshape(-1)[0]
    return time.perf_counter() - begin


def _touch(arrays: Mapping[str, Any]) -> None:
    for array in arrays.values():
        _ = array.numpy()[0]
