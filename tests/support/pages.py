"""What is called in the examples of a page."""

from __future__ import annotations

import sys
from collections.abc import Callable


def calls_of(act: Callable[[], object]) -> int:
    """How many calls of functions something takes: what it costs, whatever the machine."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count
