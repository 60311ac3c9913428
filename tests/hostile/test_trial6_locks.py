"""A file with as many locks as its sender likes: each close of it takes longer than all else that is done with it."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tests.hostile.test_keeper_sizes import is_open

from vram import open_files
from vram.testing.keeper import SOON, WRITABLE, make_memfd, until

if TYPE_CHECKING:
    import pytest

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


def test_who_receives_them_waits_a_moment_for_their_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever attaches closes all descriptors that came, and with 250 of them that would be minutes."""
    with locked(100_000) as fd:
        numbers = [os.dup(fd) for _ in range(110)]
        some, others = numbers[:10], numbers[10:]
        each = statistics.median([timed(os.close, one) for one in some])
        monkeypatch.setattr(open_files, "_MOMENT", 3 * each)
        spent = timed(open_files.close_fds, others)
        assert others == []
        # Less than a third of the hundred, and some for beginning threads.
        assert spent < 30 * each + 0.1, f"{spent:.3f} s, where one takes {each:.3f} s"
        until(lambda: not any(map(is_open, numbers)), what="the close of the rest in another thread")


def timed(call: Callable[[Any], object], argument: object) -> float:
    """Return the seconds of this thread that a call takes."""
    begin = time.thread_time()
    call(argument)
    return time.thread_time() - begin
