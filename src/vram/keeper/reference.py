"""A reference to a keeper: one to talk to, or a private one that was started here and is this process's default."""

from __future__ import annotations

import contextlib
import os
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

        Attached memory stays with its readers. ``VRAM_KEEPER`` is again what it was before this keeper started.
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
    global _named
    if not _open:
        _named = os.environ.get(ENVIRONMENT)
    _open.append(keeper.path)
    os.environ[ENVIRONMENT] = keeper.path
    return keeper


def _end(private: PrivateKeeper) -> None:
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
