"""Makes docs/pictures/metrics.png: a keeper under load, scraped each second, as `vram metrics` shows it to Prometheus.

    python docs/pictures/make_metrics.py [--seconds 60]

It needs matplotlib, which nothing else here does, and vram[metrics].
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import vram
from vram.errors import NotFoundError, QuotaError
from vram.metrics import Exporter

READERS, PUBLISHERS, NAMES = 8, 2, 24
MIB = 1 << 20
Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def publish(path: str, seed: int, stop: object) -> None:
    """Publish under changing names, of changing sizes, until the ceiling refuses; now and then remove one."""
    dice = random.Random(seed)
    while not stop.wait(dice.expovariate(12)):
        name = f"shard/{dice.randrange(NAMES // PUBLISHERS) * PUBLISHERS + seed}"
        try:
            if dice.random() < 0.12:
                vram.remove(name, keeper=path)
                continue
            with vram.empty(dice.randrange(2, 14) * MIB, device="host") as array:
                vram.publish(name, {"a": array}, keeper=path)
        except (NotFoundError, QuotaError):
            pass


def read(path: str, seed: int, stop: object) -> None:
    """Attach whatever is there, hold it for a moment, and give it back."""
    dice = random.Random(seed)
    began = time.monotonic()
    while not stop.wait(dice.expovariate(15 + 20 * ((time.monotonic() - began) % 30 > 15))):
        try:
            with vram.attach(f"shard/{dice.randrange(NAMES)}", keeper=path):
                stop.wait(dice.expovariate(8))
        except NotFoundError:
            pass


def scrape(address: str) -> Scrape:
    """Ask once."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def collect(seconds: int) -> list[tuple[float, Scrape]]:
    """Run a keeper with readers and publishers, and scrape it each second."""
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    with vram.private_keeper(max_bytes=256 * MIB) as keeper:
        exporter = Exporter("127.0.0.1", 0, keeper.path)
        jobs = [(publish, seed) for seed in range(PUBLISHERS)] + [(read, 100 + seed) for seed in range(READERS)]
        children = [spawn.Process(target=job, args=(keeper.path, seed, stop)) for job, seed in jobs]
        found: list[tuple[float, Scrape]] = []
        try:
            for child in children:
                child.start()
            while vram.statistics(keeper=keeper).connections < len(children):
                time.sleep(0.05)
            began = time.monotonic()
            for second in range(seconds + 1):
                time.sleep(max(0.0, began + second - time.monotonic()))
                found.append((time.monotonic() - began, scrape(f"127.0.0.1:{exporter.port}")))
        finally:
            stop.set()
            for child in children:
                child.join(30)
            exporter.close()
    return found


def series(found: list[tuple[float, Scrape]], name: str, label: str = "") -> dict[str, list[float]]:
    """The values of a metric over time, by a label; 0 where it is not there yet."""
    kinds = {dict(key[1]).get(label, "") for _, one in found for key in one if key[0] == name}
    rows: dict[str, list[float]] = {kind: [] for kind in sorted(kinds)}
    for _, one in found:
        sums: defaultdict[str, float] = defaultdict(float)
        for (metric, labels), value in one.items():
            if metric == name:
                sums[dict(labels).get(label, "")] += value
        for kind in rows:
            rows[kind].append(sums[kind])
    return rows


def rates(found: list[tuple[float, Scrape]], name: str, label: str, over: int = 5) -> dict[str, list[float]]:
    """What `rate(name[5s])` is, by a label."""
    times = [when for when, _ in found]
    return {
        kind: [
            (row[i] - row[max(0, i - over)]) / ((times[i] - times[max(0, i - over)]) or 1.0) for i in range(len(row))
        ]
        for kind, row in series(found, name, label).items()
    }


