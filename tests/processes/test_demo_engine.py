"""``vram demo engine``: a model that generates tokens, in real processes, one of them killed."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.deadlines import SOON

from vram.cli.engine_model import Sizes

VRAM = Path(sys.executable).with_name("vram")
LITTLE = "12MiB"


def demo(*arguments: str, keeper: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it, with a keeper of its own: another one is neither needed nor touched."""
    return subprocess.run(
        [VRAM, "demo", "engine", *arguments],
        capture_output=True,
        text=True,
        timeout=2 * SOON,
        env={**os.environ, "VRAM_KEEPER": str(keeper), "COLUMNS": "200", **environment},
    )


def test_it_proves_its_story(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="could not import 'torch'")
    done = demo("--size", LITTLE, keeper=tmp_path / "nobody.sock")
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout
    for what in (
        "was killed with SIGKILL; the model was not",
        "generated the same tokens",
        "freed",
        "updated in place 10 times",
        "each of exactly one version",
    ):
        assert what in told, told
    assert told.splitlines()[-1].startswith("proved: ")


def test_its_facts_add_up(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="could not import 'torch'")
    done = demo("--size", LITTLE, "--json", "--device", "auto", keeper=tmp_path / "nobody.sock", LD_LIBRARY_PATH="")
    assert (done.returncode, done.stderr) == (0, "")
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["updates"] == 10
    assert facts["sections"] >= 11  # one of each version at least
    assert len(facts["tokens"]) == 16
    for time in ("first", "second"):
        assert facts[f"sleep_{time}"]["freed"] >= facts["nbytes"]
    assert 0 < facts["attach_seconds"] < facts["first_token_seconds"]


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("torch is installed: its absence is not tested")
    done = demo(keeper=tmp_path / "nobody.sock")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "vram: vram demo engine needs PyTorch; have no such package. Install it: pip install torch\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("engine", "--weights", "model.safetensors"), "--weights is for vram demo"),
        (("--size", "3GiB"), "--size is for vram demo engine"),
    ],
)
def test_options_of_the_other_story_are_refused(arguments: tuple[str, ...], words: str) -> None:
    done = subprocess.run([VRAM, "demo", *arguments], capture_output=True, text=True, timeout=SOON)
    assert (done.returncode, done.stdout) == (1, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("device", "nbytes"), [("host", 24 << 20), ("cuda:0", 3 << 30)])
def test_a_model_is_about_as_large_as_asked(device: str, nbytes: int) -> None:
    sizes = Sizes.of(device, nbytes)
    itemsize = {"float32": 4, "bfloat16": 2}[sizes.dtype]
    total = sum(itemsize * math.prod(shape) for shape in sizes.shapes().values())
    assert 0.85 * nbytes < total < 1.1 * nbytes
    assert Sizes.of(device, 0).layers == 1
