"""What a map shows, before it is drawn: lanes of bytes, each with rows of spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..spec import format_count, format_size

# What a span may be, as the legend says it.
KINDS = {
    "array": "an array",
    "view": "used here: by an array, a slice or a view",
    "mapped": "memory that is mapped",
    "shared": "memory that has left its process: others may have it, too",
    "private": "a private copy",
    "asleep": "asleep: the addresses are kept, the bytes are elsewhere or nowhere",
    "parked": "parked: in memory of the host until somebody wakes it",
    "reserved": "addresses without memory: room to grow",
    "retired": "an older version, kept by those who hold it",
    "opaque": "memory in which nothing is described",
}
MOST_LANES = 64
_CELLS = 400  # what is narrower than one of so many parts of a lane is drawn together with its neighbours


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes from `start` up to `stop` of a lane; `count` of them where several were put together."""

    start: int
    stop: int
    kind: str
    label: str = ""
    count: int = 1

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Row:
    """Spans beside one another, with what they are."""

    label: str
    spans: tuple[Span, ...]

    @property
    def things(self) -> str:
        """What several of its spans are called."""
        return {"used by": "arrays and views", "mapped": "mappings"}.get(self.label, self.label)


@dataclass(frozen=True, slots=True)
class Lane:
    """Bytes that lie behind one another, drawn as rows to one scale; `facts` is said of them in words."""

    title: str
    nbytes: int
    rows: tuple[Row, ...]
    facts: tuple[str, ...] = ()
    address: int | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """A map: what it is of, what is said of it all, its lanes, and what it does not show."""

    title: str
    facts: tuple[str, ...]
    lanes: tuple[Lane, ...]
    notes: tuple[str, ...] = ()

    @property
    def kinds(self) -> list[str]:
        """Which kinds of spans there are, in the order of the legend."""
        used = {span.kind for lane in self.lanes for row in lane.rows for span in row.spans}
        return [kind for kind in KINDS if kind in used]


def exact_size(nbytes: int) -> str:
    """Write a number of bytes in both ways: ``"4 MiB (4,194,304 bytes)"``."""
    return f"{format_size(nbytes)} ({nbytes:,} bytes)" if nbytes >= 1024 else f"{nbytes} bytes"


def merged(spans: Iterable[Span], nbytes: int, things: str = "spans") -> list[Span]:
    """Return the spans that are drawn of a row: a run of narrow spans becomes one span, which says how many they are.
    The result has a few hundred spans however many come in. `nbytes` is the size of the lane, `things` their plural."""
    ordered = sorted((span for span in spans if span.nbytes > 0), key=lambda span: (span.start, span.stop))
    cell = max(nbytes // _CELLS, 1)
    drawn = _joined(ordered, cell, things, of_one_kind=True)
    return drawn if len(drawn) <= 2 * _CELLS + 1 else _joined(ordered, cell, things, of_one_kind=False)


def _joined(ordered: Sequence[Span], cell: int, things: str, *, of_one_kind: bool) -> list[Span]:
    drawn: list[Span] = []
    run: list[Span] = []

    def end() -> None:
        if len(run) > 1:
            together = sum(span.count for span in run)
            size = format_size(sum(span.nbytes for span in run))
            stop = max(span.stop for span in run)
            drawn.append(replace(run[0], stop=stop, label=f"{together:,} {things}, {size} together", count=together))
        else:
            drawn.extend(run)
        run.clear()

    for span in ordered:
        if run and (span.nbytes >= cell or (of_one_kind and span.kind != run[0].kind)):
            end()
        run.append(span)
        if span.nbytes >= cell:
            end()
    end()
    return drawn


def bounded(picture: Picture) -> Picture:
    """Return a picture of at most :data:`MOST_LANES` lanes, the largest; how many were left out is in its notes."""
    lanes = picture.lanes
    if len(lanes) <= MOST_LANES:
        return picture
    largest = sorted(range(len(lanes)), key=lambda number: -lanes[number].nbytes)[:MOST_LANES]
    kept = set(largest)
    left = [lane for number, lane in enumerate(lanes) if number not in kept]
    size = format_size(sum(lane.nbytes for lane in left))
    note = f"{format_count(len(left), 'smaller bar')} of {size} together: left out of the drawing"
    return replace(picture, lanes=tuple(lanes[number] for number in sorted(kept)), notes=(*picture.notes, note))
