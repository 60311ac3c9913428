"""The deadlines of a catalogue: of calls that wait, of versions with a time to live, of claims and of moves."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from .records import Claim, Move, Version, Waiter

Due = Waiter | Version | Claim | Move


class Deadlines:
    """The records that are due, in order. A record that is not awaited any more is left out."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Due]] = []
        self._ids = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> float | None:
        """When something is due next, at the earliest; None if nothing is."""
        return self._heap[0][0] if self._heap else None

    def add(self, when: float, due: Due, most: int) -> None:
        """Note when something is due; at most `most` records can be awaited."""
        heapq.heappush(self._heap, (when, next(self._ids), due))
        if len(self._heap) > 64 + 2 * most:  # a client that waits and gives up for ever must not make it grow
            self._heap = [one for one in self._heap if one[2].is_awaited]
            heapq.heapify(self._heap)

    def past(self, now: float) -> Iterator[Due]:
        """Take out what is due, one after the other."""
        while self._heap and self._heap[0][0] <= now:
            _, _, due = heapq.heappop(self._heap)
            if due.is_awaited:
                yield due
