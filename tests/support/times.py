"""Processor time by directory and file, children included, printed at the end of a run.

A child counts for the test that waits for it. ``VRAM_TEST_FILES=50`` prints more files.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from .children import spent_by_children

_PROPERTY = "processor seconds"


def spent() -> float:
    """Return the processor time of this process and of the children that it has waited for, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + spent_by_children()


class Times:
    """Adds up what each file has taken, in the process that reports."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self._last = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """Note what a phase of a test has taken since the one before it."""
        report: pytest.TestReport = yield
        now = spent()
        report.user_properties.append((_PROPERTY, round(now - self._last, 3)))
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add it up. A phase carries the properties of the ones before it."""
        found = [value for name, value in report.user_properties if name == _PROPERTY]
        if found:
            self.files[report.nodeid.partition("::")[0]] += found[-1]

    def directories(self) -> Counter[str]:
        """Return the sums by directory below tests."""
        sums: Counter[str] = Counter()
        for file, seconds in self.files.items():
            parts = Path(file).parts
            sums[parts[parts.index("tests") + 1] if "tests" in parts else parts[0]] += seconds
        return sums

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the sums, and the files that took most."""
        if not self.files:
            return
        terminalreporter.section("processor time, children included")
        line = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.directories().most_common())
        terminalreporter.line(f"{sum(self.files.values()):.0f} s: {line}")
        most = ", ".join(
            f"{file} {seconds:.0f}"
            for file, seconds in self.files.most_common(int(os.environ.get("VRAM_TEST_FILES") or 8))
        )
        terminalreporter.line(f"most: {most}")
