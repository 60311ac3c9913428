"""Where the bytes of a region are while it sleeps: in memory of the host, in a file, in shared memory, or nowhere.

The memory of a backup is a dependency of the region's handle, so it goes with the region at the latest. :mod:`.sleep`
chooses a backup and calls its methods. A caller that wants a certain kind, or to look at the bytes, makes a backup for
each region and passes it as the place; it may call :attr:`HostBackup.is_there`,
:meth:`HostBackup.spans` and :meth:`HostBackup.claim`.
"""

from __future__ import annotations

import errno
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import cast

from ..driver.protocol import DeviceMemory, HostMemory
from ..errors import BackupError, UsageError
from ..lifetime import Claim, Handle, close_all, let_in, noted, own
from ..spec import HOST, Access, Location, format_size, round_up
from .allocation import Memory, PhysicalAllocation, Received, acquire, or_else
from .long_work import count
from .pinned import Span, store_of
from .region import Region

_PIECE = 32 << 20  # bytes of a file that are read or written, and checked, at once
_PAGE = 2 << 20  # bytes; pageable memory comes in multiples of it


class Copies:
    """The copies between devices and pinned memory of one call: a stream for each device, so that all are busy."""

    def __init__(self) -> None:
        self._claim = own("streams for sleeping memory", None)
        self._streams: dict[Location, tuple[DeviceMemory, int]] = {}

    def start(self, region: Region, destination: int, source: int, nbytes: int) -> None:
        """Queue a copy on the stream of the region's device."""
        place = region.users[0]
        if place not in self._streams:
            able = cast("DeviceMemory", region.driver)
            claim, made = acquire("stream for sleeping memory", partial(able.stream_create, place), able.stream_destroy)
            self._claim.handle.adopt(claim)
            self._streams[place] = able, made
        driver, stream = self._streams[place]
        driver.copy_async(destination, source, nbytes, stream)

    def finish(self) -> None:
        """Return when all of them are done."""
        for place, (driver, stream) in self._streams.items():
            driver.stream_synchronize(stream, place)

    def settle(self, error: BaseException) -> None:
        """Return when nothing is under way any more, since `error` came: another one becomes a note on that."""
        with noted(error):
            self.finish()

    def close(self) -> None:
        """Give the streams back. Idempotent."""
        self._claim.release()


class Backup:
    """The copy of a region that sleeps; this class keeps nothing, and so discards memory. `frees` says that the device
    has the memory back, `discards` that the bytes are gone, `copies` that bytes are put aside and brought back."""

    __slots__ = ("_held", "sizes")

    frees = discards = True
    copies = False
    where = "nowhere"
    remedy = "vram.wake it"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)  # bytes of each chunk
        self._held: list[Handle] = []  # what the region's handle depends on for this

    def take(self, region: Region, nbytes: int) -> None:
        """Have room for the first `nbytes` of a region, or begin to make it: before the bytes of any are put aside."""

    def store(self, region: Region, nbytes: int, copies: Copies) -> None:
        """Put the first `nbytes` of a region aside; done when `copies` are finished."""

    def map(self, region: Region, first: int, last: int) -> None:
        """Put memory behind the region's next addresses: its chunks from number `first` up to `last`, writable."""
        region._chunks.make(self.sizes[first:last], region._kinds, Access.READ_WRITE, region._flags)

    def restore(self, region: Region, start: int, stop: int, copies: Copies) -> None:
        """Bring back the bytes from `start` up to `stop`, where memory is again; done when `copies` are finished."""

    def drop(self, region: Region) -> None:
        """Let go of what was put aside. Idempotent."""
        while self._held:
            region._chunks.handle.drop_dependency(self._held.pop())


