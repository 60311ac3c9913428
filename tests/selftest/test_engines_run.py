"""What runs other people's tests finds what it is there for: without a GPU, on tests and a torch made up here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import multiprocessing, os, sys
import torch_memory_saver

def good():
    import torch_memory_saver
    assert torch_memory_saver.entrypoint.__name__.startswith("vram.")

def crashing():
    os._exit(3)

def run(target):
    process = multiprocessing.get_context("spawn").Process(target=target)
    process.start()
    process.join()

def test_good():
    run(good)

def test_crash():
    run(crashing)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_examples.py").write_text(TESTS)
    (tmp_path / "tests/test_utils.py").write_text("def test_nothing():\n    pass\n")
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: True)\n")
    return tmp_path


def run(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/engines/run.py"), "torch_memory_saver", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *sys.path])},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_process_that_crashes_at_its_end_fails_its_test(place: Path) -> None:
    done = run(place, "--tests", str(place / "tests"))
    assert "processes of test_examples.py::test_crash ended with [3]" in done.stdout, done.stdout + done.stderr
    assert "torch_memory_saver's tests: 1 failed, 2 passed\n" in done.stdout
    assert "left out: test_examples.py::test_training_engine: it needs a library that is preloaded" in done.stdout
    assert done.returncode == 1


def test_a_parameter_that_is_not_here_is_named(place: Path) -> None:
    package = place / "torch_memory_saver"
    package.mkdir()
    text = "class TorchMemorySaver:\n    def pause(self, tag=None, MORE):\n        pass\n"
    (package / "entrypoint.py").write_text(text.replace(", MORE", ""))
    done = run(place, "--package", str(place))
    assert (done.returncode, done.stderr) == (0, "")
    assert "are those of the package" in done.stdout
    assert "did not run here: no directory of them was given" in done.stdout
    (package / "entrypoint.py").write_text(text.replace("MORE", "more=1"))
    done = run(place, "--package", str(place))
    assert done.returncode == 1
    assert "pause takes ['self', 'tag=None', 'more=1'] there, and ['self', 'tag=None'] here" in done.stdout


def test_without_a_gpu_it_says_that_they_did_not_run(place: Path) -> None:
    (place / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    done = run(place, "--tests", str(place / "tests"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "torch_memory_saver: its own tests did not run here: torch sees no GPU\n"
