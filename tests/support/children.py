"""Processes of tests: forks of a server that has imported vram, so that one takes a twentieth of a spawned one's time.

``CHILDREN`` is a context of multiprocessing. A child gets the environment that its parent has when it starts it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import context, forkserver, reduction, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from .deadlines import SOON

# What the functions that tests run in children import; without threads, and without a driver.
_IMPORTED = [
    "pytest",
    "hypothesis",
    "numpy",
    "vram",
    "vram.keeper.client",
    "vram.handover.pickling",
    "vram.cli.app",
    "vram.keeper.__main__",
]


def _begin(kind: type[BaseProcess], environment: Mapping[str, str]) -> BaseProcess:
    """Make a process object in the child; its arguments are unpickled after this."""
    os.environ.clear()
    os.environ.update(environment)
    return kind.__new__(kind)


class _Process(context.ForkServerProcess):
    def __reduce__(self) -> Any:
        return _begin, (type(self), dict(os.environ)), self.__dict__


class _Context(context.ForkServerContext):
    Process = _Process


CHILDREN = _Context()


def serve() -> None:
    """Start the server, before the first test takes stock of what there is."""
    resource_tracker.ensure_running()
    multiprocessing.set_forkserver_preload(_IMPORTED)
    forkserver.ensure_running()


def spent_by_children() -> float:
    """Return the processor time of the server and of the children that have ended, in seconds."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Inherited:
    """A descriptor that a child gets: as the number that it has there."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _number, (reduction.DupFd(self._fd),)


def _number(inherited: Any) -> int:
    number: int = inherited.detach()
    return number


class Child:
    """The process and the pipe to it. Made by :func:`child`."""

    def __init__(self, work: Callable[..., None], given: tuple[Any, ...], first: tuple[Any, ...]) -> None:
        self.pipe, theirs = CHILDREN.Pipe()
        self.process = CHILDREN.Process(target=work, args=(*first, theirs, *given), daemon=True)
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
