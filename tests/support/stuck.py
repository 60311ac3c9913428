"""What an undo that failed left, for tests of faults."""

from __future__ import annotations

import contextlib

from vram import lifetime


def take_back_what_is_stuck(*gone: type[Exception]) -> int:
    """Undo what the faults kept from being undone, as lifetimes would have; return how many there were.
    `gone` are errors that say that nothing was left to undo."""
    count = 0
    while lifetime._stuck:
        handle = lifetime._stuck.pop(0)
        with contextlib.suppress(*gone):
            handle._undo()  # type: ignore[misc]
        handle._state = lifetime._CLOSED
        lifetime._released.extend((other, serial) for serial, other in reversed(handle._depends.items()))
        handle._depends = {}
        lifetime._settle()
        count += 1
    return count
