"""Maps as values, lanes of bytes with rows of spans, and how they are drawn: as SVG, and as a page."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError
from ..markup import escape
from ..spec import format_count, format_size, printable

# Each kind of span, in the order of the legend: its meaning, and its colour on light and on dark paper.
KINDS = {
    "array": ("an array", "#79b8ff"),
    "view": ("used here: by an array, a slice or a view", "#9fd3c7"),
    "mapped": ("memory that is mapped", "#8fd19e"),
    "shared": ("memory that has left its process: others may have it, too", "#f2b56b"),
    "private": ("a private copy", "#c8b6ff"),
    "asleep": ("asleep: the addresses are kept, the bytes are elsewhere or nowhere", "#a9b3c1"),
    "parked": ("parked: in memory of the host until somebody wakes it", "#d6c4a8"),
    "reserved": ("addresses without memory: room to grow", "#d0d7de"),
    "retired": ("an older version, kept by those who hold it", "#e5a3a3"),
    "opaque": ("memory in which nothing is described", "#b9c1cc"),
}
MOST_LANES = 64
_MOST_FACTS = 16
_MOST_LISTED = 1000  # spans of a lane in its table
_CELLS = 400  # narrower than one of so many parts of a lane, a span is drawn together with its neighbours
_LABELLED = 0.03  # the part of a bar that a span needs for its label
_ROOM_DRAWN = 0.25  # the part of a lane that its memory needs for the room behind it to be drawn
_WIDTH, _LEFT, _BAR = 960, 96, 840  # pixels: of all, before a bar, and of a bar
_TICKS = 4
_STYLE = """
.vram-map{--vm-paper:#ffffff;--vm-ink:#1b1f24}
@media (prefers-color-scheme:dark){.vram-map{--vm-paper:#0d1117;--vm-ink:#e6edf3}}
.vram-map text{font:11px ui-monospace,Menlo,Consolas,monospace;fill:var(--vm-ink)}
.vram-map .vm-label{fill:#1b1f24}
.vram-map .vm-head{font:bold 15px system-ui,sans-serif}.vram-map .vm-title{font:bold 12px system-ui,sans-serif}
.vram-map .vm-paper{fill:var(--vm-paper)}.vram-map .vm-bar{fill:var(--vm-ink);fill-opacity:.06}
.vram-map line{stroke:var(--vm-ink)}.vram-map .vm-span{stroke:var(--vm-paper);stroke-width:.5}
.vram-map .vm-reserved,.vram-map .vm-asleep,.vram-map .vm-parked{stroke:#57606a;stroke-dasharray:3 2}
""" + "".join(f".vram-map .vm-{kind}{{fill:{colour}}}" for kind, (_, colour) in KINDS.items())
_PAGE_STYLE = """
body{margin:0;background:var(--vm-paper);color:var(--vm-ink);font:14px/1.45 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:1rem;overflow-wrap:anywhere}p{margin:.1rem 0}
.scroll{overflow-x:auto}.scroll>svg{min-width:960px}summary{cursor:pointer}
table{border-collapse:collapse;font:12px ui-monospace,Menlo,Consolas,monospace;white-space:nowrap}
td,th{padding:.1rem .8rem .1rem 0;text-align:left;border-bottom:1px solid}.n{text-align:right}
"""


class Span(NamedTuple):
    """Bytes from `start` up to `stop` of a lane."""

    start: int
    stop: int
    kind: str
    label: str

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.stop - self.start


class Lane:
    """Bytes drawn as rows to one scale, `used` of them memory. A row's name is what its spans are called.
    The room to grow, up to `capacity`, is drawn in the last row, or said where it would leave nothing else to see."""

    def __init__(
        self,
        title: str,
        rows: Mapping[str, list[Span]],
        facts: Sequence[str] = (),
        *,
        used: int,
        capacity: int = 0,
        address: int | None = None,
    ) -> None:
        self.title, self.nbytes, self.rows, self.address = title, used, rows, address
        self.facts = _first(facts)
        if capacity > used and (not used or used >= _ROOM_DRAWN * capacity):
            self.nbytes = capacity
            [*rows.values()][-1].append(Span(used, capacity, "reserved", "room to grow"))
        elif capacity > used:
            self.facts.append(f"behind it {format_size(capacity - used)} of addresses, not drawn: room to grow")
        self.heading = f"{title}: {_exact_size(self.nbytes)}" + ("" if address is None else f" at {address:#x}")


class MemoryMap:
    """A picture of memory at one moment, made by :func:`memory_map`; a notebook shows it by itself.
    Each bar is to scale. Narrow neighbours are drawn as one, and at most 64 bars are drawn, the largest."""

    __slots__ = ("facts", "lanes", "title")

    def __init__(self, title: str, facts: Sequence[str], lanes: Sequence[Lane]) -> None:
        left = set(sorted(lanes, key=lambda lane: lane.nbytes, reverse=True)[MOST_LANES:])
        self.title, self.facts, self.lanes = title, _first(facts), [lane for lane in lanes if lane not in left]
        if left:
            size = format_size(sum(lane.nbytes for lane in left))
            self.facts.append(f"{format_count(len(left), 'smaller bar')} of {size} together: left out of the drawing")

    def svg(self) -> str:
        """Return it as one SVG element, 960 pixels wide, with a legend, light or dark as its reader prefers."""
        parts: list[tuple[int, str]] = [(20, _text(self.title, "vm-head", most=100)), *map(_fact, self.facts)]
        used = {span.kind for lane in self.lanes for spans in lane.rows.values() for span in spans}
        for kind, (meaning, _) in KINDS.items():
            if kind in used:
                box = f'<rect x="16" y="3" width="18" height="11" class="vm-span vm-{kind}"/>'
                parts.append((16, box + _text(meaning, x=42)))
        for lane in self.lanes:
            parts += [(14, ""), (16, _text(lane.heading, "vm-title", most=120)), *map(_fact, lane.facts), (3, "")]
            for name, spans in lane.rows.items():
                parts.append((22, _text(name, most=11) + _beside(_bar(name, spans, lane.nbytes))))
            parts.append((18, _beside(_ticks(lane.nbytes))))
        drawn, y = "", 16
        for height, part in parts:
            drawn += f'<g transform="translate(0 {y})">{part}</g>\n' if part else ""
            y += height
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="vram-map" width="{_WIDTH}" height="{y + 16}" '
            f'viewBox="0 0 {_WIDTH} {y + 16}" style="width:100%;max-width:{_WIDTH}px;height:auto" role="img" '
            f'aria-label="{escape(self.title)}"><style>{_STYLE}</style>'
            f'<rect class="vm-paper" width="100%" height="100%"/>{drawn}</svg>\n'
        )

    def html(self) -> str:
        """Return it as a page of its own: the drawing, and every number in tables."""
        return (
            '<!doctype html>\n<html lang="en" class="vram-map"><head><meta charset="utf-8">'
            # Nothing is run or loaded, whatever a name should turn out to say.
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_PAGE_STYLE}</style></head>\n"
            f"<body><main><div class=scroll>{self.svg()}</div>{_paragraphs(self.facts)}"
            f"{''.join(map(_table, self.lanes))}</main></body></html>\n"
        )

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the map as SVG (``.svg``) or as a page (``.html``); the file is replaced as a whole or not at all."""
        path = os.fspath(file)
        draw = {".svg": self.svg, ".html": self.html, ".htm": self.html}.get(os.path.splitext(path)[1].lower())
        if draw is None:
            raise UsageError(f"{printable(path)!r}: a map is saved as .svg or .html")
        write_whole(path, draw())

    def __repr__(self) -> str:
        size = format_size(sum(lane.nbytes for lane in self.lanes))
        return f"<MemoryMap of {printable(self.title)}, {format_count(len(self.lanes), 'bar')}, {size}>"

    def _repr_html_(self) -> str:
        return self.svg()  # within the page it becomes as narrow as its cell; as an image notebooks would cut it off


def write_whole(path: str, text: str) -> None:
    """Replace a file by a new one, as a whole or not at all. Raises UsageError for anything but a regular file.
    A link is refused, too: in a directory of all users, others could lay one to a file of ours."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise UsageError(f"{printable(path)!r} is no regular file that could be replaced by a map: name another")
    beside = Path(f"{path}.{os.urandom(4).hex()}")
    try:
        with beside.open("x", encoding="utf-8") as out:
            out.write(text)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def merged(spans: Iterable[Span], nbytes: int, things: str) -> list[Span]:
    """Return the spans that are drawn of a row of `nbytes`, a few hundred at most: runs of narrow ones become one.
    A run is of one kind, or narrower than a cell."""
    cell = max(nbytes // _CELLS, 1)
    runs: list[list[Span]] = []
    for span in sorted(span for span in spans if span.nbytes):
        first = runs[-1][0] if runs else span
        is_like_it = span.kind == first.kind or span.stop - first.start < cell
        if runs and max(span.nbytes, first.nbytes) < cell and is_like_it:
            runs[-1].append(span)
        else:
            runs.append([span])
    return [run[0] if len(run) == 1 else _joined(run, f"{len(run):,} {things}") for run in runs]


def _joined(run: Sequence[Span], label: str) -> Span:
    return Span(run[0].start, max(span.stop for span in run), run[0].kind, label)


def _first(facts: Sequence[str]) -> list[str]:
    left = len(facts) - _MOST_FACTS
    return [*facts[:_MOST_FACTS], *([f"and {left:,} more"] if left > 0 else [])]


def _text(text: str, style: str = "", *, x: int = 16, most: int = 136) -> str:
    return f'<text x="{x}" y="13" class="{style}">{escape(text, most)}</text>'


def _fact(fact: str) -> tuple[int, str]:
    return 16, _text(fact)


def _beside(drawn: str) -> str:
    return f'<svg x="{_LEFT}" width="{_BAR}" height="19">{drawn}</svg>'


def _bar(name: str, spans: Iterable[Span], nbytes: int) -> str:
    drawn = '<rect class="vm-bar" width="100%" height="100%"/>'
    for span in merged(spans, nbytes, name):
        part = span.nbytes / nbytes
        said = escape(f"{span.label}: {_exact_size(span.nbytes)} at offset {span.start:,}", 1200)
        label = f'<text x="3" y="13" class="vm-label">{escape(span.label)} · {format_size(span.nbytes)}</text>'
        # An element of its own cuts off a label that is too long.
        drawn += (
            f'<svg x="{span.start / nbytes:.4%}" width="{max(part, 0.001):.4%}"><title>{said}</title>'
            f'<rect class="vm-span vm-{span.kind}" width="100%" height="100%"/>{label * (part > _LABELLED)}</svg>\n'
        )
    return drawn


def _ticks(nbytes: int) -> str:
    drawn = ""
    for tick in range(_TICKS + 1):
        x, anchor = f"{tick / _TICKS:.0%}", {0: "start", _TICKS: "end"}.get(tick, "middle")
        size = format_size(nbytes * tick // _TICKS)
        drawn += f'<line x1="{x}" x2="{x}" y2="4"/><text x="{x}" y="15" text-anchor="{anchor}">{size}</text>'
    return drawn


def _paragraphs(facts: Sequence[str]) -> str:
    return "".join(f"<p>{escape(fact, 400)}</p>" for fact in facts)


def _table(lane: Lane) -> str:
    listed = [(name, span) for name, spans in lane.rows.items() for span in spans]
    rows = "".join(
        f"<tr><td>{escape(name)}<td>{escape(span.label, 1100)}<td class=n>{span.start:,}<td class=n>{span.nbytes:,}"
        f"<td>{span.kind}\n"
        for name, span in listed[:_MOST_LISTED]
    )
    more = f"<p>and {len(listed) - _MOST_LISTED:,} more</p>" if len(listed) > _MOST_LISTED else ""
    return (
        f"<details><summary>{escape(lane.heading, 400)}</summary>{_paragraphs(lane.facts)}<div class=scroll><table>"
        f"<tr><th>row<th>what<th class=n>offset<th class=n>bytes<th>is\n{rows}</table></div>{more}</details>\n"
    )


def _exact_size(nbytes: int) -> str:
    return f"{format_size(nbytes)} ({nbytes:,} bytes)" if nbytes >= 1024 else f"{nbytes} bytes"
