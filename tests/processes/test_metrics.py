"""A keeper's numbers, as whoever scrapes them sees them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.deadlines import SOON
from tests.support.memfds import make_memfd
from tests.support.places import short_directory

import vram
from vram.errors import NotFoundError, UsageError
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient
from vram.keeper.private import KeeperProcess
from vram.metrics import Exporter, exporter

VRAM = Path(sys.executable).with_name("vram")


@pytest.fixture
def kept() -> Iterator[vram.Keeper]:
    with vram.private_keeper() as keeper:
        yield keeper


@pytest.fixture
def served(kept: vram.Keeper) -> Iterator[Exporter]:
    with contextlib.closing(Exporter("127.0.0.1", 0, kept.path)) as found:
        yield found


def scrape(address: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=SOON) as answer:
        return str(answer.read().decode())


def values(text: str) -> dict[tuple[str, ...], float]:
    """By the name of the sample and the values of its labels, in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def measured(keeper: vram.Keeper) -> m.Measurements:
    with KeeperClient.connect(keeper.path) as client:
        return client.measure()


# -- what the keeper counts -------------------------------------------------------------------------------------------
def test_requests_are_counted_by_kind_with_what_failed(kept: vram.Keeper) -> None:
    vram.publish("a", {"a": np.zeros(4)}, keeper=kept)
    for _ in range(3):
        vram.attach("a", keeper=kept).close(wait=True)
    with pytest.raises(NotFoundError):
        vram.attach("none", keeper=kept)
    vram.revoke("a", keeper=kept)
    rows = {row.kind: row for row in measured(kept).requests}
    assert (rows["attach"].count, rows["attach"].errors) == (4, {"NotFoundError": 1})
    assert rows["publish"].count == 1
    assert rows["revoke"].count >= 1
    for row in rows.values():
        assert sum(row.buckets) == row.count
        assert row.seconds > 0.0


def test_bytes_are_counted_by_user_and_by_device_until_they_are_gone(kept: vram.Keeper) -> None:
    vram.publish("a", {"a": np.zeros(4)}, keeper=kept)
    vram.publish("b", {"a": np.zeros(4)}, keeper=kept)
    lease = vram.attach("a", keeper=kept)
    found = measured(kept)
    (user,) = found.users
    assert (user.uid, user.nbytes, user.entries, user.leases) == (os.geteuid(), 4 << 20, 2, 1)
    (device,) = found.devices
    assert (device.device, device.nbytes, device.versions) == ("host", 4 << 20, 2)
    vram.publish("a", {"a": np.zeros(1 << 20)}, keeper=kept)  # the old version stays for its reader
    (device,) = measured(kept).devices
    assert (device.nbytes, device.versions) == (12 << 20, 3)
    lease.close(wait=True)
    vram.remove("a", keeper=kept)
    vram.remove("b", keeper=kept)
    assert measured(kept).devices == []


def test_devices_that_no_memory_is_on_are_not_counted(kept: vram.Keeper) -> None:
    """A publisher may name 64, each version others: nobody's answer is to grow by that."""
    fd = make_memfd(2 << 20)
    try:
        with KeeperClient.connect(kept.path) as client:
            devices = [f"{number:064}" for number in range(63)]
            rows = [m.SegmentRow(2 << 20, 1, 63)]
            client._request(m.Published, m.Publish, "w", rows, [*devices, "host"], b"m", False, True, {}, fds=[fd])
    finally:
        os.close(fd)
    (row,) = measured(kept).devices
    assert (row.device, row.nbytes) == ("host", 2 << 20)


# -- what is served ---------------------------------------------------------------------------------------------------
def test_a_scrape_has_what_the_keeper_says(kept: vram.Keeper, served: Exporter) -> None:
    vram.publish("a", {"a": np.zeros(4)}, keeper=kept)
    lease = vram.attach("a", keeper=kept)
    found = values(scrape(f"127.0.0.1:{served.port}"))
    assert found["vram_keeper_up",] == 1
    assert found["vram_keeper_entries",] == found["vram_keeper_leases",] == 1
    assert found["vram_keeper_memory_bytes",] == found["vram_keeper_device_memory_bytes", "host"] == 2 << 20
    assert found["vram_keeper_user_memory_bytes", str(os.geteuid())] == 2 << 20
    assert found["vram_keeper_request_duration_seconds_count", "attach"] == 1
    assert found["vram_keeper_request_duration_seconds_bucket", "+Inf", "attach"] == 1
    assert found["vram_keeper_info", vram.__version__] == 1
    assert abs(found["vram_keeper_start_time_seconds",] - time.time()) < SOON
    lease.close()


