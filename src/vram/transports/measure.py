"""Measured estimates: two sizes through the real thing, a line through both, remembered by the pair of places.

Nothing here is a constant of a machine: what has not been measured in this process is measured when it is asked for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ..arrays.numpy_on_use import np
from ..lifetime import let_in, shielded, take
from ..spec import Location
from .contract import Estimate
from .places import fresh

SMALL = 4 << 10  # bytes
LARGE = 32 << 20
_ROUNDS = {SMALL: 20, LARGE: 4}

_lock = threading.RLock()
_known: dict[tuple[str, Location, Location], Estimate] = {}


@shielded
def measured(
    kind: str,
    src: Location,
    dst: Location,
    ends: Callable[[Location, Location], AbstractContextManager[tuple[Any, Any]]],
    carry: Callable[..., None],
) -> Estimate:
    """Return the estimate for a pair of places; measured at the first call. `ends` makes a sender and a receiver, which
    may be one, and `carry` moves the first so many bytes of an array from one to the other."""
    key = (kind, src, dst)
    lock = _lock
    take(lock)  # one at a time: two that measure together would measure each other
    try:
        found = _known.get(key)
        if found is None:
            with ends(src, dst) as (sender, receiver), fresh(src, (LARGE,), np.dtype("uint8")) as source:
                with fresh(dst, (LARGE,), np.dtype("uint8")) as target:
                    found = _known[key] = _fit(partial(carry, sender, receiver, source, target))
        return found
    finally:
        lock.release()


def _fit(transfer: Callable[[int], None]) -> Estimate:
    small, large = _best(transfer, SMALL), _best(transfer, LARGE)
    # Where the large one hardly takes longer, the difference is noise, and may be next to nothing or less: then the
    # large one alone has the say, which is no more than was seen.
    rate = (LARGE - SMALL) / (large - small) if large > 2 * small else LARGE / large
    return Estimate(rate, max(small - SMALL / rate, small / 2))


def _best(transfer: Callable[[int], None], nbytes: int) -> float:
    """Return the least of some rounds, in seconds: what disturbs only ever adds."""
    transfer(nbytes)  # pages, contexts and mappings are made at the first
    best = float("inf")
    for _ in range(_ROUNDS[nbytes]):
        let_in()
        started = time.perf_counter_ns()
        transfer(nbytes)
        best = min(best, max(time.perf_counter_ns() - started, 1) / 1e9)
    return best


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that does not exist here may have held it; what was measured stays true


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
