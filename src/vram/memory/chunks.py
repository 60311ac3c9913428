"""How a region is mapped: a row of chunks at the front of its addresses. Internal to this room; no policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from ..driver.protocol import UNDECIDED, DeviceMemory, Driver, HostMemory
from ..errors import BusyError, DriverError, OutOfMemoryError, UnsupportedError, UsageError
from ..lifetime import Claim, Handle, own, unwinding
from ..spec import Access, AllocationFlags, HandleKind, Location, format_size, round_up
from . import checks
from .allocation import Memory, PhysicalAllocation, Received, create_memory, is_sealed, retain_memory
from .capabilities import has
from .reservation import AddressRange, Unmap, put_memory, unmap_together

_PATIENCE = 60.0  # seconds to wait for an unmap that another thread is running


Ready: TypeAlias = tuple[Memory, Claim]  # memory, and what keeps it; of a supply it is zero and nobody else's


class Chunk:
    """An allocation mapped whole, from `start` to `stop`, offsets in bytes. If the driver made or opened the memory in
    the mapping call, only the mapping holds it, until somebody wants the memory itself; `get` is how, where others
    mapped it."""

    __slots__ = ("_get", "_memory", "mapping", "place", "start", "stop", "undo")

    def __init__(
        self, start: int, stop: int, place: Location, mapping: Handle, undo: Unmap, memory: Memory | None,
        get: Callable[[], Ready] | None = None,
    ) -> None:  # fmt: skip
        self._get = get
        self.place = place
        self.start = start
        self.stop = stop
        self.mapping = mapping
        self.undo = undo
        self._memory = {} if memory is None else {mapping: memory}  # of one: setdefault has one winner, without a lock

    @property
    def known(self) -> Memory | None:
        """The memory, if anybody ever wanted to have it: nobody else can have exported or sealed it here."""
        return self._memory.get(self.mapping)

    @property
    def memory(self) -> Memory:
        """The memory. From the first time on it has a handle of its own, which goes with the mapping at the latest."""
        if not self._memory:
            where = self.undo.where
            at, nbytes = where.address + self.start, self.stop - self.start
            memory, claim = self._get() if self._get else retain_memory(where.driver, at, nbytes, self.place)
            memory.first_mapped = self.mapping._id
            self.mapping.adopt(claim)
            self._memory.setdefault(self.mapping, memory)
        return self._memory[self.mapping]


class Kind(NamedTuple):
    """The properties of a chunk: chunks of one kind can take each other's place."""

    driver: Driver
    location: Location
    kinds: HandleKind
    flags: AllocationFlags
    nbytes: int


# Supplies of memory made ahead (:class:`~vram.memory.ahead.Prepared`), by kind. :mod:`.ahead` fills them, and is loaded
# on first use.
supplies: dict[Kind, Any] = {}


class Made(NamedTuple):
    """Chunks that are mapped and in no row yet, and what of their memory was kept ready."""

    chunks: list[Chunk]
    taken: list[tuple[Any, Ready]]  # with the supply that it was taken from


# A chunk to be made: its size, how to map it, and the memory if it exists already.
Piece: TypeAlias = tuple[int, Callable[[int, int], object], Memory | None]


