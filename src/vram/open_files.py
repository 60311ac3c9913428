"""What an open file is, found out and closed without waiting for whoever serves it.

A descriptor that another process sent may be a file of a FUSE mount whose server never answers. Whatever asks that
server waits for as long as it pleases, and cannot be interrupted: ``fstat``, ``fstatfs``, ``poll``, an ``ioctl``, and
even ``close``, which sends it a FLUSH. So what a descriptor stands for is asked of the kernel first, in ways that it
answers from what it holds in memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

if sys.platform != "win32":
    import fcntl

F_GET_SEALS = 1034  # <linux/fcntl.h>; Python names it in some versions only
_F_SEAL_WRITE = 0x8
_F_SEAL_FUTURE_WRITE = 0x10
_NO_ADVICE = -1  # none that posix_fadvise knows
_NVIDIA_MAJOR = 195  # <linux/Documentation/admin-guide/devices.txt>: /dev/nvidia0, /dev/nvidiactl
_MOMENT = 0.1  # seconds in which whatever is well served is closed, and those of this thread that closing may take


class Closer:
    """Up to `most` daemon threads, started as they are needed, which close what may take long to close: the last
    descriptor of memory frees it, a second for 8 GiB, and a file of a FUSE mount waits for its server.
    A thread that has nothing to do waits for `linger` seconds, and ends."""

    def __init__(self, most: int = 8, linger: float = 0.0) -> None:
        self._most, self._linger = most, linger
        self._change = threading.Condition(threading.RLock())  # a finalizer may come in the middle
        self._tasks: deque[Callable[[], object]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def put(self, task: Callable[[], object]) -> bool:
        """Have a thread do a task, and return whether a thread is free for it."""
        with self._change:
            self._tasks.append(task)
            if len(self._tasks) <= self._idle:
                self._change.notify()
                return True
            if len(self._threads) >= self._most or sys.is_finalizing():
                return False
            thread = threading.Thread(target=self._work, name="vram: closing", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be started now; the next call tries again
                return False
            self._threads.append(thread)
        return True

    def close(self, fds: Sequence[int]) -> None:
        """Close descriptors, soon."""
        if fds:
            self.put(partial(_close_each, tuple(fds)))

    def finish(self, seconds: float) -> None:
        """Wait until everything is closed, at most so long; the threads end."""
        until = time.monotonic() + seconds
        with self._change:
            self._linger, threads = 0.0, list(self._threads)
            self._change.notify_all()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        # A handler that this thread were running as the interpreter ends would find none (SIGSEGV in CPython 3.11).
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        while True:
            with self._change:
                if not self._tasks:
                    self._idle += 1
                    self._change.wait(self._linger)
                    self._idle -= 1
                if not self._tasks:
                    self._threads.remove(threading.current_thread())
                    return
                task = self._tasks.popleft()
            task()


_closer = Closer()


def is_memory(fd: int) -> bool:
    """Whether a descriptor stands for memory that can be sealed: a memfd, or a file of a tmpfs.
    Raises OSError (``EBADF``) if the descriptor is not open."""
    try:
        fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            fcntl.fcntl(fd, fcntl.F_GETFD)  # raises, unless it stands for no more than a path (O_PATH)
        return False
    return True


def is_read_only(fd: int) -> bool:
    """Whether a descriptor stands for memory that nobody can write: no new mapping can, and no writable one is left.
    Raises OSError (``EBADF``) if the descriptor is not open."""
    try:
        seals: int = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        is_memory(fd)  # raises, if it is not open
        return False
    return bool(seals & _F_SEAL_WRITE)


def is_guarded(fd: int) -> bool:
    """Whether a descriptor stands for memory that nobody can map writable any more; older mappings may still write."""
    try:
        return bool(fcntl.fcntl(fd, F_GET_SEALS) & (_F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE))
    except OSError:
        return False


def attributes(fd: int) -> os.stat_result | None:
    """Return ``fstat`` of memory, a device or a socket; None for a file, a directory, a path or a pipe, which is not
    asked, since its file system may never answer. Raises OSError (``EBADF``) if the descriptor is not open."""
    if not is_memory(fd) and not _is_special(fd):
        return None
    return os.fstat(fd)


def _is_special(fd: int) -> bool:
    """Whether a descriptor is neither a regular file nor a directory nor a pipe, without asking its file system.
    The kernel refuses both no-op calls by type, without a lock; advice comes second, as some file systems handle it."""
    try:
        os.copy_file_range(fd, fd, 0, 0, 0)
    except OSError as error:
        # ENOSYS: no Linux, but something that plays it, and none of its file systems is served by another process.
        if error.errno in (errno.EINVAL, errno.ENOSYS):
            try:
                os.posix_fadvise(fd, 0, 0, _NO_ADVICE)
            except OSError as refused:
                return refused.errno == errno.EINVAL  # for the advice; ESPIPE: for a pipe
    return False


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors that the caller owns, and empty a list of them; a closed one does not keep the others open.
    A thread closes what is neither memory nor an NVIDIA device, and all that takes over 0.1 s: ``close`` may block."""
    slow = _close_quick(fds if isinstance(fds, list) else list(fds))
    if slow:
        done = threading.Event()
        if _closer.put(partial(_close_each, tuple(slow), done)):
            done.wait(_MOMENT)


def _close_each(fds: Sequence[int], done: threading.Event | None = None) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    if done is not None:
        done.set()


def _close_quick(fds: list[int]) -> list[int]:
    """Close what is closed at once, from the end of a list on, and return the rest."""
    began = time.thread_time() if len(fds) > 1 else 0.0
    slow: list[int] = []
    while fds:
        fd = fds.pop()
        try:
            is_quick = is_memory(fd) or is_gpu(fd)
        except (OSError, ValueError):  # not open
            continue
        if not is_quick:
            slow.append(fd)
            continue
        with contextlib.suppress(OSError):
            os.close(fd)
        if fds and time.thread_time() - began > _MOMENT:
            slow += fds
            fds.clear()
    return slow


def is_gpu(fd: int) -> bool:
    """Whether a descriptor stands for an NVIDIA device, as exported GPU memory does; by device number, since names lie.
    Raises OSError (``EBADF``) if the descriptor is not open."""
    found = attributes(fd)
    return found is not None and stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == _NVIDIA_MAJOR


def _after_fork_in_child() -> None:
    """Begin anew: the threads are the parent's, and close the parent's descriptors."""
    global _closer
    _closer = Closer()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
