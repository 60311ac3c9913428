"""What CI holds its results against: each way in which tests can silently not run is red, and says which."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = """
[minimum.main]
unit = 2
processes = 1

[minimum.torch]
unit = 1

[skips]
"root may read every file" = "anywhere"
"could not import 'torch'.*" = ["main"]
"""
PASSED = '<testcase classname="tests.{suite}.test_x" name="{name}"/>'
SKIPPED = '<testcase classname="tests.{suite}.test_x" name="{name}_not"><skipped message="{why}"/></testcase>'
MODULE = (
    '<testcase classname="" name="tests.{suite}.test_x"><skipped message="collection skipped">'
    "('/somewhere/tests/{suite}/test_x.py', 23, \"Skipped: {why}\")</skipped></testcase>"
)
FAILED = '<testcase classname="tests.{suite}.test_x" name="{name}"><failure message="no"/></testcase>'


def cases(kind: str, suite: str, count: int = 1, why: str = "") -> str:
    return "".join(kind.format(suite=suite, name=f"test_{number}", why=why) for number in range(count))


WHOLE = {"main": cases(PASSED, "unit", 2) + cases(PASSED, "processes"), "torch": cases(PASSED, "unit")}


def counts(folder: Path, results: Mapping[str, str]) -> tuple[int, str]:
    """Run the check as CI does, over results of these environments."""
    for environment, found in results.items():
        (folder / f"{environment}.xml").write_text(f"<testsuites><testsuite>{found}</testsuite></testsuites>")
    (folder / "expected.toml").write_text(EXPECTED)
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci/counts.py"), str(folder), str(folder / "expected.toml")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert not done.stderr
    return done.returncode, done.stdout


def test_what_ran_whole_is_green_and_counted(tmp_path: Path) -> None:
    status, printed = counts(tmp_path, WHOLE)
    assert (status, "FAILED" in printed) == (0, False)
    assert "unit: 2 passed, 0 failed, 0 skipped" in printed
    assert "unit@torch: 1 passed, 0 failed, 0 skipped" in printed


def test_skips_for_allowed_reasons_are_green(tmp_path: Path) -> None:
    more = cases(SKIPPED, "unit", why="root may read every file")
    more += cases(MODULE, "unit", why="could not import &apos;torch&apos;: No module named &apos;torch&apos;")
    status, printed = counts(tmp_path, {**WHOLE, "main": WHOLE["main"] + more})
    assert status == 0, printed
    assert "unit: 2 passed, 0 failed, 2 skipped" in printed


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ({**WHOLE, "main": cases(PASSED, "unit", 2)}, "processes@main: 0 tests executed, and it has at least 1"),
        ({**WHOLE, "main": cases(PASSED, "unit") + cases(PASSED, "processes")}, "unit@main: 1 tests executed"),
        ({"main": WHOLE["main"]}, "torch: there is no result of it"),
        ({**WHOLE, "3.99": cases(PASSED, "unit")}, "3.99: a result that is not expected"),
        ({**WHOLE, "torch": cases(SKIPPED, "unit", why="root may read every file")}, "unit@torch: 0 tests executed"),
        (
            {**WHOLE, "torch": WHOLE["torch"] + cases(MODULE, "unit", why="could not import &apos;torch&apos;: none")},
            "torch: 1 skipped for a reason that .ci/expected.toml does not allow there: could not import 'torch': none",
        ),
        (
            {**WHOLE, "main": WHOLE["main"] + cases(MODULE, "unit", why="no C compiler")},
            "main: 1 skipped for a reason that .ci/expected.toml does not allow there: no C compiler",
        ),
    ],
    ids=["suite gone", "smaller suite", "missing file", "unknown environment", "skipped only", "no torch", "module"],
)  # fmt: skip
def test_what_did_not_run_is_red(tmp_path: Path, results: Mapping[str, str], said: str) -> None:
    status, printed = counts(tmp_path, results)
    assert status == 1
    assert f"FAILED: {said}" in printed, printed


def test_failures_count_as_executed(tmp_path: Path) -> None:
    status, printed = counts(tmp_path, {**WHOLE, "torch": cases(FAILED, "unit")})
    assert status == 0
    assert "unit@torch: 0 passed, 1 failed, 0 skipped" in printed


def test_a_test_that_is_there_twice_has_run_once(tmp_path: Path) -> None:
    """One that failed and whose teardown failed too, or that was run again."""
    twice = cases(PASSED, "unit") + cases(PASSED, "unit") + cases(PASSED, "processes")
    status, printed = counts(tmp_path, {**WHOLE, "main": twice})
    assert status == 1
    assert "FAILED: unit@main: 1 tests executed, and it has at least 2" in printed
    status, printed = counts(tmp_path, {**WHOLE, "main": WHOLE["main"] + cases(FAILED, "unit")})
    assert "unit: 1 passed, 1 failed, 0 skipped" in printed


def test_the_table_names_every_suite_of_the_main_environment() -> None:
    """A suite that is not in it may vanish, and nobody sees it."""
    table = tomllib.loads((ROOT / ".ci/expected.toml").read_text())
    suites = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    elsewhere = {"gpu", "standin", "site"}  # by hand, in a process to itself, and in a browser
    assert table["minimum"]["main"].keys() == suites - elsewhere
    for suite, least in table["minimum"]["main"].items():
        assert least >= len(list((ROOT / "tests" / suite).glob("test_*.py"))), suite


def test_the_table_names_every_environment_that_ci_makes() -> None:
    """Five releases of the bindings, every promised Python and torch: none can be forgotten in either file."""
    table = tomllib.loads((ROOT / ".ci/expected.toml").read_text())
    bindings = [name for name in table["minimum"] if name.startswith("cuda-")]
    script = (ROOT / ".ci/run").read_text()
    assert len(bindings) >= 4  # and the newest, in the main environment
    assert all(name.removeprefix("cuda-") in script and f"standin-{name}" in table["minimum"] for name in bindings)
    assert {"main", "standin", "torch", "3.12", "3.13"} <= table["minimum"].keys()
    assert all(least > 0 for suites in table["minimum"].values() for least in suites.values())
