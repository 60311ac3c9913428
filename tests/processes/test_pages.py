"""Every Python block of the site is run: here, or in the test of its page. Those that need an engine are parsed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions")
ELSEWHERE = {"guide.md": "test_guide.py", "start.md": "test_start.py"}  # whose tests run each block
# These blocks need an engine, a GPU or a model, so they are parsed only; test_guide.py looks up the names in them.
ENGINES = {"engines.md"}
NIXL = "from vram.nodes.nixl import"  # a block with this line needs it, too: `make test-nodes` does what it does
EXAMPLES = {path.read_text() for path in (ROOT / "examples").glob("*.py")}  # test_examples.py runs them


def blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^ *```python\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_block_of_a_page_is_run_somewhere(page: Path) -> None:
    if page.name in ELSEWHERE:
        assert f"docs/{page.name}" in (ROOT / "tests/processes" / ELSEWHERE[page.name]).read_text()
        return
    for block in blocks(page):
        if page.name in ENGINES:
            ast.parse(block)
        elif NIXL in block:
            for line in ast.parse(block).body:
                if isinstance(line, ast.ImportFrom):
                    exec(compile(ast.Module([line], []), page.name, "exec"), {})
        elif page.name != "index.md":
            assert block in EXAMPLES, "it is not, to the byte, a program of examples/"


def test_the_first_page_works(tmp_path: Path) -> None:
    (block,) = blocks(ROOT / "docs/index.md")
    command = re.search(r"vram keep [a-z-]+", block)
    assert command
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "VRAM_KEEPER": str(tmp_path / "k")}
    shell = f"trap 'vram stop --force >&2' EXIT\n{command[0]}\npython -W error -c \"$BLOCK\"\n"
    done = subprocess.run(
        ["timeout", "--kill-after=5", "300", "bash", "-ec", shell],
        cwd=tmp_path,
        env={**environment, "BLOCK": block},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "(4096, 384) 1"
