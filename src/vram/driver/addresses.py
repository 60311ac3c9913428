"""Ranges of addresses as the kernel sees them: taking them, putting ``PROT_NONE`` back, touching their pages.

An address range is a ``PROT_NONE`` mapping, and stays one mapping or another until it is freed. It is never unmapped in
between: another thread could take the hole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import time
from collections.abc import Iterator, Sequence

from ..errors import UsageError
from ..spec import Access, round_up
from . import libc
from .arguments import GRANULARITY
from .books import PATIENCE, Books, Mapping, Reservation

RESERVED = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
PROTECTION = {Access.NONE: 0, Access.READ: libc.PROT_READ, Access.READ_WRITE: libc.PROT_READ | libc.PROT_WRITE}
_PAGE = 4096
_LARGE_PAGE = 2 << 20
_PASSING = (errno.EAGAIN, errno.EBUSY)  # why one page is not collapsed, while the next one may be
_POPULATE_STEP = 256 << 20  # bytes between two chances for a signal handler to run


def reserve(nbytes: int, alignment: int, wish: int) -> int:
    """Return the base of a new range, at `wish` if that is free; -1 with errno set if there is none."""
    if nbytes + alignment >= 1 << 63:  # ctypes would cut it to 64 bits, and what is unmapped below be others' memory
        ctypes.set_errno(errno.ENOMEM)
        return -1
    # Recent kernels align large mappings on their own: one call, most of the time.
    base: int = libc.mmap(wish, nbytes, 0, RESERVED, -1, 0)
    if base == -1 or base % alignment == 0:
        return base
    libc.munmap(base, nbytes)
    start: int = libc.mmap(0, nbytes + alignment, 0, RESERVED, -1, 0)
    if start == -1:
        return -1
    base, end = round_up(start, alignment), start + nbytes + alignment
    if base > start:
        libc.munmap(start, base - start)
    if end > base + nbytes:
        libc.munmap(base + nbytes, end - base - nbytes)
    return base


def read_zeros(reservation: Reservation) -> bool:
    """Whether an empty range of addresses reads as zeros from now on; if not, errno is set."""
    reservation.reads_zero = True  # first: what is put back after the change is as the change has it
    if libc.mprotect(reservation.address, reservation.nbytes, libc.PROT_READ) == 0:
        return True
    reservation.reads_zero = False
    return False


class HostBooks(Books):
    """The books of the host driver, and the kernel's part in what they say. In `pages` is a mapping to give up at the
    limit of mappings: there the kernel refuses even an unmap, which replaces one, and an undo that fails is a leak."""

    __slots__ = ("pages",)

    def __init__(self) -> None:
        super().__init__(GRANULARITY)
        self.pages: list[int] = []

    def take_ballast(self) -> None:
        """Have such a page. Not worth an error where there is none to be had."""
        if self.pages:
            return
        page = libc.mmap(0, _PAGE, 0, RESERVED, -1, 0)
        if page != -1:
            libc.madvise(page, _PAGE, libc.MADV_DONTDUMP)  # a flag of its own keeps it from merging with neighbours
            self.pages.append(page)

    def _drop(self) -> bool:
        """Whether there was one to give up."""
        try:
            page = self.pages.pop()
        except IndexError:
            return False
        return bool(libc.munmap(page, _PAGE) == 0)

    def put_back(self, address: int, nbytes: int, reservation: Reservation) -> bool:
        """Whether a span of a range is again as it was reserved; if not, errno is set."""
        flags, right = RESERVED | libc.MAP_FIXED, libc.PROT_READ if reservation.reads_zero else 0
        if libc.mmap(address, nbytes, right, flags, -1, 0) != -1:
            return True
        if ctypes.get_errno() != errno.ENOMEM or not self._drop():
            return False
        done = bool(libc.mmap(address, nbytes, right, flags, -1, 0) != -1)
        code = ctypes.get_errno()
        self.take_ballast()
        ctypes.set_errno(code)
        return done

    def free(self, reservation: Reservation) -> bool:
        """Whether this call gave an empty range back to the kernel; if the kernel refused, errno is set."""
        # Out of the books before it is out of the kernel: the next reservation may get this very address.
        ctypes.set_errno(0)
        if not self.reservations.remove(reservation):
            return False
        if not reservation.mappings.at and libc.munmap(reservation.address, reservation.nbytes) == 0:
            return True
        self.reservations.add(reservation)  # refused, or something was mapped in it meanwhile
        return False

    def catch_up(self) -> None:
        """Carry out the unmaps and frees that came while another call was at a mapping; called after each turn. It
        never waits: a call whose turn it is comes here next. Ranges that the kernel refuses stay for later."""
        for late in tuple(self.late):
            if isinstance(late, Mapping):
                self._catch_up(late)
        for late in tuple(self.late):
            if isinstance(late, Reservation) and not late.mappings.at and (self.free(late) or not self.has(late)):
                self.late.pop(late, None)

    def _catch_up(self, mapping: Mapping) -> None:
        if mapping.turn.acquire(blocking=False):  # else whoever has it comes here next
            try:
                if mapping in self.late and self.put_back(mapping.address, mapping.nbytes, mapping.reservation):
                    self.withdraw(mapping)
                    self.late.pop(mapping, None)
            finally:
                mapping.turn.release()

    def await_late(self, reservation: Reservation, start: int, end: int) -> None:
        """Wait for late unmaps in a span, so that it can be mapped anew. Not for undo calls (I3)."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.catch_up()
            spans = [late for late in tuple(self.late) if isinstance(late, Mapping) and late.reservation is reservation]
            if not any(late.address < end and start < late.end for late in spans) or time.monotonic() > deadline:
                return
            time.sleep(0.0001)

    def unmap(self, taken: Sequence[Mapping], address: int, nbytes: int) -> bool:
        """Whether mappings that the caller took back are unmapped, or will be at once; if not, errno is set."""
        held: list[Mapping] = []
        try:
            held += itertools.takewhile(lambda mapping: mapping.turn.acquire(blocking=False), taken)
            if len(held) < len(taken):
                # Another call has the kernel at work on one. Undo calls do not wait (I3): that one does it next.
                self.late.update(dict.fromkeys(taken))
                for mapping in taken:
                    mapping.is_leaving = True
            elif self.put_back(address, nbytes, taken[0].reservation):
                for mapping in taken:
                    self.withdraw(mapping)
            else:
                return False
        finally:
            for mapping in held:
                mapping.turn.release()
        if self.late:
            self.catch_up()
        return True

    @contextlib.contextmanager
    def turns(self, due: Sequence[Mapping]) -> Iterator[bool]:
        """Have the turns of some mappings, in the order of their addresses, for the length of a block, and yield True;
        or False if one of them went meanwhile. Not for undo calls (I3)."""
        held: list[Mapping] = []
        try:
            held += itertools.takewhile(Mapping.take_turn, due)
            yield len(held) == len(due)
        finally:
            for mapping in held:
                mapping.turn.release()
            if self.late:
                self.catch_up()

    def protect(self, due: Sequence[Mapping], address: int, nbytes: int, access: Access) -> int:
        """Change what may be done in a span of whole mappings; all of it, or return errno."""
        with self.turns(due) as are_there:
            if not are_there:
                raise UsageError(f"mem_set_access({address:#x}, {nbytes}): another thread unmapped some of it")
            if not libc.mprotect(address, nbytes, PROTECTION[access]):
                for mapping in due:
                    mapping.access = access
                return 0
            code = ctypes.get_errno()
            for mapping in due:  # the kernel has changed those before the one that it refused
                libc.mprotect(mapping.address, mapping.nbytes, PROTECTION[mapping.access])
            return code


