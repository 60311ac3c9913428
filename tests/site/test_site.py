"""The site in a browser, as a reader sees it: served over HTTP, at two widths. By hand: make test-site."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-site")

SITE = Path(__file__).resolve().parents[2] / "build/site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.name != "404.html")


def test_there_are_pages() -> None:
    assert len(PAGES) > 40


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_and_its_links_and_drawings_are_there(page: object, address: str, name: str) -> None:
    page.goto(f"{address}/{name}")
    assert page.locator("h1").count() == 1
    # What is too wide for a narrow screen scrolls in a box of its own, not the page.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.evaluate("[...document.querySelectorAll('pre > code')].every(e => e.scrollWidth <= e.clientWidth + 1)")
    for drawing in page.locator("article img").all():
        assert drawing.evaluate("image => image.complete && image.naturalWidth > 0"), drawing.get_attribute("src")
    anchors = page.evaluate(
        "[...document.querySelectorAll('article a[href^=\"#\"]')].map(a => a.getAttribute('href').slice(1))"
    )
    missing = [anchor for anchor in anchors if not page.evaluate("id => !id || !!document.getElementById(id)", anchor)]
    assert not missing


def test_links_between_pages_lead_somewhere(page: object, address: str) -> None:
    found = set()
    for name in PAGES:
        page.goto(f"{address}/{name}")
        found.update(page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)"))
    inside = {link.partition("#")[0] for link in found if link.startswith(address)}
    assert len(inside) > 40
    assert not [link for link in inside if page.request.get(link).status != 200]


@pytest.mark.parametrize(
    ("words", "leads_to"), [("publish_file", "reference"), ("F_SEAL_WRITE", "security"), ("claim timeout", "guide")]
)
def test_search_finds_it(page: object, address: str, words: str, leads_to: str) -> None:
    page.goto(address)
    if page.viewport_size["width"] < 960:
        page.locator("label[for=__search].md-header__button").click()
    box = page.locator("input.md-search__input")
    box.wait_for(state="visible")
    found = page.locator(".md-search-result__link").first
    # What is typed before the page's script listens is not searched for, as for a reader, who types again.
    for patience in (5_000, 5_000, 5_000, 60_000):
        box.fill("")
        box.fill(words)
        with contextlib.suppress(playwright.TimeoutError):
            found.wait_for(timeout=patience)
            break
    assert found.is_visible()
    links = [link.get_attribute("href") or "" for link in page.locator(".md-search-result__link").all()]
    assert any(leads_to in link for link in links), links


def test_code_can_be_copied_and_the_dark_scheme_is_there(page: object, address: str) -> None:
    page.goto(f"{address}/start.html")
    assert page.locator("article .highlight").count() >= 5
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("form[data-md-component=palette] label:visible").first.click()
    page.wait_for_function("before => getComputedStyle(document.body).backgroundColor !== before", arg=before)
