"""The side of a region that changes nothing: what it is, who looks at it, and what holds its bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from ..driver.protocol import Driver, Sealing
from ..errors import RangeError, UsageError
from ..lifetime import Claim, Owned
from ..spec import Access, AllocationFlags, HandleKind, Location, format_size
from .allocation import PhysicalAllocation, is_sealed
from .chunks import Chunks
from .pin import Pin, Span

__all__ = ["MappedRegion"]


class MappedRegion(Owned):
    """What :class:`~vram.memory.Region` is before anything changes its size: not made on its own.

    Attributes
    ----------
    driver : Driver
        The driver of its memory.
    location : Location
        Where its memory lives.
    users : tuple of Location
        Who may access its memory: the place that works on it first. The memory's own location, unless told.
    address : int
        Where it begins; the same for as long as it lives.
    capacity : int
        The ceiling, in bytes: a multiple of the granularity.
    is_private : bool
        Whether what is written here is seen here only.
    """

    __slots__ = (
        "_access", "_changing_lock", "_chunks", "_exact", "_flags", "_frozen", "_granularity", "_imported", "_kinds",
        "_least", "_nbytes", "_reached", "_shown_full", "_size_lock", "_warn_on_leak",
        "address", "capacity", "driver", "is_private", "location", "users",
    )  # fmt: skip

    # Two locks, neither ever reached from a finalizer. The size lock guards `_nbytes` and the row of chunks against
    # pins, for a few lines; the changing lock is held over driver calls. Both are reentrant, so that a signal handler
    # gets an answer or an error, not a deadlock.

    def __init__(
        self,
        claim: Claim,
        mapped: Chunks,
        access: Access,
        granularity: int,
        *,
        kinds: HandleKind = HandleKind.NONE,
        flags: AllocationFlags = AllocationFlags.NONE,
        least: int = 0,
        exact: bool = False,
        imported: bool = False,
        managed: bool = False,
    ) -> None:
        where = mapped.where
        self.driver: Final[Driver] = where.driver
        self.location: Final[Location] = mapped.location
        self.users: Final[tuple[Location, ...]] = mapped.users
        self.address: Final[int] = where.address
        self.capacity: Final[int] = where.nbytes
        self.is_private: Final[bool] = mapped.private
        self._chunks = mapped
        self._access = access
        self._granularity = granularity
        self._kinds = kinds
        self._flags = flags
        self._least = least
        self._exact = exact
        self._imported = imported
        self._frozen = False
        self._nbytes = 0
        self._reached = 0  # bytes: its largest size so far, as far as that memory is still here
        self._shown_full = False
        self._size_lock = threading.RLock()
        self._changing_lock = threading.RLock()
        self._warn_on_leak = not managed
        self._claim = claim

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """The size, in bytes."""
        return self._nbytes

    @property
    def mapped(self) -> int:
        """Bytes that have memory behind them: the sum of the chunks, at least the size."""
        return self._chunks.mapped

    @property
    def chunks(self) -> tuple[int, ...]:
        """The size of each chunk, in bytes."""
        return tuple(chunk.stop - chunk.start for chunk in self._chunks.row)

    @property
    def layout(self) -> tuple[object, ...]:
        """The chunks as opaque objects, for telling what became of a region since one looked.

        A region that only grew begins with the same objects; chunks that were given back never come again.
        """
        return self._chunks.row

    @property
    def access(self) -> Access:
        """What its location may do here."""
        return self._access

    @property
    def is_imported(self) -> bool:
        """Whether its memory was made elsewhere, so that only its owner can make it grow."""
        return self._imported

    @property
    def is_frozen(self) -> bool:
        """Whether all its memory is read-only for good, by :meth:`freeze` here or by whoever else has the memory.

        Where the driver has no such thing: whether it was frozen here.
        """
        self.handle  # noqa: B018  (the driver is asked about memory that this object keeps)
        row = self._chunks.row
        if not row or not isinstance(self.driver, Sealing):
            return self._frozen
        if not self._imported and None in [chunk.known for chunk in row]:
            return False  # what was made here, and that nobody ever wanted to have, nobody can have sealed
        return all(is_sealed(chunk.memory) for chunk in row)

    @property
    def remains(self) -> tuple[int, int]:
        """From where to where (bytes) there may be something behind its size, in memory that goes with it elsewhere.

        New memory is zero; what an earlier, larger size left, or a view of the whole capacity wrote, is not. Of memory
        that was made elsewhere nothing is known.
        """
        size, end = self._nbytes, self._chunks.mapped
        known = end if self._imported or self._shown_full else min(self._reached, end)
        return size, max(size, known)

    @property
    def may_clear(self) -> bool:
        """Whether nobody can be using what lies behind its size, so that :meth:`Region.clear` may be called.

        Not if it has left this process before: another one, or another mapping here, may show what was there then.
        """
        size = self._nbytes
        tail = [chunk.known for chunk in self._chunks.row if chunk.stop > size]
        return self._is_ours_behind(size) and not any(memory is not None and memory.has_left for memory in tail)

    def _is_ours_behind(self, size: int) -> bool:
        """Whether this region may write behind its size, and no pin reaches there."""
        if self._imported or self.is_private or self._access is not Access.READ_WRITE:
            return False
        return not any(isinstance(tag, Span) and tag.is_live and tag.stop > size for tag in self.handle.tags())

    def __repr__(self) -> str:
        size, ceiling = format_size(self._nbytes), format_size(self.capacity)
        if size.split()[-1] == ceiling.split()[-1]:
            size = size.split()[0]
        row = self._chunks.row
        flags = {
            "private": self.is_private,
            "imported": self._imported,
            "frozen": self._frozen,
            "shared": any(chunk.known is not None and chunk.known.has_left for chunk in row),
        }
        state = ", ".join(
            [f"{len(row)} chunk{'s' * (len(row) != 1)}", self._access.letters, *(word for word in flags if flags[word])]
        )
        return f"<Region {self.location} {self.address:#x} {size}/{ceiling}, {'closed' if self.is_closed else state}>"

    def synchronize(self) -> None:
        """Return when the work is done that devices have under way on its memory. On the host there is none."""
        for place in self.users:
            self.driver.synchronize(place)

    # -- who looks at it ----------------------------------------------------------------------------------------
    def pin(self, start: int, stop: int, holder: object = "pin", *, full: bool = False, keeps: object = None) -> Pin:
        """Keep the bytes from `start` up to `stop` where they are until the pin is released.

        Parameters
        ----------
        start, stop : int
            Offsets in bytes, within the size.
        holder : str or object
            Who looks at them, as BusyError will say: what ``str()`` says of it at that time.
        full : bool
            Allow a span up to the capacity. That keeps what is mapped there, now or later, from being unmapped; it
            does not make unmapped bytes readable.
        keeps : object
            Anything else that has to live as long as the pin and those taken from it.

        Raises
        ------
        RangeError
            If the span does not lie within the region.
        """
        handle = self.handle
        with self._size_lock:
            try:
                fits = 0 <= start <= stop <= (self.capacity if full else self._nbytes)
            except ValueError:  # of an array of several numbers
                raise UsageError(f"bytes {start!r:.40} to {stop!r:.40} are no span: two integers are") from None
            if not fits:
                raise RangeError(
                    f"bytes {start} to {stop} are not within the {self._nbytes} bytes of the region "
                    f"(capacity {self.capacity})"
                )
            self._shown_full = self._shown_full or full
            span = Span(start, stop, holder)
            return Pin(handle, handle.claim(holder, span), span, keeps)

    def pinned_by(self, *, excluding: Iterable[Pin | None] = ()) -> tuple[str, ...]:
        """Return who has a live pin, leaving out some."""
        left_out = {id(pin._span) for pin in excluding if pin is not None}
        spans = (tag for tag in self.handle.tags() if isinstance(tag, Span) and tag.is_live)
        return tuple(f"{span.holder} [{span.start}:{span.stop}]" for span in spans if id(span) not in left_out)

    def segments(self, start: int, stop: int) -> tuple[tuple[PhysicalAllocation, ...], int]:
        """Return the allocations that hold the bytes from `start` up to `stop`, and where `start` is in the first.

        Each comes with a claim of its own, given up when it is closed or forgotten.

        Raises
        ------
        RangeError
            If the span does not lie within the size.
        UsageError
            If the region is private: what it shows exists in this process only.
        """
        handle = self.handle
        if self.is_private:
            raise UsageError(
                f"{handle.label} is a private copy: what was written to it is in no memory that another process "
                f"could map. Copy it into memory of its own to share it"
            )
        # No shrink between the look and the claims. A driver may be asked for a handle, which is a look into its books.
        with self._size_lock:
            if not 0 <= start <= stop <= self._nbytes:
                raise RangeError(f"bytes {start} to {stop} are not within the {self._nbytes} bytes of the region")
            found = [c for c in self._chunks.row if c.start < stop and start < c.stop and start < stop]
            held = [PhysicalAllocation.of(chunk.memory) for chunk in found]
            return tuple(held), start - found[0].start if found else 0
