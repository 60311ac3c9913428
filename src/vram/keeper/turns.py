"""Reads from connections in the order that :mod:`.fairness` says."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
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

    __slots__ = ("first", "run", "uid")

    def __init__(self, uid: int, run: Callable[[], None], *, first: bool = False) -> None:
        self.uid = uid
        self.run = run
        self.first = first


class _Selector(selectors.DefaultSelector):
    """Counts how long the loop had nothing to do, and when its turn began."""

    idle = 0.0  # seconds
    began = 0.0  # of this thread's own time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.began = time.thread_time()
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

    The loop's own work for a request is charged with it: it is as much as a short request itself, and a user who makes
    the loop turn for each of a thousand connections would else have twice its share.
    """

    def __init__(self, server: TurnsHost) -> None:
        self.fairness: Fairness[Readable | _Work] = Fairness()
        self.selector = _Selector()
        self._server = server
        self._timer: asyncio.Handle | None = None
        self._timer_at = float("inf")
        self._behind: set[int] = set()  # users who have work that comes before their requests
        self._charged = 0.0  # until when this thread's time is charged to somebody

    def ready(self, connection: Readable) -> None:
        """A message can be read: answer it now, or when it is its user's turn."""
        uid = connection.credentials.uid
        if len(self._server.by_user) < 2 and uid not in self._behind:  # nobody to be fair to
            connection.read()
            return
        begin = self._begin()
        now = begin + self.selector.idle
        waits = not self.fairness.may(uid, now)
        try:
            if waits:
                connection.park(self._server.now())
            else:
                connection.read()
        finally:
            self.fairness.spent(uid, self._since(begin), now, waited=waits)
        if waits:
            self.fairness.wait(uid, connection)
            self._wake(now)

    def drop(self, connection: Readable) -> None:
        """Forget a connection that waits."""
        self.fairness.drop(connection.credentials.uid, connection)

    def later(self, uid: int, work: Callable[[], None], *, first: bool = False) -> None:
        """Run work that is left of a user's request, when it is that user's turn again.

        Parameters
        ----------
        first : bool
            Before anything else of this user is done, also where the user is alone; else the user's next request gets
            its turn before, as other users do.
        """
        now = self._now()
        self.fairness.spent(uid, 0.0, now, waited=True)
        self.fairness.wait(uid, _Work(uid, work, first=first), first=first)
        if first:
            self._behind.add(uid)
        self._wake(now)

    @contextlib.contextmanager
    def charged(self, uid: int) -> Iterator[None]:
        """Charge a block to the user whose request caused it."""
        begin = self._begin()
        try:
            yield
        finally:
            self.fairness.spent(uid, self._since(begin), begin + self.selector.idle, waited=True)

    @contextlib.contextmanager
    def shared(self, users: Mapping[int, int]) -> Iterator[None]:
        """Charge a block in nobody's turn to the users for whom it is done, too.

        A user whose waiters are served again and again would else have nobody's share besides its own.

        Parameters
        ----------
        users : mapping
            Their parts of it, once it has ended.
        """
        begin = time.thread_time()
        try:
            yield
        finally:
            took, now = time.thread_time() - begin, begin + self.selector.idle
            for uid, part in users.items():
                self.fairness.spent(uid, took * part / sum(users.values()), now, waited=True)

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
        begin = self._begin()
        now = begin + self.selector.idle
        try:
            yield users.append
        finally:
            spent = self._since(begin)
            for uid in users if len(self._server.by_user) > 1 else ():
                keeps_share = self.fairness.keeps_share(uid, now)  # not its pauses: who connects waits without a turn
                self.fairness.spent(uid, spent, now, waited=not keeps_share)
                if not keeps_share and not in_turn:
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

    def _begin(self) -> float:
        """Return since when this thread has worked for what is charged next."""
        return max(self._charged, self.selector.began)

    def _since(self, begin: float) -> float:
        """Return what this thread has worked since then, and begin anew."""
        self._charged = time.thread_time()
        return self._charged - begin

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
        try:
            if isinstance(due, _Work):
                if due.first:
                    self._behind.discard(due.uid)
                with self.charged(due.uid):
                    due.run()
            elif due is not None:
                with self.charged(due.credentials.uid):
                    if due.unpark(self._server.now()):
                        due.read()
        finally:  # also after a mistake of ours: the others wait for their turn
            self._wake(now)
