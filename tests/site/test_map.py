"""Maps in a browser: to scale, legible, narrow where the screen is, and nothing run that somebody wrote into a name."""

from __future__ import annotations

import pytest

NAMES = ["model", "many", "process"]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_its_screen_and_its_bars_are_there(page: object, maps: str, name: str) -> None:
    page.goto(f"{maps}/{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator(".bar").count() >= 2
    for box in [one.bounding_box() for one in page.locator(".bar").all()]:
        assert box["width"] > 200
        assert box["x"] + box["width"] <= page.viewport_size["width"]
    assert page.locator("ul.legend li").count() >= 2
    page.locator("summary").first.click()  # its table may be wider, in a box of its own
    assert page.locator("details table").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_spans_are_to_scale(page: object, maps: str) -> None:
    page.goto(f"{maps}/model.html")
    bar = page.locator(".bar").first.bounding_box()
    first = page.locator(".bar .vm-array").first.bounding_box()
    assert first["width"] / bar["width"] == pytest.approx(3 / 6, abs=0.02)  # of 6 MiB


@pytest.mark.parametrize("name", ["model.html", "model.svg"])
def test_names_are_words_and_nothing_of_them_is_run(page: object, maps: str, name: str) -> None:
    page.goto(f"{maps}/{name}")
    assert page.title() != "run"
    assert page.locator("script, img").count() == 0
    assert page.locator("h1").count() == (1 if name.endswith("html") else 0)
    assert "<script>document.title" in page.evaluate("document.documentElement.textContent")


def test_ten_thousand_arrays_are_said_to_be_so_many(page: object, maps: str) -> None:
    page.goto(f"{maps}/many.html")
    assert page.locator(".bar .vm-array").count() == 1
    assert "10,000 arrays" in page.locator(".bar .vm-array").inner_text()


@pytest.mark.parametrize("name", [f"{name}.html" for name in NAMES] + ["model.svg"])
def test_it_is_light_or_dark_as_its_reader_prefers(page: object, maps: str, name: str) -> None:
    seen = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{maps}/{name}")
        paper = page.locator("body, rect.vm-paper").first
        seen.append(paper.evaluate("one => getComputedStyle(one)[one.matches('body') ? 'backgroundColor' : 'fill']"))
    assert seen[0] == "rgb(255, 255, 255)"
    assert seen[1] == "rgb(13, 17, 23)"


def test_no_text_of_a_drawing_runs_over_its_edge(page: object, maps: str) -> None:
    for name in NAMES:
        page.goto(f"{maps}/{name}.svg")
        over = page.evaluate(
            "[...document.querySelectorAll('text')].filter(one => one.getBBox().x + one.getBBox().width > 960)"
            ".map(one => one.textContent)"
        )
        assert over == []