class HostBackup(Backup):
    """In memory of the host, which can be looked at. It may outlast the waking, and be written again the next time."""

    __slots__ = ("_spans",)

    discards, copies = False, True

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self._spans: list[Span] = []

    @property
    def is_there(self) -> bool:
        """Whether bytes are in it: of memory that sleeps, or of when it last slept where they were kept."""
        return bool(self._held)

    def spans(self, start: int, stop: int) -> list[Span]:
        """Return the addresses, and the bytes at each, of what was put aside from `start` up to `stop`."""
        return [(address, size) for address, _, size in self._parts(start, stop)] if self._held else []

    def claim(self, holder: str) -> Claim:
        """Keep the memory, also when the backup is let go of. Not the bytes: they are written again with the next."""
        return self._held[-1].claim(holder)

    def take(self, region: Region, nbytes: int) -> None:
        """Have room for the first `nbytes`; see the base class, here and below."""
        if self._held and sum(size for _, size in self._spans) < nbytes:
            self.drop(region)  # of when the region was smaller
        if not self._held:
            self._spans = []
            if nbytes:
                self._take(region, nbytes)

    def store(self, region: Region, nbytes: int, copies: Copies) -> None:
        """Put the first `nbytes` aside."""
        for host, start, size in self._copied(region, 0, nbytes):
            copies.start(region, host, region.address + start, size)

    def restore(self, region: Region, start: int, stop: int, copies: Copies) -> None:
        """Bring back the bytes from `start` up to `stop`."""
        for host, first, size in self._copied(region, start, stop):
            copies.start(region, region.address + first, host, size)

    def _copied(self, region: Region, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield what one copy takes of a part of the region, as :meth:`_parts` does, once it may be copied."""
        return self._parts(start, stop)

    def _take(self, region: Region, nbytes: int) -> None:
        """Put memory into `_spans` and what holds it into `_held`, which has it first."""
        raise NotImplementedError

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Return what of the spans holds a part of the region: an address, an offset in the region, a size."""
        offset = 0
        for address, nbytes in self._spans:
            first, last = max(start, offset), min(stop, offset + nbytes)
            if first < last:
                yield address + first - offset, first, last - first
            offset += nbytes


class PinnedBackup(HostBackup):
    """The bytes in pinned memory of the host, at the speed of the bus. With `whole` they are in one piece where
    possible, for a caller that looks at them; it may pin more memory."""

    __slots__ = ("_whole",)

    where = "in pinned memory of the host"

    def __init__(self, sizes: Sequence[int], whole: bool = False) -> None:
        super().__init__(sizes)
        self._whole = whole

    def _take(self, region: Region, nbytes: int) -> None:
        store = store_of(region.driver)
        self._held.append(region._chunks.handle.keep("pinned backup", partial(store.give_back, self._spans)))
        store.lend(nbytes, region.users[0], self._spans, whole=self._whole)

    def _copied(self, region: Region, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        for address, first, size in self._parts(start, stop):
            for at, nbytes in store_of(region.driver).parts(address, size):
                yield at, first + at - address, nbytes


class PageableBackup(HostBackup):
    """In memory of the host that is not pinned: slower, and the host has it back as soon as it is let go of."""

    __slots__ = ()

    where = "in memory of the host"

    def _take(self, region: Region, nbytes: int) -> None:
        size = round_up(nbytes, _PAGE)
        with Region.create(HOST, capacity=size, nbytes=size, managed=True) as memory:
            region._chunks.handle.depend(memory.handle)
            self._held.append(memory.handle)
            self._spans.append((memory.address, nbytes))


class FileBackup(Backup):
    """In a file that has no name, each piece with its checksum."""

    __slots__ = ("_at", "_fd", "_file", "_piece", "_sums", "_whole")

    discards, copies = False, True
    where = "in a file"

    def __init__(self, sizes: Sequence[int], file: Handle | None, fd: int, at: int, piece: int = _PIECE) -> None:
        super().__init__(sizes)
        self._file = file  # which goes with the last region in it
        self._fd = fd
        self._at = at  # where in the file the region begins
        self._piece = piece
        self._whole = 0  # bytes of the region that are there
        self._sums: dict[int, int] = {}

    def store(self, region: Region, nbytes: int, copies: Copies) -> None:
        """Write the first `nbytes`, piece by piece, with their checksums."""
        file = cast("Handle", self._file)
        region._chunks.handle.depend(file)
        self._held.append(file)
        self._whole = nbytes
        for offset, size in self._pieces(0, nbytes):
            let_in()
            with _window(region, offset, size, write=False) as view:
                self._sums[offset] = zlib.crc32(view)
                _all_of(os.pwrite, self._fd, view, self._at + offset)
            count(size)

    def restore(self, region: Region, start: int, stop: int, copies: Copies) -> None:
        """Read the bytes from `start` up to `stop`, and compare their checksums."""
        for offset, size in self._pieces(start, min(stop, self._whole)):
            let_in()
            with _window(region, offset, size, write=True) as view:
                _all_of(lambda fd, part, at: os.preadv(fd, [part], at), self._fd, view, self._at + offset)
                if zlib.crc32(view) != self._sums[offset]:
                    raise BackupError(
                        f"the {format_size(size)} at offset {offset} of {region._chunks.handle.label} are not in the "
                        f"file as they were put there: somebody or something changed it. The memory stays asleep; wake "
                        f"it with discard=True to have it without its bytes, or close it"
                    )
            count(size)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Return the pieces that lie in a span, which begins where a chunk does: none reaches over two chunks."""
        first = 0
        for size in self.sizes:
            for offset in range(max(first, start), min(first + size, stop), self._piece):
                yield offset, min(self._piece, first + size - offset, stop - offset)
            first += size


class NamedFileBackup(FileBackup):
    """The bytes in a file in `directory` that others can find: its name goes with them, or at the end of the process.
    `piece` bytes are read or written, and checked, at once."""

    __slots__ = ("_directory",)

    def __init__(self, sizes: Sequence[int], directory: Path, piece: int = _PIECE) -> None:
        super().__init__(sizes, None, -1, 0, piece)
        self._directory = directory

    def store(self, region: Region, nbytes: int, copies: Copies) -> None:
        """Make the file, and write the first `nbytes`."""
        claim, self._fd = open_file(self._directory, nbytes, named=True)
        try:
            self._file = claim.handle
            super().store(region, nbytes, copies)
        finally:
            claim.release()


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


class LentBackup(Backup):
    """With whoever lent the memory, of which nothing is held here meanwhile. `given`, in the order of the chunks, is
    put there before the region wakes; `kept` is held while it sleeps, such as a lease."""

    __slots__ = ("_kept", "given")

    frees = discards = False
    where = "with their keeper"
    remedy = "lease.wake()"

    def __init__(self, sizes: Sequence[int], kept: Handle) -> None:
        super().__init__(sizes)
        self._kept = kept
        self.given: Sequence[Received] = ()

    def store(self, region: Region, nbytes: int, copies: Copies) -> None:
        """Hold what the mappings held."""
        region._chunks.handle.depend(self._kept)
        self._held.append(self._kept)

    def map(self, region: Region, first: int, last: int) -> None:
        """Map what was given again."""
        if len(self.given) != len(self.sizes):
            raise UsageError(f"{region._chunks.handle.label} wakes with all of its lease: lease.wake()")
        region._chunks.append(self.given[first:last], region._access)


@contextmanager
def _window(region: Region, offset: int, nbytes: int, *, write: bool) -> Iterator[memoryview]:
    """Lend a piece of a region as bytes that the processor can read or write, also where it is memory of a device."""
    driver, address = region.driver, region.address + offset
    if isinstance(driver, HostMemory):
        with driver.buffer(address, nbytes, readonly=not write) as view:
            yield view
        return
    view = memoryview(bytearray(nbytes))
    if not write:
        driver.copy_out(view, address)
    yield view
    if write:
        driver.copy_in(address, view)


def open_file(directory: Path, nbytes: int, *, named: bool = False) -> tuple[Claim, int]:
    """Make a file that has room for `nbytes`; return the first claim on it and its descriptor, which the claim owns.
    Raises UsageError if there is no such directory, BackupError if it cannot be written or has too little room."""
    if not os.path.isdir(directory):  # Path.is_dir raises for a name that is too long
        raise UsageError(
            f"to={str(directory)!r:.200} is no directory: memory sleeps in one, in 'host' memory, or in None"
        )
    fds: list[int] = []
    name = directory / f"vram-asleep-{os.getpid()}-{token_hex(8)}"
    undo = partial(_remove, name, fds) if named else partial(close_all, fds)
    claim = own(f"file of {format_size(nbytes)} for sleeping memory", undo, at_exit=named)
    with or_else(claim.release):
        try:
            if named:
                fds.append(os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
            else:
                _open_unnamed(directory, fds)
            if nbytes:
                os.posix_fallocate(fds[0], 0, nbytes)
        except OSError as error:
            raise _failed(f"{format_size(nbytes)} cannot be put aside in {directory}", error) from error
    return claim, fds[0]


def _remove(name: Path, fds: list[int]) -> None:
    with suppress(OSError):  # somebody removed it, or its directory
        name.unlink()
    close_all(fds)


def _open_unnamed(directory: Path, into: list[int]) -> None:
    """Put the descriptor of a new file without a name into a list that somebody owns."""
    try:
        into.append(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
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
