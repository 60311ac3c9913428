"""Ranges of addresses as the kernel sees them: taking them, putting ``PROT_NONE`` back, touching their pages.

An address range is a ``PROT_NONE`` mapping, and stays one mapping or another until it is freed. It is never unmapped in
between: another thread could take the hole.
"""

from __future__ import annotations

import ctypes
import errno
import os

from ..spec import Access, round_up
from . import libc
from .books import Mapping

__all__ = ["RESERVED", "Ballast", "populate", "put_back", "reserve"]

RESERVED = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
_PAGE = 4096
_POPULATE_STEP = 256 << 20  # bytes between two chances for a signal handler to run


class Ballast:
    """One mapping that can be given up.

    At the limit of mappings the kernel refuses even to replace one by one, which is what an unmap is. And an undo that
    fails is a leak for good.
    """

    __slots__ = ("_pages",)

    def __init__(self) -> None:
        self._pages: list[int] = []

    def take(self) -> None:
        """Have one. Not worth an error where there is none to be had."""
        if self._pages:
            return
        page = libc.mmap(0, _PAGE, 0, RESERVED, -1, 0)
        if page != -1:
            libc.madvise(page, _PAGE, libc.MADV_DONTDUMP)  # a flag of its own keeps it from merging with neighbours
            self._pages.append(page)

    def drop(self) -> bool:
        """Whether there was one to give up."""
        try:
            page = self._pages.pop()
        except IndexError:
            return False
        return bool(libc.munmap(page, _PAGE) == 0)


def reserve(nbytes: int, alignment: int, wish: int) -> int:
    """Return the base of a new range, at `wish` if that is free; -1 with errno set if there is none."""
    # Recent kernels align large mappings on their own: one call, most of the time.
    base: int = libc.mmap(wish, nbytes, 0, RESERVED, -1, 0)
    if base == -1 or base % alignment == 0:
        return base
    libc.munmap(base, nbytes)
    wide: int = libc.mmap(0, nbytes + alignment, 0, RESERVED, -1, 0)
    if wide == -1:
        return -1
    base = round_up(wide, alignment)
    if base > wide:
        libc.munmap(wide, base - wide)
    if wide + alignment > base:
        libc.munmap(base + nbytes, wide + alignment - base)
    return base


def put_back(address: int, nbytes: int, ballast: Ballast) -> bool:
    """Whether ``PROT_NONE`` is back over a span; if not, errno is set."""
    flags = RESERVED | libc.MAP_FIXED
    if libc.mmap(address, nbytes, 0, flags, -1, 0) != -1:
        return True
    if ctypes.get_errno() != errno.ENOMEM or not ballast.drop():
        return False
    done = bool(libc.mmap(address, nbytes, 0, flags, -1, 0) != -1)
    code = ctypes.get_errno()
    ballast.take()
    ctypes.set_errno(code)
    return done


def populate(mapping: Mapping, start: int, end: int) -> None:
    """Touch all pages of a part of a mapping, keeping their contents.

    Raises
    ------
    DriverError
        If the kernel cannot.
    """
    start -= start % _PAGE
    end = round_up(end, _PAGE)
    writable = mapping.access == Access.READ_WRITE
    while start < end:
        step = min(_POPULATE_STEP, end - start)
        if libc.madvise(start, step, libc.MADV_POPULATE_WRITE if writable else libc.MADV_POPULATE_READ):
            code = ctypes.get_errno()
            if code in (errno.EINTR, errno.EAGAIN):
                continue
            if code != errno.EINVAL:
                raise libc.failure(f"madvise({start:#x}, {step}) to populate", code)
            _touch(mapping, start, step)
        start += step


def _touch(mapping: Mapping, start: int, nbytes: int) -> None:
    """Populate without the advice (before Linux 5.14): fallocate takes the memory and keeps what is there."""
    if mapping.access == Access.READ_WRITE and not mapping.private:
        try:
            os.posix_fallocate(mapping.memory.fd(), start - mapping.address, nbytes)
        except OSError as error:
            raise libc.failure(f"fallocate of {nbytes} bytes", error.errno) from None
    with libc.view(start, nbytes, readonly=True) as view:
        bytes(view[::_PAGE])
