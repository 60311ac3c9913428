"""What two measurements of a keeper say together, and what is drawn of that, without a keeper or a terminal."""

from __future__ import annotations

import math

import pytest

from vram.keeper.messages import Measurements, RequestRow
from vram.metrics.rates import rates

BOUNDS = [1e-3, 2e-3, 4e-3]


def done(uptime: float, **kinds: list[int]) -> Measurements:
    rows = [RequestRow(kind, sum(buckets), 0.0, buckets, {}) for kind, buckets in kinds.items()]
    return Measurements(1, uptime, 0.0, 0, BOUNDS, rows, [], [])


def test_rates_are_differences_over_the_time_between() -> None:
    before, after = done(10.0, attach=[100, 0, 0, 0]), done(12.0, attach=[100, 8, 0, 0], publish=[2, 0, 0, 0])
    found = rates(before, after, 2.0)
    assert (found["attach"].per_second, found["publish"].per_second, found[""].per_second) == (4.0, 1.0, 5.0)


def test_quantiles_lie_within_their_bucket_in_proportion() -> None:
    found = rates(done(1.0, attach=[7, 0, 0, 0]), done(2.0, attach=[7, 50, 50, 0]), 1.0)["attach"]
    assert found.median == pytest.approx(2e-3)  # all of the second bucket is half of them
    assert found.high == pytest.approx(2e-3 + 2e-3 * 49 / 50)
    quarter = rates(None, done(1.0, attach=[4, 0, 0, 0]), 1.0)["attach"]
    assert quarter.median == pytest.approx(0.5e-3)


def test_what_took_longer_than_the_last_bound_is_beyond_all() -> None:
    found = rates(None, done(1.0, attach=[1, 0, 0, 1]), 1.0)["attach"]
    assert (found.median, found.high) == (1e-3, math.inf)


def test_without_requests_there_is_no_latency() -> None:
    found = rates(done(1.0, attach=[5, 0, 0, 0]), done(2.0, attach=[5, 0, 0, 0]), 1.0)["attach"]
    assert (found.per_second, found.median, found.high) == (0.0, None, None)


@pytest.mark.parametrize(
    "after",
    [
        done(2.0, attach=[4, 0, 0, 0]),  # it began a moment ago
        done(90.0, attach=[4, 0, 0, 0]),  # it has done less
        done(90.0, publish=[4, 0, 0, 0]),  # it has never done what the other did
    ],
)
def test_another_keeper_counts_from_its_own_start(after: Measurements) -> None:
    found = rates(done(50.0, attach=[100, 0, 0, 0]), after, 1.0)
    assert found[""].per_second == pytest.approx(4 / after.uptime)
    assert all(rate.per_second >= 0 for rate in found.values())


def test_errors_are_counted_by_second() -> None:
    row = RequestRow("attach", 10, 0.0, [10, 0, 0, 0], {"NotFoundError": 4, "QuotaError": 2})
    after = Measurements(1, 3.0, 0.0, 0, BOUNDS, [row], [], [])
    found = rates(done(1.0, attach=[4, 0, 0, 0]), after, 2.0)
    assert found["attach"].errors == found[""].errors == 3.0
