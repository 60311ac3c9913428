"""Closing in other threads: the last close of memory frees it, a second for 8 GiB, and a client's file may block.

As the asynchronous_close() of systemd: nothing that a client sent is closed in the thread that serves everybody.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from ..sharing.unread import drain, hang_up

_MOST = 8  # threads


class Closer:
    """Up to 8 daemon threads, started as they are needed, which close what they are given."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0  # tasks that are not done
        self._threads: list[threading.Thread] = []

    def close(self, fds: Sequence[int]) -> None:
        """Close descriptors, soon."""
        if fds:
            self._put(partial(_close_each, tuple(fds)))

    def close_socket(self, sock: socket.socket) -> None:
        """End a connection now, for every process that has its socket, and close it with all that is unread in it."""
        if hang_up(sock):
            sock.close()
        else:
            self._put(partial(_close_filled, sock))

    def finish(self, seconds: float) -> None:
        """Wait until everything is closed, at most so long; the threads end."""
        until = time.monotonic() + seconds
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _put(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)
        with self._lock:
            self._pending += 1
            if self._pending <= len(self._threads) or len(self._threads) == _MOST:
                return
        thread = threading.Thread(target=self._work, name="closer", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started now; the next call tries again
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            with self._lock:
                self._pending -= 1


def _close_each(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _close_filled(sock: socket.socket) -> None:
    drain(sock)  # another process may have this socket, too, and close it last: it is to find nothing
    sock.close()
