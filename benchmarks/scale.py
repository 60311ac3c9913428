"""Attaching where there are many readers, and where there are many entries."""

from __future__ import annotations

import contextlib
import resource
from functools import partial
from multiprocessing.connection import Connection

import vram
from vram.bench.attach import touch
from vram.bench.children import child, own_keeper
from vram.bench.measure import Figure, Result, Row, in_turns, places
from vram.keeper.client import KeeperClient
from vram.open_files import close_fds

from .entries import fill

_READERS, _ENTRIES = 1_000, 10_000
_NAME = "model"


def on_host(quick: bool) -> Result:
    """Measure the same attach at three keepers, in turns: an idle one, one with many readers, one with many entries."""
    notes: list[str] = []
    readers, entries = (20, 100) if quick else (_READERS, _ENTRIES)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stage:
        few, crowded, full = (stage.enter_context(own_keeper()) for _ in range(3))
        # Both sides of every connection, and every entry, is a descriptor of some process.
        limits = {limit.name: limit.most for limit in vram.statistics(keeper=full).limits}
        room = limits["descriptors"] or entries + 1
        readers, entries = _fewer(readers, hard // 3, "readers", notes), _fewer(entries, room - 1, "entries", notes)
        for keeper in (few, crowded, full):
            with vram.zeros(2 << 20, "uint8", device="host") as array:
                vram.publish(_NAME, {"w": array}, keeper=keeper)
        crowd = stage.enter_context(child(_connect_readers, crowded, readers))
        crowd.hear()
        fill(full, entries - 1)
        pids = [vram.statistics(keeper=keeper).pid for keeper in (few, crowded, full)]
        with places()[0].hold(*pids):
            values = in_turns(
                {keeper: partial(touch, _NAME, keeper) for keeper in (few, crowded, full)}, 3 if quick else 60, burst=5
            )
    figures = [Figure.of(values[keeper], "us", scale=1e6) for keeper in (few, crowded, full)]
    one = Row("attach, touch: 1 entry, no other reader", figures[0])
    rows = [
        one,
        Row.held(f"attach, touch: 1 entry, {readers} other readers", figures[1], one, at_most=1.5),
        Row.held(f"attach, touch: {entries} entries", figures[2], one, at_most=1.5),
    ]
    notes.append("each reader has a connection and a lease of its own. All on one core")
    return Result("scale", "Attach by name among many", rows, notes)


def _fewer(wanted: int, most: int, what: str, notes: list[str]) -> int:
    if wanted <= most:
        return wanted
    notes.append(f"{wanted} {what} were wanted; the limit of open descriptors here (RLIMIT_NOFILE) allows {most}")
    return most


def _connect_readers(pipe: Connection, path: str, count: int) -> None:
    """A process of its own: connect so often, hold a lease on each connection, and stay until the parent hangs up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.ExitStack() as stage:
        for number in range(count):
            reader = stage.enter_context(KeeperClient.connect(path, label=f"reader {number}"))
            close_fds(reader.attach(_NAME).fds)  # what is counted is the lease
        pipe.send(count)
        pipe.recv()
