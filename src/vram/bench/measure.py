"""How everything here is measured: side by side in one run, in turns, medians with spread.

These machines are shared and noisy. A figure on its own says little, so each case is timed together with what it is
held against, round by round (ours, theirs, ours, theirs, ...), and the ratio is taken of the medians of one run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Figure", "Result", "Row", "in_turns", "timed"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity over several rounds.

    Attributes
    ----------
    median, low, high : float
        The median, and the 10th and 90th percentile (with fewer than ten rounds: the extremes).
    unit : str
        ``"us"``, ``"s"``, ``"GB/s"``, ``"MiB"``, ``"copies"`` ...
    rounds : int
        How many values these are of.
    """

    median: float
    low: float
    high: float
    unit: str
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float], unit: str) -> Figure:
        """Summarize values that are in `unit` already."""
        ordered = sorted(values)
        edge = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[edge], ordered[-1 - edge], unit, len(ordered))

    def __str__(self) -> str:
        if self.rounds == 1:
            return f"{_short(self.median)} {self.unit}"
        return f"{_short(self.median)} {self.unit} ({_short(self.low)} to {_short(self.high)})"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing measured, and how it stands against its target.

    Attributes
    ----------
    case : str
        What was done.
    figure : Figure
        What it took.
    ratio : float or None
        Against the row that `against` names; how it is formed is said there.
    against : str
        What the ratio is taken to; empty for a row that others are held against.
    target : str
        What was to be reached; empty where nothing was set.
    reached : bool or None
        None where nothing was set.
    """

    case: str
    figure: Figure
    ratio: float | None = None
    against: str = ""
    target: str = ""
    reached: bool | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One benchmark: a title, its rows, and what did not run here and why."""

    name: str
    title: str
    rows: list[Row]
    notes: list[str]


def in_turns(cases: dict[str, Callable[[], float]], rounds: int, *, warm: int = 2) -> dict[str, list[float]]:
    """Run each case once a round, in turns, and return what each returned: seconds, or whatever it measures.

    Parameters
    ----------
    cases : dict of str to callable
        Each does its work and returns the figure, so that its own preparation is not timed.
    rounds : int
        How many values to take of each.
    warm : int
        Rounds to run first and not count.
    """
    values: dict[str, list[float]] = {name: [] for name in cases}
    enabled = gc.isenabled()
    gc.disable()  # a collection in the middle of a round is charged to whoever is running
    try:
        for number in range(warm + rounds):
            for name, case in cases.items():
                value = case()
                if number >= warm:
                    values[name].append(value)
            gc.collect(0)
    finally:
        if enabled:
            gc.enable()
    return values


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
