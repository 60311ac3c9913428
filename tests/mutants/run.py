"""Plant the bugs of a table, one at a time, and run the tests that must catch each: ``make mutants``.

Each bug is an exact replacement in one source file. It is planted in a copy of the tree, never in the tree itself, and
is caught only if one of its own tests fails with the words that the table states. A test that passes, that cannot be
collected, that fails for another reason or that runs past its deadline has not caught it. Before any bug is planted,
all tests that the table names must pass.

The tables are the files ``*.toml`` beside this one; README.md says what is in them.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).resolve().parent
DEADLINE = 180.0  # seconds for the tests of one bug; they take under ten on a quiet machine
PATIENCE = 30  # seconds after which a test gives up what a bug keeps from coming; all of them pass within it
COPIED = (
    "src",
    "deploy",
    "tests",
    "docs",
    ".ci",
    "pyproject.toml",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
)
COMPILED = "build/standin"  # the stand-in's, found by the hash of its sources, so that it is not compiled again


class TableError(Exception):
    """The table itself is wrong: a bug that cannot be planted is not a bug that was caught."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted bug.

    Attributes
    ----------
    name : str
        What is wrong, as a noun phrase.
    file : str
        The file that it is planted in, from the root of the tree.
    find, replace : str
        The text that stands there, which must occur exactly once, and what stands there instead.
    tests : list of str
        Node ids. At least one must fail.
    because : str
        What the message of the failure must contain (its own words, not the source lines around it), so that a crash
        of the bug itself proves nothing.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: list[str]
    because: str

    def planted(self, text: str) -> str:
        """Return a file's text with this bug in it."""
        if (count := text.count(self.find)) != 1:
            raise TableError(f"{self.name}: its text occurs {count} times in {self.file}, and must occur once")
        return text.replace(self.find, self.replace)


