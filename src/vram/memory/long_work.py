"""How far long work has come. It is counted where bytes move, and only while somebody looks.

An observer reads the numbers from a thread of its own, at any time: the code that moves bytes calls no observer, so
that none can fail, wait or be interrupted there. The numbers are for people: two threads that count at the same moment
may lose a count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar


class Work:
    """A piece of long work; `what` is for people, ``"publishing model"``. `total` and `done` are bytes; `began` is a
    :func:`time.monotonic`."""

    __slots__ = ("_ask", "began", "done", "total", "what")

    def __init__(self, what: str, total: int, ask: Callable[[], int] | None = None) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self.began = time.monotonic()
        self._ask = ask

    def look(self) -> int:
        """Return how many bytes are done, at most all."""
        return min(self.total, self.done if self._ask is None else self._ask())


_watches: tuple[list[Work], ...] = ()  # one of each who looks: what is under way
_work: ContextVar[Work | None] = ContextVar("work", default=None)  # that this thread is at


@contextlib.contextmanager
def watching() -> Iterator[list[Work]]:
    """Yield a list of what is under way, the oldest first, which is kept up to date for the length of a block."""
    global _watches
    mine: list[Work] = []
    _watches = (*_watches, mine)
    try:
        yield mine
    finally:
        _watches = tuple(other for other in _watches if other is not mine)


@contextlib.contextmanager
def long_work(what: str, total: int, ask: Callable[[], int] | None = None) -> Iterator[None]:
    """Show watchers what is done in a block, and count what is done in it: `total` bytes.
    `ask` returns the bytes done so far, where another thread does the work."""
    watches = _watches
    if not watches:
        yield
        return
    work = Work(what, total, ask)
    token = _work.set(work)
    try:
        for watch in watches:
            watch.append(work)
        yield
    finally:
        _work.reset(token)
        for watch in watches:
            with contextlib.suppress(ValueError):
                watch.remove(work)


def current() -> Work | None:
    """Return the work that this thread is at, for other threads to count for; None while nobody looks."""
    return _work.get()


def count(nbytes: int) -> None:
    """Count bytes that this thread has moved."""
    work = _work.get()
    if work is not None:
        work.done += nbytes
