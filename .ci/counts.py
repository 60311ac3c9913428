"""Print how many tests ran where: one line for each suite and Python, from pytest's JUnit files in a directory."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def main(directory: str) -> int:
    """Return 1 when nothing was executed: a run without tests must not look like a run that passed."""
    executed = 0
    for path in sorted(Path(directory).glob("*.xml"), key=lambda p: (p.stem != "main", p.stem)):
        suites: dict[str, Counter[str]] = {}
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "passed"
            place = (case.get("classname") or case.get("name") or "?").removeprefix("tests.")
            suites.setdefault(place.partition(".")[0], Counter())[outcome] += 1
        for suite, count in sorted(suites.items()):
            where = suite if path.stem == "main" else f"{suite}@{path.stem}"
            print(f"{where}: {count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
            executed += count["passed"] + count["failed"]
    if not executed:
        print("no test was executed")
    return 0 if executed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
