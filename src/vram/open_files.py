"""Kinds of open files: memory that can be sealed, an NVIDIA device, or something else."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Sequence

if sys.platform != "win32":
    import fcntl

# <linux/fcntl.h>; Python names them in some versions only
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = 0x02, 0x04, 0x08, 0x10
_NVIDIA_MAJOR = 195  # <linux/Documentation/admin-guide/devices.txt>: /dev/nvidia0, /dev/nvidiactl


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
    return bool(seals & F_SEAL_WRITE)


def is_guarded(fd: int) -> bool:
    """Whether a descriptor stands for memory that nobody can map writable any more; older mappings may still write."""
    try:
        return bool(fcntl.fcntl(fd, F_GET_SEALS) & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))
    except OSError:
        return False


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors that the caller owns, and empty a list of them; a closed one does not keep the others open."""
    left = fds if isinstance(fds, list) else list(fds)
    while left:
        with contextlib.suppress(OSError):
            os.close(left.pop())


def is_gpu(fd: int) -> bool:
    """Whether a descriptor stands for an NVIDIA device, as exported GPU memory does; by device number, since names lie.
    Raises OSError (``EBADF``) if the descriptor is not open."""
    found = os.fstat(fd)
    return stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) == _NVIDIA_MAJOR
