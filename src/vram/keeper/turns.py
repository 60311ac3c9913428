"""Reads from connections in the order that :mod:`.fairness` says."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ..sharing.channel import Credentials
from .fairness import Fairness

__all__ = ["NOBODY", "Readable", "Turns", "TurnsHost"]

NOBODY = -1  # the user id for work that the keeper does for no user, such as ending a claim whose time is over
_ACCEPTING = -2  # the same for accepting, while somebody connects beyond their share


class TurnsHost(Protocol):
    """The server as :class:`Turns` uses it.

    Attributes
    ----------
    by_user : dict of int to int
        How many connections each user has; users without any are not in it.
    loop : AbstractEventLoop
        There once it serves.
    paused : bool
        Whether a successor has everything.
    """

    by_user: dict[int, int]
    loop: asyncio.AbstractEventLoop
    paused: bool

    def now(self) -> float:
        """Return the time in seconds, on the wall."""
        ...


class Readable(Protocol):
    """A connection, as far as it waits here; see :class:`~vram.keeper.connection.Connection`."""

    credentials: Credentials

    def read(self) -> None:
        """Take one message off the socket and have it answered."""
        ...

    def park(self, now: float) -> None:
        """Watch its socket no more, until :meth:`unpark`."""
        ...

    def unpark(self, now: float) -> bool:
        """It is its turn; return whether to read."""
        ...


class _Work:
    """Work that waits for its user's turn and is no request."""

    __slots__ = ("run", "uid")

    def __init__(self, uid: int, run: Callable[[], None]) -> None:
        self.uid = uid
        self.run = run


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
    """Decides which connections are read from now, and which wait.

    A connection that waits is not watched by the loop: a thousand that are ready would else cost everybody a thousand
    calls in each of its turns.

    Notes
    -----
    Time here is the keeper's own: when it works, and when it has nothing to do. While another process has the
    processor it stands still. On a busy machine a user would else have its share of what passes, and that may be all
    that the keeper gets; and a user whose request is interrupted in the middle would pay for it.
    """

    def __init__(self, server: TurnsHost) -> None:
        self.fairness: Fairness[Readable | _Work] = Fairness()
        self.selector = _Selector()
        self._server = server
        self._timer: asyncio.Handle | None = None
        self._timer_at = float("inf")

    def ready(self, connection: Readable) -> None:
        """A message can be read: answer it now, or when it is its user's turn."""
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

    def drop(self, connection: Readable) -> None:
        """Forget a connection that waits."""
        self.fairness.drop(connection.credentials.uid, connection)

    def later(self, uid: int, work: Callable[[], None]) -> None:
        """Run work that is left of a user's request, when it is that user's turn again.

        Other users, and the next request of this one, get their turn before.
        """
        now = self._now()
        self.fairness.spent(uid, 0.0, now, waited=True)
        self.fairness.wait(uid, _Work(uid, work))
        self._wake(now)

    @contextlib.contextmanager
    def charged(self, uid: int) -> Iterator[None]:
        """Charge a block to the user whose request caused it."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self.fairness.spent(uid, time.thread_time() - begin, begin + self.selector.idle, waited=True)

    @contextlib.contextmanager
    def accepting(self, *, in_turn: bool) -> Iterator[Callable[[int], None]]:
        """Charge a block that accepts a connection to its user, who is told to what this yields.

        Where that is beyond the user's share, the next connection, whosever it is, waits for a share of its own: who
        connects all the time leaves others the time that they have beside any other who asks much.

        Parameters
        ----------
        in_turn : bool
            Whether this connection waited for its turn: then that share is charged already.
        """
        users: list[int] = []
        begin = time.thread_time()
        now = begin + self.selector.idle
        try:
            yield users.append
        finally:
            spent = time.thread_time() - begin
            for uid in users if len(self._server.by_user) > 1 else ():
                may = self.fairness.may(uid, now)
                self.fairness.spent(uid, spent, now, waited=not may)
                if not may and not in_turn:
                    self.fairness.spent(_ACCEPTING, spent, now, waited=True)

    def may_accept(self, work: Callable[[], None]) -> bool:
        """Whether to accept a connection now. If not, `work` is called when it is time."""
        if len(self._server.by_user) < 2:
            return True
        now = self._now()
        if self.fairness.may(_ACCEPTING, now):
            return True
        self.fairness.wait(_ACCEPTING, _Work(_ACCEPTING, work))
        self._wake(now)
        return False

    def _now(self) -> float:
        return time.thread_time() + self.selector.idle

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
        """Run one piece of work: between two of them the loop polls the other connections."""
        self._timer = None
        self._timer_at = float("inf")
        if self._server.paused:  # a successor has everything
            return
        now = self._now()
        due = self.fairness.next(now)
        if isinstance(due, _Work):
            with self.charged(due.uid):
                due.run()
        elif due is not None:
            with self.charged(due.credentials.uid):
                if due.unpark(self._server.now()):
                    due.read()
        self._wake(now)
