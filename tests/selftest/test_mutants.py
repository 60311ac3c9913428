"""The table of planted bugs can be planted, and its runner tells what was caught from what only looks so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "def double(number):\n    return 2 * number\n\n\ndef name():\n    return 'toy'\n"
TESTS = """
import time
import toy

def test_double():
    assert toy.double(3) == 6, "doubled wrongly"

def test_waits():
    while toy.name() != "toy":
        time.sleep(0.1)

def test_blind():
    toy.double(3)
"""
ENTRY = """
[[mutant]]
name = "{name}"
file = "src/toy.py"
find = '''{find}'''
replace = '''{replace}'''
tests = ["tests/test_toy.py::{test}"]
because = "doubled wrongly"
"""


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants_run", ROOT / "tests/mutants/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def toy(root: Path, *entries: str) -> tuple[Path, Path]:
    """Make a tree of one module with one table of bugs."""
    (root / "src").mkdir()
    (root / "tests").mkdir()
    (root / "src/toy.py").write_text(SOURCE)
    (root / "tests/test_toy.py").write_text(TESTS)
    tables = root / "tables"
    tables.mkdir()
    (tables / "toy.toml").write_text("".join(entries))
    return tables, root


def entry(name: str, find: str = "2 * number", replace: str = "3 * number", test: str = "test_double") -> str:
    return ENTRY.format(name=name, find=find, replace=replace, test=test)


def test_every_bug_of_the_table_can_be_planted_and_there_are_sixty(runner: ModuleType) -> None:
    assert len(runner.load(runner.TABLES, ROOT)) >= 60


def test_what_is_caught_for_its_reason_counts_and_nothing_else_does(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables, root = toy(
        tmp_path,
        entry("a wrong factor"),
        entry("a crash", replace="undefined * number"),
        entry("a file that is no Python", replace="2 *"),
        entry("a survivor", test="test_blind"),
        entry("a hang", find="'toy'", replace="'game'", test="test_waits"),
    )
    assert runner.run(tables, root, jobs=2, deadline=20.0) == 4
    printed = capsys.readouterr().out
    assert "a wrong factor: caught" in printed
    assert "a crash: its tests fail for another reason" in printed
    assert "a file that is no Python: its tests did not run to a failure" in printed
    assert "a survivor: SURVIVED" in printed
    assert "a hang: HUNG" in printed
    assert "1 passed, 4 failed" in printed
    assert (root / "src/toy.py").read_text() == SOURCE  # planted in a copy


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([], "no bug in"),
        ([entry("absent", find="4 * number")], "occurs 0 times"),
        ([entry("ambiguous", find="return")], "occurs 2 times"),
        ([entry("no change", replace="2 * number")], "changes nothing"),
        ([entry("twice"), entry("twice")], "name is taken"),
        ([entry("elsewhere").replace("test_toy.py", "test_gone.py")], "there is no tests/test_gone.py"),
        ([entry("no reason").replace("doubled wrongly", "")], "only replace may be empty"),
        ([entry("a spare key") + "spare = 1\n"], "it takes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_table_that_proves_nothing_is_refused(
    runner: ModuleType, tmp_path: Path, entries: list[str], why: str
) -> None:
    tables, root = toy(tmp_path, *entries)
    if not entries:
        (tables / "toy.toml").unlink()
    with pytest.raises(runner.TableError, match=why):
        runner.load(tables, root)


def test_a_bug_that_is_no_python_is_named(runner: ModuleType, tmp_path: Path) -> None:
    found = runner.load(*toy(tmp_path, entry("a wrong factor"), entry("half a line", replace="2 *")))
    runner.parse(found[:1], tmp_path)
    with pytest.raises(runner.TableError, match=r"half a line: planted, src/toy.py is no Python"):
        runner.parse(found, tmp_path)


def test_tests_that_are_not_there_are_named(runner: ModuleType, tmp_path: Path) -> None:
    tables, root = toy(tmp_path, entry("a wrong factor"), entry("a case that is gone", test="test_double[3]"))
    found = runner.load(tables, root)
    runner.find_tests(found[:1], root)
    with pytest.raises(runner.TableError, match=r"test_toy.py::test_double\[3\]"):
        runner.find_tests(found, root)


def test_tests_that_fail_without_a_bug_catch_nothing(runner: ModuleType, tmp_path: Path) -> None:
    tables, root = toy(tmp_path, entry("a wrong factor"))
    (root / "src/toy.py").write_text(SOURCE.replace("2 * number", "2 * number + 1 - 0 * number"))
    (tables / "toy.toml").write_text(entry("a wrong factor", find="2 * number + 1"))
    with pytest.raises(runner.TableError, match="without any bug, pytest ended with 1"):
        runner.run(tables, root)


def test_more_jobs_than_there_are_tests_run_nothing_else(runner: ModuleType, tmp_path: Path) -> None:
    """One that got no test ran pytest without arguments, which collected the whole tree."""
    tables, root = toy(tmp_path, entry("a wrong factor"), entry("another", replace="4 * number"))
    (root / "tests/test_other.py").write_text("def test_fails():\n    assert False\n")
    assert runner.run(tables, root, jobs=2, deadline=20.0) == 0