def map_anew(mapping: Mapping, fd: int, access: Access) -> None:
    """Map the memory of a mapping once more, by another descriptor, in the turn of it and without a gap for readers."""
    flags = libc.MAP_SHARED | libc.MAP_FIXED
    if libc.mmap(mapping.address, mapping.nbytes, PROTECTION[access], flags, fd, 0) == -1:
        raise libc.failure(f"mmap of memory anew at {mapping.address:#x}")
    mapping.access = access


def collapse(mapping: Mapping, start: int, end: int, until: float) -> None:
    """Have the kernel back whole units of 2 MiB of a shared mapping by one page each, until a time; a hint.
    ``MADV_COLLAPSE`` (Linux 6.1) ignores ``shmem_enabled``, but for ``deny``, and serves all processes at once."""
    if mapping.private:
        return  # its pages are copies, each of which is made by a write
    start, end = round_up(start, _LARGE_PAGE), end - end % _LARGE_PAGE
    while start < end and time.monotonic() < until:
        # The kernel does not collapse a hole: it takes one page that is there.
        if libc.madvise(start, _PAGE, libc.MADV_POPULATE_WRITE):
            return
        if libc.madvise(start, _LARGE_PAGE, libc.MADV_COLLAPSE) and ctypes.get_errno() not in _PASSING:
            return
        start += _LARGE_PAGE


def populate(mapping: Mapping, start: int, end: int) -> None:
    """Touch all pages of a part of a mapping, keeping their contents. Raises DriverError if the kernel cannot."""
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
