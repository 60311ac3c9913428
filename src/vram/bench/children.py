"""The other processes of a benchmark: each answers its parent over a pipe, and ends with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import struct
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import InternalError
from ..keeper.client import close_client
from ..keeper.private import KeeperProcess

DEADLINE = 120  # seconds for anything that one process waits for from another
_GRACE = 10.0


class Child:
    """A process that runs `work(pipe, *arguments)`; made by :func:`child`."""

    def __init__(self, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, work, arguments), daemon=True)
        try:
            self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid or 0

    def tell(self, *what: object) -> None:
        """Send it something."""
        self._pipe.send(what)

    def hear(self) -> Any:
        """Wait for what it sends next. Raises InternalError if it failed, or sends nothing in time."""
        if not self._pipe.poll(DEADLINE):
            raise InternalError(f"a process of the benchmark (pid {self.pid}) was silent for {DEADLINE} s")
        try:
            said = self._pipe.recv()
        except EOFError:
            raise InternalError(f"a process of the benchmark (pid {self.pid}) ended without an answer") from None
        if isinstance(said, _Failed):
            raise InternalError(f"a process of the benchmark failed:\n{said.trace}")
        return said

    def ask(self, *what: object) -> Any:
        """Send it something and wait for the answer."""
        self.tell(*what)
        return self.hear()

    def trouble(self) -> str:
        """Return the traceback that it ended with, if it has sent one."""
        with contextlib.suppress(OSError, EOFError):
            while self._pipe.poll(0):
                said = self._pipe.recv()
                if isinstance(said, _Failed):
                    return said.trace
        return ""

    def end(self) -> None:
        """Hang up, and wait until it has ended; it is killed if it does not."""
        self._pipe.close()
        self._process.join(_GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


class _Failed:
    def __init__(self, trace: str) -> None:
        self.trace = trace


def _run(pipe: Connection, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
    try:
        work(pipe, *arguments)
    except EOFError:
        pass  # the parent has hung up: nothing more is wanted
    except Exception:  # noqa: BLE001  (whatever it was, the parent says it)
        with contextlib.suppress(OSError):
            pipe.send(_Failed(traceback.format_exc()))


@contextlib.contextmanager
def child(work: Callable[..., None], *arguments: object) -> Iterator[Child]:
    """Run a function of a module in a process of its own for the length of a block.

    Sockets among the arguments are passed on; the caller closes its copies.
    """
    made = Child(work, arguments)
    try:
        yield made
    except Exception as error:
        trace = made.trouble()  # what we see may only be that it hung up
        if trace:
            error.add_note(f"the other process had failed:\n{trace}")
        raise
    finally:
        made.end()


@contextlib.contextmanager
def socket_pair(kind: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Make connected unix sockets that give up after a while instead of waiting for ever.

    The deadline is the kernel's: Python's own would poll before every call, and raw calls are what is measured.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", DEADLINE, 0))
        yield ours, theirs


@contextlib.contextmanager
def queue_pair(context: Any) -> Iterator[tuple[Any, Any]]:
    """Make two queues of a context of multiprocessing, whose threads have ended at the end of the block."""
    pair = context.Queue(), context.Queue()
    try:
        yield pair
    finally:
        for each in pair:
            each.close()
            each.join_thread()


@contextlib.contextmanager
def own_keeper(*options: str) -> Iterator[str]:
    """Run a keeper for the length of a block; yields the path of its socket."""
    keeper = KeeperProcess.private(options)
    try:
        yield keeper.path
    finally:
        close_client(keeper.path)
        keeper.stop()


@contextlib.contextmanager
def workplace(inside: Path | None = None) -> Iterator[Path]:
    """Make a directory for files, removed at the end of the block; by default where temporary files go."""
    with tempfile.TemporaryDirectory(prefix="vram-bench-", dir=inside) as directory:
        yield Path(directory)


def status(pid: int | str, field: str) -> int:
    """Return a field of ``/proc/PID/status`` that is a size, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise InternalError(f"/proc/{pid}/status has no {field}")
