"""What a keeper's numbers are called.

Names are those of OpenTelemetry's conventions as Prometheus writes them: a dot is an underscore, the unit stands at the
end, and what only grows ends in ``_total``. A keeper lists at most a hundred users and devices. The rest is the label
``(other)``, and so is what publishers call a device that is neither ``host`` nor a GPU's UUID.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator

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
    yield _gauge(*_UP, 0)


def families(held: StatisticsInfo, done: Measurements) -> Iterator[Metric]:
    """Yield all metrics of one scrape."""
    yield _gauge(*_UP, 1)
    yield InfoMetricFamily("vram_exporter", "Who asks the keeper.", {"version": __version__})
    yield InfoMetricFamily("vram_keeper", "The keeper.", {"version": held.keeper_version})
    started = round(time.time() - done.uptime, 1)
    yield _gauge("vram_keeper_start_time_seconds", "When the keeper began, since the epoch.", started)
    yield _total("vram_keeper_cpu_seconds", "Processor time of the keeper, all threads.", done.processor)
    yield _gauge("vram_keeper_resident_memory_bytes", "The keeper's own memory, without what it keeps.", done.resident)
    for name, meaning, number in (
        ("entries", "Names with a current version.", held.entries),
        ("versions", "Versions that are kept, old ones that are leased included.", held.versions),
        ("leases", "Leases.", held.leases),
        ("connections", "Processes that are connected.", held.connections),
        ("waiters", "Requests that wait for a name or a version.", held.waiting),
        ("memory_bytes", "Bytes that are kept.", held.nbytes),
        ("descriptors", "Descriptors that are kept.", held.descriptors),
    ):
        yield _gauge(f"vram_keeper_{name}", meaning, number)
    for found in held.limits:
        limit = limit_called(found.name)
        unit = "_bytes" if limit.is_size else ""
        for whose, of, most in (("", "", found.most), ("user_", " of one user", found.most_per_user)):
            if most is not None:
                yield _gauge(f"vram_keeper_{whose}{limit.metric}_limit{unit}", f"Ceiling for {limit.what}{of}.", most)
    yield from _users(done)
    yield from _devices(done)
    yield from _requests(done)


def _users(done: Measurements) -> Iterator[Metric]:
    for name, meaning, field in (
        ("memory_bytes", "Bytes that count for a user.", "nbytes"),
        ("entries", "Names of a user.", "entries"),
        ("descriptors", "Descriptors that count for a user.", "descriptors"),
        ("leases", "Leases of a user.", "leases"),
        ("connections", "Connections of a user.", "connections"),
    ):
        family = GaugeMetricFamily(f"vram_keeper_user_{name}", meaning, labels=["uid"])
        for row in done.users:
            family.add_metric([_label(row.uid)], getattr(row, field))
        yield family


def _devices(done: Measurements) -> Iterator[Metric]:
    memory = GaugeMetricFamily("vram_keeper_device_memory_bytes", "Bytes kept of a device's memory.", labels=["device"])
    versions = GaugeMetricFamily("vram_keeper_device_versions", "Versions with memory of a device.", labels=["device"])
    sums: dict[str, list[int]] = {}
    for row in done.devices:
        known = row.device is not None and _DEVICE.fullmatch(row.device) is not None
        counts = sums.setdefault(_label(row.device if known else None), [0, 0])
        counts[0] += row.nbytes
        counts[1] += row.versions
    for device, (nbytes, count) in sums.items():
        memory.add_metric([device], nbytes)
        versions.add_metric([device], count)
    yield memory
    yield versions


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


def _label(value: object) -> str:
    return "(other)" if value is None else str(value)


def _gauge(name: str, meaning: str, number: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=number)


def _total(name: str, meaning: str, number: float) -> Metric:
    return CounterMetricFamily(name, meaning, value=number)
