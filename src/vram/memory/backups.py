"""Where the bytes of a region are while it sleeps: in pinned memory, in a file, in shared memory, or nowhere.

What a backup holds is a dependency of the region's handle, so it goes with the region at the latest. Internal to this
room: :mod:`.sleep` says when which of these runs.
"""

from __future__ import annotations

import errno
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..driver.protocol import HostAddressable, StreamOrdered
from ..errors import BackupError, UsageError
from ..lifetime import Claim, Handle, close_all, noted, own, uninterrupted, unwinding
from ..spec import Access, Location, format_size
from .allocation import Memory, PhysicalAllocation
from .chunks import destroy_streams
from .pinned import Span, store_of

if TYPE_CHECKING:
    from .region import Region

__all__ = ["Backup", "Copies", "FileBackup", "KeptBackup", "PinnedBackup", "open_file"]

_INTERRUPTS = 5  # in a row, after which nobody waits any more
_PIECE = 32 << 20  # bytes of a file that are read or written, and checked, at once


class Copies:
    """The copies between devices and pinned memory of one call: a stream for each device, so that all are busy."""

    def __init__(self) -> None:
        self._claim = own("streams for sleeping memory", None)
        self._streams: dict[Location, tuple[StreamOrdered, int]] = {}

    def start(self, region: Region, destination: int, source: int, nbytes: int) -> None:
        """Queue a copy on the stream of the region's device."""
        place = region.users[0]
        if place not in self._streams:
            able, made = cast("StreamOrdered", region.driver), list[int]()
            self._claim.handle.keep("stream for sleeping memory", partial(destroy_streams, able, made))
            made.append(able.stream_create(place))
            self._streams[place] = able, made[0]
        driver, stream = self._streams[place]
        driver.copy_async(destination, source, nbytes, stream)

    def finish(self) -> None:
        """Return when all of them are done."""
        for place, (driver, stream) in self._streams.items():
            driver.stream_synchronize(stream, place)

    def settle(self, error: BaseException) -> None:
        """Return when nothing is under way any more, since `error` came: another one becomes a note on that."""
        for _ in range(_INTERRUPTS):
            try:
                with noted(error):
                    self.finish()
                return
            except BaseException:  # noqa: BLE001  (an interrupt: the first error is raised when this is over)
                continue

    def close(self) -> None:
        """Give the streams back. Idempotent."""
        self._claim.release()


class Backup:
    """What is kept of a region that sleeps: this one, nothing. It is how memory is discarded.

    Attributes
    ----------
    frees, discards : bool
        Whether the device has the memory back, and whether the bytes are gone.
    """

    __slots__ = ("_held", "sizes")

    frees = discards = True
    where = "nowhere"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)  # bytes of each chunk
        self._held: list[Handle] = []  # what the region's handle depends on for this

    def store(self, region: Region, nbytes: int, copies: Copies) -> None:
        """Put the first `nbytes` of a region aside; done when `copies` are finished."""

    def map(self, region: Region, first: int, last: int) -> None:
        """Put memory behind the region's next addresses: its chunks from number `first` up to `last`, writable."""
        region._chunks.make(self.sizes[first:last], region._kinds, Access.READ_WRITE, region._flags)

    def restore(self, region: Region, start: int, stop: int, copies: Copies) -> None:
        """Bring back the bytes from `start` up to `stop`, where memory is again; done when `copies` are finished."""

    def drop(self, region: Region) -> None:
        """Let go of what was put aside. Idempotent."""
        while True:
            if not self._held:
                break
            region._chunks.handle.drop_dependency(self._held.pop())


class PinnedBackup(Backup):
    """In pinned memory of the host, at the speed of the bus."""

    __slots__ = ("_spans",)

    discards = False
    where = "in pinned memory of the host"

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self._spans: list[Span] = []

    def store(self, region: Region, nbytes: int, copies: Copies) -> None:
        """Put the first `nbytes` aside; see the base class, here and below."""
        store = store_of(region.driver)
        spans = self._spans
        self._held.append(region._chunks.handle.keep("pinned backup", partial(store.give_back, spans)))
        store.lend(nbytes, region.users[0], spans)
        for pinned, start, size in self._parts(0, nbytes):
            copies.start(region, pinned, region.address + start, size)

    def restore(self, region: Region, start: int, stop: int, copies: Copies) -> None:
        """Bring back the bytes from `start` up to `stop`."""
        for pinned, first, size in self._parts(start, stop):
            copies.start(region, region.address + first, pinned, size)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Return what of the pinned spans holds a part of the region: an address, an offset in the region, a size."""
        offset = 0
        for address, nbytes in self._spans:
            first, last = max(start, offset), min(stop, offset + nbytes)
            if first < last:
                yield address + first - offset, first, last - first
            offset += nbytes


class FileBackup(Backup):
    """In a file that has no name, each piece with its checksum."""

    __slots__ = ("_at", "_fd", "_file", "_sums", "_whole")

    discards = False
    where = "in a file"

    def __init__(self, sizes: Sequence[int], file: Handle, fd: int, at: int) -> None:
        super().__init__(sizes)
        self._file = file  # which goes with the last region in it
        self._fd = fd
        self._at = at  # where in the file the region begins
        self._whole = 0  # bytes of the region that are there
        self._sums: dict[int, int] = {}

    def store(self, region: Region, nbytes: int, copies: Copies) -> None:
        """Write the first `nbytes`, piece by piece, with their checksums."""
        region._chunks.handle.depend(self._file)
        self._held.append(self._file)
        self._whole = nbytes
        for offset, size in self._pieces(0, nbytes):
            with _Window(region, offset, size, write=False) as view:
                self._sums[offset] = zlib.crc32(view)
                _all_of(os.pwrite, self._fd, view, self._at + offset)

    def restore(self, region: Region, start: int, stop: int, copies: Copies) -> None:
        """Read the bytes from `start` up to `stop`, and compare their checksums."""
        for offset, size in self._pieces(start, min(stop, self._whole)):
            with _Window(region, offset, size, write=True) as view:
                _all_of(lambda fd, part, at: os.preadv(fd, [part], at), self._fd, view, self._at + offset)
                if zlib.crc32(view) != self._sums[offset]:
                    raise BackupError(
                        f"the {format_size(size)} at offset {offset} of {region._chunks.handle.label} are not in the "
                        f"file as they were put there: somebody or something changed it. The memory stays asleep; wake "
                        f"it with discard=True to have it without its bytes, or close it"
                    )

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Return the pieces that lie in a span, which begins where a chunk does: none reaches over two chunks."""
        first = 0
        for size in self.sizes:
            for offset in range(max(first, start), min(first + size, stop), _PIECE):
                yield offset, min(_PIECE, first + size - offset, stop - offset)
            first += size


