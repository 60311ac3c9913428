"""A keeper of one's own: a child process that ends when it is told to, or with its parent.

The keeper removes its directory when it ends, whoever ended it; its parent does where the keeper was killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import IO

from ..errors import PeerGoneError, UsageError, WaitTimeoutError
from ..lifetime import waiting
from ..programs import above_standard, python
from ..sharing.channel import MAX_PATH
from ..spec import parse_size
from .paths import PRIVATE, check_platform, make_directory
from .rules import START, check_entries

_STOP = 10.0

_running: weakref.WeakSet[KeeperProcess] = weakref.WeakSet()


class KeeperProcess:
    """A keeper as a child process, until :meth:`stop` or the end of this process; it has `timeout` seconds to serve.
    `launcher` is a command that executes its arguments; another `user` needs root."""

    def __init__(
        self,
        path: str,
        options: Sequence[str] = (),
        *,
        timeout: float = START,
        user: int | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        check_platform()
        self.path = path
        self._said = ""
        opened: list[int] = []
        begun = False
        try:
            opened += os.pipe2(os.O_CLOEXEC)
            ready, ready_child = opened[0], above_standard(opened[1])
            opened[1] = ready_child
            # Nothing is ever written here: it reads end of file when the last copy of our end is gone, however we end.
            opened += os.pipe2(os.O_CLOEXEC)
            parent_child, self._parent = above_standard(opened[2]), opened[3]
            opened[2] = parent_child
            # No pipe: nobody would read it, and a full one stops the keeper.
            opened.append(os.memfd_create("vram-keeper-stderr", os.MFD_CLOEXEC))
            self._stderr = open(opened[4], "w+b")  # noqa: SIM115  (see _reap)
            opened.pop()
            try:
                self.process = self._started(
                    [
                        *launcher,
                        # -P: what lies in the current directory is no part of the library
                        *(python(), "-P", "-m", "vram.keeper", "--socket", path),
                        *("--ready-fd", str(ready_child), "--parent-fd", str(parent_child)),
                        *options,
                    ],
                    stderr=self._stderr,
                    fds=(ready_child, parent_child),
                    user=user,
                )
                begun = True
            finally:
                if not begun:
                    self._stderr.close()
        finally:
            for fd in (ready_child, parent_child) if begun else opened:
                os.close(fd)
        _running.add(self)
        try:
            self._wait_until_ready(ready, timeout)
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(ready)

    @staticmethod
    def _started(
        command: Sequence[str], *, stderr: IO[bytes], fds: Sequence[int], user: int | None
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=fds,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for us; we stop it
            user=user,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def _wait_until_ready(self, ready: int, timeout: float) -> None:
        poll = select.poll()
        poll.register(ready, select.POLLIN)
        if not waiting(poll.poll, timeout * 1000):
            raise WaitTimeoutError(f"a keeper at {self.path} was not ready after {timeout:g} s")
        if not os.read(ready, 4096):
            self.process.wait()
            said = self.said().strip()[-2000:] or "it said nothing"
            raise PeerGoneError(f"a keeper at {self.path} ended with status {self.process.returncode}: {said}")

    def said(self) -> str:
        """Return its standard error so far, also after it ended."""
        if not self._stderr.closed:
            self._stderr.seek(0)
            self._said = self._stderr.read().decode(errors="replace")
        return self._said

    def stop(self, timeout: float = _STOP) -> int:
        """Tell it to stop, wait, and return its exit status. Idempotent. Kills it if it does not stop in time."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self._reap()

    def kill(self) -> int:
        """End it with SIGKILL and return its exit status. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        return self._reap()

    def _reap(self) -> int:
        status = self.process.wait()
        self.said()
        self._stderr.close()
        self._close_parent_end()
        return status

    def _close_parent_end(self) -> None:
        fd, self._parent = self._parent, -1
        if fd >= 0:
            os.close(fd)


class PrivateKeeper:
    """A keeper that only this user can reach, in a directory of its own, until :meth:`stop` or the end of this process.
    It has `timeout` seconds to serve; `options` are further arguments of ``python -m vram.keeper``."""

    def __init__(
        self,
        *,
        max_bytes: int | str | None = None,
        max_entries: int | None = None,
        options: Sequence[str] = (),
        timeout: float = START,
    ) -> None:
        arguments = [*options]
        if max_bytes is not None:
            arguments += ["--max-bytes", str(parse_size(max_bytes, what="max_bytes"))]
        if max_entries is not None:
            arguments += ["--max-entries", str(check_entries(max_entries))]
        check_platform()
        self._directory = make_directory(PRIVATE, _short_place())
        try:
            self.path = os.path.join(self._directory, "keeper.sock")
            self._process = KeeperProcess(self.path, [*arguments, "--own-directory"], timeout=timeout)
        except BaseException:
            self._remove_directory()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def stop(self) -> None:
        """Stop it, and wait until it and its directory are gone. Idempotent."""
        try:
            self._process.stop()
        finally:
            self._remove_directory()

    def _remove_directory(self) -> None:
        """Remove it where the keeper was killed before it had."""
        shutil.rmtree(self._directory, ignore_errors=True)


@contextlib.contextmanager
def private_socket(
    *,
    max_bytes: int | str | None = None,
    max_entries: int | None = None,
    options: Sequence[str] = (),
    timeout: float = START,
) -> Iterator[str]:
    """Run a :class:`PrivateKeeper` for the length of a ``with`` block, and yield the path of its socket."""
    owner = os.getpid()
    keeper = PrivateKeeper(max_bytes=max_bytes, max_entries=max_entries, options=options, timeout=timeout)
    try:
        yield keeper.path
    finally:
        if os.getpid() == owner:  # a forked child leaves the block too, and the keeper is its parent's
            keeper.stop()


@contextlib.contextmanager
def short_directory() -> Iterator[str]:
    """Make a directory, 0700, whose path leaves room for a socket's name, for the length of a ``with`` block."""
    owner = os.getpid()
    directory = make_directory("vram-", _short_place())
    try:
        yield directory
    finally:
        # The keeper has unlinked its socket; if it was killed, we do. Not in a forked child: its parent is in there.
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)


def _short_place() -> str:
    """Return the temporary directory, or one with a shorter path where a socket in it would have too long a one."""
    try:
        place = tempfile.gettempdir()
    except FileNotFoundError as error:  # none of those that Python tries can be written to
        raise UsageError(f"no temporary directory can be written to ({error.strerror}): set TMPDIR") from None
    if len(os.fsencode(place)) > MAX_PATH - 40:
        place = "/tmp"
        if not os.access(place, os.W_OK):
            raise UsageError(f"the temporary directory {tempfile.gettempdir()} is too long a path for a socket")
    return place


def _environment() -> dict[str, str]:
    """Ours, with the place this library was imported from: it may be no installed package."""
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if here not in paths:
        paths.append(here)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _after_fork_in_child() -> None:
    """Close the parents' ends: our keepers end with our parent, not with us."""
    for keeper in list(_running):
        with contextlib.suppress(OSError):
            keeper._close_parent_end()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
