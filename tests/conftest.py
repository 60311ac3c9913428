"""What every test gets: the ledger, bounded random inputs, and a summary of what could not run here."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import hypothesis
import pytest

pytest.register_assert_rewrite("vram.testing")  # before anything imports the suites, or their asserts say nothing

from vram.testing.ledger import Ledger  # noqa: E402

# No deadline per example: the machine may be busy, and what can hang has a deadline of its own.
_bounded = hypothesis.settings(deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("default", _bounded, max_examples=50)
hypothesis.settings.register_profile("ci", _bounded, max_examples=50, derandomize=True, database=None)
hypothesis.settings.register_profile("fuzz", _bounded, max_examples=2_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))

_left_out: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def ledger() -> Iterator[Ledger]:
    """Fail a test that leaves handles, fds, mappings, children or threads behind."""
    before = Ledger.take()
    yield before
    extra = before.left_behind()
    if extra:
        pytest.fail("left behind:\n  " + "\n  ".join(extra), pytrace=False)


def pytest_report_header() -> str:
    """Say what this run is able to test."""
    torch = "there" if importlib.util.find_spec("torch") else "not there"
    return f"kernel {platform.release()}, {os.cpu_count()} cores, uid {os.getuid()}, torch is {torch}"


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what was left out on purpose, by the reason it carries."""
    for item in items:
        reasons = [mark.name for mark in item.iter_markers() if mark.name in ("gpu", "slow")]
        _left_out[reasons[0] if reasons else "by selection"] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what could not run here and why: one line for each reason."""
    skipped: defaultdict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[reason.removeprefix("Skipped: ").splitlines()[0]].append(report.nodeid.partition("::")[0])
    if not skipped and not _left_out:
        return
    terminalreporter.section("did not run here")
    for reason, files in sorted(skipped.items()):
        places = sorted(set(files))
        shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more files" if len(places) > 3 else "")
        terminalreporter.line(f"{len(files)} skipped: {reason} ({shown})")
    for reason, count in sorted(_left_out.items()):
        terminalreporter.line(f"{count} left out: {reason}")
