"""Memory to publish without any driver."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

_F_ADD_SEALS = 1033
SHRINK, GROW, WRITE, FUTURE_WRITE = 0x2, 0x4, 0x8, 0x10
WRITABLE = SHRINK | GROW
READ_ONLY = WRITABLE | WRITE


def make_memfd(nbytes: int = 4096, *, seals: int = READ_ONLY, content: bytes = b"") -> int:
    """Return a new memfd, which the caller closes: `nbytes` long, holding `content`, sealed with `seals`."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        if content:
            os.pwrite(fd, content, 0)
        fcntl.fcntl(fd, _F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def memfds(count: int = 1, nbytes: int = 4096, *, seals: int = READ_ONLY) -> Iterator[list[int]]:
    """Make some memfds for the length of a ``with`` block."""
    made: list[int] = []
    try:
        for index in range(count):
            made.append(make_memfd(nbytes, seals=seals, content=b"%d" % index))
        yield made
    finally:
        for fd in made:
            os.close(fd)