class Chunks:
    """The chunks of one region, back to back from its first byte; the region's handle keeps them.
    `row` is replaced, never changed, so that it can be read without a lock."""

    __slots__ = (
        "ahead", "depends", "handle", "inherited", "location", "populate", "private", "row", "users", "where", "zeros",
    )  # fmt: skip

    def __init__(
        self,
        where: AddressRange,
        handle: Handle,
        location: Location,
        *,
        users: tuple[Location, ...] = (),
        private: bool = False,
        populate: bool = False,
        inherited: bool = True,
        depends: tuple[Handle, ...] = (),
    ) -> None:
        self.where = where
        self.handle = handle
        self.location = location
        self.users = users or (location,)  # who may access it
        if has(type(where.driver), DeviceMemory):
            where.workers = self.users
        self.private = private
        self.populate = populate
        self.inherited = inherited
        self.depends = depends
        self.row: tuple[Chunk, ...] = ()
        self.ahead: list[Ready] = []  # the memory that comes next, if it was made already
        self.zeros: Any = None  # what is mapped behind the row, if anything is: see :class:`~vram.memory.zeros.Zeros`

    @property
    def mapped(self) -> int:
        """Bytes from the first that have memory behind them."""
        row = self.row
        return row[-1].stop if row else 0

    @property
    def ends_sealed(self) -> bool:
        """Whether the last chunk is read-only for good. The driver is asked only where somebody else could have sealed
        it, since every growth comes by here."""
        memory = self.row[-1].known if self.row else None
        return memory is not None and (memory.sealed or (memory.has_left and is_sealed(memory)))

    def make(
        self, sizes: Sequence[int], kinds: HandleKind, access: Access, flags: AllocationFlags, into: Made | None = None
    ) -> None:
        """Make memory and map it behind what is mapped: all of it, or nothing (I4). With `into` the caller puts the
        chunks into the row, or into :meth:`give_back`, and releases or puts back the claims on memory from a supply."""
        driver, place = self.where.driver, self.location
        put = None
        if self.zeros is None:  # else memory comes first: it may be that there is none
            right = Access.NONE if self.where.workers else access  # on a device it is given to all users in one call
            put = partial(driver.mem_map_new, location=place, handle_kinds=kinds, access=right, flags=flags)
            if not self.inherited:
                put.keywords["inherited"] = False
        taken: list[tuple[Any, Ready]] = []
        made, self.ahead = self.ahead, []
        ahead = [memory.nbytes for memory, _ in made]
        try:
            pieces: list[Piece] = [(memory.nbytes, put_memory(memory, False), memory) for memory, _ in made]
            if ahead and ahead != [*sizes]:
                raise BusyError(f"{self.handle.label} is grown already, by memory that was made for it before")
            for size in () if ahead else sizes:
                supply = supplies.get(Kind(driver, place, kinds, flags, size)) if supplies and self.inherited else None
                ready = None if supply is None else supply._take()
                if ready is not None:
                    taken.append((supply, ready))
                elif put is not None:
                    pieces.append((size, put, None))
                    continue
                else:
                    made.append(create_memory(driver, size, place, kinds, flags))
                    ready = made[-1]
                pieces.append((size, put_memory(ready[0], False), ready[0]))
            self._append(pieces, access, None if into is None else into.chunks)
            if into is not None:
                into.taken.extend(taken)
        except BaseException as error:
            with unwinding(error):
                put_back(taken)
                for _, claim in reversed(made):
                    claim.release()
            if not ahead and is_lack(error) and make_room(driver, place):
                self.make(sizes, kinds, access, flags, into)
                return
            raise
        for _, claim in made:
            claim.release()  # the mappings keep it now
        if into is None:
            for supply, (_, claim) in taken:
                claim.release()
                supply._refill()

    def append(self, given: Sequence[PhysicalAllocation | Received], access: Access) -> None:
        """Map memory behind what is mapped: all of it, or nothing (I4). Received memory whose owner asks for a seal is
        waited for: a second at most, all of it together."""
        soon = time.monotonic() + UNDECIDED
        right = Access.NONE if self.where.workers else access  # as in make
        pieces: list[Piece] = []
        for one in given:
            if isinstance(one, Received):
                put = partial(
                    self.where.driver.mem_map_import, fd=one.fd, kind=one.handle_kinds, access=right,
                    private=self.private, location=self.location,
                    until=soon if one.until is None else min(soon, one.until),
                )  # fmt: skip
                pieces.append((one.nbytes, put, None))
            else:
                pieces.append((one.nbytes, put_memory(one._memory, self.private), one._memory))
        if pieces:
            self._append(pieces, access)

    def _append(self, pieces: Sequence[Piece], access: Access, into: list[Chunk] | None = None) -> None:
        """Map pieces behind what is mapped, into the row or a list; a piece without memory is accessible once it is
        mapped. The region's handle keeps each mapping from before it is made; the caller has a claim on the handle."""
        handle, where = self.handle, self.where
        start = offset = self.row[-1].stop if self.row else 0
        made: list[Handle] = []
        row: list[Chunk] = []
        needs = (*self.depends, where.handle)
        is_accessible = not where.workers
        try:
            if self.zeros is not None:
                self.zeros.uncover(start, start + sum([nbytes for nbytes, _, _ in pieces]))
            for nbytes, put, memory in pieces:
                # The order in which they are given up is the opposite one: a lease after the memory.
                undo, depends = Unmap(where, offset, nbytes), needs if memory is None else (*needs, memory.handle)
                undo.is_idle = True  # nobody has heard of it
                made.append(handle.keep(undo.describe, undo, depends=depends))
                if memory is not None and not memory.first_mapped:
                    memory.first_mapped = made[-1]._id
                put(where.address + offset, nbytes)
                undo.is_mapped, where.spans[offset] = True, nbytes
                row.append(Chunk(offset, offset + nbytes, self.location, made[-1], undo, memory))
                offset += nbytes
                is_accessible = is_accessible and memory is None
            if not is_accessible and access is not Access.NONE:
                where.driver.mem_set_access(where.address + start, offset - start, access, self.users)
            if self.populate:
                touchable(where.driver, access).populate(where.address + start, offset - start)
            for chunk in row:
                chunk.undo.is_idle = False
            if into is None:
                self.row = (*self.row, *row)
            else:
                into += row
        except BaseException as error:
            with unwinding(error):
                for mapping in reversed(made):
                    handle.drop_dependency(mapping)
            raise

    def protect(self, access: Access) -> None:
        """Change what all users may do with what is mapped."""
        if self.mapped:
            self.where.driver.mem_set_access(self.where.address, self.mapped, access, self.users)

    def beyond(self, nbytes: int) -> tuple[Chunk, ...]:
        """Return the chunks that lie wholly beyond `nbytes`."""
        return tuple(chunk for chunk in self.row if chunk.start >= nbytes)

    def unmap(self, chunks: Sequence[Chunk]) -> None:
        """Take the last chunks out of the row and give them back, last one first; return when they are unmapped."""
        if chunks:
            self.row = tuple(chunk for chunk in self.row if chunk.start < chunks[0].start)
        self.give_back(chunks)

    def give_back(self, chunks: Sequence[Chunk]) -> None:
        """Unmap adjacent chunks that are in the row no more, or not yet; see :meth:`unmap`.
        No device works on them, and the caller has a claim on the region's handle, which keeps them all."""
        if not chunks:
            return
        if len(chunks) > 1:
            unmap_together([chunk.undo for chunk in chunks])
        self.handle.drop_dependency(*[chunk.mapping for chunk in chunks])
        for chunk in chunks:
            chunk.undo.wait(_PATIENCE)  # another thread may be working off the queue, and this one with it


