"""A file on which another process has many locks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from vram.testing.keeper import SOON, WRITABLE, make_memfd

# One lock over all, and then holes in it from the end on: each takes no longer than the first, however many there are.
SPLIT = """
import fcntl, sys
fd, locks = int(sys.argv[1]), int(sys.argv[2])
fcntl.lockf(fd, fcntl.LOCK_EX, 2 * locks, 0)
for hole in range(locks - 1, 0, -1):
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, 2 * hole)
print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def locked(count: int) -> Iterator[int]:
    """A memfd on which another process has so many locks."""
    fd = make_memfd(seals=WRITABLE)
    command = [sys.executable, "-c", SPLIT, str(fd), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(fd,)) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"ready\n"
            yield fd
        finally:
            holder.stdin.close()
            holder.wait(SOON)
            os.close(fd)
