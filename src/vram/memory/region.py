"""Regions: one reservation with a ceiling, mapped chunk by chunk behind one address that never changes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal

from ..driver.protocol import Driver, HostMemory
from ..errors import AsleepError, BusyError, CapacityError, RangeError, UsageError, VramError
from ..lifetime import Claim, Handle, Owned, shielded, unwinding
from ..spec import Access, AllocationFlags, HandleKind, Location, format_size, round_up
from . import checks, chunks
from .allocation import PhysicalAllocation, Received, can_seal, is_sealed, seal_memory
from .capabilities import copy_on_write
from .chunks import Chunks
from .pin import Pin, Span

if TYPE_CHECKING:
    from typing import Self

_LEAST_SHARE = 256  # a chunk is at least this part of the capacity: no region needs many more descriptors than that


class Region(Owned):
    """Memory at one stable address, with a size that can change up to a ceiling chosen at creation.

    Made by :meth:`create`, or from imported memory by :meth:`from_allocations`. Growing maps more chunks behind the
    same address, shrinking unmaps whole chunks; nothing ever moves (invariant I5). A user of a part of it takes a
    :meth:`pin`; closing the region under live pins takes effect with the last of them (I6).

    Safe to use from several threads: changes of size wait for one another, and pins wait for no driver call.
    """

    __slots__ = (
        "_access", "_changing_lock", "_chunks", "_exact", "_flags", "_frozen", "_granularity", "_imported", "_kinds",
        "_least", "_nbytes", "_reached", "_shown_full", "_size_lock", "_warn_on_leak",
        "address", "asleep", "capacity", "driver", "is_private", "is_updatable", "location", "users",
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
        self._kinds, self._flags = kinds, flags
        self._least, self._exact = least, exact
        self._imported = imported
        self._frozen = self._shown_full = False
        # The state of sleep, which only sleep.py knows: from when it begins to fall asleep until it is awake.
        self.asleep: object = None
        # Whether it was published so that this process, and no other, goes on writing to it under its readers.
        self.is_updatable = False
        self._nbytes = self._reached = 0  # bytes; of the latter: its largest size, as far as that memory is still here
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
        """The chunks as opaque objects. A region that only grew since one looked begins with the same ones; chunks that
        were given back never come again."""
        return self._chunks.row

    @property
    def access(self) -> Access:
        """The rights of its location here."""
        return self._access

    @property
    def is_imported(self) -> bool:
        """Whether its memory was made elsewhere, so that only its owner can make it grow."""
        return self._imported

    @property
    def is_frozen(self) -> bool:
        """Whether all its memory is read-only for good, by :meth:`freeze` here or by whoever else has the memory. Where
        the driver has no such thing: whether it was frozen here."""
        self.handle  # noqa: B018  (the driver is asked about memory that this object keeps)
        row = self._chunks.row
        if not row or not can_seal(self.driver):
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
        """Whether nobody can be using what lies behind its size, so that :meth:`Region.clear` may be called. Not if it
        has left this process before: another one, or another mapping here, may show what was there then."""
        size = self._nbytes
        tail = [chunk.known for chunk in self._chunks.row if chunk.stop > size]
        return self._is_ours_behind(size) and not any(memory is not None and memory.has_left for memory in tail)

    @property
    def has_left(self) -> bool:
        """Whether any of its memory may have left this process: others may have it mapped, as it was then."""
        return any(chunk.known is not None and chunk.known.has_left for chunk in self._chunks.row)

    def _is_ours_behind(self, size: int) -> bool:
        """Whether this region may write behind its size, and no pin reaches there."""
        if self._imported or self.is_private or self._access is not Access.READ_WRITE:
            return False
        return not any(isinstance(tag, Span) and tag.stop > size for tag in self.handle.tags())

    def __repr__(self) -> str:
        size, ceiling = format_size(self._nbytes), format_size(self.capacity)
        if size.split()[-1] == ceiling.split()[-1]:
            size = size.split()[0]
        row = self._chunks.row
        private, imported, frozen, shared = self.is_private, self._imported, self._frozen, self.has_left
        flags = {"private": private, "imported": imported, "frozen": frozen, "shared": shared}
        state = ", ".join(
            [f"{len(row)} chunk{'s' * (len(row) != 1)}", self._access.letters, *(word for word in flags if flags[word])]
            if self.asleep is None
            else [str(self.asleep), self._access.letters]
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
            The user of the addresses, as BusyError will say: what ``str()`` says of it at that time.
        full : bool
            Allow a span up to the capacity. That keeps what is mapped there, now or later, from being unmapped; it
            does not make unmapped bytes readable.
        keeps : object
            Anything else that has to live as long as the pin and those taken from it.

        Raises
        ------
        RangeError
            If the span does not lie within the region.
        AsleepError
            If the region is asleep. The pins that there are stay: they keep the address, not the bytes (I13).
        """
        handle = self.handle
        with self._size_lock:
            if self.asleep is not None:
                raise self.sleeps()
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
            pin = handle.claim(holder, span, Pin)
            pin._span, pin.keeps = span, keeps
            return pin

    def peek(self, start: int, stop: int) -> bytes | None:
        """Return a copy of a few bytes, for who prints an object; None if the CPU cannot, or may not, look."""
        driver, copy = self.driver, bytearray(stop - start)
        if not isinstance(driver, HostMemory):
            return None
        try:
            # The lock is held meanwhile: a touch while another thread puts the memory to sleep would end the process.
            with self.pin(start, stop, "repr"), self._size_lock:
                if self.asleep is not None or self._access is Access.NONE:
                    return None
                driver.copy_out(memoryview(copy), self.address + start)
        except VramError:  # closed, asleep, or smaller meanwhile
            return None
        return bytes(copy)

    def pinned_by(self, *, excluding: Iterable[Pin | None] = ()) -> tuple[str, ...]:
        """Return who has a live pin, leaving out some."""
        left_out = {id(pin._span) for pin in excluding if pin is not None}
        spans = (tag for tag in self.handle.tags() if isinstance(tag, Span))
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
        AsleepError
            If it is asleep.
        """
        handle = self.handle
        if self.is_private:
            raise UsageError(
                f"{handle.label} is a private copy: what was written to it is in no memory that another process "
                f"could map. Copy it into memory of its own to share it"
            )
        # No shrink between the look and the claims. A driver may be asked for a handle, which is a look into its books.
        with self._size_lock:
            if self.asleep is not None:
                raise self.sleeps()
            if not 0 <= start <= stop <= self._nbytes:
                raise RangeError(f"bytes {start} to {stop} are not within the {self._nbytes} bytes of the region")
            found: list[chunks.Chunk] = []
            for chunk in self._chunks.row:
                if chunk.stop <= start or stop <= chunk.start or start == stop:
                    continue
                found += (chunk,)
            held = [PhysicalAllocation.of(chunk.memory) for chunk in found]
            return tuple(held), start - found[0].start if found else 0

    # -- making one ---------------------------------------------------------------------------------------------
    @classmethod
    @shielded
    def create(
        cls,
        location: Location | str,
        *,
        capacity: int | str,
        nbytes: int | str = 0,
        chunk: int | str | None = None,
        access: Access = Access.READ_WRITE,
        handle_kinds: HandleKind = HandleKind.POSIX_FD,
        flags: AllocationFlags = AllocationFlags.NONE,
        populate: bool = False,
        inherited: bool = True,
        users: Iterable[Location | str] = (),
        backing: Literal["zero"] | None = None,
        managed: bool = False,
        driver: Driver | None = None,
    ) -> Self:
        """Reserve a ceiling and make memory for the first `nbytes` of it.

        Parameters
        ----------
        location : Location or str
            Where: ``"host"``, ``"cuda:0"``, ``"cuda:GPU-<uuid>"``, or a place that a driver is registered for.
        capacity : int or str
            The ceiling in bytes, rounded up to the granularity, one granule at least. Addresses cost no memory.
        nbytes : int or str
            The size to begin with, in bytes; any number up to the capacity.
        chunk : int or str, optional
            Make every chunk exactly this many bytes (rounded up to the granularity; the ceiling cuts the last), so
            that shrinking gives memory back in these steps. By default each growth makes one chunk of what was asked
            for, at least 1/256 of the capacity.
        access : Access
            The rights of `location` here.
        handle_kinds : HandleKind
            How the memory must be able to leave this process.
        flags : AllocationFlags
            The purpose of the memory, now and as it grows. Allocations of :meth:`segments` say what was granted.
        populate : bool
            Touch the pages of every new chunk at once rather than at first use.
        inherited : bool
            Whether forked children inherit host memory that is not frozen yet. If not, touching it there is a SIGSEGV.
        users : iterable of Location or str
            Places that may access it, now and later; arrays on it are shown to the first. By default `location`.
        backing : "zero", optional
            Addresses without memory, up to the capacity, read as zeros; writing to them faults. On a GPU that is one
            chunk for all regions, mapped again and again, and growing waits for the work of the devices.
        managed : bool
            Something else closes it, such as an array: no LeakWarning when it is garbage-collected.
        driver : Driver, optional
            The driver to make it with, if that is not registered, such as one with faults put in front of
            it. By default the one that serves `location`, which is loaded at its first use.

        Raises
        ------
        CapacityError
            If `nbytes` is past the capacity.
        OutOfMemoryError, AddressSpaceError
            If there is not enough of either.
        UnsupportedError
            If this system has no driver for `location`, or this process does not see that GPU. For `populate` where the
            CPU cannot touch the memory, and for `flags` that the driver or the device lacks.
        """
        if driver is None:
            location, driver = checks.served(location)
        place = checks.place(driver, location)
        first, kinds, right, meant = checks.size(nbytes, "nbytes"), handle_kinds, access, flags
        if type(kinds) is not HandleKind or type(right) is not Access or type(meant) is not AllocationFlags:
            kinds, right, meant = checks.kinds(kinds), checks.access(right), checks.flags(meant)  # one of which raises
        granularity = driver.mem_granularity(place, kinds, meant).recommended
        ceiling = max(round_up(checks.size(capacity, "capacity"), granularity), granularity)
        share = -(-ceiling // _LEAST_SHARE) if chunk is None else checks.size(chunk, "chunk")
        if not share:
            raise UsageError(f"chunk is 0; the least is one granule of {granularity} bytes")
        if first > ceiling:
            raise CapacityError(f"nbytes {first} is past the capacity of {ceiling} bytes; ask for more capacity")
        if populate is not False and checks.flag(populate, "populate"):
            chunks.touchable(driver, right)
        whose = () if type(users) is tuple and not users else chunks.users(driver, users)  # an array has no truth
        silent = managed is True or checks.flag(managed, "managed")
        forks = inherited is True or checks.flag(inherited, "inherited")
        least, exact = round_up(share, granularity), chunk is not None
        where, claim = chunks.reserve(driver, ceiling, place, ())
        mapped = Chunks(where, claim.handle, place, populate=populate, inherited=forks, users=whose)
        region = cls(
            claim, mapped, right, granularity, kinds=kinds, flags=meant, least=least, exact=exact, managed=silent
        )
        try:
            if backing is not None:
                from .zeros import back_with_zeros  # few want it

                back_with_zeros(mapped, backing)
            if first:
                mapped.make(chunks.plan(first, 0, ceiling, granularity, least, exact), kinds, right, meant)
            if mapped.zeros is not None:
                mapped.zeros.cover()
        except BaseException as error:  # or_else spelt out: every array comes by here
            with unwinding(error):
                region.close()
            raise
        region._reached = region._nbytes = first
        return region

    @classmethod
    @shielded
    def from_allocations(
        cls,
        driver: Driver,
        allocations: Iterable[PhysicalAllocation | Received],
        *,
        nbytes: int | str | None = None,
        capacity: int | str | None = None,
        access: Access = Access.READ,
        private: bool = False,
        depends: Iterable[Handle] = (),
        location: Location | str | None = None,
        users: Iterable[Location | str] = (),
        managed: bool = False,
    ) -> Self:
        """Map existing memory, one allocation behind the other: what another process shared with this one.

        The region holds the memory on its own; the allocations given may be closed afterwards.

        Parameters
        ----------
        allocations : iterable of PhysicalAllocation or Received
            In the order of their addresses; may be empty. Memory that was only received is opened here.
        nbytes : int or str, optional
            The size in bytes; by default all of it.
        capacity : int or str, optional
            The ceiling in bytes for :meth:`extend`; by default no more than there is.
        access : Access
            The rights of the memory's location here.
        private : bool
            Copy on write: what is written here is seen here only.
        depends : iterable of Handle
            Objects that must outlive the mappings, such as a lease; let go of after the last unmap.
        location : Location or str, optional
            Where the memory lives, for a region without allocations.
        users : iterable of Location or str
            Places that may access it, as in :meth:`create`.
        managed : bool
            Something else closes it: no LeakWarning when it is garbage-collected.

        Raises
        ------
        RangeError
            If `nbytes` is more than the allocations hold.
        CapacityError
            If `capacity` is less.
        AccessDeniedError
            For READ_WRITE, not privately, to memory that was sealed read-only.
        ProtocolError
            If a descriptor is not such memory, is smaller than stated, or could be truncated under its reader.
        UnsupportedError
            For `private` where the driver has no such mapping.
        """
        given = checks.each(allocations, (PhysicalAllocation, Received), "allocations")
        total, place = chunks.measure(driver, given, None if location is None else checks.place(driver, location))
        size = total if nbytes is None else checks.size(nbytes, "nbytes")
        if size > total:
            raise RangeError(f"nbytes {size} is more than the allocations hold: {total} bytes")
        asked = total if capacity is None else checks.size(capacity, "capacity")
        if asked < total:
            raise CapacityError(f"capacity {asked} is less than the allocations hold: {total} bytes")
        needed = checks.each(depends, (Handle,), "depends")
        whose = () if type(users) is tuple and not users else chunks.users(driver, users)  # as in create
        if private:
            copy_on_write(driver)  # before anything is made
        right = checks.access(access)
        return cls.from_checked(driver, place, given, size, asked, right, private, needed, whose, managed=managed)

    @classmethod
    def from_checked(
        cls, driver: Driver, place: Location, given: Sequence[PhysicalAllocation | Received], nbytes: int,
        capacity: int, access: Access, private: bool, depends: tuple[Handle, ...], users: tuple[Location, ...],
        *, managed: bool,
    ) -> Self:  # fmt: skip
        """Do what :meth:`from_allocations` does with values that were checked: every attach comes by here."""
        kinds = given[0].handle_kinds if given else HandleKind.NONE
        granularity = driver.mem_granularity(place, kinds).minimum
        where, claim = chunks.reserve(driver, -(-max(capacity, 1) // granularity) * granularity, place, depends)
        mapped = Chunks(where, claim.handle, place, private=private, depends=depends, users=users)
        region = cls(claim, mapped, access, granularity, imported=True, managed=managed)
        try:
            mapped.append(given, access)
        except BaseException as error:  # or_else spelt out
            with unwinding(error):
                region.close()
            raise
        region._nbytes = nbytes
        return region

    # -- its size -----------------------------------------------------------------------------------------------
    def resize(self, nbytes: int | str) -> None:
        """Set the size: :meth:`grow` or :meth:`shrink`, whichever it takes."""
        self._resize(nbytes, "resize")

    def grow(self, nbytes: int | str) -> None:
        """Make it larger, behind the same address.

        New chunks are zeroed. Bytes that an earlier :meth:`shrink` left in a chunk it kept come back as they were,
        unless :meth:`clear` was called.

        Parameters
        ----------
        nbytes : int or str
            The new size in bytes, not below the present one.

        Raises
        ------
        CapacityError
            Past the ceiling.
        UsageError
            If it is smaller than now, or if the region is imported or frozen.
        OutOfMemoryError
            If there is not enough. Nothing is left behind then (invariant I4).
        """
        self._resize(nbytes, "grow")

    def shrink(self, nbytes: int | str, *, after: int | None = None) -> None:
        """Make it smaller; chunks that lie wholly beyond the new size are unmapped and their memory given back.

        Parameters
        ----------
        nbytes : int or str
            The new size in bytes, not above the present one.
        after : int, optional
            An event of a device: work that used what goes is done when it is. By default all work of the devices that
            may use the memory is waited for.

        Raises
        ------
        BusyError
            While a pin reaches beyond the new size; names the pins and changes nothing.
        UsageError
            If it is larger than now.
        """
        self._resize(nbytes, "shrink", after)

    @shielded
    def extend(self, allocations: Iterable[PhysicalAllocation | Received], nbytes: int | str) -> None:
        """Map further allocations behind an imported region whose owner grew it, and set the size.

        Parameters
        ----------
        allocations : iterable of PhysicalAllocation or Received
            The memory that comes next; the region holds the memory on its own. May be empty if the last one has room.
        nbytes : int or str
            The new size in bytes, not below the present one.

        Raises
        ------
        CapacityError
            Past the ceiling.
        RangeError
            If there is less memory than `nbytes`.
        UsageError
            If the region is not imported, or `nbytes` is below its size.
        """
        size = checks.size(nbytes, "nbytes")
        given = tuple(allocations)
        with self._alone():
            if not self._imported:
                raise UsageError("only a region of imported memory is extended; this one makes its own: use grow")
            if self.asleep is not None:
                raise self.sleeps()
            if size < self._nbytes:
                raise UsageError(f"cannot extend to {size} bytes: the region has {self._nbytes}; use shrink")
            self.handle  # noqa: B018  (as in _grow)
            mapped = self._chunks
            total = mapped.mapped + chunks.measure(self.driver, given, self.location)[0]
            if total > self.capacity:
                raise CapacityError(
                    f"{total} bytes of memory do not fit the capacity of {self.capacity} bytes; attach again, with more"
                )
            if size > total:
                raise RangeError(f"nbytes {size} is more than the allocations hold: {total} bytes in all")
            with self.handle.claim("extend"):  # as in _grow, here and below
                if given:
                    mapped.append(given, self._access)
                self._nbytes = size
            self.handle  # noqa: B018

    def get_access(self, location: Location | str | None = None) -> Access:
        """Ask the driver what a location may do with this memory: the least of all chunks; NONE while there are none.

        Parameters
        ----------
        location : Location or str, optional
            The place whose right it is; by default the first that may access it.

        Raises
        ------
        UsageError
            For a place that does not exist.
        """
        with self._alone():  # nothing is unmapped meanwhile
            driver = self.driver
            place = self.users[0] if location is None else checks.place(driver, location)
            with self.handle.claim("get_access"):  # another thread may close this object meanwhile
                rights = [driver.mem_get_access(self.address + chunk.start, place) for chunk in self._chunks.row]
                return min(rights, default=Access.NONE)

    def populate(self, *, large: float = 0.0) -> None:
        """Touch all mapped pages ahead of use, and spend up to `large` seconds on large ones; their contents stay.

        Raises
        ------
        UnsupportedError
            If the CPU cannot touch this memory.
        """
        with self._alone():
            driver = chunks.touchable(self.driver, self._access)
            if self.asleep is not None:
                raise self.sleeps()
            with self.handle.claim("populate"):  # another thread may close this object meanwhile
                if self.mapped:
                    if large and self._access is Access.READ_WRITE:
                        driver.collapse(self.address, self.mapped, large)
                    driver.populate(self.address, self.mapped)

    def clear(self) -> bool:
        """Zero what an earlier, larger size left behind the present one: whoever gets the memory sees that, too.

        For who has asked :attr:`may_clear`, before the memory left this process.

        Returns
        -------
        bool
            Whether there is nothing now. Not if it is being looked at, or cannot be written; then nothing has changed.
        """
        with self._alone():
            driver = self.driver
            if self.asleep is not None:
                raise self.sleeps()
            with self.handle.claim("clear"):  # another thread may close this object meanwhile
                start, stop = self.remains
                if start == stop:
                    return True
                shown, self._shown_full = self._shown_full, False  # first: a pin that comes now sets it again
                if not self._is_ours_behind(start):
                    self._shown_full = self._shown_full or shown
                    return False
                driver.fill(self.address + start, 0, stop - start)
                self._reached = start
                self.synchronize()
                return True

    # -- read-only for good -------------------------------------------------------------------------------------
    @shielded
    def freeze(self) -> None:
        """Make its memory read-only for everybody and for good; it cannot grow any more. Idempotent.

        Where the driver has no such thing, as on a GPU, the memory becomes read-only here: each process that maps it
        has rights of its own. After a failure some chunks may be sealed: it does not grow, and can be frozen again.

        Raises
        ------
        UsageError
            If the region is private.
        BusyError
            If it was published to be updated in place.
        """
        with self._alone():
            if self.asleep is not None:
                raise self.sleeps()
            if self.is_updatable:
                raise BusyError(f"{self.handle.label} was published with updatable=True and stays writable; copy it")
            if self.is_private:
                raise UsageError("a private copy cannot be frozen: nobody else sees it. Map it with Access.READ")
            with self.handle.claim("freeze"):  # another thread may close this object meanwhile
                right = min(self._access, Access.READ)
                if can_seal(self.driver):
                    for chunk in self._chunks.row:
                        seal_memory(chunk.memory)
                        self._frozen, self._access = True, right
                else:
                    self._chunks.protect(right)
                self._frozen, self._access = True, right

    # -- how ----------------------------------------------------------------------------------------------------
    def sleeps(self) -> AsleepError:
        """Return the error for what cannot be done while the region is asleep."""
        label, mark = self._chunks.handle.label, self.asleep
        return AsleepError(f"{label} is {mark or 'awake again'}: {getattr(mark, 'remedy', 'vram.wake it')} first")

    def _alone(self) -> threading.RLock:
        """Return the lock under which the region is changed, for a with block.
        Raises BusyError if this thread has it already: a callback in the middle of a change."""
        handle = self.handle  # before the lock: in a forked child nobody would ever let go of it
        if self._changing_lock._is_owned():  # type: ignore[attr-defined]  # threading.Condition asks the same
            raise BusyError(f"{handle.label} is being changed by the very call that this one comes from")
        return self._changing_lock

    def _resize(self, nbytes: int | str, verb: Literal["grow", "shrink", "resize"], after: int | None = None) -> None:
        from .resize import resize_regions  # which whoever only attaches does without

        resize_regions({self: checks.size(nbytes, "nbytes")}, after=after, verb=verb)

    def _growth(self, nbytes: int) -> list[int]:
        """Return the sizes of the chunks that it takes to become larger: none where there is memory already.
        The caller (:mod:`.resize`) holds the lock of :meth:`_alone`."""
        if self._imported:
            raise UsageError(
                f"imported memory is grown by its owner, so {self._chunks.handle.label} is not; take what it published "
                f"since (upgrade the lease, or extend this region), or copy into a region of your own"
            )
        if nbytes > self.capacity:
            raise CapacityError(
                f"cannot grow {self._chunks.handle.label} to {nbytes} bytes: the capacity is {self.capacity}, fixed at "
                f"creation. Make a region with more and copy, or ask for more from the start: it costs addresses only"
            )
        mapped = self._chunks
        if self._frozen or (mapped.row and mapped.ends_sealed):
            raise UsageError(
                f"a frozen region cannot grow, and {mapped.handle.label} is: its memory is read-only for good. To grow "
                f"it under its readers publish it with writable=True; or copy it into a new one"
            )
        present = mapped.mapped
        if nbytes <= present:
            return []
        return chunks.plan(nbytes, present, self.capacity, self._granularity, self._least, self._exact)
