"""The part of a catalogue that waits: attaches by name, claims until they are used, and deadlines."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from .records import Claim, Session, Version, Waiter

Due = Waiter | Version


class Waiting:
    """Waiters and claims by name, and the records that are due, in order: what nobody awaits any more is left out."""

    def __init__(self, sessions: dict[int, Session]) -> None:
        self._sessions = sessions
        self.count = 0  # of waiters
        self.claims: dict[int, Claim] = {}
        self._lines: dict[str, dict[int, Waiter]] = {}  # by name and order, in which they came
        self._claim_of: dict[str, Claim] = {}  # by name
        self._due: list[tuple[float, int, Due]] = []  # a heap
        self._ids = itertools.count()

    # -- waiters ------------------------------------------------------------------------------------------------------
    def line_of(self, name: str) -> list[Waiter]:
        """Return the waiters of a name in the order in which they came."""
        return list(self._lines.get(name, {}).values())

    def add(self, waiter: Waiter) -> None:
        """Have a waiter wait."""
        self._sessions[waiter.session].waiters[waiter.asked.call] = waiter
        self._lines.setdefault(waiter.asked.name, {})[waiter.order] = waiter
        self.count += 1

    def remove(self, waiter: Waiter, session: Session) -> None:
        """End the wait of a waiter of this session."""
        del session.waiters[waiter.asked.call]
        line = self._lines[waiter.asked.name]
        del line[waiter.order]
        if not line:
            del self._lines[waiter.asked.name]
        self.count -= 1

    # -- claims -------------------------------------------------------------------------------------------------------
    def claim_of(self, name: str) -> Claim | None:
        """Return the claim on a name, if there is one."""
        return self._claim_of.get(name)

    def add_claim(self, claim: Claim) -> None:
        """Note a claim, the one on its name."""
        self._claim_of[claim.name] = self._sessions[claim.session].claims[claim.id] = self.claims[claim.id] = claim

    def remove_claim(self, claim: Claim, session: Session) -> None:
        """End a claim of this session."""
        del self.claims[claim.id], session.claims[claim.id], self._claim_of[claim.name]

    # -- deadlines ----------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._due)

    @property
    def next(self) -> float | None:
        """When something is due next, at the earliest; None if nothing is."""
        return self._due[0][0] if self._due else None

    def schedule(self, when: float | None, due: Due, versions: int) -> None:
        """Note when something is due, if it is ever; `versions` is how many there are, each of which may be due."""
        if when is None:
            return
        heapq.heappush(self._due, (when, next(self._ids), due))
        # A client that waits and gives up for ever must not make it grow.
        if len(self._due) > 64 + 2 * (self.count + versions):
            self._due = [one for one in self._due if self._is_awaited(one[2])]
            heapq.heapify(self._due)

    def past(self, now: float) -> Iterator[Due]:
        """Take out what is due, one after the other."""
        while self._due and self._due[0][0] <= now:
            _, _, due = heapq.heappop(self._due)
            if self._is_awaited(due):
                yield due

    def _is_awaited(self, due: Due) -> bool:
        if isinstance(due, Waiter):
            return due.order in self._lines.get(due.asked.name, ())
        return due.expires is not None
