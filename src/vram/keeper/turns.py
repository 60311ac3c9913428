"""Reads from connections in the order that :mod:`.fairness` says."""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import TYPE_CHECKING

from .fairness import Fairness

if TYPE_CHECKING:
    from .connection import Connection
    from .server import KeeperServer

__all__ = ["Turns"]


class _Selector(selectors.DefaultSelector):
    """Counts how long the loop had nothing to do."""

    idle = 0.0  # seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        begin = time.monotonic()
        try:
            return super().select(timeout)
        finally:
            self.idle += time.monotonic() - begin


class Turns:
    """Who may be read from now, and who waits.

    A connection that waits is not watched by the loop: a thousand that are ready would else cost everybody a thousand
    calls in each of its turns.

    Notes
    -----
    Time here is the keeper's own: when it works, and when it has nothing to do. While another process has the
    processor it stands still. On a busy machine a user would else have its share of what passes, and that may be all
    that the keeper gets; and who is interrupted in the middle of a request would pay for it.
    """

    def __init__(self, server: KeeperServer) -> None:
        self.fairness: Fairness[Connection] = Fairness()
        self.selector = _Selector()
        self._server = server
        self._timer: asyncio.Handle | None = None
        self._timer_at = float("inf")

    def ready(self, connection: Connection) -> None:
        """There is something to read: answer it now, or when it is its turn."""
        if len(self._server.by_user) < 2:  # nobody to be fair to
            connection.read()
            return
        uid, begin = connection.credentials.uid, time.thread_time()
        now = begin + self.selector.idle
        waits = not self.fairness.may(uid, now)
        try:
            if waits:
                connection.park(self._server.now())
            else:
                connection.read()
        finally:
            self.fairness.spent(uid, time.thread_time() - begin, now, waited=waits)
        if waits:
            self.fairness.wait(uid, connection)
            self._wake(now)

    def drop(self, connection: Connection) -> None:
        """It waits no longer."""
        self.fairness.drop(connection.credentials.uid, connection)

    def _wake(self, now: float) -> None:
        """Have the next turn taken when it is due."""
        delay = self.fairness.delay(now)
        if delay is None or now + delay >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = now + delay
        loop = self._server.loop
        self._timer = loop.call_later(delay, self._turn) if delay > 0 else loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Answer one request: between two of them the loop sees who else has come."""
        self._timer = None
        self._timer_at = float("inf")
        if self._server.paused:  # a successor has everything
            return
        begin = time.thread_time()
        now = begin + self.selector.idle
        connection = self.fairness.next(now)
        if connection is not None:
            try:
                if connection.unpark(self._server.now()):
                    connection.read()
            finally:
                spent = time.thread_time() - begin
                self.fairness.spent(connection.credentials.uid, spent, now, waited=True)
        self._wake(now)
