"""Keeps memory alive when its maker is gone: a process that holds descriptors, names and leases, and its client.

Import what you need from the modules: :mod:`.client` in programs, :mod:`.private` for a keeper of your own,
``python -m vram.keeper`` for the process itself. Nothing here imports numpy or a driver.

The room has the name of a verb. Importing anything from it makes it an attribute of ``vram``, where users expect the
verb; so it is the verb, a function with what Python wants of a package.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Keeper


def keeper(*, max_bytes: int | str | None = None, max_entries: int | None = None) -> Keeper:
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
    >>> with vram.keeper():
    ...     published = vram.publish("numbers", {"x": numpy.arange(3)})

    >>> kept = vram.keeper()  # in a notebook: it lives on from cell to cell
    >>> kept.close()
    """
    from .session import start

    return start(max_bytes=max_bytes, max_entries=max_entries)


def _become_a_package(verb: Any) -> None:
    package = sys.modules[__name__]
    for name in ("__file__", "__loader__", "__package__", "__path__", "__spec__"):
        setattr(verb, name, getattr(package, name))
    verb.__name__ = __name__  # what `from vram.keeper import client` goes by
    verb.__module__ = __name__.rpartition(".")[0]  # where it is found by its qualified name, for pickle and help()
    sys.modules[__name__] = verb


_become_a_package(keeper)
