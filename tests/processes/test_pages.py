"""Every Python block of the site is run: here, or in the test of its page. Those that need an engine are parsed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.samples import in_turns

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions")
ELSEWHERE = {"guide.md": "test_guide.py", "builders.md": "test_guide.py", "start.md": "test_pages.py"}  # run there
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


# -- the first five minutes -------------------------------------------------------------------------------------------
START = Path(__file__).resolve().parents[2] / "docs/start.md"
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```$", START.read_text(), re.MULTILINE | re.DOTALL)
INSTALL = "pip install .\n"  # the step `packages` of CI does that


def follow(tmp_path: Path, blocks: list[tuple[str, str]]) -> str:
    """Run the blocks in order in one shell, and return what they printed; what they started ends with it."""
    lines = ["set -e"]
    for kind, text in blocks:
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            assert name, "a program of the page begins with its name"
            lines.append(f"cat >{name[1]} <<'END'\n{text}END")
        elif text != INSTALL:
            lines.append(text)
            if "python worker.py &" in text:
                lines.append("wait")
    lines = ["trap 'vram stop --force >&2' EXIT", *lines]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "HOME": str(tmp_path),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "COLUMNS": "120",
    }
    script = ["timeout", "--kill-after=5", "300", "bash", "-c", "\n".join(lines)]  # with all that it started
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


@in_turns(5)
def test_five_minutes_are_as_the_page_says(tmp_path: Path) -> None:
    printed = follow(tmp_path, BLOCKS)
    assert printed.count("1 (1024, 1024)") == 4, printed  # four workers, on version 1
    assert "model version 2" in printed.rpartition("(1024, 1024)")[2]  # which is replaced after that


def test_it_is_as_short_as_it_says() -> None:
    until = START.read_text().partition("## 5.")[0]
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", until, re.MULTILINE | re.DOTALL)
    commands = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    lines = [line for kind, text in blocks if kind == "python" for line in text.splitlines()]
    needed = [line for line in commands if "save_file" not in line and line != "vram ls"]  # a file one has; a look
    assert len(needed) <= 5
    assert len([line for line in lines if line and not line.startswith("#")]) <= 10
