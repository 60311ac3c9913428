"""A process that a test talks to over a pipe, and that has ended when its block has."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

from vram.testing.keeper import SOON

SPAWN = multiprocessing.get_context("spawn")

resource_tracker.ensure_running()  # now, and not in the middle of a test, to which it would be left


class Child:
    """The process and the pipe to it. Made by :func:`child`."""

    def __init__(self, work: Callable[..., None], given: tuple[Any, ...], first: tuple[Any, ...]) -> None:
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=work, args=(*first, theirs, *given), daemon=True)
        self.process.start()
        theirs.close()

    def said(self) -> Any:
        """Return what it says next."""
        assert self.pipe.poll(SOON), "nothing was said"
        return self.pipe.recv()

    def tell(self) -> None:
        """Have it go on."""
        self.pipe.send(None)

    def kill(self) -> None:
        """End it with SIGKILL, if it has not ended."""
        self.process.kill()
        self.process.join(SOON)
        assert not self.process.is_alive()


@contextlib.contextmanager
def child(work: Callable[..., None], *given: Any, first: tuple[Any, ...] = (), may_end: bool = True) -> Iterator[Child]:
    """Run ``work(*first, pipe, *given)`` in a process of its own.

    At the end of the block it hangs up, and the process has to end by itself, unless it does not do that (`may_end`),
    or the test has failed: then it is killed.
    """
    made = Child(work, given, first)
    try:
        yield made
        made.pipe.close()
        if may_end:
            made.process.join(SOON)
            assert not made.process.is_alive(), "a process did not end by itself"
    finally:
        made.pipe.close()
        made.kill()
        made.process.close()