def test_openmetrics_is_served_to_who_asks_for_it(served: Exporter) -> None:
    assert scrape(f"127.0.0.1:{served.port}", "application/openmetrics-text; version=1.0.0").endswith("# EOF\n")


def test_a_keeper_that_is_gone_is_down_and_up_again_with_the_next() -> None:
    with short_directory() as directory:
        path = os.path.join(directory, "k.sock")
        with contextlib.closing(Exporter("127.0.0.1", 0, path)) as found:
            address = f"127.0.0.1:{found.port}"
            assert values(scrape(address)) == {("vram_keeper_up",): 0}
            for _ in range(2):
                keeper = KeeperProcess(path, [])
                try:
                    assert values(scrape(address))["vram_keeper_up",] == 1
                finally:
                    keeper.stop()
                assert values(scrape(address)) == {("vram_keeper_up",): 0}


def test_names_of_devices_are_words(kept: vram.Keeper, served: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    done = measured(kept)
    row = m.DeviceRow('x"} 1\nvram_keeper_up 0\x1b', 5, 1)
    monkeypatch.setattr(KeeperClient, "measure", lambda self: m.decode_reply(m.encode(_with_devices(done, [row]))))
    text = scrape(f"127.0.0.1:{served.port}")
    assert values(text)["vram_keeper_up",] == 1
    assert values(text)["vram_keeper_device_memory_bytes", "(other)"] == 5


def _with_devices(done: m.Measurements, devices: list[m.DeviceRow]) -> m.Measurements:
    return m.Measurements(1, done.uptime, done.processor, done.resident, done.bounds, [], [], devices)


def test_an_address_that_is_taken_is_said(served: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_BUSY", 0.3)
    with pytest.raises(UsageError, match=f"cannot listen at 127.0.0.1:{served.port}"):
        Exporter("127.0.0.1", served.port)


# -- the commands -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_keep_serves_its_numbers_and_takes_the_exporter_along(tmp_path: Path, end: signal.Signals) -> None:
    """One that nobody follows, when it is killed; one that survives not before it is told to end."""
    path = tmp_path / "k.sock"
    command = [VRAM, "keep", "--socket", path, "--metrics", "127.0.0.1:0"]
    if end == signal.SIGKILL:
        command.append("--ephemeral")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as keeper:
        assert keeper.stderr is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", keeper.stderr.readline())
            assert found is not None
            port = int(found[1])
            until(lambda: "vram_keeper_up 1.0" in scrape(f"127.0.0.1:{port}"), "the keeper's numbers are served")
            if end == signal.SIGTERM:
                with KeeperClient.connect(str(path)) as client:
                    os.kill(client.statistics().pid, signal.SIGKILL)
                    assert client.statistics().pid  # of the next one
                assert "vram_keeper_up 1.0" in scrape(f"127.0.0.1:{port}")
            keeper.send_signal(end)
            keeper.wait(SOON)

            def is_refused() -> bool:
                with socket.socket() as asking:
                    return asking.connect_ex(("127.0.0.1", port)) != 0

            until(is_refused, "the exporter ends with its keeper")
        finally:
            keeper.terminate()


def test_metrics_of_a_keeper_that_runs(kept: vram.Keeper) -> None:
    with subprocess.Popen(
        [VRAM, "metrics", "--listen", "127.0.0.1:0", "--socket", kept.path], stderr=subprocess.PIPE, text=True
    ) as serving:
        assert serving.stderr is not None
        found = re.search(r"127\.0\.0\.1:\d+", serving.stderr.readline())
        assert found is not None
        assert "vram_keeper_up 1.0" in scrape(found[0])
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(SOON) == 0
        assert serving.stderr.read() == ""


def test_a_wrong_address_keeps_the_keeper_from_starting(tmp_path: Path) -> None:
    done = subprocess.run(
        [VRAM, "keep", "--socket", tmp_path / "k.sock", "--metrics", "here"],
        capture_output=True, text=True, timeout=SOON,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "no address" in done.stderr
    assert not (tmp_path / "k.sock").exists()
