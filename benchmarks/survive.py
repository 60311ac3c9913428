"""A keeper that is followed by another when it is killed: what that costs, and how long nobody answers."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import vram
from vram.bench.children import workplace
from vram.bench.measure import Figure, Result, Row, in_turns, places
from vram.errors import VramError
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds

from .entries import fill, rss

_NAME = "w"
_PAIRS = 4  # of keepers, as one process is some percent slower than another that does the same
_PLAIN, _SURVIVES = "one that ends when it is killed", "one that survives"
_ENTRIES, _LEASES = 10_000, 1_000


def on_host(quick: bool) -> Result:
    """Measure attach and publish with and without a log, then kill keepers with 10,000 entries and 1,000 leases."""
    pairs, rounds = (1, 3) if quick else (_PAIRS, 50)
    entries, leases = (100, 10) if quick else (_ENTRIES, _LEASES)
    attach: dict[str, list[float]] = {}
    publish: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stage:
        stage.enter_context(_compiled())
        array = stage.enter_context(vram.zeros(2 << 20, "uint8", device="host"))
        for number in range(pairs):
            _measure_pair(array, rounds, attach, publish, survivor_first=bool(number % 2))
        rows = [*_rows("attach, touch, close", attach, 1.03), *_rows("publish 2 MiB, shared", publish, 1.10)]
        surviving = stage.enter_context(_keeper("--survive"))
        vram.publish(_NAME, {"w": array}, keeper=surviving.path)
        pid = vram.statistics(keeper=surviving.path).pid
        fill(surviving.path, min(entries, 1_000) - 1)
        names = f"with {format(min(entries, 1_000), ',')} entries"
        rows += [
            Row.limited(f"resident: the keeper, {names}", Figure.of([rss(pid)], "MiB"), at_most=40),
            Row.limited(f"resident: its guardian, {names}", Figure.of([rss(surviving.pid)], "MiB"), at_most=12),
        ]
        times = []
        with KeeperClient.connect(surviving.path, label="reader") as reader:
            for _ in range(leases):
                close_fds(reader.attach(_NAME).fds)
            fill(surviving.path, entries - 1)  # those that are there already once more: versions are replaced
            for _ in range(2 if quick else 9):
                times.append(_back(surviving.path, entries, leases))
            what = f"killed with {entries:,} entries and {leases:,} leases: the next answer"
            rows.append(Row.limited(what, Figure.of(times, "s"), at_most=0.3))
            rows.append(Row("resident: the guardian then", Figure.of([rss(surviving.pid)], "MiB")))
            longest = [_restart(stage, surviving.path) for _ in range(2 if quick else 9)]
            what = f"restarted (--takeover) with {entries:,} entries, under load: the longest call"
            rows.append(Row.limited(what, Figure.of(longest, "s"), at_most=0.3))
    notes = [
        f"attach and publish with the client, the keeper and its guardian on one core, over {pairs} pairs of keepers. "
        f"An answer after a kill is a count of all entries and leases, which is looked at; in that time "
        f"a Python process is started, which finds the bytecode of what it imports, as where the library is installed"
    ]
    return Result("survive", "A keeper that is killed and goes on", rows, notes)


@contextlib.contextmanager
def _compiled() -> Iterator[None]:
    """Have the keepers that are started in a block find bytecode, also where this process is not to write any."""
    names = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="vram-") as place:
        os.environ["PYTHONPYCACHEPREFIX"] = place
        try:
            yield
        finally:
            del os.environ["PYTHONPYCACHEPREFIX"]
            os.environ.update(before)


def _measure_pair(
    array: vram.Array,
    rounds: int,
    attach: dict[str, list[float]],
    publish: dict[str, list[float]],
    *,
    survivor_first: bool,
) -> None:
    """Measure a keeper of each kind. Which of them is the first to start and to have its turn changes by the pair."""
    kinds: dict[str, tuple[str, ...]] = {_PLAIN: (), _SURVIVES: ("--survive",)}
    with contextlib.ExitStack() as stage:
        keepers: dict[str, str] = {}
        pids: list[int] = []
        for kind in sorted(kinds, key=lambda kind: (kind == _SURVIVES) != survivor_first):
            process = stage.enter_context(_keeper(*kinds[kind]))
            vram.publish(_NAME, {"w": array}, keeper=process.path)
            keepers[kind] = process.path
            pids += {process.pid, vram.statistics(keeper=process.path).pid}  # two, where there is a guardian
        with places()[0].hold(*pids):
            for values, work, burst in ((attach, _attach, 9), (publish, partial(_publish, array), 5)):
                cases: dict[str, Callable[[], float]] = {kind: partial(work, path) for kind, path in keepers.items()}
                for kind, found in in_turns(cases, rounds, burst=burst, both_ways=True).items():
                    values.setdefault(kind, []).extend(found)


@contextlib.contextmanager
def _keeper(*options: str) -> Iterator[KeeperProcess]:
    with workplace() as place:
        process = KeeperProcess(os.path.join(place, "k"), options)
        try:
            yield process
        finally:
            close_client(process.path)
            process.stop()


def _rows(what: str, values: dict[str, list[float]], at_most: float) -> list[Row]:
    one, other = (Figure.of(values[kind], "us", scale=1e6) for kind in (_PLAIN, _SURVIVES))
    base = Row(f"{what}: {_PLAIN}", one)
    return [base, Row.held(f"{what}: {_SURVIVES}", other, base, at_most=at_most)]


def _attach(keeper: str) -> float:
    begin = time.perf_counter()
    with vram.attach(_NAME, keeper=keeper) as lease:
        _ = lease["w"].numpy()[0]
    return time.perf_counter() - begin


def _publish(array: vram.Array, keeper: str) -> float:
    begin = time.perf_counter()
    vram.publish("published", {"w": array}, keeper=keeper)
    return time.perf_counter() - begin


def _restart(stage: contextlib.ExitStack, path: str) -> float:
    """Have the next keeper go on by a planned restart; return the seconds that the longest attach took meanwhile."""
    spent, is_over = [0.0], threading.Event()

    def work() -> None:
        with KeeperClient.connect(path, label="worker") as worker:
            while not is_over.is_set():
                begin = time.perf_counter()
                got = worker.attach(_NAME)
                spent.append(time.perf_counter() - begin)
                worker.give_back(got)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        stage.callback(KeeperProcess(path, ["--takeover"]).stop)
    finally:
        is_over.set()
        thread.join()
    return max(spent)


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
