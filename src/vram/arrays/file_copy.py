"""Copies of the bytes of files into a region, in one pass, by several threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..driver.protocol import DeviceMemory
from ..errors import UnreadableFileError, UsageError
from ..lifetime import shielded, waiting
from ..memory import Region
from ..memory.kinds import way
from .pieces import Pieces
from .upload import ring_of, write
from .views import RegionViews

_PIECE = 64 << 20  # bytes that a thread copies at once
_THREADS = 4  # so that a disk or a network is read at several places
_PIPE = 1 << 20  # bytes; what anybody may ask for
_BOUNCE = 16 << 20
_Read = tuple[int, int, int, int]  # of which file, from where in it, to which offset of the region, how many bytes
_Write = tuple[int, int, int, int]  # from which offset of the region, to which file, where in it, how many bytes


@shielded
def copy_files(reads: Sequence[_Read], paths: Mapping[int, str], region: Region) -> None:
    """Copy parts (descriptor, file offset, region offset, bytes) of open files to a writable region; `paths` is by
    descriptor. Raises UsageError if a file ends too early, UnreadableFileError if it cannot be read."""
    if not reads:
        return
    begin = min(offset for _, _, offset, _ in reads)
    end = max(offset + nbytes for _, _, offset, nbytes in reads)
    with region.pin(begin, end, "loading a file"):
        if isinstance(region.driver, DeviceMemory) and not RegionViews.of(region).addressable:
            ring = ring_of(region.driver, region.users[0])
            blocks = [(fd, start, region.address + offset, nbytes) for fd, start, offset, nbytes in reads]
            with _reading(*paths.values()):
                ring.upload_files(blocks, lambda fd: changed(paths[fd]), into=[region.handle])
            return
        pieces = Pieces(
            (fd, start + done, offset + done, min(_PIECE, nbytes - done))
            for fd, start, offset, nbytes in reads
            for done in range(0, nbytes, _PIECE)
        )
        _by_threads(pieces, lambda _, taken: _copy(taken, paths, region))


@shielded
def write_files(writes: Sequence[_Write], region: Region) -> None:
    """Copy parts of a region (offset, descriptor, file offset, bytes) to open files. Raises OSError if one is full."""
    begin = min(offset for offset, _, _, _ in writes)
    end = max(offset + nbytes for offset, _, _, nbytes in writes)
    with region.pin(begin, end, "saving to a file"):
        if isinstance(region.driver, DeviceMemory) and not RegionViews.of(region).addressable:
            blocks = [(region.address + offset, fd, start, nbytes) for offset, fd, start, nbytes in writes]
            ring_of(region.driver, region.users[0]).download(blocks, into=[region.handle])
            return
        pieces = Pieces(
            (offset + done, fd, start + done, min(_PIECE, nbytes - done))
            for offset, fd, start, nbytes in writes
            for done in range(0, nbytes, _PIECE)
        )
        _by_threads(pieces, lambda _, taken: _write_out(taken, region))


def _by_threads(pieces: Pieces[Any], work: Callable[[int, Pieces[Any]], None]) -> None:
    """Have threads do all pieces; raise what one of them raised, once none is at work."""
    try:
        pieces.share_out(work, _THREADS, "vram file")
        if pieces.error is not None:
            raise pieces.error
    finally:
        pieces.stop()
        pieces.done.wait()
        pieces.error = None  # it keeps this frame


def _write_out(pieces: Pieces[_Write], region: Region) -> None:
    driver: Any = region.driver
    for offset, fd, start, nbytes in iter(pieces.next, None):
        driver.populate(region.address + offset, nbytes)  # at once: a write looks each page up that is not mapped
        with driver.buffer(region.address + offset, nbytes, readonly=True) as view:
            write(fd, start, view)


@contextlib.contextmanager
def _reading(*paths: str) -> Iterator[None]:
    """Name the files, of which one is read, in an error of the kernel."""
    try:
        yield
    except OSError as error:
        some = " or ".join(map(repr, paths[:3])) + (" or ..." if len(paths) > 3 else "")
        raise UnreadableFileError(f"{some} cannot be read to the end: {error.strerror or error}") from None


def _copy(pieces: Pieces[_Read], paths: Mapping[int, str], region: Region) -> None:
    for fd, start, offset, nbytes in iter(pieces.next, None):
        path = paths[fd]
        with _reading(path):
            if not RegionViews.of(region).addressable:
                _bounce(fd, path, start, region, offset, nbytes)
            elif region.is_private:  # what is written to the descriptors would not be seen here
                _read_mapped(fd, path, start, region, offset, nbytes)
            else:
                _fill_memory(fd, path, start, region, offset, nbytes)


def _fill_memory(fd: int, path: str, start: int, region: Region, offset: int, nbytes: int) -> None:
    allocations, inside = region.segments(offset, offset + nbytes)
    for allocation in allocations:
        count = min(allocation.nbytes - inside, nbytes)
        with allocation:
            if way(allocation.handle_kinds):
                _splice(fd, path, start, allocation.export(), inside, count)
            else:
                _read_mapped(fd, path, start, region, offset, count)
        start, offset, nbytes, inside = start + count, offset + count, nbytes - count, 0


def changed(path: str) -> UsageError:
    """Return the error for a file that is not what it was a moment ago."""
    return UsageError(f"{path!r} changed while it was read; try again when nobody writes to it")


def _splice(fd: int, path: str, start: int, into: int, at: int, nbytes: int) -> None:
    """Copy within the kernel: a mapping would fault page by page and clear what is overwritten. The pipe is larger than
    sendfile's, since each stretch in it ends amid a page, which is then looked up twice."""
    with _pipe() as (source, sink, size):
        while nbytes:
            inside = waiting(os.splice, fd, sink, min(nbytes, size), start)
            if not inside:
                raise changed(path)
            start, nbytes = start + inside, nbytes - inside
            _empty(source, into, at, inside)
            at += inside


def _empty(source: int, into: int, at: int, nbytes: int) -> None:
    while nbytes:
        count = waiting(os.splice, source, into, nbytes, None, at)
        at, nbytes = at + count, nbytes - count


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int, int]]:
    """A pipe: its two ends, and how much goes in."""
    import fcntl  # not on every system where this module is imported

    source, sink = os.pipe2(os.O_CLOEXEC)
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
        with buffer[done:] as part:
            count = waiting(os.preadv, fd, [part], start + done)
        if not count:
            raise changed(path)
        done += count
