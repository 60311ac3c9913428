"""How long tests wait, and waiting for what comes about."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Seconds for what ends on its own, whatever the machine does besides: a bound for hangs.
SOON = float(os.environ.get("VRAM_TEST_SECONDS", "120"))
# Seconds in which everything is known that is told by an event, such as the end of a peer; far from every deadline.
AT_ONCE = SOON / 4


def until(predicate: Callable[[], object], *, seconds: float = SOON, what: str = "it") -> None:
    """Return once `predicate` is true; fail if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come about within {seconds:g} s")
        time.sleep(0.002)
