"""Sleep and wake: memory that keeps its addresses and gives up its bytes, or moves them to where it was told (I13).

All or nothing, both ways. To fall asleep, everything is put aside first, and only when all copies are done is anything
unmapped. To wake, everything is mapped and filled first, and only then is anything shown; what was put aside is let go
of last. The call marks the regions (:attr:`Region.asleep`), which keeps others out without a lock being held over
driver calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from ..driver.protocol import DeviceMemory
from ..errors import AsleepError, BusyError, UsageError
from ..lifetime import Claim, Handle, noted, shielded, unwinding, waiting
from ..spec import Access, Location, format_size
from . import chunks
from .allocation import can_seal, seal_memory
from .backups import Backup, Copies, FileBackup, HostBackup, KeptBackup, LentBackup, PinnedBackup, open_file
from .children import child_with
from .foreign import ForeignRegion
from .region import Region
from .reservation import settle

Place: TypeAlias = Path | Literal["host"] | Backup | None


class Asleep:
    """How a region sleeps, or is about to; `state` is text for errors. `backup` has no chunks until it is chosen.
    With `is_sealed` the memory was read-only for good, and is to be again."""

    __slots__ = ("backup", "is_sealed", "nbytes", "state")

    def __init__(self) -> None:
        self.state = "falling asleep"
        self.backup = Backup(())
        self.nbytes = 0  # bytes from the first that are put aside
        self.is_sealed = False

    def __str__(self) -> str:
        return f"{self.state}, its bytes {self.backup.where}" if self.state == "asleep" else self.state

    @property
    def remedy(self) -> str:
        """The call that wakes it."""
        return self.backup.remedy


@dataclass(frozen=True, slots=True)
class SleepReport:
    """The result of putting memory to sleep: `nbytes` were put aside, and the place has `freed` bytes back."""

    nbytes: int
    freed: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes that were put aside, a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class WakeReport:
    """The result of waking: `nbytes` were brought back; `discarded` bytes, not put aside or not asked for, are zero.
    Memory that was only unmapped counts in neither."""

    nbytes: int
    discarded: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes that were brought back, a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


class Remapped(NamedTuple):
    """The news about addresses whose memory changes: of each span its place, first address, and bytes mapped while
    awake. After a change, `changed` says whether it came about; if not, everything is as before."""

    verb: Literal["sleep", "wake"]
    when: Literal["before", "after"]
    changed: bool
    spans: tuple[tuple[Location, int, int], ...]


_listeners: dict[object, Callable[[Remapped], object]] = {}


def on_remap(callback: Callable[[Remapped], object]) -> Callable[[], None]:
    """Have a function called before and after memory goes from addresses, and comes back to them.

    It is for objects that depend on the memory behind addresses, such as registrations for RDMA and windows of NCCL. An
    error of the call before keeps the memory as it is, and is raised by :func:`sleep` or :func:`wake`; an error of the
    call after is raised when all is done.

    Parameters
    ----------
    callback : callable
        Takes a :class:`Remapped`. Called by the thread that puts memory to sleep or wakes it, without locks.

    Returns
    -------
    callable
        Takes no argument, and ends it.
    """
    key = object()
    _listeners[key] = callback
    return lambda: _listeners.pop(key, None) and None


class _Call:
    """The steps that a call to sleep or wake has begun, and how it ends: done, or taken back.
    `rows` are unmapped in the end. From `is_decided` on the change comes about, whatever comes."""

    def __init__(self, verb: Literal["sleep", "wake"], marks: dict[Region, Asleep], keep: bool = False) -> None:
        self.verb: Literal["sleep", "wake"] = verb
        self.marks = marks
        self.keep = keep
        self.using: list[Claim] = []
        self.files: list[Claim] = []
        self.copies = Copies()
        self.rows: dict[Region, tuple[chunks.Chunk, ...]] = {}
        self.is_decided = False
        self._told: list[Callable[[Remapped], object]] = []  # who is to hear how it ended

    def tell_before(self) -> None:
        """Tell those who want to know what is about to be done."""
        if self.marks:  # nothing is told where nothing changes
            self._told += _listeners.values()
            for callback in self._told.copy():
                waiting(callback, self._news("before"))

    def end(self, error: BaseException | None) -> None:
        """Finish what is decided, or else take everything back; then let go."""
        with unwinding(error) if error is not None else nullcontext():
            if not self.is_decided:
                if error is not None:
                    self.copies.settle(error)  # what is under way writes where something else would be put
                self._take_back()
            elif self.verb == "sleep":
                _unmap(self.rows, self.marks)
            else:
                self._show()
            self.copies.close()
            for claim in (*self.files, *self.using):
                claim.release()
        with noted(error) if error is not None else nullcontext():
            self._tell_after()

    def _take_back(self) -> None:
        """Of what is to sleep nothing was unmapped: let go of what was put aside, and of the regions. Of what is to
        wake, unmap what was mapped: all of it is still asleep, and whole."""
        if self.verb == "wake":
            self.rows = self.rows or {region: region._chunks.row for region in self.marks}  # which unmapping empties
            _unmap(self.rows, self.marks)
            return
        for region, mark in self.marks.items():
            if region.asleep is not mark:
                continue
            mark.backup.drop(region)
            region.asleep = None

    def _show(self) -> None:
        """Everything is there again: let everybody at it, and go of what was put aside."""
        for region, mark in self.marks.items():
            if region.asleep is mark:
                region.asleep = None
            if not (self.keep and isinstance(mark.backup, HostBackup)):
                mark.backup.drop(region)

    def _tell_after(self) -> None:
        """Tell those who were told before."""
        failed: list[Exception] = []
        while self._told:
            try:
                self._told.pop(0)(self._news("after"))
            except Exception as error:  # noqa: BLE001  (raised when all have heard)
                failed.append(error)
        if failed:
            raise failed[0]

    def _news(self, when: Literal["before", "after"]) -> Remapped:
        spans = tuple((region.location, region.address, sum(mark.backup.sizes)) for region, mark in self.marks.items())
        return Remapped(self.verb, when, self.is_decided and when == "after", spans)


# -- sleep ------------------------------------------------------------------------------------------------------
@shielded
def sleep_regions(
    places: Mapping[Region, Place], *, after: int | None = None, unmap_shared: bool = False
) -> SleepReport:
    """Put regions to sleep, all or none, each to a directory, "host" (pinned), its own backup, or None (nowhere).
    `after` is an event to wait for instead of all device work; `unmap_shared` unmaps memory that others hold, too."""
    started = time.perf_counter()
    call = _Call("sleep", {region: Asleep() for region in places})
    marks = call.marks
    try:
        for region in marks:
            call.using.append(region.handle.claim("sleep"))  # another thread may close it meanwhile
        lent = [chunk.mapping for one, to in places.items() if isinstance(to, LentBackup) for chunk in one._chunks.row]
        for region, mark in marks.items():
            _begin(region, mark, lent if isinstance(places[region], LentBackup) else None, unmap_shared)
        _choose(marks, places, call.files)
        call.tell_before()
        settle([region._chunks.where for region in marks], after)  # a kernel that runs on would write behind the copy
        for region, mark in marks.items():
            mark.backup.take(region, mark.nbytes)
        for region, mark in marks.items():
            mark.backup.store(region, mark.nbytes, call.copies)
        call.copies.finish()
        _refuse_children(marks)
        call.rows = {region: region._chunks.row for region in marks}
        call.is_decided = True  # from here on it falls asleep, whatever comes
    except BaseException as error:
        call.end(error)
        raise
    call.end(None)
    freeing = [mark for mark in marks.values() if mark.backup.frees]
    freed = sum(sum(mark.backup.sizes) for mark in freeing)
    stored = sum(mark.nbytes for mark in freeing if not mark.backup.discards)
    return SleepReport(stored, freed, time.perf_counter() - started)


def _begin(region: Region, mark: Asleep, lent: Sequence[Handle] | None, unmap_shared: bool) -> None:
    """Mark a region, from when on nobody gets at its memory; then see whether anybody has. Of lent memory, only this
    process is looked at, and `lent` has all mappings that go."""
    if isinstance(region, ForeignRegion):
        raise UsageError(f"{region!r} is not ours to unmap: another library's memory, or a lender's")
    if region.is_private and lent is None:
        raise UsageError(f"{region!r} is a private copy: what was written to it is nowhere else. Copy what is needed")
    with region._alone(), region._size_lock:
        if region.asleep is not None:
            raise AsleepError(f"{region._chunks.handle.label} is {region.asleep} already")
        mark.nbytes, mark.is_sealed = region.remains[1], region.is_frozen and can_seal(region.driver)
        region.asleep = mark
    others = tuple(
        f"{holder} ({format_size(chunk.stop - chunk.start)})"
        for chunk in region._chunks.row
        for holder in _others(region, chunk, lent)
    )
    unmap_shared = unmap_shared and not region.is_updatable  # nobody could map that writable again
    if others and not unmap_shared:
        raise _held(region, others)
    if others:
        mark.backup = KeptBackup(region.chunks)


def _held(region: Region, others: tuple[str, ...]) -> BusyError:
    left = (
        "A descriptor of it has left this process (it was lent, sent, published or exported), and can have been "
        "kept or passed on where nobody here sees it: it counts as held from then on, also when a loan is over. "
        "Copy it into memory of its own"
    )
    return BusyError(
        f"{region.handle.label} cannot sleep: others hold its memory, and would keep the old bytes when it wakes. "
        f"{left if region.has_left else 'Let them give it back first (a forked child does when it ends)'}, or unmap it "
        f"here only (shared='unmap'), which frees nothing",
        others,
    )


def _refuse_children(marks: Mapping[Region, Asleep]) -> None:
    """Refuse what a child has that was forked since the others were asked, by another thread or by who was told."""
    for region, mark in marks.items():
        found = [child for chunk in region._chunks.row for child in child_with(chunk)] if mark.backup.frees else []
        if found:
            raise _held(region, tuple(dict.fromkeys(found)))


def _others(region: Region, chunk: chunks.Chunk, lent: Sequence[Handle] | None) -> tuple[str, ...]:
    """Return who besides this region's mapping holds the memory of a chunk, or may; see :func:`_begin`."""
    if lent is not None:
        return () if chunk.known is None else chunk.known.handle.holders(besides=lent)
    if region.is_imported:
        return ("whoever made it",)
    memory, forked = chunk.known, child_with(chunk)
    if memory is None:  # nobody else here ever wanted to have it
        return forked
    found = (*memory.handle.holders(besides=[chunk.mapping]), *forked)
    return (*found, "whoever it was exported to") if memory.has_left else found


