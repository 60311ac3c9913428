"""Children that are forked, for tests of what a fork does: everything else starts processes by spawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vram.errors import ForkedError


class Forked:
    """A forked child that waits: its process id, and how to have it go on."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe
        self._status: int | None = None

    def end(self) -> int:
        """Let the child go on, and return what its work returned; 99 if that raised. Idempotent."""
        if self._status is None:
            os.close(self._pipe)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


@contextmanager
def forked(work: Callable[[], int] = int, before: Callable[[], object] = int) -> Iterator[Forked]:
    """Have a forked child, which waits until it is told to end or the block is over.

    Parameters
    ----------
    work : callable
        What the child does then; returns its exit status, up to 98.
    before : callable
        What it does first: the block begins when it has.
    """
    asked, ask = os.pipe()
    begun, begin = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(ask)
            os.close(begun)
            before()
            os.close(begin)
            os.read(asked, 1)
            os._exit(work())
        finally:
            os._exit(99)
    os.close(asked)
    os.close(begin)
    os.read(begun, 1)
    os.close(begun)
    child = Forked(pid, ask)
    try:
        yield child
    finally:
        child.end()


def end_of(work: Callable[[], int]) -> int:
    """Return what a forked child's work returns; 99 if it raises."""
    with forked(work) as child:
        return child.end()


def refused(*uses: Callable[[], object]) -> int:
    """Do this in a forked child: return how many of some calls are refused for that."""
    count = 0
    for use in uses:
        try:
            use()
        except ForkedError:
            count += 1
    return count
