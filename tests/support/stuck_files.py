"""Descriptors that take long to close."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from tests.support.memfds import WRITABLE, make_memfd


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
