"""The README, run: its Python and its commands, as a newcomer would, in a directory and with a keeper of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.samples import in_turns

README = Path(__file__).resolve().parents[2] / "README.md"
PYTHON = os.environ.get("VRAM_README_PYTHON", sys.executable)  # that of an environment which .ci/release.py has made
SCRIPTS = Path(PYTHON).parent
MODEL = """
import numpy, safetensors.numpy
safetensors.numpy.save_file({"weight": numpy.ones((64, 32), "float32")}, "model.safetensors")
"""


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What a shell would have in which the program is in PATH and a keeper is chosen."""
    path = f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "VRAM_KEEPER": str(tmp_path / "keeper.sock"), "COLUMNS": "120"}


@pytest.fixture
def keeper(environment: dict[str, str], tmp_path: Path) -> Iterator[None]:
    """A keeper as the README starts it, once it answers."""
    with (tmp_path / "keeper.log").open("w+") as log:
        process = subprocess.Popen(["vram", "keep"], env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
            while subprocess.run(["vram", "ls"], env=environment, capture_output=True, timeout=300).returncode:
                log.seek(0)
                assert process.poll() is None, log.read()
                assert time.monotonic() < deadline, log.read()
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


def test_the_python_of_the_readme_works(environment: dict[str, str], tmp_path: Path) -> None:
    (code,) = blocks("python")
    command = [PYTHON, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["1 False (4096, 384) 1.5", "True 1.5"]


def test_the_python_of_the_readme_can_be_pasted(environment: dict[str, str], tmp_path: Path) -> None:
    """Where an empty line ends a block, as it does at the prompt of Python 3.11 and 3.12."""
    (code,) = blocks("python")
    done = subprocess.run(
        [PYTHON, "-q", "-i", "-W", "error"],
        input=code + "\n",
        cwd=tmp_path,
        env={**environment, "PYTHON_BASIC_REPL": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    prompts = re.sub(r"(>>>|\.\.\.) ", "", done.stderr).strip()
    assert (done.returncode, prompts) == (0, "")
    printed = [line for line in done.stdout.splitlines() if not line.startswith("<Published ")]
    assert printed == ["1 False (4096, 384) 1.5", "True 1.5"]


@pytest.mark.usefixtures("keeper")
def test_the_commands_of_the_readme_work(environment: dict[str, str], tmp_path: Path) -> None:
    (commands,) = blocks("sh")
    subprocess.run([PYTHON, "-c", MODEL], cwd=tmp_path, env=environment, check=True, timeout=300)
    lines = [line.partition("#")[0].strip() for line in commands.splitlines()]
    assert [line.split()[1] for line in lines] == ["publish-file", "ls", "show", "rm"]
    for line in lines:
        done = subprocess.run(
            ["bash", "-euc", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        assert "minilm" in done.stdout, line


@in_turns(5)
def test_the_other_commands_of_the_readme_exist(environment: dict[str, str]) -> None:
    named = set(re.findall(r"`vram ([a-z][a-z-]*)((?: --[a-z-]+)*)`", README.read_text()))
    assert {command for command, _ in named} >= {"keep", "demo", "bench"}
    for command, options in named:
        done = subprocess.run(["vram", command, "--help"], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"vram {command}: {done.stderr}"
        assert all(option in done.stdout for option in options.split())


def test_three_lines_are_all_that_a_fresh_machine_needs() -> None:
    indented = re.findall(
        r"^    (\S.*)$", re.sub(r"^```.*?^```$", "", README.read_text(), flags=re.M | re.S), re.MULTILINE
    )
    assert indented == ["pip install . && vram demo", "make demo", "make test"]
