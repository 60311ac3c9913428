"""Maps in a browser: to scale, legible, and nothing run that somebody wrote into a name."""

from __future__ import annotations

import pytest

NAMES = ["model", "many", "process"]
SPAN = "svg svg svg rect"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_fits_its_screen_and_its_bars_are_there(page: object, maps: str, name: str) -> None:
    page.goto(f"{maps}/{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator(".vm-bar").count() >= 2
    for box in [one.bounding_box() for one in page.locator(".vm-bar").all()]:
        assert box["width"] > 800  # the drawing and the table may be wider than the screen, in boxes of their own
    page.locator("summary").first.click()
    assert page.locator("details table").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_spans_are_to_scale(page: object, maps: str) -> None:
    page.goto(f"{maps}/model.html")
    bar = page.locator(".vm-bar").first.bounding_box()
    first = page.locator(f"{SPAN}.vm-array").first.bounding_box()
    assert first["width"] / bar["width"] == pytest.approx(3 / 6, abs=0.02)  # of 6 MiB


@pytest.mark.parametrize("name", ["model.html", "model.svg"])
def test_names_are_words_and_nothing_of_them_is_run(page: object, maps: str, name: str) -> None:
    page.goto(f"{maps}/{name}")
    assert page.title() != "run"
    assert page.locator("script, img").count() == 0
    assert page.locator("h1").count() == 0
    assert "<script>document.title" in page.evaluate("document.documentElement.textContent")


def test_ten_thousand_arrays_are_said_to_be_so_many(page: object, maps: str) -> None:
    page.goto(f"{maps}/many.html")
    assert page.locator(f"{SPAN}.vm-array").count() == 1
    assert "10,000 arrays" in page.locator(".vm-label").first.text_content()


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
            "[...document.querySelectorAll('text:not(.vm-label)')]"  # the bar cuts off its labels
            ".filter(one => one.getBBox().x + one.getBBox().width > 960).map(one => one.textContent)"
        )
        assert over == []
