"""Calls in threads of their own, which start together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.support.deadlines import SOON


def race(*jobs: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own, starting together; return what each returned, or raise what one raised."""
    results: list[Any] = [None] * len(jobs)
    failures: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(number: int) -> None:
        try:
            start.wait(SOON)
            results[number] = jobs[number]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)  # what waits for somebody in vain ends before
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    return results
