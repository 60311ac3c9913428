"""A map as SVG: one drawing of a fixed width, without scripts, fonts or anything from elsewhere."""

from __future__ import annotations

from ..markup import escape, printable
from ..spec import format_size
from .picture import KINDS, Lane, Picture, Row, Span, exact_size, merged
from .style import LIGHT_AND_DARK

_WIDTH, _LEFT, _RIGHT = 960, 96, 24  # pixels: of all, before a bar, and behind it
_BAR = _WIDTH - _LEFT - _RIGHT
_HIGH, _LINE = 22, 16  # pixels: of a row, and of a line of text
_CHARACTER = 6.7  # pixels that one takes at most, of 11 pixels' monospace
_TICKS = 4
_STYLE = (
    ".vram-map text{font:11px ui-monospace,Menlo,Consolas,monospace;fill:var(--vm-ink)}"
    ".vram-map .vm-head{font:bold 15px system-ui,sans-serif}.vram-map .vm-title{font:bold 12px system-ui,sans-serif}"
    ".vram-map .vm-soft{fill:var(--vm-soft)}.vram-map .vm-paper{fill:var(--vm-paper)}"
    ".vram-map .vm-bar{fill:var(--vm-bar);stroke:var(--vm-line)}.vram-map .vm-tick{stroke:var(--vm-line)}"
    ".vram-map .vm-span{stroke:var(--vm-paper);stroke-width:.5}"
    ".vram-map .vm-hatched{stroke:var(--vm-soft);stroke-dasharray:3 2;stroke-width:.6}"
    + "".join(f".vram-map .vm-{kind}{{fill:var(--vm-{kind})}}" for kind in KINDS)
)
_DASHED = ("reserved", "asleep", "parked")  # told apart without colours, too


class _Page:
    """Lines of SVG, from top to bottom."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.y = 16

    def text(self, what: object, x: int, kind: str = "", *, width: int = 0, line: int = _LINE) -> None:
        """Write one line, as much of it as fits."""
        room = int((width or _WIDTH - _RIGHT - x) / _CHARACTER)
        self.y += line
        shown = escape(what, max(room, 2))
        self.lines.append(f'<text x="{x}" y="{self.y - 4}" class="{kind}">{shown}</text>')


def draw_svg(picture: Picture) -> str:
    """Return a picture as one SVG element. What anybody chose is escaped; it is bounded, whatever there is."""
    page = _Page()
    page.text(picture.title, 16, "vm-head", line=20)
    for fact in picture.facts:
        page.text(fact, 16, "vm-soft")
    _legend(page, picture)
    for lane in picture.lanes:
        _lane(page, lane)
    page.y += 8
    for note in picture.notes:
        page.text(note, 16, "vm-soft")
    height = page.y + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="vram-map" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" style="width:100%;max-width:{_WIDTH}px;height:auto" role="img" '
        f'aria-label="{escape(picture.title)}">'
        f"<style>{LIGHT_AND_DARK}{_STYLE}</style>"
        f'<rect class="vm-paper" width="{_WIDTH}" height="{height}"/>' + "\n".join(page.lines) + "</svg>\n"
    )


def _legend(page: _Page, picture: Picture) -> None:
    page.y += 6
    for kind in picture.kinds:
        page.lines.append(_box(16, page.y + 3, 18, 11, kind))
        page.text(KINDS[kind], 42, "vm-soft")


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    dashed = " vm-hatched" if kind in _DASHED else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.0f}" width="{width:.2f}" height="{height:.0f}" class="vm-span vm-{kind}{dashed}">'
        "</rect>"
    )


def _lane(page: _Page, lane: Lane) -> None:
    page.y += 14
    where = "" if lane.address is None else f" at {lane.address:#x}"
    page.text(f"{lane.title}: {exact_size(lane.nbytes)}{where}", 16, "vm-title")
    for fact in lane.facts:
        page.text(fact, 16, "vm-soft")
    page.y += 2
    for row in lane.rows:
        _row(page, lane, row)
    for tick in range(_TICKS + 1):
        x = _LEFT + _BAR * tick / _TICKS
        anchor = "start" if tick == 0 else "end" if tick == _TICKS else "middle"
        page.lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{page.y}" y2="{page.y + 4}" class="vm-tick"/>')
        page.lines.append(
            f'<text x="{x:.1f}" y="{page.y + 15}" text-anchor="{anchor}" class="vm-soft">'
            f"{format_size(lane.nbytes * tick // _TICKS)}</text>"
        )
    page.y += 18


def _row(page: _Page, lane: Lane, row: Row) -> None:
    y = page.y
    page.lines.append(f'<text x="16" y="{y + 15}">{escape(row.label, 11)}</text>')
    page.lines.append(f'<rect x="{_LEFT}" y="{y}" width="{_BAR}" height="{_HIGH - 3}" class="vm-bar"/>')
    for span in merged(row.spans, lane.nbytes, row.things):
        page.lines.append(_drawn(span, lane, y))
    page.y = y + _HIGH


def _drawn(span: Span, lane: Lane, y: int) -> str:
    whole = max(lane.nbytes, 1)
    x = _LEFT + _BAR * span.start / whole
    width = max(_BAR * span.nbytes / whole, 0.8)
    said = f"{span.label}: {exact_size(span.nbytes)} at offset {span.start:,}"
    parts = [f"<g><title>{escape(said, 1200)}</title>", _box(x, y, width, _HIGH - 3, span.kind)]
    room = int((width - 6) / _CHARACTER)
    if span.label and room >= 3:
        full = f"{span.label} · {format_size(span.nbytes)}"
        shown = full if span.count == 1 and len(printable(full)) <= room else span.label
        parts.append(f'<text x="{x + 3:.2f}" y="{y + 14}">{escape(shown, room)}</text>')
    return "".join((*parts, "</g>"))