def _choose(marks: dict[Region, Asleep], places: Mapping[Region, Place], files: list[Claim]) -> None:
    """Choose where the bytes of each region go. Regions with one directory share a file, one behind another."""
    into: dict[Path, dict[Region, Asleep]] = {}
    for region, mark in marks.items():
        if isinstance(mark.backup, KeptBackup):
            continue
        to, sizes = places[region], region.chunks
        if isinstance(to, Backup) and to.sizes != sizes:
            raise UsageError(f"the backup was made for chunks of {to.sizes} bytes, and {region!r} has {sizes}")
        if isinstance(to, Path):
            into.setdefault(to, {})[region] = mark
        elif (to == "host" or isinstance(to, HostBackup)) and not isinstance(region.driver, DeviceMemory):
            raise UsageError(
                f"memory on {region.location} is no better off in 'host' memory: give a directory, or None to let its "
                f"bytes go"
            )
        elif isinstance(to, Backup):
            mark.backup = to
        else:
            mark.backup = Backup(sizes) if to is None else PinnedBackup(sizes)
    for directory, due in into.items():
        claim, fd = open_file(directory, sum(mark.nbytes for mark in due.values()))
        files.append(claim)
        at = 0
        for region, mark in due.items():
            mark.backup = FileBackup(region.chunks, claim.handle, fd, at)
            at += mark.nbytes


