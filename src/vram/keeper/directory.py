"""The directory of a private keeper: who removes it, whoever is killed.

It is locked by the process that makes it, and the lock goes to the keeper, which removes the directory when it ends,
whoever ended it and also if its parent is dead. If both are killed the kernel gives up the lock, and whoever starts the
next private keeper removes the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat

from ..errors import VramError
from .bind import clear_path, lock_directory
from .paths import PRIVATE, make_directory

SOCKET = "keeper.sock"
_OURS = re.compile(PRIVATE + r"[a-z0-9_]{8}")  # what mkdtemp makes of the prefix


def make_locked(place: str) -> tuple[str, int]:
    """Make a directory, 0700, and return its path and a descriptor that holds its lock."""
    while True:
        directory = make_directory(PRIVATE, place)
        fd = -1
        try:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            lock_directory(fd, directory)
            if os.path.samestat(os.stat(directory), os.fstat(fd)):
                return directory, fd
        except FileNotFoundError:
            pass  # until it is locked, another process that sweeps may take it for a dead one's: make another
        except BaseException:
            if fd >= 0:
                os.close(fd)
            shutil.rmtree(directory, ignore_errors=True)
            raise
        if fd >= 0:
            os.close(fd)


def sweep(place: str) -> None:
    """Remove the directories in `place` of this user's private keepers that were killed together with their owners.
    Such a directory has a matching name, mode 0700, a free lock, and nothing in it but a socket without listener."""
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(place) as found:
        names += [entry.name for entry in found]
    for name in filter(_OURS.fullmatch, names):
        with contextlib.suppress(OSError, VramError):  # somebody's, or being swept by another
            _remove_if_dead(os.path.join(place, name))


def _remove_if_dead(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
            return
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it is in use, or about to be
        names = os.listdir(fd)
        if names == [SOCKET]:
            clear_path(os.path.join(directory, SOCKET))  # BusyError: a keeper took over from who had the lock
        elif names:
            return
        if os.path.samestat(os.stat(directory, follow_symlinks=False), found):
            os.rmdir(directory)
    finally:
        os.close(fd)
