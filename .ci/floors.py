"""Print the least versions that pyproject.toml allows, as requirements for pip: python .ci/floors.py [EXTRA...]

Of what vram needs, or of the extras that are named.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    groups = [project["optional-dependencies"][extra] for extra in extras] or [project["dependencies"]]
    for requirement in dict.fromkeys(one for group in groups for one in group):
        found = re.fullmatch(r"([\w.-]+)>=([\d.]+)(;\S+)?", requirement)
        if found is None:
            raise SystemExit(f"{requirement!r} has no plain floor (name>=version)")
        print(f"{found[1]}=={found[2]}{found[3] or ''}")


if __name__ == "__main__":
    main(sys.argv[1:])
