"""A map as a page of its own: the same bars, which become narrow with the screen, and every number in a table."""

from __future__ import annotations

from ..markup import escape
from ..spec import format_size
from .picture import KINDS, Lane, Picture, Row, Span, exact_size, merged
from .style import LIGHT_AND_DARK

_MOST_LISTED = 1000  # spans of a lane that its table names
_LABELLED = 0.05  # the part of a bar that a span takes at least to be written on
_TICKS = 4
_STYLE = """
body{margin:0;background:var(--vm-paper);color:var(--vm-ink);font:14px/1.45 system-ui,sans-serif}
main{max-width:1100px;margin:0 auto;padding:1rem}
h1{font-size:1.3rem;overflow-wrap:anywhere;margin:.2rem 0}
h2{font-size:1rem;overflow-wrap:anywhere;margin:1.6rem 0 .2rem}
p,li{overflow-wrap:anywhere;margin:.1rem 0}.soft{color:var(--vm-soft)}
.row{display:grid;grid-template-columns:5.5rem minmax(0,1fr);gap:.5rem;align-items:center;margin:.2rem 0}
.row>span{font-size:.8rem;overflow:hidden;text-overflow:ellipsis}
.bar{position:relative;height:1.6rem;background:var(--vm-bar);border:1px solid var(--vm-line);overflow:hidden}
.bar div{position:absolute;top:0;bottom:0;min-width:1px;box-sizing:border-box;text-indent:3px;
border-right:1px solid var(--vm-paper);
overflow:hidden;white-space:nowrap;text-overflow:ellipsis;font:11px/1.6rem ui-monospace,Menlo,Consolas,monospace}
.ticks{display:flex;justify-content:space-between;margin-left:6rem;font-size:.7rem;color:var(--vm-soft)}
ul.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem}
.legend i{display:inline-block;width:1.4em;height:.9em;margin-right:.4em;vertical-align:-.1em}
.vm-reserved,.vm-asleep,.vm-parked{outline:1px dashed var(--vm-soft);outline-offset:-2px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font:12px ui-monospace,Menlo,Consolas,monospace}
td,th{padding:.1rem .8rem .1rem 0;text-align:left;border-bottom:1px solid var(--vm-line);white-space:nowrap}
td.n,th.n{text-align:right}summary{cursor:pointer;color:var(--vm-soft);font-size:.85rem}
""" + "".join(f".vm-{kind}{{background:var(--vm-{kind})}}" for kind in KINDS)


def draw_page(picture: Picture) -> str:
    """Return a picture as a whole page, which loads nothing and runs no script. What anybody chose is escaped."""
    title = escape(picture.title)
    legend = "".join(f'<li><i class="vm-{kind}"></i>{KINDS[kind]}</li>' for kind in picture.kinds)
    return (
        '<!doctype html>\n<html lang="en" class="vram-map"><head><meta charset="utf-8">'
        # Nothing is run or loaded, whatever a name should turn out to say.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{LIGHT_AND_DARK}{_STYLE}</style></head>\n<body><main><h1>{title}</h1>"
        + "".join(f'<p class="soft">{escape(fact, 400)}</p>' for fact in picture.facts)
        + f'<ul class="legend">{legend}</ul>\n'
        + "\n".join(_lane(lane) for lane in picture.lanes)
        + "".join(f'<p class="soft">{escape(note, 400)}</p>' for note in picture.notes)
        + "</main></body></html>\n"
    )


def _lane(lane: Lane) -> str:
    where = "" if lane.address is None else f" at {lane.address:#x}"
    ticks = "".join(f"<span>{format_size(lane.nbytes * tick // _TICKS)}</span>" for tick in range(_TICKS + 1))
    return (
        f"<section><h2>{escape(lane.title, 400)}: {exact_size(lane.nbytes)}{where}</h2>"
        + "".join(f'<p class="soft">{escape(fact, 400)}</p>' for fact in lane.facts)
        + "".join(_row(lane, row) for row in lane.rows)
        + f'<div class="ticks">{ticks}</div>'
        + _table(lane)
        + "</section>"
    )


def _row(lane: Lane, row: Row) -> str:
    spans = "".join(_drawn(span, lane) for span in merged(row.spans, lane.nbytes, row.things))
    return f'<div class="row"><span>{escape(row.label)}</span><div class="bar">{spans}</div></div>'


def _drawn(span: Span, lane: Lane) -> str:
    whole = max(lane.nbytes, 1)
    label = escape(span.label, 80) if span.nbytes >= _LABELLED * whole else ""
    said = f"{span.label}: {exact_size(span.nbytes)} at offset {span.start:,}"
    return (
        f'<div class="vm-{span.kind}" style="left:{100 * span.start / whole:.4f}%;'
        f'width:{100 * span.nbytes / whole:.4f}%" title="{escape(said, 1200)}">{label}</div>'
    )


def _table(lane: Lane) -> str:
    spans = [(row.label, span) for row in lane.rows for span in row.spans]
    rows = "".join(
        f"<tr><td>{escape(label)}</td><td>{escape(span.label, 1100)}</td><td class=n>{span.start:,}</td>"
        f"<td class=n>{span.nbytes:,}</td><td>{span.kind}</td></tr>"
        for label, span in spans[:_MOST_LISTED]
    )
    more = f"<p>and {len(spans) - _MOST_LISTED:,} more</p>" if len(spans) > _MOST_LISTED else ""
    return (
        f"<details><summary>in numbers</summary><div class=scroll><table><thead><tr><th>row</th><th>what</th>"
        f"<th class=n>offset</th><th class=n>bytes</th><th>is</th></tr></thead><tbody>{rows}</tbody></table></div>"
        f"{more}</details>"
    )