class KeptBackup(Backup):
    """In the same memory, which others hold as well: only what this process has mapped goes."""

    __slots__ = ("_memories",)

    frees = discards = False
    where = "in memory that is shared, unmapped here"

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self._memories: list[Memory] = []

    def store(self, region: Region, nbytes: int, copies: Copies) -> None:
        """Hold on to the memory, beside its mapping."""
        for chunk in region._chunks.row:
            memory = chunk.memory
            region._chunks.handle.depend(memory.handle)
            self._held.append(memory.handle)
            self._memories.append(memory)

    def map(self, region: Region, first: int, last: int) -> None:
        """Map the same memory again."""
        for memory in self._memories[first:last]:
            with PhysicalAllocation.of(memory) as allocation:
                region._chunks.append([allocation], region._access)


class _Window:
    """A piece of a region as bytes that the processor can read or write, also where it is memory of a device."""

    def __init__(self, region: Region, offset: int, nbytes: int, *, write: bool) -> None:
        self._region, self._address, self._nbytes, self._write = region, region.address + offset, nbytes, write
        self._view: memoryview | None = None

    def __enter__(self) -> memoryview:
        driver: Any = self._region.driver
        if isinstance(driver, HostAddressable):
            self._view = driver.buffer(self._address, self._nbytes, readonly=not self._write)
        else:
            self._view = memoryview(bytearray(self._nbytes))
            if not self._write:
                driver.copy_out(self._view, self._address)
        return self._view

    def __exit__(self, kind: object, *_: object) -> None:
        view, driver = cast("memoryview", self._view), self._region.driver
        if kind is None and self._write and not isinstance(driver, HostAddressable):
            driver.copy_in(self._address, view)
        view.release()


def open_file(directory: Path, nbytes: int) -> tuple[Claim, int]:
    """Make a file without a name that has room for `nbytes`; return the first claim on it and its descriptor.

    Raises
    ------
    UsageError
        If there is no such directory.
    BackupError
        If nothing can be written there, or there is not enough room.
    """
    if not os.path.isdir(directory):  # Path.is_dir raises for a name that is too long
        raise UsageError(
            f"to={str(directory)!r:.200} is no directory: memory sleeps in one, in 'host' memory, or in None"
        )
    fds: list[int] = []
    claim = own(f"file of {format_size(nbytes)} for sleeping memory", partial(close_all, fds))
    try:
        try:
            _open_unnamed(directory, fds)
            if nbytes:
                os.posix_fallocate(fds[0], 0, nbytes)
        except OSError as error:
            raise _failed(f"{format_size(nbytes)} cannot be put aside in {directory}", error) from error
    except BaseException as error:
        with unwinding(error):
            claim.release()
        raise
    return claim, fds[0]


def _open_unnamed(directory: Path, into: list[int]) -> None:
    """Put the descriptor of a new file without a name into a list that somebody owns."""
    try:
        into.append(uninterrupted(os.open, directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        fd, name = tempfile.mkstemp(prefix="vram-asleep-", dir=directory)  # a file system that has no unnamed files
        into.append(fd)
        os.unlink(name)


def _all_of(call: Callable[[int, memoryview, int], int], fd: int, view: memoryview, at: int) -> None:
    """Read or write all of a buffer, which the kernel may do in parts."""
    done = 0
    while done < len(view):
        try:
            count = call(fd, view[done:], at + done)
        except OSError as error:
            raise _failed("the file of sleeping memory cannot be read or written", error) from error
        if not count:
            raise BackupError("the file of sleeping memory is shorter than what was put there: somebody cut it off")
        done += count


def _failed(what: str, error: OSError) -> BackupError:
    return BackupError(f"{what}: {os.strerror(error.errno or 0)} ({errno.errorcode.get(error.errno or 0, '?')})")
