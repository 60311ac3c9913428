"""How long a publisher waits before it may write, a reader in one section after the other: one slot, and two."""

from __future__ import annotations

import contextlib
import functools
import time
from multiprocessing.connection import Connection

import vram

from .children import child
from .measure import Figure, Row, in_turns

__all__ = ["waits"]

_SECTION = 0.01  # seconds that the reader is in each of its sections; an update is made every other one


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
