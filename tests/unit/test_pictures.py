"""The plots of docs/performance.md show the figures that the benchmarks printed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

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
