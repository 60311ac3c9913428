"""Rates and quantiles between two measurements of a keeper, and bars to draw them with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..keeper.messages import Measurements

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-:=+*#"


@dataclass(frozen=True, slots=True)
class Rate:
    """The rates of one kind of request between two measurements: requests and failures per second.
    `median` and `high` (99 %) are seconds of work; ``inf`` is beyond the last bucket, None means no requests."""

    per_second: float
    errors: float
    median: float | None
    high: float | None


def rates(before: Measurements | None, after: Measurements, seconds: float) -> dict[str, Rate]:
    """Return the rates between two measurements by kind of request; ``""`` is the sum of all kinds.
    Without `before`, or if another keeper counts since then, the rates run from the keeper's start on, by its clock."""
    old = {} if before is None else {row.kind: row for row in before.requests}
    # Counts only grow. Where one does not, another keeper has begun to count.
    if before is not None and (
        after.uptime < before.uptime
        or before.bounds != after.bounds
        or any(row.count < old[row.kind].count for row in after.requests if row.kind in old)
        or not old.keys() <= {row.kind for row in after.requests}
    ):
        before, old = None, {}
    seconds = max(after.uptime if before is None else seconds, 1e-6)
    found: dict[str, Rate] = {}
    sums, failures = [0] * (len(after.bounds) + 1), 0
    for row in after.requests:
        was = old.get(row.kind)
        buckets = list(row.buckets) if was is None else [b - a for a, b in zip(was.buckets, row.buckets, strict=False)]
        errors = sum(row.errors.values()) - (0 if was is None else sum(was.errors.values()))
        found[row.kind] = _rate(after.bounds, buckets, errors, seconds)
        failures += errors
        sums = [a + b for a, b in zip(sums, buckets, strict=False)]
    found[""] = _rate(after.bounds, sums, failures, seconds)
    return found


def _rate(bounds: Sequence[float], buckets: Sequence[int], errors: int, seconds: float) -> Rate:
    return Rate(
        sum(buckets) / seconds, errors / seconds, _quantile(bounds, buckets, 0.5), _quantile(bounds, buckets, 0.99)
    )


def _quantile(bounds: Sequence[float], buckets: Sequence[int], part: float) -> float | None:
    total = sum(buckets)
    if not total:
        return None
    wanted, below = part * total, 0
    for index, (upper, count) in enumerate(zip(bounds, buckets, strict=False)):
        if count and below + count >= wanted:
            lower = bounds[index - 1] if index else 0.0
            return lower + (upper - lower) * (wanted - below) / count
        below += count
    return math.inf


def shape(values: Iterable[float], width: int, *, plain: bool = False) -> str:
    """Draw the last values as at most `width` characters, from zero to the largest of them; `plain` draws in ASCII."""
    last = list(values)[-width:] if width > 0 else []
    most = max(last, default=0.0)
    bars = _PLAIN_BARS if plain else _BARS
    if most <= 0 or not math.isfinite(most):
        return bars[0] * len(last)
    # A value above zero is drawn, however small it is.
    return "".join(bars[0 if value <= 0 else max(1, round(value / most * (len(bars) - 1)))] for value in last)
