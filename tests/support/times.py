"""Processor time by directory and file, children included: printed at the end of a run, and held to ceilings.

A child counts for the test that waits for it. ``VRAM_TEST_CEILINGS=1`` (``make test``) fails a run in which a directory
takes more than its ceiling.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

CEILINGS = Path(__file__).with_name("ceilings.toml")
_PROPERTY = "processor seconds"


def spent() -> float:
    """Return the processor time of this process and of the children that it has waited for, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


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

    def too_much(self) -> list[str]:
        """Say which directories took more than their ceiling."""
        ceilings: dict[str, float] = tomllib.loads(CEILINGS.read_text())["processor_seconds"]
        sums = self.directories()
        sums["all"] = sum(sums.values())
        return [
            f"{name} took {sums[name]:.0f} s of processor time, and may take {ceilings.get(name, 0):.0f} "
            f"(tests/support/{CEILINGS.name})"
            for name in sorted(sums)
            if sums[name] > ceilings.get(name, 0)
        ]

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
        if os.environ.get("VRAM_TEST_CEILINGS"):
            for said in self.too_much():
                terminalreporter.line(f"FAILED: {said}", red=True)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that took too much."""
        if os.environ.get("VRAM_TEST_CEILINGS") and not hasattr(session.config, "workeroutput") and self.too_much():
            session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)
