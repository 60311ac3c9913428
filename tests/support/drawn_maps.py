"""Drawings of memory, checked as HTML and SVG, with words of strangers in them."""

from __future__ import annotations

import html.parser
import xml.etree.ElementTree as ElementTree

EVIL = (
    "<script>alert(1)</script><img src=x onerror=a>\"' onload='b' &amp;]]>--></svg>\x00\x1b[31m\x7f\u202e\ud800\ufffe"
)


SVG = "{http://www.w3.org/2000/svg}"


TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "p", "div", "details", "summary", "strong"),
    *("table", "thead", "tbody", "tr", "th", "td", "svg", "g", "rect", "line", "text"),
}
ATTRIBUTES = {
    *("class", "style", "lang", "charset", "name", "content", "http-equiv", "xmlns", "viewbox", "role", "aria-label"),
    *("width", "height", "x", "y", "x1", "x2", "y2", "transform", "text-anchor"),
}


class Tags(html.parser.HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def check_html(text: str) -> Tags:
    """Assert that a page, or a part of one, has our own elements and attributes alone, and nothing unprintable."""
    seen = Tags(text)
    assert seen.found <= TAGS, seen.found - TAGS
    assert seen.attributes <= ATTRIBUTES, seen.attributes - ATTRIBUTES
    assert text.replace("\n", "").isprintable()
    text.encode()
    return seen


def check_svg(text: str) -> ElementTree.Element:
    """Assert that a drawing is well-formed, and has our own elements and attributes alone."""
    root = ElementTree.fromstring(text.encode())
    tags = {one.tag.removeprefix(SVG) for one in root.iter()}
    assert tags <= {"svg", "style", "rect", "text", "line", "g", "title"}, tags
    assert not [name for one in root.iter() for name in one.attrib if name.startswith("on") or "href" in name]
    return root
