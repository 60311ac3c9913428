"""What whoever gets a descriptor would see besides the arrays that were published.

Memory goes as whole allocations. A keeper hands them to whoever may connect, and none of these is held to look only
where an array is: rows beyond a slice, rows that a shrink left, and other arrays in the same memory are there to be
read. So a publication shares memory in place only if there is nothing else in it (decision 020).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays.views import Home
from ..errors import BusyError
from ..memory import Region
from ..memory.foreign import ForeignRegion
from ..spec import Access
from .pieces import Span

__all__ = ["clear", "what_else"]

# Bytes between arrays that are looked at, for a span: what pads a packed copy, or the end of its last allocation.
_MOST_READ = 16 << 20
_STEP = 1 << 20
_ZEROS = bytes(_STEP)

_PART = "it is a part of memory that holds more, which all readers would see (whole=True publishes all of it)"
_LEFT = (
    "its memory holds rows from before it was made smaller, which all readers would see and others may be using "
    "(whole=True publishes them, too)"
)


def what_else(span: Span) -> tuple[str, bool]:
    """Find out whether the memory of a span can be published as it is.

    Returns
    -------
    reason : str
        Why it cannot; empty if there is nothing in it but the arrays of the span.
    has_remains : bool
        Whether there is nothing else once :func:`clear` was called: rows that nobody can see, and a reader would.
    """
    region = span.region
    first = span.start - span.inside
    last = first + sum([one.nbytes for one in span.allocations])
    between = _uncovered(span, first, min(last, region.nbytes))
    if between and not _is_padding(region, between):
        return _PART, False
    start, stop = region.remains
    if last <= start or start == stop:
        return "", False
    return ("", True) if region.may_clear else (_LEFT, False)


def clear(regions: Sequence[Region]) -> None:
    """Zero what :func:`what_else` found that may be.

    Raises
    ------
    BusyError
        If somebody began to use it meanwhile.
    """
    for region in regions:
        if not region.clear():
            raise BusyError(f"{region.handle.label} is being changed while it is published; publish it again")


def _uncovered(span: Span, first: int, last: int) -> list[tuple[int, int]]:
    """Return the parts of a region from `first` to `last` in which no array of the span is."""
    found: list[tuple[int, int]] = []
    at = first
    for start, stop in sorted([(item.offset, item.offset + item.nbytes) for item in span.items]):
        if start > at:
            found.append((at, start))
        at = max(at, stop)
    if at < last:
        found.append((at, last))
    return found


def _is_padding(region: Region, between: Sequence[tuple[int, int]]) -> bool:
    """Whether what lies between arrays is nobody's: in memory that is no array's rows, and zero."""
    if isinstance(region, ForeignRegion) or Home.of(region).is_grown or region.access < Access.READ:
        return False
    if sum(stop - start for start, stop in between) > _MOST_READ:
        return False
    first, last = between[0][0], between[-1][1]
    if Home.of(region).addressable:
        driver: Any = region.driver
        with driver.buffer(region.address + first, last - first, readonly=True) as view:
            return all(_is_zero(view[start - first : stop - first]) for start, stop in between)
    return all(_is_zero_there(region, start, stop) for start, stop in between)


def _is_zero(view: memoryview) -> bool:
    return all(
        part == _ZEROS[: len(part)] for part in (bytes(view[at : at + _STEP]) for at in range(0, len(view), _STEP))
    )


def _is_zero_there(region: Region, start: int, stop: int) -> bool:
    """Whether a part of a GPU's memory is zero."""
    for at in range(start, stop, _STEP):
        part = bytearray(min(_STEP, stop - at))
        region.driver.copy_out(memoryview(part), region.address + at)
        if part != _ZEROS[: len(part)]:
            return False
    return True
