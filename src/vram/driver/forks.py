"""Which forks of this process still have children that live, and so share its memory of the host.

The kernel tells nobody who else has memory mapped. But it refuses to make a memfd read-only while any process has it
mapped writable (fcntl(2), ``F_SEAL_WRITE``). So a page of a memfd is mapped before each fork, and unmapped in the
parent afterwards. While that memfd cannot be sealed, a child of that fork, or a child of that child, still has what it
inherited. A child that ended, or became another program, has not.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time

from ..lifetime import last_fork
from . import libc

_MOST = 16  # memfds that are open at once: the forks beyond share the last one
_LAST = float("inf")


class _Fork:
    """A fork, or several that share a memfd. Memory whose handle has a lower number than `serial` was there."""

    __slots__ = ("fd", "serial", "when")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.serial = _LAST  # until it is over
        self.when = time.time()

    def is_over(self) -> bool:
        """Whether no child has the page mapped any more."""
        try:
            fcntl.fcntl(self.fd, libc.F_ADD_SEALS, libc.F_SEAL_WRITE)
        except OSError:  # EBUSY; or EBADF, where no memfd was to be had, so that nothing is known of the children
            return False
        return True


_forks: list[_Fork] = []
_under_way: dict[int, tuple[_Fork, int]] = {}  # by thread, with the address of the page
_lock = threading.RLock()  # reentrant: a signal handler may fork


def child_since(serial: int) -> float | None:
    """Return when a child was forked that lives, and that has what was mapped when a handle of a serial number was
    made; None if there is no such child."""
    forget_ended()
    found = [fork.when for fork in _forks.copy() if serial < fork.serial]
    return found[-1] if found else None


def forget_ended() -> None:
    """Close the memfds of forks whose children have all ended."""
    if not _forks:
        return
    with _lock:
        for fork in _forks.copy():
            if fork.serial != _LAST and fork.is_over():
                _forks.remove(fork)
                os.close(fork.fd)


def _before() -> None:
    forget_ended()
    with _lock:
        is_shared = len(_forks) >= _MOST and _forks[-1].serial != _LAST
        fork = _forks[-1] if is_shared else _Fork(_new())
        if is_shared:
            fork.serial = _LAST
        else:
            _forks.append(fork)
        page = libc.mmap(None, mmap.PAGESIZE, libc.PROT_READ | libc.PROT_WRITE, libc.MAP_SHARED, fork.fd, 0)
        _under_way[threading.get_ident()] = fork, page


def _new() -> int:
    try:
        fd = os.memfd_create("vram-fork", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return -1
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd


def _after_in_parent() -> None:
    fork, page = _under_way.pop(threading.get_ident())
    fork.serial, fork.when = last_fork()
    if page != -1:
        libc.munmap(page, mmap.PAGESIZE)


def _after_in_child() -> None:
    """The page stays mapped; the memfds are the parent's."""
    global _lock
    _lock = threading.RLock()
    for fork in _forks:
        with contextlib.suppress(OSError):
            os.close(fork.fd)
    _forks.clear()
    _under_way.clear()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
