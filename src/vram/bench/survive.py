"""A keeper that is followed by another when it is killed: what that costs, and how long nobody answers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import vram

from ..errors import VramError
from ..keeper.client import KeeperClient, close_client
from ..keeper.private import KeeperProcess, short_directory
from ..sharing.channel import close_fds
from .children import rss
from .entries import fill
from .measure import Figure, Result, Row, in_turns, places

__all__ = ["measure"]

_NAME = "w"
_ENTRIES, _LEASES = 10_000, 1_000


def measure(quick: bool) -> Result:
    """Measure attach and publish with and without a log, then kill keepers with 10,000 entries and 1,000 leases."""
    rounds = 3 if quick else 60
    entries, leases = (100, 10) if quick else (_ENTRIES, _LEASES)
    with contextlib.ExitStack() as stage:
        plain, surviving = (stage.enter_context(_keeper(*options)) for options in ((), ("--survive",)))
        keepers = {"one that ends when it is killed": plain.path, "one that survives": surviving.path}
        array = stage.enter_context(vram.zeros(2 << 20, "uint8", device="host"))
        for path in keepers.values():
            vram.publish(_NAME, {"w": array}, keeper=path)
        pids = [vram.statistics(keeper=path).pid for path in keepers.values()]
        with places()[0].hold(*pids):
            attach = in_turns({name: partial(_attach, path) for name, path in keepers.items()}, rounds, burst=9)
            publish = in_turns(
                {name: partial(_publish, array, path) for name, path in keepers.items()}, rounds, burst=5
            )
        rows = [*_rows("attach, touch, close", attach, 1.03), *_rows("publish 2 MiB, shared", publish, 1.10)]
        fill(surviving.path, min(entries, 1_000) - 1)
        names = f"with {format(min(entries, 1_000), ',')} entries"
        rows += [
            Row.limited(f"resident: the keeper, {names}", Figure.of([rss(pids[1])], "MiB"), at_most=40),
            Row.limited(f"resident: its holder, {names}", Figure.of([rss(surviving.pid)], "MiB"), at_most=12),
        ]
        times = []
        with KeeperClient.connect(surviving.path, label="reader") as reader:
            for _ in range(leases):
                close_fds(reader.attach(_NAME).fds)
            fill(surviving.path, entries - 1)  # those that are there already once more: versions are replaced
            for _ in range(2 if quick else 9):
                times.append(_back(surviving.path, entries, leases))
        what = f"killed with {entries:,} entries and {leases:,} leases: the next answer"
        rows.append(Row.limited(what, Figure.of(times, "s"), at_most=1))
        rows.append(Row("resident: the holder then", Figure.of([rss(surviving.pid)], "MiB")))
    notes = ["attach and publish on one core. An answer after a kill is a count of all entries and leases, which is"]
    notes[0] += " looked at; in that time is the start of a Python process"
    return Result("survive", "A keeper that is killed and goes on", rows, notes)


@contextlib.contextmanager
def _keeper(*options: str) -> Iterator[KeeperProcess]:
    with short_directory() as place:
        process = KeeperProcess(os.path.join(place, "k"), options)
        try:
            yield process
        finally:
            close_client(process.path)
            process.stop()


def _rows(what: str, values: dict[str, list[float]], at_most: float) -> list[Row]:
    one, other = values
    base = Row(f"{what}: {one}", Figure.of(values[one], "us", scale=1e6))
    return [base, Row.held(f"{what}: {other}", Figure.of(values[other], "us", scale=1e6), base, at_most=at_most)]


def _attach(keeper: str) -> float:
    begin = time.perf_counter()
    with vram.attach(_NAME, keeper=keeper) as lease:
        _ = lease["w"].numpy()[0]
    return time.perf_counter() - begin


def _publish(array: vram.Array, keeper: str) -> float:
    begin = time.perf_counter()
    vram.publish("published", {"w": array}, keeper=keeper)
    return time.perf_counter() - begin


def _back(path: str, entries: int, leases: int) -> float:
    """Kill the keeper, and return the seconds until the next one has said what it has."""
    pid = vram.statistics(keeper=path).pid
    begin = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    found = vram.statistics(keeper=path)
    spent = time.perf_counter() - begin
    if found.pid == pid or found.entries < entries or found.leases < leases:
        raise VramError(f"{found.entries} entries and {found.leases} leases came back of {entries} and {leases}")
    return spent
