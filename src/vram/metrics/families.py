"""Names and labels of a keeper's metrics.

Names are those of OpenTelemetry's conventions as Prometheus writes them: a dot is an underscore, the unit stands at the
end, and what only grows ends in ``_total``. A keeper lists at most a hundred users and devices. A device that is
neither ``host`` nor a GPU's UUID has the label ``(other)``, since publishers choose its name.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from .. import __version__
from ..keeper.limits import limit_called
from ..keeper.messages import Measurements
from ..keeper.reports import StatisticsInfo

_DEVICE = re.compile(r"host|GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UP = "vram_keeper_up", "1 if the keeper answered, else 0."


def absent() -> Iterator[Metric]:
    """Yield what is said while no keeper answers."""
    yield GaugeMetricFamily(*_UP, 0)


def families(held: StatisticsInfo, done: Measurements) -> Iterator[Metric]:
    """Yield all metrics of one scrape."""
    yield GaugeMetricFamily(*_UP, 1)
    yield InfoMetricFamily("vram_exporter", "The process that asks the keeper.", {"version": __version__})
    yield InfoMetricFamily("vram_keeper", "The keeper.", {"version": held.keeper_version})
    yield CounterMetricFamily("vram_keeper_cpu_seconds", "Processor time of the keeper, all threads.", done.processor)
    for name, meaning, number in (
        ("start_time_seconds", "When the keeper began, since the epoch.", round(time.time() - done.uptime, 1)),
        ("resident_memory_bytes", "The keeper's own memory, without what it keeps.", done.resident),
        ("entries", "Names with a current version.", held.entries),
        ("versions", "Versions that are kept, old ones that are leased included.", held.versions),
        ("leases", "Leases.", held.leases),
        ("connections", "Processes that are connected.", held.connections),
        ("waiters", "Requests that wait for a name or a version.", held.waiting),
        ("memory_bytes", "Bytes that are kept.", held.nbytes),
        ("descriptors", "Descriptors that are kept.", held.descriptors),
    ):
        yield GaugeMetricFamily(f"vram_keeper_{name}", meaning, number)
    for found in held.limits:
        limit = limit_called(found.name)
        unit = "_bytes" if limit.is_size else ""
        for whose, of, most in (("", "", found.most), ("user_", " of one user", found.most_per_user)):
            if most is not None:
                name = f"vram_keeper_{whose}{limit.metric}_limit{unit}"
                yield GaugeMetricFamily(name, f"Ceiling for {limit.what}{of}.", most)
    for name, meaning, field in (
        ("memory_bytes", "Bytes that count for a user.", "nbytes"),
        ("entries", "Names of a user.", "entries"),
        ("descriptors", "Descriptors that count for a user.", "descriptors"),
        ("leases", "Leases of a user.", "leases"),
        ("connections", "Connections of a user.", "connections"),
    ):
        yield _labelled(f"user_{name}", meaning, "uid", {row.uid: getattr(row, field) for row in done.users})
    nbytes, versions = Counter[str | None](), Counter[str | None]()
    for row in done.devices:
        device = row.device if _DEVICE.fullmatch(row.device) else None
        nbytes[device] += row.nbytes
        versions[device] += row.versions
    yield _labelled("device_memory_bytes", "Bytes kept of a device's memory.", "device", nbytes)
    yield _labelled("device_versions", "Versions with memory of a device.", "device", versions)
    yield from _requests(done)


def _labelled(name: str, meaning: str, label: str, numbers: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(f"vram_keeper_{name}", meaning, labels=[label])
    for value, number in numbers.items():
        family.add_metric(["(other)" if value is None else str(value)], number)
    return family


def _requests(done: Measurements) -> Iterator[Metric]:
    took = HistogramMetricFamily(
        "vram_keeper_request_duration_seconds", "Seconds that the keeper worked on a request.", labels=["request"]
    )
    failed = CounterMetricFamily(
        "vram_keeper_request_errors", "Requests that were refused or failed, by the error.", labels=["request", "error"]
    )
    bounds = [f"{bound:g}" for bound in done.bounds]
    for row in done.requests:
        counts = itertools.accumulate(row.buckets)
        took.add_metric([row.kind], list(zip([*bounds, "+Inf"], counts, strict=True)), row.seconds)
        for error, count in sorted(row.errors.items()):
            failed.add_metric([row.kind, error], count)
    yield took
    yield failed