def quantile(found: list[tuple[float, Scrape]], request: str, share: float, over: int = 10) -> list[float]:
    """What `histogram_quantile` of the last seconds is, in microseconds."""
    rows = []
    name = "vram_keeper_request_duration_seconds_bucket"
    for _, one in found:
        row = [
            (float(dict(key[1])["le"]), value)
            for key, value in one.items()
            if key[0] == name and dict(key[1])["request"] == request
        ]
        rows.append(sorted(row))
    result = []
    for i, row in enumerate(rows):
        before = dict(rows[max(0, i - over)])
        counts = [(bound, value - before.get(bound, 0.0)) for bound, value in row]
        wanted, below, floor = share * (counts[-1][1] if counts else 0), 0.0, 0.0
        answer = float("nan")
        for bound, count in counts:
            if counts[-1][1] and count >= wanted:
                top = floor if bound == float("inf") else bound
                answer = floor + (top - floor) * ((wanted - below) / ((count - below) or 1.0))
                break
            below, floor = count, bound
        result.append(answer * 1e6)
    return result


def draw(found: list[tuple[float, Scrape]], path: Path) -> None:
    """Plot six panels in Grafana's manner."""
    import matplotlib  # not in the children

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    times = [when for when, _ in found]
    plt.style.use("dark_background")
    plt.rcParams.update({"font.size": 8, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left"})
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.2), facecolor="#111217")
    colours = ["#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#f2495c", "#8ab8ff", "#c0d8ff"]
    for axis in axes.flat:
        axis.set_facecolor("#181b1f")
        axis.grid(color="#2c3235", linewidth=0.6)
        axis.set_prop_cycle(color=colours)
        axis.set_xlim(0, times[-1])
        for side in axis.spines.values():
            side.set_visible(False)
        axis.tick_params(length=0)
    held, asked, slow, wrong, counts, work = axes.flat

    held.set_title("Memory that is kept (MiB)")
    row = [value / MIB for value in series(found, "vram_keeper_memory_bytes")[""]]
    held.fill_between(times, row, alpha=0.15)
    held.plot(times, row, linewidth=1.2, label="host")
    limit = [value / MIB for value in series(found, "vram_keeper_memory_limit_bytes")[""]]
    held.plot(times, limit, "--", color="#f2495c", linewidth=1, label="ceiling (--max-bytes)")
    held.set_ylim(0, max(limit) * 1.15)

    asked.set_title("Requests (each second)")
    busy = rates(found, "vram_keeper_request_duration_seconds_count", "request")
    busy = {kind: row for kind, row in busy.items() if max(row) >= 1 and kind not in ("statistics", "measure")}
    asked.stackplot(times, *busy.values(), labels=list(busy), colors=colours, alpha=0.75, linewidth=0)
    asked.set_ylim(bottom=0)

    slow.set_title("Work on one request (µs, of the last 10 s)")
    for request in ("attach", "publish", "release"):
        for share, style in ((0.5, "-"), (0.99, ":")):
            row = quantile(found, request, share)
            if any(value == value for value in row):
                colour = colours[("attach", "publish", "release").index(request)]
                slow.plot(times, row, style, color=colour, linewidth=1.2, label=f"{request} p{share * 100:g}")
    slow.set_yscale("log")

    wrong.set_title("Refused (each second)")
    for kind, row in rates(found, "vram_keeper_request_errors_total", "error").items():
        wrong.plot(times, row, linewidth=1.2, label=kind)
    wrong.set_ylim(bottom=0)

    counts.set_title("Entries, versions, leases, connections")
    for name in ("entries", "versions", "leases", "connections"):
        counts.plot(times, series(found, f"vram_keeper_{name}")[""], linewidth=1.2, label=name)
    counts.set_ylim(bottom=0)

    work.set_title("The keeper itself")
    for row in rates(found, "vram_keeper_cpu_seconds_total", "").values():
        work.plot(times[1:], [value * 100 for value in row][1:], linewidth=1.2, label="processor, % of a core")
    row = [value / MIB for value in series(found, "vram_keeper_resident_memory_bytes")[""]]
    work.plot(times, row, linewidth=1.2, label="own memory, MiB")
    work.set_ylim(bottom=0)

    for axis in axes.flat:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncol=4, fontsize=7, frameon=False)
    figure.tight_layout(h_pad=1.5)
    figure.savefig(path, dpi=100, facecolor=figure.get_facecolor())


def main() -> None:
    """Collect, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    given = parser.parse_args()
    draw(collect(given.seconds), Path(__file__).with_name("metrics.png"))


if __name__ == "__main__":
    main()
