"""``vram demo engine`` on a real GPU, where PyTorch is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.support.deadlines import SOON

pytestmark = pytest.mark.gpu
MAIN = "import sys; from vram.cli import main; sys.exit(main())"


def test_it_proves_its_story_on_a_gpu() -> None:
    pytest.importorskip("torch", reason="could not import 'torch'")
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "demo", "engine", "--device", "cuda:0", "--size", "512MiB", "--json"],
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    for time in ("first", "second"):
        assert facts[f"sleep_{time}"]["freed"] >= facts["nbytes"]
    before, *_, after = facts["memory"]
    assert after < before + facts["nbytes"], "the removed model still is on the GPU"
