"""Keepers that this process talks to by an object, and those that it starts as child processes of its own.

Such a keeper ends when it is told to, or with its parent. A private one removes its directory when it ends, whoever
ended it; its parent does where the keeper was killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import IO, TYPE_CHECKING

from ..errors import ClosedError, PeerGoneError, UsageError, WaitTimeoutError
from ..lifetime import Owned, own, shielded, waiting
from ..programs import above_standard, python
from ..sharing.channel import MAX_PATH
from ..spec import parse_size
from .client import close_client
from .limits import parse_limit
from .paths import ENVIRONMENT, PRIVATE, check_platform, make_directory
from .rules import START

if TYPE_CHECKING:
    from typing import Self

_STOP = 10.0

_running: weakref.WeakSet[KeeperProcess] = weakref.WeakSet()

# The private keepers that are open, the newest last, and what the environment named before the first of them. Both are
# changed in single steps, without a lock: a finalizer comes here too (I3).
_open: list[str] = []
_named: str | None = None


class Keeper:
    """A keeper to talk to; every verb takes it, or its path, as ``keeper=``.

    ``vram.private_keeper()`` starts a private one. It ends with :meth:`close`, at the end of a ``with`` block or with
    this process; one that is dropped without that ends too, with a LeakWarning. ``Keeper(path)`` stands for one that
    runs already; closing that ends nothing. In a child process, forked or pickled to, a Keeper is one that runs
    already.

    Parameters
    ----------
    path : str or PathLike
        The socket of a keeper.
    label : str, optional
        A label of this process there, shown in lists of holders; by default ``VRAM_LABEL`` of the
        environment, or else the name of the program. It is said with the first call there, and at most 120 characters
        of it are shown; another label later is a :class:`~vram.errors.UsageError`, raised by the call that uses it.

    Attributes
    ----------
    path, label : str
        As they were given; a path as text.
    is_closed : bool
        Whether :meth:`close` was called on this object.
    """

    __slots__ = ("_process", "is_closed", "label", "path")

    def __init__(self, path: str | os.PathLike[str], *, label: str = "") -> None:
        self.path = os.fspath(path) if isinstance(path, os.PathLike) else path
        self.label = label
        self._process: Owned | None = None  # if it was started here
        self.is_closed = False

    @shielded
    def close(self) -> None:
        """End the keeper, if it was started here, and free what it keeps that nobody has attached. Idempotent.

        Attached memory stays with its readers. ``VRAM_KEEPER`` is again what it was before this keeper started.
        """
        self.is_closed = True
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> Self:
        if self.is_closed:
            raise ClosedError(f"the keeper at {self.path} was closed here; start another")
        if self._process is not None:
            self._process.__enter__()
        return self

    @shielded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_closed = True
        if self._process is not None:
            self._process.__exit__(kind, error, trace)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Keeper, label=self.label), (self.path,)

    def __repr__(self) -> str:
        return f"<Keeper at {self.path}{', closed' if self.is_closed else ''}>"


@shielded
def private_keeper(*, max_bytes: int | str | None = None, max_entries: int | None = None) -> Keeper:
    """Start a private keeper, for notebooks and tests: a child process, which serves when this returns.

    It is this process's default and, through ``VRAM_KEEPER``, that of the children it starts, until it is closed: by
    ``close()``, at the end of a ``with`` block, or at the end of the program. If this process is killed, the keeper
    ends too.

    Parameters
    ----------
    max_bytes : int or str, optional
        Ceiling for the memory that it keeps, in bytes or as a size such as ``"4GiB"``; none by default.
    max_entries : int, optional
        Ceiling for the names that it keeps; none by default.

    Returns
    -------
    Keeper

    Raises
    ------
    UsageError
        For a ceiling that is negative or is no number.
    PeerGoneError, WaitTimeoutError
        If it does not start.

    Examples
    --------
    >>> with vram.private_keeper():
    ...     published = vram.publish("numbers", {"x": numpy.arange(3)})

    >>> kept = vram.private_keeper()  # in a notebook: it lives on from cell to cell
    >>> kept.close()
    """
    options: list[str] = []
    if max_bytes is not None:
        options += ["--max-bytes", str(parse_size(max_bytes, what="max_bytes"))]
    if max_entries is not None:
        parse_limit(str(max_entries), "--max-entries")
        options += ["--max-entries", str(max_entries)]
    process = KeeperProcess.private(options)
    keeper = Keeper(process.path)
    keeper._process = Owned()
    # At exit too: its process would end by itself, but a connection to it is better closed than cut.
    keeper._process._claim = own(f"the private keeper at {process.path}", partial(_end, process), at_exit=True)
    global _named
    if not _open:
        _named = os.environ.get(ENVIRONMENT)
    _open.append(keeper.path)
    os.environ[ENVIRONMENT] = keeper.path
    return keeper


def _end(private: KeeperProcess) -> None:
    """The undo of a private keeper. A finalizer may come here: it takes no locks (I3)."""
    with contextlib.suppress(ValueError):  # in a forked child
        _open.remove(private.path)
    if os.environ.get(ENVIRONMENT) == private.path:  # not if the user chose another one since
        before = _open[-1] if _open else _named
        if before is None:
            os.environ.pop(ENVIRONMENT, None)
        else:
            os.environ[ENVIRONMENT] = before
    try:
        close_client(private.path)
    finally:
        private.stop()


class KeeperProcess:
    """A keeper as a child process, until :meth:`stop` or the end of this process; it has `timeout` seconds to serve.
    `launcher` is a command that executes its arguments."""

    _directory = ""  # of its own

    def __init__(
        self,
        path: str,
        options: Sequence[str] = (),
        *,
        timeout: float = START,
        launcher: Sequence[str] = (),
    ) -> None:
        check_platform()
        self.path = path
        self._said = ""
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as passed:
            # No pipe: nobody would read it, and a full one stops the keeper.
            self._stderr = failed.enter_context(open(os.memfd_create("vram-keeper-stderr", os.MFD_CLOEXEC), "w+b"))
            ready, theirs = os.pipe2(os.O_CLOEXEC)
            failed.callback(os.close, ready)
            passed.callback(os.close, ready_child := above_standard(theirs))
            # Nothing is ever written here: it reads end of file when the last copy of our end is gone, however we end.
            theirs, ours = os.pipe2(os.O_CLOEXEC)
            self._parent = failed.enter_context(open(ours, "wb", buffering=0))
            passed.callback(os.close, parent_child := above_standard(theirs))
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
            )
            failed.pop_all()
        _running.add(self)
        try:
            poll = select.poll()
            poll.register(ready, select.POLLIN)
            if not waiting(poll.poll, timeout * 1000):
                raise WaitTimeoutError(f"a keeper at {path} was not ready after {timeout:g} s")
            if not os.read(ready, 4096):
                said = f"a keeper at {path} ended with status {self.process.wait()}"
                raise PeerGoneError(f"{said}: {self.said().strip()[-2000:] or 'it said nothing'}")
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(ready)

    @classmethod
    def private(cls, options: Sequence[str] = ()) -> Self:
        """Start one that only this user can reach, in a directory of its own."""
        directory = make_directory(PRIVATE, _short_place())
        try:
            made = cls(os.path.join(directory, "keeper.sock"), [*options, "--own-directory"])
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        made._directory = directory
        return made

    @staticmethod
    def _started(command: Sequence[str], *, stderr: IO[bytes], fds: Sequence[int]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=fds,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for us; we stop it
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def said(self) -> str:
        """Return its standard error so far, also after it ended."""
        if not self._stderr.closed:
            self._stderr.seek(0)
            self._said = self._stderr.read().decode(errors="replace")
        return self._said

    def stop(self, timeout: float = _STOP) -> int:
        """Tell it to stop, wait, and return its exit status. Idempotent. Kills it if it does not stop in time."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.kill()

    def kill(self) -> int:
        """End it with SIGKILL, unless it has ended, and return its exit status. Idempotent."""
        self.process.kill()
        status = self.process.wait()
        self.said()
        self._stderr.close()
        self._parent.close()
        if self._directory:  # still there if the keeper was killed before it had removed it
            shutil.rmtree(self._directory, ignore_errors=True)
        return status


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
            keeper._parent.close()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
