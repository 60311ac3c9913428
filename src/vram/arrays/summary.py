"""An array in one line and in a notebook: some of its elements, or why there are none to see. Nothing here raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..spec import format_size
from .dtypes import packed_name
from .numpy_on_use import np
from .views import RegionViews

if TYPE_CHECKING:
    from .protocols import Viewable

_EDGE = 3  # elements that are shown of either end
_MOST = 120  # characters of all of them: those of a structure, or a text, may be long


def as_text(array: Viewable, views: RegionViews | None, lost: Exception | None) -> str:
    """Return the line that is the repr of an array; without `views` it was closed or is lost."""
    if views is None:
        return f"<Array {_kind(array)} {array.shape} {_without(lost)}>"
    region = views.region
    asleep = region.asleep  # once: other threads wake it
    rights = region.access.letters + (", private" if region.is_private else "")
    place = f"{region.location} {region.address + array._offset:#x}"
    said = f"{place} {format_size(array.nbytes)} {rights}"
    if asleep is not None:
        return f"<Array {_kind(array)} {array.shape} {said}, {asleep}>"
    values = _elements(array, views)
    return f"<Array {_kind(array)} {array.shape} {said}{values and ' '}{values}>"


def as_html(array: Viewable, views: RegionViews | None, lost: Exception | None, capacity: tuple[int, ...]) -> str:
    """Return what a notebook shows of an array; without `views` it was closed or is lost."""
    from ..markup import table

    title = f"Array {_kind(array)} {array.shape}"
    if views is None:
        return table(title, (), (), facts=[_without(lost)])
    region = views.region
    asleep = region.asleep
    facts = [str(region.location), format_size(array.nbytes), region.access.letters, *["private"] * region.is_private]
    if asleep is not None:
        return table(title, (), (), facts=[*facts, asleep])
    rows = [
        ("address", f"{region.address + array._offset:#x}"),
        ("capacity", " x ".join(map(str, capacity)) or "-"),
        ("elements", _elements(array, views) or "not for the CPU to see"),
    ]
    return table(title, ("", ""), rows, facts=facts)


def _kind(array: Viewable) -> str:
    """Return what the elements are called: a packed type by its own name."""
    return packed_name(array.dtype) or str(array.dtype)


def _without(lost: Exception | None) -> str:
    return "closed" if lost is None else f"lost: {lost}"


def _elements(array: Viewable, views: RegionViews) -> str:
    """Return the first and the last elements; nothing where the CPU cannot, or may not, look."""
    start, end = array._offset, array._offset + array.nbytes
    edge = _EDGE * array.itemsize
    spans = [(start, end)] if array.size <= 2 * _EDGE else [(start, start + edge), (end - edge, end)]
    parts = []
    for span in spans:
        seen = views.region.peek(*span)
        if seen is None:
            return ""
        try:
            parts.append(" ".join(map(_word, np.frombuffer(seen, array.dtype).tolist())))
        except (TypeError, ValueError, OverflowError):  # bytes that are nothing of that type, such as no character
            return ""
    text = " ... ".join(parts)
    return f"[{text if len(text) <= _MOST else text[: _MOST - 1] + '…'}]"


def _word(element: object) -> str:
    """Write one element. Not as numpy does, which takes most of a millisecond for six."""
    if isinstance(element, (float, complex)):
        return f"{element:.4g}"
    return repr(element) if isinstance(element, (str, bytes)) else str(element)
