"""Memfds, the physical memory of the host: made here, or sent by other processes and then not believed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Iterator

from ..errors import ProtocolError, UsageError
from ..open_files import is_read_only
from ..spec import Access
from . import libc
from .addresses import PROTECTION
from .protocol import UNDECIDED

_BOUND = libc.F_SEAL_SHRINK | libc.F_SEAL_GROW
# Others may read what they got, and open it once more for that (:func:`reading`). With the right to write to the file,
# which a new memfd gives everybody, they could hang extended attributes to it: memory of the kernel without an end.
_MODE = 0o644
_PAUSE = 0.001  # seconds


_flags = libc.MFD_CLOEXEC | libc.MFD_ALLOW_SEALING | libc.MFD_NOEXEC_SEAL
# All ordinary memfds lie on one mount of the kernel's own, which lasts as long as the kernel; so do those of each size
# of huge pages: what was found out about its device once stays true. (Files of a tmpfs that somebody mounted never get
# this far: their set of seals is closed from the start.)
_device = -1


def make(nbytes: int) -> int:
    """Return a new memfd of a size that is sealed: a peer that truncates it would kill a mapped reader.
    Its mode lets only this user open it; others use a descriptor that they were given."""
    global _flags
    try:
        fd = os.memfd_create("vram", _flags)
    except OSError as error:
        if error.errno == errno.EINVAL and _flags & libc.MFD_NOEXEC_SEAL:  # before Linux 6.3
            _flags &= ~libc.MFD_NOEXEC_SEAL
            return make(nbytes)
        raise libc.failure(f"memfd_create for {nbytes} bytes", error.errno) from None
    try:
        os.fchmod(fd, _MODE)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, libc.F_ADD_SEALS, _BOUND)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise libc.failure(f"sizing a memfd to {nbytes} bytes", error.errno) from None
        raise
    return fd


def check(call: str, fd: int, nbytes: int, granularity: int) -> tuple[tuple[int, int], int]:
    """Return the identity and the seals of a memfd that was sent, if its first `nbytes` are there for good.
    Raises ProtocolError if it is no memfd, is too small, or could be truncated or starved under its reader."""
    global _device
    # The seals before the size: a peer that truncates it in between would have a reader killed by SIGBUS.
    try:
        seals, stat = fcntl.fcntl(fd, libc.F_GET_SEALS), os.fstat(fd)  # look spelt out: every attach comes by here
    except (OSError, OverflowError, ValueError, TypeError):
        stat, seals = look(call, fd)
    if seals & _BOUND != _BOUND:
        raise ProtocolError(
            f"{call}({fd}): its size could change under a reader (its seals are {seals:#x}); "
            f"it must carry F_SEAL_SHRINK and F_SEAL_GROW"
        )
    # A sealed size cannot change any more, so the first `nbytes` exist and will.
    size = stat.st_size
    if size < nbytes or size % granularity:
        raise ProtocolError(
            f"{call}({fd}): it has {size} bytes; {nbytes} were stated, and its size must be a multiple of {granularity}"
        )
    if stat.st_dev != _device:
        if libc.filesystem_type(fd) != libc.TMPFS_MAGIC:
            # Pages of a limited pool: a fault that finds the pool empty would kill the reader.
            raise ProtocolError(f"{call}({fd}): this is no ordinary shared memory (a memfd without MFD_HUGETLB)")
        _device = stat.st_dev
    return (stat.st_dev, stat.st_ino), seals


def look(call: str, fd: int) -> tuple[os.stat_result, int]:
    """Return what ``fstat`` says of a memfd, and the seals that it had before. Raises ProtocolError for any other file,
    whose file system is not asked and may never answer, and UsageError if the descriptor is not open."""
    try:
        seals: int = fcntl.fcntl(fd, libc.F_GET_SEALS)
        return os.fstat(fd), seals
    except (OSError, OverflowError, ValueError, TypeError):
        try:
            fcntl.fcntl(fd, fcntl.F_GETFD)
        except (OSError, OverflowError, ValueError, TypeError):
            raise UsageError(f"{call}({fd}): this is no open file descriptor") from None
        raise ProtocolError(f"{call}({fd}): this is no shared memory (memfd)") from None


@contextlib.contextmanager
def reading(fd: int) -> Iterator[int]:
    """Open a memfd once more, for reading only, for the length of a block: what is mapped through it stays read-only.
    Raises DriverError if it cannot be opened, as without ``/proc``."""
    try:
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise libc.failure(f"opening /proc/self/fd/{fd} for reading", error.errno) from None
    try:
        yield opened
    finally:
        os.close(opened)


def place_again(address: int, nbytes: int, access: Access, flags: int, fd: int, until: float | None) -> int:
    """Map a memfd where ``mmap`` was refused; return the address, or -1 with an errno. It waits while a seal is
    undecided, up to `until` (``time.monotonic``), and then opens sealed memory read-only, as Linux before 6.7 needs."""
    protection = PROTECTION[access]
    placed = -1
    deadline = time.monotonic() + UNDECIDED if until is None else until
    while placed == -1 and ctypes.get_errno() == errno.EPERM and not is_decided(fd) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        placed = libc.mmap(address, nbytes, protection, flags, fd, 0)
    if placed == -1 and ctypes.get_errno() == errno.EPERM and access <= Access.READ and is_read_only(fd):
        with reading(fd) as reader:
            placed = libc.mmap(address, nbytes, protection, flags, reader, 0)
    return placed


def is_decided(fd: int) -> bool:
    """Whether memory is sealed against writing, now or in the future: what the kernel says of mappings then stays."""
    return bool(fcntl.fcntl(fd, libc.F_GET_SEALS) & (libc.F_SEAL_WRITE | libc.F_SEAL_FUTURE_WRITE))
