"""Threads of the library that make calls while nobody waits for them: one for news, one for following names.

A call is made as soon as it is posted, or at the time that it returned the last time. To post takes no lock and never
waits, so that finalizers and callbacks may do it. A thread lasts as long as it has users.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

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
                when = _called(act)
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


def _called(act: Act) -> float | None:
    try:
        return act()
    except BaseException as error:  # noqa: BLE001  (other calls go on)
        report(error)
        return None


def report(error: BaseException) -> None:
    """Say aloud what somebody else's code raised, as what ends a thread is; but the thread goes on."""
    threading.excepthook(
        threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
    )


news = Worker("vram: revoked leases")
following = Worker("vram: following")

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=news.after_fork)
    os.register_at_fork(after_in_child=following.after_fork)
