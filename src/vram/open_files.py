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
import stat
import sys
import threading
import time
from collections.abc import Sequence

if sys.platform != "win32":
    import fcntl

F_GET_SEALS = 1034  # <linux/fcntl.h>; Python names it in some versions only
_F_SEAL_WRITE = 0x8
_F_SEAL_FUTURE_WRITE = 0x10
_NO_ADVICE = -1  # none that posix_fadvise knows
_NVIDIA_MAJOR = 195  # <linux/Documentation/admin-guide/devices.txt>: /dev/nvidia0, /dev/nvidiactl
_MAX_THREADS = 8
_MOMENT = 0.1  # seconds in which whatever is well served is closed, and those of this thread that closing may take


class _Slow:
    """Descriptors of a sender (empty if uncounted) that a thread closes, from the end of the list on.
    That thread takes `turn` and keeps it; `closed` is set once all are closed."""

    __slots__ = ("closed", "fds", "sender", "turn")

    def __init__(self, fds: list[int], sender: str) -> None:
        self.fds = fds
        self.sender = sender
        self.turn = threading.Lock()
        self.closed = threading.Event()


pending: dict[_Slow, None] = {}  # in the order in which they came, until they are closed
_threads: list[threading.Thread] = []


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


def close_fds(fds: Sequence[int], sender: str = "") -> None:
    """Close descriptors that the caller owns, and empty a list of them; a closed one does not keep the others open.
    A thread closes what is neither memory nor an NVIDIA device, and all that takes over 0.1 s: ``close`` may block."""
    slow = _close_quick(fds if isinstance(fds, list) else list(fds))
    if not slow:
        return
    waits = _Slow(slow, sender)
    pending[waits] = None
    go_on_closing()
    if not sys.is_finalizing() and all(one.turn.locked() for one in pending.copy() if one is not waits):
        waits.closed.wait(_MOMENT)  # what waits behind something else is closed in no moment


def unclosed(sender: str | None = None) -> int:
    """Return how many descriptors of one sender, or of all, other threads have still to close (:func:`close_fds`)."""
    return sum(len(one.fds) for one in pending.copy() if sender in (None, one.sender))


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


def go_on_closing() -> None:
    """Have a thread begin with what nobody is closing: after a fork, or when none was to be had before."""
    if all(one.turn.locked() for one in pending.copy()):
        return
    _threads[:] = [thread for thread in list(_threads) if thread.is_alive()]
    if sys.is_finalizing():  # no thread begins any more, and who waited for one would wait for ever; the kernel closes
        return
    if len(_threads) < _MAX_THREADS:
        thread = threading.Thread(target=_close_slowly, name="vram: closing", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread to be had now: whoever comes next takes these along
            thread.start()
            _threads.append(thread)


def _close_slowly() -> None:
    """Close what nobody is at, until there is nothing more."""
    while (one := next((one for one in pending.copy() if one.turn.acquire(blocking=False)), None)) is not None:
        while one.fds:
            with contextlib.suppress(OSError):
                os.close(one.fds[-1])
            del one.fds[-1]
        pending.pop(one, None)
        one.closed.set()


def _after_fork_in_child() -> None:
    """Take over the descriptors that the parent's threads had to close, to be closed with the next ones.
    The descriptor that a thread was just closing is left out: its number may be another file's already."""
    _threads.clear()
    theirs = [*pending]
    pending.clear()
    for one in theirs:
        pending[_Slow(one.fds[:-1] if one.turn.locked() else one.fds, one.sender)] = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
