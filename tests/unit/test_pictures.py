"""The plots of docs/performance.md are of the figures that the bench printed, and so are the tables beside them."""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
FILES = sorted(DOCS.glob("pictures/bench-*.json"))
SVG = "{http://www.w3.org/2000/svg}"


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


@pytest.mark.parametrize("result", results(), ids=lambda result: result["name"])
def test_every_median_is_a_bar_as_long_as_it_says(drawing: ModuleType, result: dict[str, Any]) -> None:
    page = ElementTree.fromstring(drawing.draw(result))
    bars = [one for one in page.iter(f"{SVG}rect") if "data-median" in one.attrib]
    rows = {(row["case"], json.dumps(row["figure"])): row["figure"] for row in result["rows"]}
    assert sorted(float(bar.attrib["data-median"]) for bar in bars) == sorted(
        float(f"{one['median']:g}") for one in rows.values()
    )
    texts = {one.text for one in page.iter(f"{SVG}text")}
    for row in drawing.rows_of(result):
        assert any(text and text.startswith(str(row.figure)) for text in texts)
    if not any("logarithmic" in (text or "") for text in texts) and len({row["unit"] for row in rows.values()}) == 1:
        scales = {round(float(bar.attrib["width"]) / float(bar.attrib["data-median"]), 2) for bar in bars}
        assert len(scales) == 1


def test_what_was_missed_is_said_and_where_the_target_is(drawing: ModuleType) -> None:
    result = next(result for result in results() if result["name"] == "survive")
    rows = {row.case: row for row in drawing.rows_of(result)}
    survives = rows["attach, touch, close: one that survives"]
    assert drawing.goal(survives, list(rows.values())) == pytest.approx(484 * 1.03)
    assert drawing.goal(rows["resident: its holder, with 1,000 entries"], list(rows.values())) == 12
    assert drawing.goal(rows["resident: the holder then"], list(rows.values())) is None
    drawn = drawing.draw(result)
    assert len(re.findall("at most 1.03x: missed", drawn)) == 1
    assert "&lt;" in drawing.draw({**result, "title": "<script>"})
    assert "<script>" not in drawing.draw({**result, "title": "<script>"})


def test_what_the_bench_prints_today_can_be_drawn(drawing: ModuleType) -> None:
    """The committed figures are of one release; the form is that of `--json` now."""
    from vram.bench.measure import Figure, Result, Row

    fields = set(Result.__dataclass_fields__)
    for result in results():
        assert set(result) == fields
        for row in result["rows"]:
            assert set(row) == set(Row.__dataclass_fields__)
            assert set(row["figure"]) == set(Figure.__dataclass_fields__)
