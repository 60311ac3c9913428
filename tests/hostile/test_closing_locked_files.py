"""A file with as many locks as its sender likes: each close of it takes longer than all else that is done with it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.many_locks import locked
from tests.support.open_files import is_open

from vram import open_files
from vram.testing.keeper import until

pytestmark = pytest.mark.slow  # goes with lanes of closing


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
