"""The import contract catches what it is there for: every forbidden import is planted in a copy of the tree, and the
linter must name each one. The list is read from the contract itself, so a contract added later is tested too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = Path(sys.executable).with_name("lint-imports")
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]

pytestmark = pytest.mark.skipif(not LINT.exists(), reason="import-linter is not installed beside this Python")


def lint(tree: Path) -> tuple[int, str]:
    """Run the linter on a copy, which must not read the installed package by mistake."""
    done = subprocess.run(
        [LINT, "--no-cache", "--no-logo"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(tree: Path, module: str, imported: str) -> None:
    path = tree / "src" / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    with path.open("a") as file:
        file.write(f"\n\ndef planted_{imported.replace('.', '_')}():\n    import {imported}\n")


def forbidden(contract: dict[str, Any]) -> list[tuple[str, str]]:
    """Return every import that a contract rules out: importer, imported."""
    if contract["type"] == "layers":
        layers = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
        above = [
            (low, high) for i, row in enumerate(layers) for high in row for under in layers[i + 1 :] for low in under
        ]
        return above + [(one, other) for row in layers for one in row for other in row if one != other]
    assert contract["type"] == "forbidden", "teach this test the new kind of contract"
    return [(source, target) for source in contract["source_modules"] for target in contract["forbidden_modules"]]


def test_the_clean_tree_passes(tree: Path) -> None:
    code, output = lint(tree)
    assert code == 0, output
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in output


@pytest.mark.slow
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract["name"])
def test_every_forbidden_import_is_caught(contract: dict[str, Any], tree: Path) -> None:
    pairs = forbidden(contract)
    assert pairs
    for importer, imported in pairs:
        plant(tree, importer, imported)
    code, output = lint(tree)
    assert code != 0, output
    assert re.search(rf"^{re.escape(contract['name'])} BROKEN", output, re.MULTILINE), output
    missed = [pair for pair in pairs if "{} is not allowed to import {}:".format(*pair) not in output]
    assert not missed, output


def test_one_planted_import_is_enough(tree: Path) -> None:
    plant(tree, "vram.lifetime", "vram.memory")
    code, output = lint(tree)
    assert code != 0
    assert "vram.lifetime is not allowed to import vram.memory:" in output
