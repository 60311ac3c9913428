"""A keeper as an object: one to talk to, or a private one that was started here and is this process's default."""

from __future__ import annotations

import os
import threading
from collections import deque
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import ClosedError
from ..lifetime import Owned, own, shielded
from .client import close_client
from .paths import ENVIRONMENT
from .private import PrivateKeeper

if TYPE_CHECKING:
    from typing import Self

# What the environment named before each private keeper that is open became the default. Both change together, by
# whoever has the lock; a finalizer leaves a note for them instead (I3).
_before: dict[str, str | None] = {}
_choosing = threading.Lock()
_ended: deque[str] = deque()


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
        What this process calls itself there, shown to whoever asks who holds what; by default ``VRAM_LABEL`` of the
        environment, or else the name of the program. It is said with the first call there, and at most 120 characters
        of it are shown; another label later is a :class:`~vram.errors.UsageError`, raised by the call that uses it.

    Attributes
    ----------
    path, label : str
        As they were given; a path as text.
    """

    __slots__ = ("_is_closed", "_process", "label", "path")

    def __init__(self, path: str | os.PathLike[str], *, label: str = "") -> None:
        self.path = os.fspath(path) if isinstance(path, os.PathLike) else path
        self.label = label
        self._process: _Process | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called on this object."""
        return self._is_closed

    @shielded
    def close(self) -> None:
        """End the keeper, if it was started here, and free what it keeps that nobody has attached. Idempotent.

        What is attached stays with its readers. ``VRAM_KEEPER`` is again what it was before this keeper started.
        """
        self._is_closed = True
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> Self:
        if self._is_closed:
            raise ClosedError(f"the keeper at {self.path} was closed here; start another")
        if self._process is not None:
            self._process.__enter__()
        return self

    @shielded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        if self._process is not None:
            self._process.__exit__(kind, error, trace)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Keeper, label=self.label), (self.path,)

    def __repr__(self) -> str:
        return f"<Keeper at {self.path}{', closed' if self._is_closed else ''}>"


class _Process(Owned):
    """The claim on a private keeper's process."""

    __slots__ = ("path",)

    def __init__(self, private: PrivateKeeper) -> None:
        self.path = private.path
        # At exit too: its process would end by itself, but a connection to it is better closed than cut.
        self._claim = own(f"the private keeper at {private.path}", partial(_end, private), at_exit=True)


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
    process = _Process(PrivateKeeper(max_bytes=max_bytes, max_entries=max_entries))
    keeper = Keeper(process.path)
    keeper._process = process
    with _choosing:
        _before[keeper.path] = os.environ.get(ENVIRONMENT)
        os.environ[ENVIRONMENT] = keeper.path
    _put_back()
    return keeper


def _end(private: PrivateKeeper) -> None:
    """The undo of a private keeper. A finalizer may come here: it takes no locks (I3)."""
    _ended.append(private.path)
    _put_back()
    try:
        close_client(private.path)
    finally:
        private.stop()


def _put_back() -> None:
    """Make the default again what it was before those keepers that ended, unless somebody is at it: they do it then."""
    while _ended:
        if not _choosing.acquire(False):
            return
        try:
            while _ended:
                _forget(_ended.popleft())
        finally:
            _choosing.release()


def _forget(path: str) -> None:
    if path not in _before:
        return
    before = _before.pop(path)
    if os.environ.get(ENVIRONMENT) == path:
        if before is None:
            os.environ.pop(ENVIRONMENT, None)
        else:
            os.environ[ENVIRONMENT] = before
    else:  # another was started since, or the user chose one: not back to this one when that one ends
        for other, named in _before.copy().items():
            if named == path:
                _before[other] = before


def _after_fork_in_child() -> None:
    global _choosing
    _choosing = threading.Lock()  # a thread that is not here may have it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
