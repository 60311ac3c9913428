"""Descriptors that take long to close."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

from vram.keeper.slow_close import SlowCloser, Unclosed
from vram.testing.keeper import SOON, WRITABLE, make_memfd


@contextlib.contextmanager
def locked(count: int) -> Iterator[int]:
    """A memfd with so many locks."""
    fd = make_memfd(seals=WRITABLE)
    try:
        for number in range(count, 0, -1):
            fcntl.lockf(fd, fcntl.LOCK_EX, 1, 2 * number)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def stuck(closer: SlowCloser, uid: int, handles: int = 1) -> Iterator[None]:
    """Have a closer's thread close so many descriptors of a user for as long as this block takes."""
    begun, over = threading.Event(), threading.Event()

    def close() -> None:
        begun.set()
        assert over.wait(SOON)

    closer._put(uid, (close, Unclosed(handles=handles)))
    try:
        assert begun.wait(SOON)
        yield
    finally:
        over.set()