def _unmap(rows: dict[Region, tuple[chunks.Chunk, ...]], marks: dict[Region, Asleep]) -> None:
    """Unmap everything, on which no device works any more."""
    for region, row in rows.items():
        for chunk in row:
            chunk.undo.is_idle = True
        region._chunks.unmap(row)
    for mark in marks.values():
        mark.state = "asleep"


# -- wake -------------------------------------------------------------------------------------------------------
@shielded
def wake_regions(regions: Iterable[Region], *, discard: bool = False, keep: bool = False) -> WakeReport:
    """Wake those of the regions that are asleep, all or none; `discard` leaves their bytes out.
    `keep` leaves the backup in host memory for its owner, until the next waking without `keep`, or with the region."""
    started = time.perf_counter()
    call = _Call("wake", {}, keep)
    marks = call.marks
    try:
        for region in regions:
            mark = region.asleep
            if not isinstance(mark, Asleep) or region in marks:
                continue
            call.using.append(region.handle.claim("wake"))
            _take_turn(region, mark, marks)
        call.tell_before()
        _fill(marks, call.copies, discard)
        call.is_decided = True  # from here on it is awake, whatever comes
    except BaseException as error:
        call.end(error)
        raise
    call.end(None)
    filled = [mark for mark in marks.values() if mark.backup.frees]
    zeroed = [mark.nbytes for mark in filled if discard or mark.backup.discards]
    restored = sum(mark.nbytes for mark in filled) - sum(zeroed)
    return WakeReport(restored, sum(zeroed), time.perf_counter() - started)


def _take_turn(region: Region, mark: Asleep, marks: dict[Region, Asleep]) -> None:
    with region._alone():
        if region.asleep is not mark or mark.state != "asleep":
            raise BusyError(f"{region._chunks.handle.label} is {mark.state} in another thread")
        marks[region] = mark
        mark.state = "waking"


def _fill(marks: dict[Region, Asleep], copies: Copies, discard: bool) -> None:
    """Map memory and bring the bytes back, a chunk of each region in turn: mapping the next overlaps the copies.
    All chunks without bytes to come back are mapped at once, which takes one call for the rights."""
    empty = [region for region, mark in marks.items() if not mark.backup.copies or (discard and mark.backup.frees)]
    reached = {region: 0 for region in marks if region not in empty}
    number = 0
    while True:
        left = [region for region in reached if number < len(marks[region].backup.sizes)]
        for region in left:
            mark = marks[region]
            mark.backup.map(region, number, number + 1)
            start = reached[region]
            reached[region] = stop = start + mark.backup.sizes[number]
            if start < mark.nbytes:
                mark.backup.restore(region, start, min(stop, mark.nbytes), copies)
        if not left:
            break
        number += 1
    for region in empty:
        backup = marks[region].backup
        if backup.sizes:
            backup.map(region, 0, len(backup.sizes))
    copies.finish()
    for region, mark in marks.items():
        if not mark.backup.frees:
            continue
        if mark.is_sealed:
            for chunk in region._chunks.row:
                seal_memory(chunk.memory)
        elif region.access is not Access.READ_WRITE:
            region._chunks.protect(region.access)
