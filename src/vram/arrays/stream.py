"""Moves the bytes of a file into a region, in one pass."""

from __future__ import annotations

import os
from typing import Any

from ..errors import UsageError
from ..memory import Region
from ..spec import HandleKind
from .views import Home

__all__ = ["changed", "copy_file"]

_STEP = 64 << 20  # bytes between two chances for a signal handler to run
_BOUNCE = 16 << 20


def copy_file(fd: int, path: str, start: int, region: Region, offset: int, nbytes: int) -> None:
    """Copy `nbytes` of an open file from `start` on to a writable region from `offset` on.

    Memory that is a file to the kernel is filled within the kernel, other memory that the CPU can address through
    its mapping, and the rest through a bounce buffer.

    Raises
    ------
    UsageError
        If the file, called `path`, ends before that.
    """
    with _Pinned(region, offset, nbytes):
        if not Home.of(region).addressable:
            _bounce(fd, path, start, region, offset, nbytes)
            return
        if region.is_private:  # what is written to the descriptors would not be seen here
            _read_mapped(fd, path, start, region, offset, nbytes)
            return
        allocations, inside = region.segments(offset, offset + nbytes)
        for allocation in allocations:
            count = min(allocation.nbytes - inside, nbytes)
            with allocation:
                into = _reopened(allocation.export()) if HandleKind.POSIX_FD in allocation.handle_kinds else None
            if into is None:
                _read_mapped(fd, path, start, region, offset, count)
            else:
                try:
                    _send(fd, path, start, into, inside, count)
                finally:
                    os.close(into)
            start, offset, nbytes, inside = start + count, offset + count, nbytes - count, 0


def changed(path: str) -> UsageError:
    """Return the error for a file that is not what it was a moment ago."""
    return UsageError(f"{path!r} changed while it was read; try again when nobody writes to it")


class _Pinned:
    """Keeps a span from being unmapped while it is written."""

    def __init__(self, region: Region, offset: int, nbytes: int) -> None:
        self._pin = region.pin(offset, offset + nbytes, "loading a file")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._pin.release()


def _send(fd: int, path: str, start: int, into: int, at: int, nbytes: int) -> None:
    """Within the kernel: faster than through a mapping, which faults page by page and clears what is overwritten."""
    os.lseek(into, at, os.SEEK_SET)
    while nbytes:
        count = os.sendfile(into, fd, start, min(nbytes, _STEP))
        if not count:
            raise changed(path)
        start += count
        nbytes -= count


def _read_mapped(fd: int, path: str, start: int, region: Region, offset: int, nbytes: int) -> None:
    driver: Any = region.driver
    with driver.buffer(region.address + offset, nbytes, readonly=False) as buffer:
        _read_into(fd, path, start, buffer)


def _bounce(fd: int, path: str, start: int, region: Region, offset: int, nbytes: int) -> None:
    with memoryview(bytearray(min(_BOUNCE, nbytes))) as bounce:
        for done in range(0, nbytes, _BOUNCE):
            with bounce[: min(_BOUNCE, nbytes - done)] as part:
                _read_into(fd, path, start + done, part)
                region.driver.copy_in(region.address + offset + done, part)


def _read_into(fd: int, path: str, start: int, buffer: memoryview) -> None:
    done = 0
    while done < buffer.nbytes:
        with buffer[done : done + _STEP] as part:
            count = os.preadv(fd, [part], start + done)
        if not count:
            raise changed(path)
        done += count


def _reopened(fd: int) -> int | None:
    """Return a descriptor of the same memory with a position of its own; None where that cannot be had.

    A duplicate would share the position with whoever else holds the memory, in other processes too.
    """
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None
