"""What the site is made of is whole, before mkdocs looks at it: pages, names, programs."""

from __future__ import annotations

import re
from pathlib import Path

import vram

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIGURATION = (ROOT / "mkdocs.yml").read_text()


def test_every_page_is_in_the_navigation() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages == set(re.findall(r"\S+\.md$", CONFIGURATION, re.MULTILINE))


def test_every_public_name_is_in_the_reference() -> None:
    named = set(re.findall(r"^::: vram\.((?:typing\.)?\w+)$", (DOCS / "reference.md").read_text(), re.MULTILINE))
    assert named == {*vram.__all__, *(f"typing.{name}" for name in vram.typing.__all__)} - {"typing"}


def test_every_example_is_on_a_page() -> None:
    pages = [page.read_text() for page in DOCS.rglob("*.md")]
    shown = {path.name for path in ROOT.glob("examples/*.py") if any(path.read_text() in page for page in pages)}
    assert shown == {path.name for path in ROOT.glob("examples/*.py")}
