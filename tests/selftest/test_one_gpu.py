"""The suites for real GPUs where there is one, played by the stand-in: what takes two says so, all else passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import standin

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = [
    "tests/gpu/test_sources.py::test_it_goes_as_explained_or_says_why_not[vram array on a GPU]",
    "tests/gpu/test_sources.py::test_it_goes_as_explained_or_says_why_not[vram array on the host]",
    "tests/gpu/test_sources.py::test_it_goes_as_explained_or_says_why_not[numpy array]",
    "tests/processes/test_transports.py::TestDescriptorsOnHardware",
]


def run(*selected: str, seconds: float) -> tuple[dict[str, int], list[str]]:
    """Run what is marked gpu with one device; return the counts of its last line, and the reasons of its skips."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *selected],
        cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False,
        env=standin.child_environment(devices=1) | {"VRAM_TEST_GPU": "1", "VRAM_MULTICAST": "off"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", done.stdout.splitlines()[-1])}
    return counts, re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.standin
def test_what_takes_two_gpus_says_so_on_one() -> None:
    counts, reasons = run(*SAMPLE, seconds=400)
    assert counts["passed"] == 3
    assert counts["skipped"] >= 16
    assert set(reasons) == {"it takes two GPUs"}


@pytest.mark.slow
@pytest.mark.standin
def test_all_suites_for_gpus_pass_on_one() -> None:
    counts, reasons = run(seconds=1600)
    assert counts["passed"] > 430
    others = [reason for reason in reasons if not reason.startswith("no hw_decompress here: ")]  # as on a Hopper
    assert not [reason for reason in others if "GPU" in reason and reason != "it takes two GPUs"]
