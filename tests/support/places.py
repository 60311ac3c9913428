"""Keepers and directories for sockets, for the length of a block."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence

from vram.keeper.private import KeeperProcess


@contextlib.contextmanager
def private_socket(options: Sequence[str] = ()) -> Iterator[str]:
    """Run a private keeper, and yield the path of its socket."""
    owner = os.getpid()
    keeper = KeeperProcess.private(options)
    try:
        yield keeper.path
    finally:
        if os.getpid() == owner:  # a forked child leaves the block too, and the keeper is its parent's
            keeper.stop()


@contextlib.contextmanager
def short_directory() -> Iterator[str]:
    """Make a directory, 0700, whose path leaves room for a socket's name."""
    owner = os.getpid()
    made = tempfile.TemporaryDirectory(prefix="vram-", ignore_cleanup_errors=True)
    try:
        yield made.name
    finally:
        if os.getpid() == owner:  # a forked child's parent is in there
            made.cleanup()
        else:
            made._finalizer.detach()  # type: ignore[attr-defined]
