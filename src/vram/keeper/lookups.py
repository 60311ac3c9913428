"""Requests that wait until it is known whose name one is: the system's database of users is asked in other threads.

It may be on another machine. Whoever publishes under ``~name/`` waits for it, as do others of the same user who do so;
the loop goes on meanwhile, and answers everybody else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ..errors import QuotaError, WaitTimeoutError
from ..spec import format_size
from . import messages as m
from .connection import Connection, ConnectionHost
from .failures import failure
from .rules import check_name, home_of
from .users import Answer, UserNames

__all__ = ["Lookups"]

_MAX_THREADS = 64
_MOST = 16 * 1024 * 1024  # bytes of requests of one user that wait
_LAST = 1.0  # seconds that a takeover waits for answers that are about to come


class LookupsHost(ConnectionHost, Protocol):
    """The server as :class:`Lookups` uses it, besides the members that a connection uses."""

    def call(self, callback: Callable[[], None]) -> None:
        """Have a function called in the loop's thread, from another one."""
        ...


class _Waiting:
    """A request that was read and is not answered yet. Nothing more is read from its connection."""

    __slots__ = ("call", "connection", "fds", "payload", "since", "user")

    def __init__(self, connection: Connection, user: str, request: m.Request, fds: list[int], since: float) -> None:
        self.connection = connection
        self.user = user
        self.call = request.call
        self.payload = m.encode(request)
        self.fds = fds
        self.since = since


class _Question:
    """One question to the database, and the thread that waits for the answer."""

    __slots__ = ("answer", "thread", "user")

    def __init__(self, user: str) -> None:
        self.user = user
        self.answer = Answer("", -1)  # unless the database says otherwise
        self.thread: threading.Thread | None = None


class Lookups:
    """Asks whose a name is, one question of each user at a time.

    Parameters
    ----------
    server : KeeperServer
    names : UserNames
        What is known, and how to ask.
    """

    def __init__(self, server: LookupsHost, names: UserNames) -> None:
        self._server = server
        self._names = names
        self._waiting: dict[int, deque[_Waiting]] = {}
        self._nbytes: dict[int, int] = {}
        self._asked: dict[int, _Question] = {}
        self._unserved: deque[int] = deque()  # users for whom there was no thread

    def waits(self, connection: Connection, request: m.Publish | m.Offer | m.Attach, fds: list[int]) -> bool:
        """Whether a request waits until it is known whose its name is. Then it is handled once more, later.

        Its descriptors are taken over, and count as others that its user sent and that are not taken yet: with more
        than a few, no more are read.

        Raises
        ------
        UsageError
            For what is no name.
        QuotaError
            If more waits of that user than the keeper has room for.
        """
        user, uid = home_of(check_name(request.name)), connection.credentials.uid
        if user is None or self._names.knows(uid, user):
            return False
        waiting = _Waiting(connection, user, request, fds[:], self._server.now())
        nbytes = self._nbytes.get(uid, 0) + len(waiting.payload)
        if nbytes > _MOST:
            raise QuotaError(
                f"requests of uid {uid} that wait for the database of users are more than {format_size(_MOST)}: try "
                f"again, or publish under ~{uid}/, for which it is not asked"
            )
        del fds[:]
        self._nbytes[uid] = nbytes
        queue = self._waiting.setdefault(uid, deque())
        queue.append(waiting)
        connection.hold()
        self._server.slow_closer.keep(uid, len(waiting.fds))
        if len(queue) == 1:
            self._ask(uid)
        return True

    def _ask(self, uid: int) -> None:
        """Have a thread ask what the next request of a user waits for."""
        if len(self._asked) >= _MAX_THREADS:
            self._unserved.append(uid)
            return
        asked = self._asked[uid] = _Question(self._waiting[uid][0].user)
        ask = self._names.question(uid, asked.user)

        def run() -> None:
            try:
                asked.answer = ask()
            finally:
                self._server.call(partial(self._answered, uid, asked))

        thread = threading.Thread(target=run, name="names of users", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread is to be had: the loop itself never asks
            del self._asked[uid]
            self._server.turns.later(uid, partial(self._refuse, uid))
        else:
            asked.thread = thread

    def _refuse(self, uid: int) -> None:
        """Tell who is next of a user that nobody can be asked now."""
        queue = self._waiting.get(uid)
        if not queue:
            return
        user = queue[0].user
        self._next(
            uid,
            WaitTimeoutError(
                f"this keeper can start no thread to ask the database of users who {user!r} is: try again, or say "
                f"~<number>/ instead of the name; and allow the keeper more threads (ulimit -u, or the limit of its "
                f"container)"
            ),
        )
        if queue:
            self._server.turns.later(uid, partial(self._go_on, uid))

    def _answered(self, uid: int, asked: _Question) -> None:
        if self._asked.get(uid) is not asked:  # it was given up
            return
        self._learn(uid)
        if self._unserved:
            self._ask(self._unserved.popleft())
        self._server.turns.later(uid, partial(self._go_on, uid))

    def _learn(self, uid: int) -> None:
        asked = self._asked.pop(uid)
        self._names.learn(uid, asked.user, asked.answer)

    def _go_on(self, uid: int) -> None:
        """Handle the next request of a user, in that user's turn."""
        queue = self._waiting.get(uid)
        if not queue:
            return
        first = queue[0]
        if not first.connection.closed and not self._names.knows(uid, first.user):
            self._ask(uid)
            return
        self._next(uid)
        if queue:
            self._server.turns.later(uid, partial(self._go_on, uid))

    def _next(self, uid: int, error: Exception | None = None) -> None:
        """Handle the next request of a user now, or answer with an error."""
        queue = self._waiting[uid]
        waiting = queue.popleft()
        self._nbytes[uid] -= len(waiting.payload)
        if not queue:
            del self._waiting[uid], self._nbytes[uid]
        closer, connection, fds = self._server.slow_closer, waiting.connection, waiting.fds
        closer.keep(uid, -len(fds))
        try:
            if connection.closed:
                return
            late = self._server.now() - waiting.since
            for unfinished in connection.partials.values():  # of which nothing was read meanwhile
                unfinished.since += late
            connection.go_on()
            if error is None:
                self._server.handle(connection, waiting.payload, fds, False)
            else:
                connection.send(m.encode(failure(waiting.call, error)))
        finally:
            if fds:
                closer.close_fds(fds, uid)

    def finish(self, seconds: float = _LAST) -> None:
        """Handle all that waits, before everything is written down or closed.

        Parameters
        ----------
        seconds : float
            For answers that are about to come; who waits for another is told to try again.
        """
        until = time.monotonic() + seconds
        self._unserved.clear()
        for uid in list(self._waiting):
            asked = self._asked.get(uid)
            if asked is not None:
                if asked.thread is not None:
                    asked.thread.join(max(0.0, until - time.monotonic()))
                if asked.thread is None or not asked.thread.is_alive():
                    self._learn(uid)
                else:
                    del self._asked[uid]
            while uid in self._waiting:
                first = self._waiting[uid][0]
                known = self._names.knows(uid, first.user)
                late = f"the database of users has not said who {first.user!r} is"
                self._next(uid, None if known else WaitTimeoutError(f"{late}; another keeper takes over: try again"))
