"""The plots of docs/performance.md are of the figures that the bench printed, and so are the tables beside them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
FILES = sorted(DOCS.glob("pictures/bench-*.json"))


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_bench", DOCS / "pictures/draw_bench.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results() -> list[dict[str, Any]]:
    return [result for file in FILES for result in json.loads(file.read_text())]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_plot_is_what_its_figures_give(drawing: ModuleType, file: Path) -> None:
    drawn = drawing.pictures(file)
    assert drawn
    for path, text in drawn.items():
        assert path.read_text() == text, f"draw it again: python docs/pictures/draw_bench.py {file}"
        assert f"]({path.relative_to(DOCS)})" in (DOCS / "performance.md").read_text()


def test_no_plot_is_of_figures_that_are_gone(drawing: ModuleType) -> None:
    drawn = {path.name for file in FILES for path in drawing.pictures(file)}
    assert {path.name for path in DOCS.glob("pictures/bench-*.svg")} == drawn


@pytest.mark.parametrize("result", results(), ids=lambda result: result["name"])
def test_the_table_beside_a_plot_has_the_same_figures(drawing: ModuleType, result: dict[str, Any]) -> None:
    assert drawing.table(result) in (DOCS / "performance.md").read_text()
