"""What engines do with memory of the host: sections in which an entry is read that is updated in place, and updates."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import vram

from ..spec import format_size
from .children import Child, child, own_keeper
from .measure import Figure, Result, Row, in_turns, timed
from .update_wait import waits

__all__ = ["measure"]

_READERS = 16
_SECTIONS = 20_000  # at a time
_NBYTES = 64 << 20  # of what is updated


def measure(quick: bool) -> Result:
    """Measure sections alone, and in many processes at once; and updates beside those."""
    sections, rounds = (200, 3) if quick else (_SECTIONS, 25)
    nbytes, count = (1 << 20, 2) if quick else (_NBYTES, _READERS)
    lock = threading.Lock()

    def locked() -> None:
        with lock:
            pass

    with contextlib.ExitStack() as stage:
        keeper = stage.enter_context(own_keeper())
        weights = stage.enter_context(vram.zeros(nbytes, "uint8", device="host"))
        vram.publish("policy", {"w": weights}, keeper=keeper, updatable=True)
        lease = stage.enter_context(vram.attach("policy", keeper=keeper))
        took = in_turns({"lock": lambda: _cpu(locked, sections), "alone": lambda: _cpu_of(lease, sections)}, rounds)
        others = [stage.enter_context(child(_read, keeper, sections)) for _ in range(count)]
        for one in others:
            one.hear()
        beside = [spent for _ in range(rounds) for spent in _all(others, "measure")]
        for one in others:
            one.tell("go on")
        updates = in_turns(
            {"write": lambda: timed(lambda: weights.fill(1)), "update": lambda: timed(lambda: _update(keeper))}, rounds
        )
        stalls = [stalled for one in others for stalled in one.ask("stop")]
        waited = waits(quick, keeper)
    plain = Row("with threading.Lock()", Figure.of(took["lock"], "us", scale=1e6))
    written = Row(
        f"{format_size(nbytes)} written, nobody reads in sections", Figure.of(updates["write"], "ms", scale=1e3)
    )
    rows = [
        plain,
        Row.held("lease.reading(), entered and left", Figure.of(took["alone"], "us", scale=1e6), plain),
        Row.limited("lease.reading(), alone", Figure.of(took["alone"], "us", scale=1e6), at_most=5),
        Row.limited(f"lease.reading(), {count} processes at once", Figure.of(beside, "us", scale=1e6), at_most=5),
        written,
        Row.held(
            f"vram.update of {format_size(nbytes)}, {count} processes in and out of sections",
            Figure.of(updates["update"], "ms", scale=1e3),
            written,
        ),
    ]
    if stalls:
        rows.append(Row("what a reader waited for an update, of those who waited", Figure.of(stalls, "ms", scale=1e3)))
    rows += waited
    notes = [
        f"processor time of the thread a section, over {sections} empty ones. {len(stalls)} sections took longer than "
        f"a millisecond while the updates were made; on a machine with fewer processors than readers most of that is "
        f"waiting for one"
    ]
    return Result("engine", "Read in sections, and updated in place", rows, notes)


def _cpu(section: Any, count: int) -> float:
    begin = time.thread_time()
    for _ in range(count):
        section()
    return (time.thread_time() - begin) / count


def _cpu_of(lease: vram.Lease, count: int) -> float:
    begin = time.thread_time()
    for _ in range(count):
        with lease.reading():
            pass
    return (time.thread_time() - begin) / count


def _all(others: list[Child], what: str) -> Iterator[float]:
    """Have all do something at once, and yield what each found."""
    for one in others:
        one.tell(what)
    for one in others:
        yield one.hear()


def _update(keeper: str) -> None:
    with vram.update("policy", keeper=keeper) as arrays:
        arrays["w"].fill(1)


def _read(pipe: Connection, keeper: str, sections: int) -> None:
    """Measure sections when told to; then read in sections until told to stop, and say how long the slow ones took."""
    with vram.attach("policy", keeper=keeper) as lease:
        view = lease["w"].numpy()
        _cpu_of(lease, sections)
        pipe.send("ready")
        while pipe.recv()[0] == "measure":
            pipe.send(_cpu_of(lease, sections))
        stalls: list[float] = []
        while not pipe.poll(0):
            begin = time.perf_counter()
            with lease.reading():
                view[0]
            spent = time.perf_counter() - begin
            if spent > 1e-3:
                stalls.append(spent)
        pipe.recv()
        pipe.send(stalls)