def load(tables: Path, root: Path) -> list[Mutant]:
    """Read every table of a directory and check each entry against the tree, without running anything.

    Raises
    ------
    TableError
        If there is no entry, or one has other keys than a :class:`Mutant`, an empty text, a name that is taken, a text
        that is not in its file exactly once, or a test whose file is not there.
    """
    keys = {field.name for field in fields(Mutant)}
    found: dict[str, Mutant] = {}
    for path in sorted(tables.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            name = f"{path.name}: {entry.get('name', '(no name)')}"
            if entry.keys() != keys or not all(entry[key] for key in keys - {"replace"}):
                raise TableError(f"{name}: it takes {', '.join(sorted(keys))}, and only replace may be empty")
            mutant = Mutant(**entry)
            if mutant.name in found:
                raise TableError(f"{name}: this name is taken")
            if missing := [test for test in mutant.tests if not (root / test.partition("::")[0]).is_file()]:
                raise TableError(f"{name}: there is no {missing[0]}")
            if not (root / mutant.file).is_file():
                raise TableError(f"{name}: there is no {mutant.file}")
            if mutant.planted((root / mutant.file).read_text()) == (root / mutant.file).read_text():
                raise TableError(f"{name}: the bug changes nothing")
            found[mutant.name] = mutant
    if not found:
        raise TableError(f"no bug in {tables}")
    return list(found.values())


def parse(mutants: list[Mutant], root: Path) -> None:
    """Have Python read what the bugs make of their files: what it cannot read is caught by nothing, or by everything.

    Raises
    ------
    TableError
        If there are some that are no Python.
    """
    broken: list[str] = []
    for mutant in mutants:
        if not mutant.file.endswith(".py"):
            continue
        try:
            ast.parse(mutant.planted((root / mutant.file).read_text()))
        except SyntaxError as error:
            broken.append(f"{mutant.name}: planted, {mutant.file} is no Python: {error}")
    if broken:
        raise TableError("\n".join(broken))


def find_tests(mutants: list[Mutant], root: Path) -> None:
    """Have pytest collect the tests that bugs name: one that was renamed, or has other parameters, catches nothing.

    Raises
    ------
    TableError
        If there are some that it does not find.
    """
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    collected = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    found = collected.stdout.splitlines()
    # Where its function is named as well, pytest says nothing of a case that is not there.
    missing = [test for test in tests if not any(f"{one}[::".startswith((f"{test}[", f"{test}::")) for one in found)]
    if collected.returncode or missing:
        said = [line for line in (found + collected.stderr.splitlines()) if line.startswith("ERROR")]
        raise TableError("\n".join(["these tests cannot be collected:", *(said or missing)]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What pytest made of the tests of one bug.

    Attributes
    ----------
    status : int or None
        Its exit status; None if it ran past the deadline.
    failures : list of str
        The message of each failed test.
    printed : str
        All that it printed.
    """

    status: int | None
    failures: list[str]
    printed: str


class Tree:
    """A copy of the tree that bugs are planted in."""

    def __init__(self, root: Path, where: Path) -> None:
        self.where = where
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, where / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).exists():
                shutil.copy2(root / name, where / name)
        if (root / COMPILED).is_dir():
            shutil.copytree(root / COMPILED, where / COMPILED)
        self._clock = time.time()

    def write(self, file: str, text: str) -> None:
        """Write a file with a time of its own: compiled files are told apart by whole seconds and length only."""
        (self.where / file).write_text(text)
        self._clock += 2
        os.utime(self.where / file, (self._clock, self._clock))

    def run(self, tests: list[str], deadline: float) -> Outcome:
        """Run tests in the copy, for at most so many seconds."""
        report = self.where / "report.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.where / "src"),  # before what is installed, in children too
            "HYPOTHESIS_PROFILE": "ci",
            "VRAM_TEST_SECONDS": str(PATIENCE),
        }
        with tempfile.TemporaryFile(mode="w+") as output:
            with subprocess.Popen(
                command, cwd=self.where, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            ) as process:  # fmt: skip
                try:
                    status: int | None = process.wait(deadline)
                except subprocess.TimeoutExpired:
                    status = None
                finally:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
            output.seek(0)
            printed = output.read()
        failures: list[str] = []
        if status is not None and report.exists():
            for case in ElementTree.parse(report).getroot().iter("testcase"):
                # An error in the teardown counts: the ledger fails a test there.
                failures += [_words(child) for child in case if child.tag in ("failure", "error")]
        return Outcome(status, failures, printed)


def _words(failure: ElementTree.Element) -> str:
    """Return what a failure says, without the source lines around it: they say the same of every failure.

    Its attribute has the first line only in some releases of pytest. In the report itself these lines begin with E.
    """
    lines = (failure.text or "").splitlines()
    said = [line[1:].strip() for line in lines if line.startswith("E ")]
    return "\n".join([failure.get("message", ""), *(said or lines)])  # no E at all: pytest.fail(pytrace=False)


def verdict(mutant: Mutant, outcome: Outcome) -> str | None:
    """Return why a bug was not caught; None if it was, for its reason."""
    if outcome.status is None:
        return "HUNG: its tests ran past their deadline, which is no verdict; they need one of their own"
    if outcome.status == 0:
        return "SURVIVED: its tests pass"
    if outcome.status != 1 or not outcome.failures:
        return f"its tests did not run to a failure (exit status {outcome.status})"
    if not any(mutant.because in message for message in outcome.failures):
        return f"its tests fail for another reason; {mutant.because!r} is not in their messages"
    return None


def run(tables: Path, root: Path, *, jobs: int = 2, only: str = "", deadline: float = DEADLINE) -> int:
    """Plant every bug whose name or file contains ``only`` and print a verdict each; return how many were not caught.

    Raises
    ------
    TableError
        If the table is wrong, or a test that it names fails without any bug.
    """
    chosen = [mutant for mutant in load(tables, root) if only in mutant.name or only in mutant.file]
    if not chosen:
        raise TableError(f"no bug has {only!r} in its name or its file")
    begun = time.monotonic()
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()

    def judge(mutant: Mutant) -> str | None:
        started, tree = time.monotonic(), trees.get()
        original = (root / mutant.file).read_text()
        tree.write(mutant.file, mutant.planted(original))
        try:
            outcome = tree.run(mutant.tests, deadline)
        finally:
            tree.write(mutant.file, original)
            trees.put(tree)
        why = verdict(mutant, outcome)
        lines = [f"{time.monotonic() - started:6.1f} s  {mutant.name}: {why or 'caught'}"]
        if why is not None:
            lines += [f"        {line}" for line in outcome.printed.splitlines()[-25:]]
        print("\n".join(lines), flush=True)
        return why

    with tempfile.TemporaryDirectory(prefix="vram-mutants-") as scratch:
        jobs = max(1, min(jobs, len(chosen)))
        copies = [Tree(root, Path(scratch) / str(number)) for number in range(jobs)]
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            parts = [tests[number::jobs] for number in range(min(jobs, len(tests)))]  # without any, pytest runs all
            for clean in pool.map(lambda copy, part: copy.run(part, 3 * deadline), copies, parts):
                if clean.status != 0:
                    raise TableError(
                        f"without any bug, pytest ended with {clean.status}, so nothing can be caught:\n"
                        f"{clean.printed[-4000:]}"
                    )
        print(f"{len(tests)} tests pass without a bug, {time.monotonic() - begun:.0f} s", flush=True)
        for tree in copies:
            trees.put(tree)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            verdicts = list(pool.map(judge, chosen))  # an error in one is raised here
    missed = [f"{mutant.name}: {why}" for mutant, why in zip(chosen, verdicts, strict=True) if why is not None]
    print(f"=== {len(chosen)} planted bugs in {time.monotonic() - begun:.0f} s")
    for line in missed:
        print(line)
    print(f"{len(chosen) - len(missed)} passed, {len(missed)} failed")
    return len(missed)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("only", nargs="?", default="", help="only bugs with this in their name or file")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="copies of the tree to work in")
    parser.add_argument("--check", action="store_true", help="check the table and that its tests are there; run none")
    options = parser.parse_args()
    try:
        if options.check:
            mutants = load(TABLES, ROOT)
            parse(mutants, ROOT)
            find_tests(mutants, ROOT)
            print(f"{len(mutants)} bugs can be planted, and their tests are there")
            return 0
        return 1 if run(TABLES, ROOT, jobs=options.jobs, only=options.only) else 0
    except TableError as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
