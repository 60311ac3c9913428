"""Calls of several threads that start at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from tests.support.deadlines import SOON


def together(calls: list[Callable[[], object]]) -> list[object]:
    """Run calls in threads that start at once; return what each returned or raised."""
    barrier = threading.Barrier(len(calls))
    results: list[object] = ["did not end"] * len(calls)

    def run(index: int) -> None:
        barrier.wait(SOON)
        try:
            results[index] = calls[index]()
        except Exception as error:  # the test looks at it
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # or each would be done before the next has begun
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
    finally:
        sys.setswitchinterval(interval)
    return results