def put_back(taken: list[tuple[Any, Ready]]) -> None:
    """Have ready again what was, which leaves the list."""
    while taken:
        supply, ready = taken.pop()
        supply._put(ready)


def plan(nbytes: int, mapped: int, capacity: int, granularity: int, least: int, exact: bool) -> list[int]:
    """Return the sizes of the chunks that take a region from `mapped` to at least `nbytes` bytes. `least` is the least
    chunk, with `exact` the size of every chunk; the ceiling cuts the last."""
    room = capacity - mapped
    if not exact:
        return [min(max(round_up(nbytes - mapped, granularity), least), room)]
    count = -(-(nbytes - mapped) // least)
    return [min(least, room - least * number) for number in range(count)]


def reserve(driver: Driver, nbytes: int, location: Location, depends: tuple[Handle, ...]) -> tuple[AddressRange, Claim]:
    """Reserve a region's addresses; return them with the first claim on the region's own handle.
    That handle undoes nothing: it keeps the reservation, later mappings, and what they depend on."""
    where = AddressRange(driver, nbytes)
    claim = own(partial(_label, where, location), None, depends=depends)
    try:
        where.handle = claim.handle.keep(where.describe, where)
        where.address = driver.address_reserve(nbytes)
        where.is_reserved = True
    except BaseException as error:  # or_else spelt out: every array comes by here
        with unwinding(error):
            claim.release()
        raise
    return where, claim


def _label(where: AddressRange, location: Location) -> str:
    return f"region of {format_size(where.nbytes)} on {location} at {where.address:#x}"


def measure(
    driver: Driver, given: Sequence[PhysicalAllocation | Received], location: Location | None
) -> tuple[int, Location]:
    """Check memory that is to lie in one region; return its bytes and its place."""
    total = 0
    for one in given:
        if isinstance(one, Received):
            total += checks.size(one.nbytes, "nbytes")  # whether it can be is for the driver to say
            continue
        if not isinstance(one, PhysicalAllocation):
            raise UsageError(f"allocations must be PhysicalAllocation objects or Received, not {one!r}")
        one.handle  # noqa: B018  (the check)
        if one.driver is not driver:
            raise UsageError(f"{one!r} belongs to another driver than the region's")
        if location is not None and one.location != location:
            raise UsageError(f"{one!r} is not on {location}; a region's memory is all in one place")
        location = one.location
        total += one.nbytes
    return total, location or Location(driver.name)


def is_lack(error: BaseException) -> bool:
    """Whether something was refused since there is no memory left, or no descriptor: what is ready has both."""
    return isinstance(error, OutOfMemoryError) or (isinstance(error, DriverError) and error.name == "EMFILE")


def make_room(driver: Driver, location: Location) -> bool:
    """Give back what is kept ready in a place, so that somebody can have it now; whether there was any."""
    here = [supply for kind, supply in supplies.copy().items() if (kind.driver, kind.location) == (driver, location)]
    return bool(sum([supply._give_way() for supply in here]))


def users(driver: Driver, given: Iterable[Location | str]) -> tuple[Location, ...]:
    """Return who is to have access, in the order given and each once; empty for the memory's own place."""
    # The driver refuses what is not there, before anything is made.
    return tuple(dict.fromkeys(checks.place(driver, place) for place in given))


def destroy_streams(driver: DeviceMemory, streams: list[int]) -> None:
    """Give streams back."""
    while streams:
        driver.stream_destroy(streams.pop())


def touchable(driver: Driver, access: Access) -> HostMemory:
    """Return the driver as one whose memory the CPU can touch."""
    if not isinstance(driver, HostMemory):
        raise UnsupportedError(
            "touching pages ahead of use", "memory that the CPU can address", f"the {driver.name} driver's"
        )
    if access is Access.NONE:
        raise UsageError("pages without access cannot be touched; make the region with READ or READ_WRITE")
    return driver
