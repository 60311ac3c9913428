"""A hook of mkdocs: CHANGELOG.md as a page, and the roles that docstrings are written with as links."""

from __future__ import annotations

import re
from typing import Any

# As in docstrings: a role, then a name, of which "~" shows the last part alone.
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):\s*<code>(~?)([^<]*)</code>")

PROGRAM = re.compile(r"^The program: \[examples/\w+\.py\]\([./]+examples/\w+\.py\)\.\n\n?", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Return a page's text; of docs/changelog.md that of CHANGELOG.md, whose links are then from docs/.

    A program that a page shows needs no link to its file, which is for who reads the page where it is not built.
    """
    if page.file.src_uri != "changelog.md":
        return PROGRAM.sub("", markdown)
    with open("CHANGELOG.md") as changes:
        return changes.read().replace("](docs/", "](")


def on_page_content(html: str, **_: object) -> str:
    """Return a page with a link for each role that names something on it."""

    def link(found: re.Match[str]) -> str:
        short, name = found.groups()
        shown = name.rpartition(".")[2] if short else name
        anchor = name if name.startswith("vram.") else f"vram.{name.lstrip('.')}"
        code = f"<code>{shown}</code>"
        return f'<a href="#{anchor}">{code}</a>' if f'id="{anchor}"' in html else code

    return ROLE.sub(link, html)
