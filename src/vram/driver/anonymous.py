"""Anonymous memory of this process alone, for what devices read: large pages where there are any, and no descriptor.

No child inherits it: the kernel would copy pages that are pinned as soon as a child is forked.
"""

from __future__ import annotations

import ctypes
import errno

from . import libc
from .addresses import RESERVED, reserve
from .arguments import GRANULARITY
from .available import AvailableMemory

_STEP = 64 << 20  # bytes between two chances for a signal handler to run
_PAGE = 4096
_available = AvailableMemory()


def make(nbytes: int, promised: int = 0) -> int:
    """Return the address of new memory, a multiple of 2 MiB; it takes no page until it is touched. Raises
    OutOfMemoryError if there is not so much besides `promised` bytes, AddressSpaceError if there are no addresses."""
    call = f"mmap of {nbytes} bytes"
    _available.check(call, nbytes + promised)
    base = reserve(nbytes, GRANULARITY, 0)
    if base == -1:
        raise libc.failure(call)
    flags = (RESERVED & ~libc.MAP_NORESERVE) | libc.MAP_FIXED
    if libc.map_uninherited(base, nbytes, libc.PROT_READ | libc.PROT_WRITE, flags, -1) == -1:
        code = ctypes.get_errno()
        libc.munmap(base, nbytes)
        raise libc.failure(call, code)
    libc.madvise(base, nbytes, libc.MADV_HUGEPAGE)  # a hint: ten times as fast to make, where the kernel has them
    return base


def touch(address: int, nbytes: int) -> None:
    """Have the kernel make the pages of a part, which several threads may do at once for several parts."""
    end = address + nbytes
    while address < end:
        step = min(_STEP, end - address)
        if libc.madvise(address, step, libc.MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code in (errno.EINTR, errno.EAGAIN):
                continue
            if code != errno.EINVAL:
                raise libc.failure(f"madvise({address:#x}, {step}) to populate", code)
            with libc.view(address, step, readonly=False) as view:  # before Linux 5.14
                view[::_PAGE] = bytes(len(range(0, step, _PAGE)))
        address += step


def give_back(address: int, nbytes: int) -> None:
    """Unmap it; in a forked child there is nothing to unmap."""
    if libc.munmap(address, nbytes):
        raise libc.failure(f"munmap({address:#x}, {nbytes})")
