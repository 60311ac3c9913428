"""Print how many tests ran where, and fail what did not run that should have.

``python .ci/counts.py RESULTS EXPECTED`` reads pytest's JUnit files in a directory, one for each environment, prints a
line for each suite and environment, and holds them against a table: the least number of tests that each suite must
execute in each environment, and the reasons for which a test may be skipped there. A result that is missing, a suite
that has become smaller, and a skip for any other reason each fail the run.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any


def main(results: str, expected: str) -> int:
    """Return 1 if anything is missing; what it is has then been printed."""
    table = tomllib.loads(Path(expected).read_text())
    counts: dict[str, dict[str, Counter[str]]] = {}
    wrong: list[str] = []
    for path in sorted(Path(results).glob("*.xml"), key=lambda path: (path.stem != "main", path.stem)):
        counts[path.stem], skips = read(path)
        wrong += [f"{path.stem}: {line}" for line in unexpected(skips, table["skips"], path.stem)]
    for environment, suites in counts.items():
        for suite, count in sorted(suites.items()):
            where = suite if environment == "main" else f"{suite}@{environment}"
            print(f"{where}: {count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    wrong += too_few(counts, table["minimum"])
    for line in wrong:
        print(f"FAILED: {line}")
    return 1 if wrong else 0


def read(path: Path) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Return the outcomes of each suite of a JUnit file, and how many tests were skipped for each reason."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    skips: Counter[str] = Counter()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome = "passed"
        if (skipped := case.find("skipped")) is not None:
            outcome = "skipped"
            skips[_reason(skipped)] += 1
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"  # also where its teardown failed after a skip
        # A module that was skipped whole has no class; its name is its path.
        place = (case.get("classname") or case.get("name") or "?").removeprefix("tests.")
        # A test that failed and whose teardown failed too, or that was run again, is there more than once: it is one.
        test = (place, case.get("name") or "?")
        if test not in found or outcome == "failed":
            found[test] = place.partition(".")[0], outcome
    suites: dict[str, Counter[str]] = {}
    for suite, outcome in found.values():
        suites.setdefault(suite, Counter())[outcome] += 1
    return suites, skips


def _reason(skipped: ElementTree.Element) -> str:
    reason = skipped.get("message", "")
    if reason == "collection skipped":  # a module, skipped whole: the text is its path, line and reason
        reason = str(ast.literal_eval(skipped.text or "('', 0, '')")[2])
    return reason.removeprefix("Skipped: ")


def unexpected(skips: Counter[str], allowed: dict[str, Any], environment: str) -> list[str]:
    """Return a line for each reason that no pattern allows in this environment."""
    patterns = [reason for reason, where in allowed.items() if where == "anywhere" or environment in where]
    return [
        f"{count} skipped for a reason that .ci/expected.toml does not allow there: {reason}"
        for reason, count in sorted(skips.items())
        if not any(re.fullmatch(pattern, reason, re.DOTALL) for pattern in patterns)
    ]


def too_few(counts: dict[str, dict[str, Counter[str]]], minimum: dict[str, dict[str, int]]) -> list[str]:
    """Return a line for each suite that executed too few tests, and for each environment without a result."""
    lines = [f"{name}: a result that is not expected; add it to .ci/expected.toml" for name in counts.keys() - minimum]
    for environment, suites in minimum.items():
        if environment not in counts:
            lines.append(f"{environment}: there is no result of it")
            continue
        for suite, least in suites.items():
            count = counts[environment].get(suite, Counter())
            if (executed := count["passed"] + count["failed"]) < least:
                lines.append(f"{suite}@{environment}: {executed} tests executed, and it has at least {least}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
