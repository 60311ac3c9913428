"""Work of the stand-in driver that stays undone until something waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import standin


@contextlib.contextmanager
def undone_until_waited_for(there: Callable[[bool], object] = bool) -> Iterator[standin.Standin]:
    """Defer asynchronous work here and, by a call that is told on or off, in another process; none may go wrong."""
    control = standin.Standin()
    control.clear()
    control.defer()
    there(True)
    try:
        yield control
    finally:
        control.defer(False)
        there(False)
    assert control.illegal() == 0
