"""Why a test failed, as a pytest plugin prints it (``-p reasons``): whether a planted bug was caught for its reason.

A planted bug that crashes proves nothing about the check that was to catch it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

__all__ = ["PLUGIN", "Reason", "environment", "of", "passed", "require", "require_of", "run", "run_machine"]

PLUGIN = ("-p", "reasons")
_WORD = "REASON "
_CHECKS = ("/vram/testing/", "/tests/")
_ASSERTIONS = ("AssertionError", "Failed")  # the second is pytest's: DID NOT RAISE, left behind
_found: list[list[str]] = []


class Reason(NamedTuple):
    """One failure: of which test, in which phase, what was raised, and the line of the check that it came through."""

    test: str
    phase: str
    kind: str
    words: str
    line: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.words} | {self.line}"


def environment(base: dict[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which a child finds this plugin."""
    base = dict(os.environ) if base is None else base
    here = str(Path(__file__).parent)
    return {**base, "PYTHONPATH": os.pathsep.join([here, *filter(None, [base.get("PYTHONPATH")])])}


def of(printed: str) -> list[Reason]:
    """Return the failures that a run with the plugin printed."""
    lines = [line.removeprefix(_WORD) for line in printed.splitlines() if line.startswith(_WORD)]
    return [Reason(*json.loads(line)) for line in lines]


def require(failures: list[Reason], because: str) -> None:
    """Fail unless one of the failures is an assertion of the check, with these words in it or in its line.

    Another error counts only where `because` begins with its name: then it is what the bug does, and no crash.
    """
    for failure in failures:
        if because in str(failure) and (failure.kind in _ASSERTIONS or because.startswith(failure.kind + ": ")):
            return
    pytest.fail(f"not caught because of {because!r}, but: " + ("\n".join(map(str, failures)) or "not caught at all"))


def run(folder: Path, chosen: list[str], base: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run tests that lie in a folder, with the plugin."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *PLUGIN, "-rA", "--rootdir", str(folder), *chosen],
        capture_output=True, text=True, timeout=300, cwd=folder, check=False, env=environment(base),
    )  # fmt: skip


def require_of(ran: subprocess.CompletedProcess[str], test: str, because: str) -> None:
    """:func:`require` of the failures of one test, by the end of its name."""
    found = of(ran.stdout)
    assert found, ran.stdout[-3000:] + ran.stderr[-2000:]
    require([one for one in found if one.test.endswith(test)], because)


def passed(ran: subprocess.CompletedProcess[str], prefix: str) -> set[str]:
    """Return which tests passed in classes that are called so, without ``test_``; none of theirs may have failed."""
    assert not [one for one in of(ran.stdout) if f"::{prefix}" in one.test]
    lines = (line for line in ran.stdout.splitlines() if line.startswith("PASSED") and f"::{prefix}" in line)
    return {line.rpartition("::test_")[2] for line in lines}


def run_machine(machine: Any, examples: int, steps: int) -> None:
    """Run a state machine in this process, and end the process with 1 and the reason at the first check that fails.

    What a bug leaves in the process disturbs the examples after it: Hypothesis would only say that they are flaky.
    """
    from hypothesis import HealthCheck, Phase, settings, stateful
    from hypothesis.stateful import run_state_machine_as_test

    def watched(function: Any) -> Any:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            try:
                return function(*arguments, **options)
            except (AssertionError, pytest.fail.Exception) as error:
                (entry, *_) = reversed([e for e in traceback.extract_tb(error.__traceback__) if _is_check(e.filename)])
                row = [machine.__name__, function.__name__, type(error).__name__, str(error), entry.line]
                print(_WORD + json.dumps(row), flush=True)
                os._exit(1)

        return call

    for name, one in inspect.getmembers(machine):
        for marker in (stateful.RULE_MARKER, stateful.INITIALIZE_RULE_MARKER, stateful.INVARIANT_MARKER):
            if (marked := getattr(one, marker, None)) is not None:
                assert callable(marked.function), name
                object.__setattr__(marked, "function", watched(marked.function))
    machine.teardown = watched(machine.teardown)
    run_state_machine_as_test(machine, settings=settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck)))  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[Any]:
    """Note why."""
    report = yield
    if report.failed and call.excinfo is not None:
        _note(item.nodeid, call.when, call.excinfo.value)
    return report


def _note(test: str, phase: str, error: BaseException | None) -> None:
    """And what it hides: what failed before something was taken back, and each of several."""
    if error is None:
        return
    info = pytest.ExceptionInfo.from_exception(error)
    lines = [str(entry.statement).strip() for entry in info.traceback if _is_check(str(entry.path))]
    _found.append([test, phase, info.typename, str(error)[:4000], (lines or [""])[-1][:500]])
    for other in error.exceptions if isinstance(error, BaseExceptionGroup) else (error.__context__,):
        _note(test, phase, other)


def _is_check(path: str) -> bool:
    return any(place in path for place in _CHECKS) and "/selftest/" not in path


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it."""
    for row in _found:
        terminalreporter.write_line(_WORD + json.dumps(row))
