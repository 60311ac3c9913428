"""Calls that are made while nobody waits for them, by two threads of the library: for news, and for following names.

A call is made as soon as it is posted, or at the time that it returned the last time. To post takes no lock and never
waits, so that finalizers and callbacks may do it. A thread lasts as long as it has users.

News of versions, above all that one is revoked, are found by the thread that reads a connection: it posts the
subscriptions that a notice is for. To stop one takes no lock, so that callbacks and finalizers may.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ..sharing.channel import Channel

Key = tuple[str, int]  # name and version
Act = Callable[[], "float | None"]  # the time.monotonic() of the next call, if there is one to be


class Worker:
    """A thread that makes calls, one after the other, as long as it has users."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Reentrant: a finalizer, or a signal handler, may add a user where this thread was adding one.
        self._lock = threading.RLock()
        self._users: dict[object, None] = {}
        self._posted: queue.SimpleQueue[Act | None] = queue.SimpleQueue()
        self._due: dict[Act, float] = {}
        self._thread: threading.Thread | None = None

    def add(self, user: object) -> None:
        """Keep the thread until this user is discarded. Raises RuntimeError if no thread can be started."""
        with self._lock:
            self._users[user] = None
            if self._thread is not None:
                return
            self._thread = thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            try:
                thread.start()
            except BaseException:
                self._users.pop(user, None)
                if thread.ident is None:
                    self._thread = None
                raise

    def discard(self, user: object) -> None:
        """Let the thread end, if this was its last user. Idempotent."""
        if user in self._users:
            with contextlib.suppress(KeyError):  # another thread was quicker
                del self._users[user]
            self._posted.put(None)

    def post(self, act: Act) -> None:
        """Have a call made soon."""
        self._posted.put(act)

    def _run(self) -> None:
        while True:
            act = self._next()
            if act is not None:
                self._due.pop(act, None)
                try:
                    when = act()
                except BaseException as error:  # noqa: BLE001  (other calls go on)
                    report(error)
                    when = None
                if when is not None:
                    self._due[act] = when
                del act  # or what it knows stayed until the next call
            if not self._users and self._is_over():
                return

    def _next(self) -> Act | None:
        """Wait for a call that was posted, or is due."""
        if not self._due:
            return self._posted.get()
        act = min(self._due, key=self._due.__getitem__)
        left = self._due[act] - time.monotonic()
        if left <= 0:  # first, since what is posted may never come to an end
            return act
        try:
            return self._posted.get(timeout=left)
        except queue.Empty:
            return act

    def _is_over(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return False  # somebody adds a user
        try:
            if self._users or not self._posted.empty():
                return False
            self._due.clear()
            self._thread = None
            return True
        finally:
            self._lock.release()

    def after_fork(self) -> None:
        """The thread is the parent's, and so is all that it has to do."""
        self.__init__(self.name)  # type: ignore[misc]


def report(error: BaseException) -> None:
    """Say aloud what somebody else's code raised, as what ends a thread is; but the thread goes on."""
    threading.excepthook(
        threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
    )


news = Worker("vram: revoked leases")
following = Worker("vram: following")


class Subscription:
    """One callback that waits for news of one version, made by :meth:`KeeperClient.watch`.
    `of_all` means any news, and the end of the keeper; otherwise only a revocation counts. `owner` is held weakly."""

    __slots__ = ("__weakref__", "_owner", "_tell", "_there", "is_accepted", "key", "of_all")

    def __init__(
        self, there: dict[Subscription, None], key: Key, owner: object, tell: Callable[[Any], object], of_all: bool
    ) -> None:
        self.key = key
        self.of_all = of_all
        self._tell: Callable[[Any], object] | None = tell  # until it was called, or stopped
        self._there = there  # those of its connection
        self.is_accepted = False  # by the keeper
        me = weakref.ref(self)

        def gone(_: object) -> None:
            subscription = me()
            if subscription is not None and news is not None:  # as at the very end of the interpreter
                subscription.stop()

        self._owner = weakref.ref(owner, gone)
        news.add(self)
        there[self] = None

    @property
    def is_over(self) -> bool:
        """Whether it was called back, or stopped."""
        return self._tell is None

    def stop(self) -> None:
        """Not to be called back any more; a callback that has begun goes on. Idempotent, takes no lock."""
        self._tell = None
        self._there.pop(self, None)
        news.discard(self)

    def post(self) -> None:
        """Have it called soon. The connection knows it no more."""
        news.post(self.call)

    def call(self) -> None:
        """Tell the owner, unless that was done or nobody listens."""
        tell, self._tell = self._tell, None
        owner = self._owner()
        try:
            if tell is not None and owner is not None:
                tell(owner)
        finally:
            news.discard(self)


class Signal:
    """A descriptor that becomes readable, and stays so, with the first news of a version."""

    __slots__ = ("__weakref__", "_reader", "_writer", "subscription")

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self._reader, self._writer = Channel.pair()  # which look after themselves: forks, the collector

    def fileno(self) -> int:
        """Lend the descriptor to wait on with select, poll or an event loop."""
        return self._reader.fileno()

    def give(self) -> None:
        """Make it readable. It is an end of file, which stays, also if somebody reads."""
        self._writer.close()

    def close(self) -> None:
        """Listen no more, and close the descriptor. Idempotent."""
        if self.subscription is not None:
            self.subscription.stop()
        self._reader.close()
        self._writer.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=news.after_fork)
    os.register_at_fork(after_in_child=following.after_fork)
