"""What happens beside a test: a keeper in a thread of its own process, one for every user, a call that may wait, a
process that stands still.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.deadlines import SOON
from tests.support.places import short_directory

from vram.keeper import admission, listing, reports  # noqa: F401  (what becomes another user may not be able to read it then)
from vram.keeper.private import KeeperProcess
from vram.keeper.server import KeeperServer


@contextlib.contextmanager
def serving(server: KeeperServer) -> Iterator[KeeperServer]:
    """Have a keeper serve from a thread for the length of a block, or until another takes over from it."""
    ready = threading.Event()
    thread = threading.Thread(target=server.serve, args=(ready.set,), kwargs={"signals": False})
    thread.start()
    try:
        assert ready.wait(SOON)
        yield server
    finally:
        with contextlib.suppress(RuntimeError):  # its loop is closed: it was taken over from
            server.loop.call_soon_threadsafe(server.stop)
        thread.join(SOON)
        assert not thread.is_alive()


@contextlib.contextmanager
def open_to_all() -> Iterator[str]:
    """Run a keeper to which every user may connect, and yield the path of its socket."""
    with short_directory() as directory:
        os.chmod(directory, 0o755)
        keeper = KeeperProcess(os.path.join(directory, "keeper.sock"), ["--mode", "0666"])
        try:
            yield keeper.path
        finally:
            keeper.stop()


def is_stopped(pid: int) -> bool:
    """Whether all threads of a process are: the signal reaches one after the other."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return all(state == "T" for state in states)


def later(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Do something in a thread; its result, or the exception, comes into the list."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(act())
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, came


@contextlib.contextmanager
def keeper_here(**options: Any) -> Iterator[KeeperServer]:
    """A keeper in a thread of this process, for a look at its memory."""
    with short_directory() as place, serving(KeeperServer(f"{place}/k", raises_limit=False, **options)) as server:
        yield server


def is_open(fd: int) -> bool:
    """Whether this process has such a descriptor."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
