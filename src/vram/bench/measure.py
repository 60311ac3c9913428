"""How everything here is measured: side by side in one run, in turns, medians with spread.

These machines are shared and noisy. A figure on its own says little, so each case is timed together with what it is
held against, round by round (ours, theirs, ours, theirs, ...), and the ratio is taken of the medians of one run.

Where two processes talk, most of the time is the scheduler's: waking a process on the same core takes a microsecond or
two, on an idle other core of a virtual machine ten times as long, and which of them happens is luck. So those cases
are run twice (:func:`places`): tied to one core, where the difference between ours and theirs is all code, and free,
which is what a user sees.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity over several rounds: `low` and `high` are the 10th and 90th percentile, or the extremes of few."""

    median: float
    low: float
    high: float
    unit: str
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float], unit: str, *, scale: float = 1.0) -> Figure:
        """Summarize values, which times `scale` are in `unit`."""
        ordered = sorted(value * scale for value in values)
        edge = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[edge], ordered[-1 - edge], unit, len(ordered))

    def __str__(self) -> str:
        if self.rounds == 1:
            return f"{_short(self.median)} {self.unit}"
        return f"{_short(self.median)} {self.unit} ({_short(self.low)} to {_short(self.high)})"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing measured, its ratio to the median of the row that `against` names, and whether it reached a target.

    Where nothing was set, `against` and `target` are empty, `ratio` and `reached` None.
    """

    case: str
    figure: Figure
    ratio: float | None = None
    against: str = ""
    target: str = ""
    reached: bool | None = None

    @classmethod
    def held(
        cls, case: str, figure: Figure, rival: Row, *, at_most: float | None = None, at_least: float | None = None
    ) -> Row:
        """Hold a figure against a rival's, with a target for the ratio if there is one."""
        ratio = figure.median / rival.figure.median
        if at_most is not None:
            return cls(case, figure, ratio, rival.case, f"at most {at_most:g}x", ratio <= at_most)
        if at_least is not None:
            return cls(case, figure, ratio, rival.case, f"at least {at_least:g}x", ratio >= at_least)
        return cls(case, figure, ratio, rival.case)

    @classmethod
    def limited(cls, case: str, figure: Figure, *, at_most: float) -> Row:
        """Hold a figure against a number."""
        return cls(case, figure, None, "", f"at most {at_most:g} {figure.unit}", figure.median <= at_most)


@dataclass(frozen=True, slots=True)
class Result:
    """One benchmark: a title, its rows, what did not run here and why, and the machine and versions it ran on."""

    name: str
    title: str
    rows: list[Row]
    notes: list[str]
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where processes that talk with each other run: on one core, or (None) wherever they are put."""

    name: str
    core: int | None

    @contextlib.contextmanager
    def hold(self, *pids: int) -> Iterator[None]:
        """Keep the calling thread, and the main threads of some processes, there for the length of a block.

        Threads and processes that are started in the block run there too.
        """
        if self.core is None:
            yield
            return
        before = {pid: os.sched_getaffinity(pid) for pid in (0, *pids)}
        try:
            for pid in before:
                os.sched_setaffinity(pid, {self.core})
            yield
        finally:
            for pid, allowed in before.items():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(pid, allowed)


def places() -> list[Place]:
    """Return both ways to place processes: all on one core, and free."""
    # The last one: interrupts are handled on the first.
    return [Place("one core", max(os.sched_getaffinity(0))), Place("free", None)]


def in_turns(
    cases: dict[str, Callable[[], float]], rounds: int, *, warm: int = 2, burst: int = 0, both_ways: bool = False
) -> dict[str, list[float]]:
    """Run each case in every round, in turns, after `warm` rounds that do not count; return what each returned.

    With `burst`, a case runs once for nothing and then so often, and the median counts: what takes microseconds would
    pay for the caches that the case before it has emptied. With `both_ways` the last begins every other round.
    """
    values: dict[str, list[float]] = {name: [] for name in cases}
    enabled = gc.isenabled()
    gc.disable()  # a collection in the middle of a round is charged to whoever is running
    try:
        for number in range(warm + rounds):
            for name in list(cases)[:: -1 if both_ways and number % 2 else 1]:
                case = cases[name]
                value = case()
                if burst:
                    value = statistics.median(case() for _ in range(burst))
                if number >= warm:
                    values[name].append(value)
            gc.collect(0)
    finally:
        if enabled:
            gc.enable()
    return values


def warm_memory(nbytes: int) -> None:
    """Touch and free so many bytes, for cases that take fresh memory by the gigabyte.

    A virtual machine gives memory that was free for some seconds back to its host, and getting it again costs several
    times what clearing a page does. The case that pays for that would be a matter of luck.
    """
    with mmap.mmap(-1, nbytes) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        memory[::_PAGE] = bytes(-(-nbytes // _PAGE))


def timed(work: Callable[[], object], repeat: int = 1) -> float:
    """Return the seconds that one call of `work` takes, over `repeat` calls."""
    begin = time.perf_counter()
    for _ in range(repeat):
        work()
    return (time.perf_counter() - begin) / repeat


def _short(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
