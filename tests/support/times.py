"""Processor time by directory and file, children included, printed at the end of a run and held against ceilings.

A child counts for the test that waits for it; collecting the tests, in every worker, counts by itself.
``VRAM_TEST_FILES=50`` prints more files. ``--ceilings`` makes a run of the whole suite red that takes more than it may:
see :data:`CEILINGS`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .children import spent_by_children

# Processor seconds that the directories, and all of them, may take in `make test`, on a machine where the yardstick
# takes YARDSTICK seconds. Each directory has some room, since the samples differ from commit to commit.
CEILINGS = {
    "architecture": 40,
    "collection": 70,
    "conformance": 40,
    "faults": 60,
    "hostile": 50,
    "processes": 290,
    "selftest": 25,
    "stateful": 20,
    "unit": 115,
    "all": 600,
}
YARDSTICK = 0.14  # processor seconds, beside a run of the suite; 0.12 on a quiet core
_BETWEEN = 10.0  # seconds between two looks at how fast the machine is: a shared one changes within seconds

_PROPERTY = "processor seconds"
_COLLECTION = "processor seconds of the collection"
_MACHINE = "processor seconds of the yardstick"


def spent() -> float:
    """Return the processor time of this process and of the children that it has waited for, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + spent_by_children()


def yardstick() -> float:
    """Return the processor seconds that fixed work takes here and now: a loop, and two processes for the kernel."""
    begun = time.process_time()
    sum(number * number for number in range(1_500_000))
    command = [sys.executable, "-c", "pass"]
    used = [os.wait4(os.posix_spawn(sys.executable, command, os.environ), 0)[2] for _ in range(2)]
    return time.process_time() - begun + sum(one.ru_utime + one.ru_stime for one in used)


class Times:
    """Adds up what each file has taken, in the process that reports."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self._last = spent()
        self._collection: float | None = None
        self._looked = time.monotonic()
        self._machine: list[float] = []  # what the yardstick took, again and again
        self._slower = 1.0
        self._over: list[str] = []

    def pytest_collection_finish(self) -> None:
        """Note what the collection has taken, for the first report."""
        now = spent()
        self._collection, self._last = now - self._last, now

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """Note what a phase of a test has taken since the one before it."""
        report: pytest.TestReport = yield
        now = spent()
        report.user_properties.append((_PROPERTY, round(now - self._last, 3)))
        if self._collection is not None:
            report.user_properties.append((_COLLECTION, round(self._collection, 3)))
            self._collection = None
        if item.config.getoption("--ceilings") and time.monotonic() > self._looked + _BETWEEN:
            report.user_properties.append((_MACHINE, yardstick()))
            self._looked, now = time.monotonic(), spent()
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add it up."""
        found: dict[str, Any] = dict(report.user_properties)
        if _PROPERTY in found:
            self.files[report.nodeid.partition("::")[0]] += found[_PROPERTY]
            self.files["collection"] += found.get(_COLLECTION, 0.0)
        if _MACHINE in found:
            self._machine.append(found[_MACHINE])

    def directories(self) -> Counter[str]:
        """Return the sums by directory below tests."""
        sums: Counter[str] = Counter()
        for file, seconds in self.files.items():
            parts = Path(file).parts
            sums[parts[parts.index("tests") + 1] if "tests" in parts else parts[0]] += seconds
        return sums

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Make a run red that took more than it may, in the process that reports."""
        if not session.config.getoption("--ceilings") or hasattr(session.config, "workerinput"):
            return
        self._slower = max(1.0, statistics.fmean(self._machine or [YARDSTICK]) / YARDSTICK)
        taken = self.directories()
        for name, seconds in [*taken.items(), ("all", sum(taken.values()))]:
            if seconds > CEILINGS[name] * self._slower:
                self._over.append(f"{name} took {seconds:.0f} s, and may take {CEILINGS[name] * self._slower:.0f}")
        if self._over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the sums, and the files that took most."""
        if not self.files:
            return
        terminalreporter.section("processor time, children included")
        line = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.directories().most_common())
        slower = f", on a machine {self._slower:.1f} times as slow as the ceilings are for" if self._slower > 1 else ""
        terminalreporter.line(f"{sum(self.files.values()):.0f} s: {line}{slower}")
        most = self.files.most_common(int(os.environ.get("VRAM_TEST_FILES") or 8))
        terminalreporter.line(f"most: {', '.join(f'{file} {seconds:.0f}' for file, seconds in most)}")
        for line in self._over:
            terminalreporter.line(f"over its ceiling: {line}", red=True)
