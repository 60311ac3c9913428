"""Copies the bytes of a file into a region, in one pass."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from ..driver.protocol import StreamOrdered
from ..errors import UsageError
from ..lifetime import uninterrupted
from ..memory import Region
from ..memory.long_work import count as count_progress
from ..spec import HandleKind
from .upload import ring_of
from .views import RegionViews

__all__ = ["changed", "copy_file"]

_STEP = 64 << 20  # bytes between two chances for a signal handler to run
_PIPE = 1 << 20  # bytes; what anybody may ask for
_BOUNCE = 16 << 20


def copy_file(fd: int, path: str, start: int, region: Region, offset: int, nbytes: int) -> None:
    """Copy `nbytes` of an open file from `start` on to a writable region from `offset` on.

    Memory that is a file to the kernel is filled within the kernel, other memory that the CPU can address through
    its mapping, that of a GPU through pinned memory by several threads (:mod:`.upload`), and the rest through a bounce
    buffer.

    Raises
    ------
    UsageError
        If the file, called `path`, ends before that.
    """
    with _Pinned(region, offset, nbytes):
        if not RegionViews.of(region).addressable:
            if isinstance(region.driver, StreamOrdered):
                ring = ring_of(region.driver, region.users[0])
                pieces = [(start, region.address + offset, nbytes)]
                ring.upload(fd, pieces, partial(changed, path), into=[region.handle])
            else:
                _bounce(fd, path, start, region, offset, nbytes)
            return
        if region.is_private:  # what is written to the descriptors would not be seen here
            _read_mapped(fd, path, start, region, offset, nbytes)
            return
        allocations, inside = region.segments(offset, offset + nbytes)
        for allocation in allocations:
            count = min(allocation.nbytes - inside, nbytes)
            with allocation:
                if HandleKind.POSIX_FD in allocation.handle_kinds:
                    _splice(fd, path, start, allocation.export(), inside, count)
                else:
                    _read_mapped(fd, path, start, region, offset, count)
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


def _splice(fd: int, path: str, start: int, into: int, at: int, nbytes: int) -> None:
    """Within the kernel: faster than through a mapping, which faults page by page and clears what is overwritten.

    And through a pipe that is larger than sendfile's own. The data of a file begins anywhere in a page, so that each
    stretch that was in the pipe ends in the middle of a page of the memory, which is then looked up twice.
    """
    with _pipe() as (source, sink, size):
        while True:
            if not nbytes:
                break
            inside = os.splice(fd, sink, min(nbytes, size), offset_src=start)
            if not inside:
                raise changed(path)
            start, nbytes = start + inside, nbytes - inside
            _empty(source, into, at, inside)
            at += inside
            count_progress(inside)


def _empty(source: int, into: int, at: int, nbytes: int) -> None:
    while nbytes:
        count = os.splice(source, into, nbytes, offset_dst=at)
        at, nbytes = at + count, nbytes - count


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int, int]]:
    """A pipe: its two ends, and how much goes in."""
    import fcntl  # not on every system where this module is imported

    source, sink = uninterrupted(os.pipe2, os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # this user has many pipes; a small one works, too
            fcntl.fcntl(sink, fcntl.F_SETPIPE_SZ, _PIPE)
        yield source, sink, fcntl.fcntl(sink, fcntl.F_GETPIPE_SZ)
    finally:
        os.close(source)
        os.close(sink)


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
        count_progress(count)
