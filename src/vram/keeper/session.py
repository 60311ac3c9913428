"""``with vram.keeper() as k``: a private keeper that is this process's default for the length of a block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from .client import close_client
from .private import private_keeper

__all__ = ["Keeper", "keeper"]


class Keeper:
    """A keeper to talk to; every verb takes it, or its path, as ``keeper=``.

    Attributes
    ----------
    path : str
        Its socket.
    """

    __slots__ = ("path",)

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<Keeper at {self.path}>"


@contextlib.contextmanager
def keeper(*, max_bytes: int | None = None, max_entries: int | None = None) -> Iterator[Keeper]:
    """Run a private keeper, for notebooks and tests: a child process that ends with the ``with`` block.

    Inside the block it is this process's default and, through ``VRAM_KEEPER``, that of the children it starts. If
    this process dies, the keeper ends too.

    Parameters
    ----------
    max_bytes, max_entries : int, optional
        Ceilings for what it keeps.

    Yields
    ------
    Keeper

    Raises
    ------
    PeerGoneError, WaitTimeoutError
        If it does not start.
    """
    owner = os.getpid()
    before = os.environ.get("VRAM_KEEPER")
    with private_keeper(max_bytes=max_bytes, max_entries=max_entries) as path:
        os.environ["VRAM_KEEPER"] = path
        try:
            yield Keeper(path)
        finally:
            if os.getpid() == owner:  # a forked child leaves the block too, and has nothing to undo
                if before is None:
                    os.environ.pop("VRAM_KEEPER", None)
                else:
                    os.environ["VRAM_KEEPER"] = before
                close_client(path)
