"""Files whose locks nobody lets go of."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import fuse_files
from tests.support.deadlines import until
from tests.support.other_users import _become
from tests.support.users import GREEDY

SOON = 4.0  # seconds in which a keeper answers whatever others do; everything that hangs here does so for longer


needs_fuse = pytest.mark.skipif(fuse_files.missing() is not None, reason=str(fuse_files.missing()))


@contextlib.contextmanager
def locked_for_ever(place: str, fd: int) -> Iterator[None]:
    """A process writes to that memfd from a page that never comes: it holds the inode's lock meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    child = os.fork()
    if child == 0:
        _become(GREEDY)
        file = os.open(f"{place}/file", os.O_RDWR)
        page = libc.mmap(None, 4096, 1, 1, file, 0)
        libc.write(fd, ctypes.c_void_p(page), 4096)
        os._exit(0)
    try:

        def is_inside() -> bool:
            """Whether it waits in write(2), as its first and third argument tell."""
            call = Path(f"/proc/{child}/syscall").read_text().split()
            return len(call) > 4 and (int(call[1], 16), int(call[3], 16)) == (fd, 4096)

        until(is_inside, what="a write that waits for its page")
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
