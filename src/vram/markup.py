"""Text of others in HTML and SVG: the one place where it is escaped, and the small tables that notebooks show."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from itertools import islice

from .spec import printable

MOST_ROWS = 20  # of a table in a notebook
_MOST = 200  # characters of one text


def escape(text: object, most: int = _MOST) -> str:
    """Return at most `most` characters of text for an element or an attribute of HTML or XML, never markup."""
    shown = str(text)
    return html.escape(printable(shown if len(shown) <= most else shown[: most - 1] + "…"), quote=True)


def table(
    title: object,
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    facts: Sequence[object] = (),
    count: int = 0,
) -> str:
    """Return a small table in HTML, with all text escaped; `facts` stand behind the title.
    Only :data:`MOST_ROWS` of the rows are shown; `count` is the number of all rows."""
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in islice(rows, MOST_ROWS)
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in header) if lines else ""
    said = "".join(f" · {escape(fact)}" for fact in facts)
    more = f"<div>and {count - MOST_ROWS} more</div>" if count > MOST_ROWS else ""
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>" if lines else ""
    return f"<div><strong>{escape(title)}</strong>{said}{body}{more}</div>"
