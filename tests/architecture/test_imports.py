"""What an import loads, asked of a fresh interpreter: the linter sees what is written, this sees what happens."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = (
    "asyncio",
    "ctypes",
    "ml_dtypes",
    "mmap",
    "msgspec",
    "multiprocessing",
    "numpy",
    "rich",
    "safetensors",
    "socket",
    "torch",
    "typer",
    "vram.driver",
)


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a statement loads in an interpreter of its own, packages above them included."""
    code = (
        f"import json, sys; before = set(sys.modules); {statement}; print(json.dumps(list(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stdout))


def test_import_vram_loads_next_to_nothing() -> None:
    loaded = loaded_by("import vram")
    assert not loaded & set(HEAVY)
    assert {name for name in loaded if name.startswith("vram")} == {"vram"}


def test_errors_are_had_without_the_rest() -> None:
    loaded = loaded_by("import vram; vram.VramError")
    assert not loaded & set(HEAVY)
    assert {name for name in loaded if name.startswith("vram.")} == {"vram.errors"}


@pytest.mark.parametrize("module", ["vram.keeper.server", "vram.keeper.client"])
def test_the_keeper_loads_neither_numpy_nor_a_driver(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    forbidden = {"numpy", "ctypes", "ml_dtypes", "safetensors", "torch", "typer", "rich"}
    assert not {name for name in loaded if name.split(".")[0] in forbidden}
    assert not {name for name in loaded if name.startswith(("vram.driver", "vram.memory", "vram.arrays"))}


def test_the_command_line_brings_no_numpy_to_the_keeper() -> None:
    loaded = loaded_by("import vram.cli")
    assert not loaded & {"numpy", "ctypes", "ml_dtypes", "safetensors", "torch"}
    assert not {name for name in loaded if name.startswith("vram.driver.")}


@pytest.mark.parametrize("module", ["vram.arrays", "vram.exchange"])
def test_torch_is_never_loaded_unasked(module: str) -> None:
    assert "torch" not in loaded_by(f"import {module}")


def test_the_suites_are_loaded_by_nobody() -> None:
    everything = "import vram; [getattr(vram, name) for name in vram.__all__]; import vram.cli"
    assert not {name for name in loaded_by(everything) if name.startswith("vram.testing")}
