"""The programs in examples/, each run as a user would, on the host and on the stand-in."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import commands
from tests.support.deadlines import SOON
from tests.support.samples import some

import standin

EXAMPLES = sorted(Path(__file__).resolve().parents[2].joinpath("examples").glob("*.py"))
# Of the host alone, or computing with torch where there is a GPU.
NOT_ON_STANDIN = {
    "pool_of_workers", "pipeline", "share_a_table", "sum_in_a_group", "replicate",
    "serve_one_model", "train_and_roll_out", "replace_under_readers", "joblib_by_name",
    "model_that_outlives_its_process", "serve_with_fastapi", "share_a_transformer", "load_batches",
    "train_with_transformers", "warm_standby",
}  # fmt: skip
NEEDS = {
    "share_a_table": ("pandas", "pyarrow"), "replicate": ("xxhash",), "joblib_by_name": ("joblib",),
    "model_that_outlives_its_process": ("torch",), "serve_with_fastapi": ("torch", "fastapi", "uvicorn"),
    "share_a_transformer": ("torch", "transformers"), "load_batches": ("torch",),
    "train_with_transformers": ("torch", "transformers"), "warm_standby": ("torch", "transformers"),
}  # fmt: skip
EXECUTED = {"joblib_by_name", *(name for name, needs in NEEDS.items() if "torch" in needs)}  # in a fresh process
WITH_TORCH = [program for program in EXAMPLES if "torch" in NEEDS.get(program.stem, ())]  # all run, where torch is
WITHOUT = [program for program in EXAMPLES if program not in WITH_TORCH]
ON_GPU = [program for program in EXAMPLES if program.stem not in NOT_ON_STANDIN]


def run(program: Path, tmp_path: Path, *arguments: str) -> str:
    """Run it, and return what it printed."""
    for package in NEEDS.get(program.stem, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"could not import '{package}'")
    environment = standin.child_environment() if arguments else {**os.environ}
    environment.pop("VRAM_KEEPER", None)
    if program.stem in EXECUTED:
        command = [sys.executable, "-W", "error", program, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SOON)
    else:
        done = commands.python(program, *arguments, cwd=tmp_path, environment=environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout


@pytest.mark.parametrize("program", [*some(WITHOUT, 7), *WITH_TORCH], ids=lambda program: program.stem)
def test_an_example_does_what_it_says(program: Path, tmp_path: Path) -> None:
    assert run(program, tmp_path).strip()
    assert not list(tmp_path.iterdir())


@pytest.mark.standin
@pytest.mark.parametrize("program", some(ON_GPU, 2), ids=lambda program: program.stem)
def test_an_example_does_the_same_on_a_gpu(program: Path, tmp_path: Path) -> None:
    assert run(program, tmp_path, "cuda:0").strip()


@pytest.mark.parametrize("program", EXAMPLES, ids=lambda program: program.stem)
def test_an_example_is_short_and_begins_with_what_it_is(program: Path) -> None:
    lines = program.read_text().splitlines()
    assert len(lines) <= 75
    assert re.fullmatch(r'"""[A-Z].+\.', lines[0]), "one sentence, on the first line"


def test_there_are_eleven() -> None:
    assert len(EXAMPLES) >= 11
