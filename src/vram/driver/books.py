"""The books of a driver: who holds which memory, and what is mapped where. Without a lock that an undo waits for.

Finalizers reach the undo calls, so nothing here may wait (invariant I3). The books are dictionaries, and every step on
them is one dictionary or list operation, which Python makes atomic:

* *Who gets it*: ``setdefault`` and ``pop`` have one winner, and only the winner makes the system call.
* *May it*: whoever claims a span writes it down first and looks for conflicts afterwards, so of two threads that race
  at least one sees the other and withdraws.
* *Until when*: a mapping stays in the books, and keeps others out of its span, until the kernel has taken it back; who
  does that is decided by a token before (:meth:`Mapping.take`).
* *Whose turn*: whoever has the kernel change a mapping holds its lock (:attr:`Mapping.turn`). Undo calls never wait for
  one: they note in ``late`` what is to go, and whoever is at the mapping does it next (:mod:`.addresses`).
* *The last one out*: a memfd is closed by whoever takes its number out of a list of one, after no user was left; a
  user that comes in between finds the list empty, or is seen and makes the closer put it back (:class:`Memory`).

Looking up: by exact base, or by the end of the mapping before (a region that grows), in O(1). Other addresses are
found in a sorted copy of the keys that is remade after the books have changed (:class:`_Spans`).
"""

from __future__ import annotations

import fcntl
import itertools
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from ..errors import RangeError, UsageError
from ..spec import Access, HandleKind
from . import libc
from .protocol import LiveObjects

PATIENCE = 2.0  # seconds; a turn is one system call


class Memory:
    """A memfd and who uses it: handles by their number, mappings by themselves."""

    __slots__ = ("_fds", "identity", "is_sealed", "kinds", "nbytes", "users")

    is_memory = True

    def __init__(
        self, fd: int, nbytes: int, kinds: HandleKind, identity: tuple[int, int] | None, *, is_sealed: bool = False
    ) -> None:
        self._fds = [fd]
        self.is_sealed = is_sealed  # known to be read-only, which is for good; False may be out of date
        # Device and inode. None: it never left or entered the process, so it cannot be in the books a second time.
        self.identity = identity
        self.nbytes = nbytes
        self.kinds = kinds
        self.users: dict[object, None] = {}

    def hold(self, user: object) -> int:
        """Keep the memfd open for `user`, and return its number."""
        self.users[user] = None
        try:
            return self._fds[0]
        except IndexError:
            self.drop(user)
            raise UsageError("the memory was released while this call began") from None

    def drop(self, user: object) -> None:
        """Let go; the last one closes the memfd. None for a memory that nobody came to use."""
        self.users.pop(user, None)
        while not self.users:
            try:
                fd = self._fds.pop()
            except IndexError:
                return
            if self.users:  # somebody came in between; look again in case they are gone by now
                self._fds.append(fd)
                continue
            try:
                os.close(fd)
            except OSError as error:
                raise libc.failure(f"close({fd})", error.errno or 0) from None
            return

    def fd(self) -> int:
        """Return the number of the memfd, which a user keeps open."""
        try:
            return self._fds[0]
        except IndexError:
            raise UsageError("the memory was released") from None

    def identify(self) -> None:
        """Find out its identity, before it leaves the process and can come back as another memory in these books."""
        if self.identity is None:
            stat = os.fstat(self.fd())
            self.identity = (stat.st_dev, stat.st_ino)


def duplicate(fd: int) -> int:
    """Return one more descriptor of what `fd` stands for."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)  # never in the place of a standard stream
    except OSError as error:
        raise libc.failure(f"dup({fd})", error.errno) from None


class _Spanned(Protocol):
    address: int
    end: int


_S = TypeVar("_S", bound=_Spanned)


class _Spans(Generic[_S]):
    """Spans by their first address, and a sorted copy of those for the questions a dictionary cannot answer."""

    __slots__ = ("_sorted", "_version", "at")

    def __init__(self) -> None:
        self.at: dict[int, _S] = {}
        self._version: object = None  # of the sorted copy; None after a change
        self._sorted: tuple[object, list[int]] = (None, [])

    def add(self, span: _S) -> bool:
        """Whether `span` is now in the books: nothing else may begin where it does."""
        is_added = self.at.setdefault(span.address, span) is span
        self._version = None
        return is_added

    def remove(self, span: _S) -> bool:
        """Whether it was this caller who took `span` out of the books."""
        if self.at.get(span.address) is not span:
            return False
        taken = self.at.pop(span.address, None)
        self._version = None
        return taken is span

    def discard(self, address: int) -> None:
        """Take out what begins at `address`, if anything does."""
        self.at.pop(address, None)
        self._version = None

    def starts(self) -> list[int]:
        """Return the first addresses in order. The list is shared: read only."""
        version, starts = self._sorted
        if version is None or version is not self._version:
            # A version is given out before the dictionary is read: a change after that takes it away again.
            self._version = version = object()
            starts = sorted(self.at)
            self._sorted = version, starts
        return starts

    def find(self, address: int) -> _S | None:
        """Return the span that `address` lies in."""
        span = self.at.get(address)
        if span is None:
            starts = self.starts()
            where = bisect_right(starts, address)
            span = self.at.get(starts[where - 1]) if where else None
            if span is None or address >= span.end:
                return None
        return span


class Reservation:
    """A range of addresses, and what is mapped in it."""

    __slots__ = ("address", "end", "is_leaving", "mappings", "nbytes", "reads_zero")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.end = address + nbytes
        self.mappings: _Spans[Mapping] = _Spans()
        self.is_leaving = False  # freed, but for mappings that are late
        self.reads_zero = False  # where nothing is mapped

    def within(self, start: int, end: int) -> list[Mapping]:
        """Return the mappings that touch [start, end), in order."""
        at, starts = self.mappings.at, self.mappings.starts()
        first = max(bisect_left(starts, start) - 1, 0)
        # Settled mappings do not overlap: the nearest one before is the only one that can reach in. One that is not
        # settled may be a mistake about to be withdrawn, and hide another.
        while first and ((before := at.get(starts[first])) is None or not before.is_settled):
            first -= 1
        found = (at.get(address) for address in starts[first : bisect_left(starts, end)])
        return [mapping for mapping in found if mapping is not None and mapping.end > start]


class Mapping:
    """A memory at an address, and what may be done there."""

    __slots__ = (
        *("token", "access", "address", "end", "is_final", "is_leaving", "is_settled", "memory", "nbytes"),
        *("is_inherited", "private", "reservation", "turn"),
    )

    def __init__(self, address: int, memory: Memory, reservation: Reservation, private: bool = False) -> None:
        self.address = address
        self.nbytes = memory.nbytes
        self.end = address + memory.nbytes
        self.memory = memory
        self.reservation = reservation
        self.private = private
        self.access = Access.NONE
        self.is_settled = False
        self.is_inherited = True  # by forked children
        self.is_final = False  # the kernel will never let it be written: mapped after the seal
        self.is_leaving = False  # unmapped, but somebody was at it: that is late
        self.token: list[None] = []  # one entry once the kernel has it: from then on it can be taken back
        self.turn = threading.Lock()  # of whoever has the kernel change it

    def take(self) -> bool:
        """Whether it is this caller who takes the mapping back."""
        try:
            self.token.pop()
        except IndexError:
            return False
        return True

    @property
    def is_gone(self) -> bool:
        """Whether it is out of the books, or about to be."""
        return self.is_leaving or self.reservation.mappings.at.get(self.address) is not self

    def take_turn(self) -> bool:
        """Wait until no other call is at it; False if it went meanwhile, without the turn. Not for undo calls (I3)."""
        if not self.turn.acquire(timeout=PATIENCE):
            raise UsageError(f"another call has been at the mapping at {self.address:#x} for {PATIENCE} s")
        if self.is_gone:
            self.turn.release()
            return False
        return True


def give_back(taken: Iterable[Mapping]) -> None:
    """Taking back some mappings failed: somebody may try again."""
    for mapping in taken:
        if not mapping.is_gone:
            mapping.token.append(None)


class Books:
    """Everything that a driver has given out and not got back.
    Every mapped address is a multiple of `granule` bytes; 0 as long as that is not known."""

    __slots__ = ("ends", "granule", "handles", "late", "mappings", "reservations", "tokens")

    def __init__(self, granule: int = 0) -> None:
        self.granule = granule
        self.reservations: _Spans[Reservation] = _Spans()
        self.handles: dict[int, Memory] = {}
        # Mappings of all reservations together: by base, and by end.
        self.mappings: dict[int, Mapping] = {}
        self.ends: dict[int, Mapping] = {}
        # Unmapped while another call was at them, and freed while such a mapping was inside. Seldom anything.
        self.late: dict[Mapping | Reservation, object] = {}
        self.tokens = itertools.count(1 << 32)  # far from any fd: the two must not be mistaken for each other

    def new_handle(self, memory: Memory) -> int:
        """Return one more handle to `memory`."""
        handle = next(self.tokens)
        memory.hold(handle)
        self.handles[handle] = memory
        return handle

    def memory(self, call: str, handle: int) -> Memory:
        """Return what `handle` stands for."""
        memory = self.handles.get(handle)
        if memory is None:
            raise UsageError(f"{call}({handle}): no such handle; it was released, or is not one of this driver")
        return memory

    def mapping_at(self, call: str, address: int) -> Mapping:
        """Return the mapping that `address` lies in."""
        mapping = self.mappings.get(address)
        if mapping is None:
            reservation = self.reservations.find(address)
            mapping = reservation.mappings.find(address) if reservation is not None else None
            if mapping is None:
                raise RangeError(f"{call}: nothing is mapped at {address:#x}")
        return mapping

    def reservation_at(self, call: str, address: int, nbytes: int) -> Reservation:
        """Return the reservation that holds the whole span."""
        reservation = self.reservations.at.get(address)
        if reservation is None:
            mapping = self.mappings.get(address) or self.ends.get(address)
            if mapping is not None and address < mapping.reservation.end:
                reservation = mapping.reservation
            else:
                reservation = self.reservations.find(address)
        if reservation is None:
            raise RangeError(f"{call}: {address:#x} lies in no reservation of this driver")
        if nbytes <= 0 or address + nbytes > reservation.end:
            raise RangeError(
                f"{call}: {nbytes} bytes at {address:#x} do not fit into the reservation of {reservation.nbytes} bytes "
                f"at {reservation.address:#x}, of which {reservation.end - address} are left there"
            )
        return reservation

    def whole(self, call: str, address: int, nbytes: int, *, gaps: bool) -> list[Mapping]:
        """Return the mappings in a span that cuts none of them in two."""
        mapping = self.mappings.get(address)
        if mapping is not None and mapping.nbytes == nbytes:
            return [mapping]
        due = self.reservation_at(call, address, nbytes).within(address, address + nbytes)
        if not due:
            raise RangeError(f"{call}({address:#x}, {nbytes}): nothing is mapped there")
        for mapping in (due[0], due[-1]):
            if mapping.address < address or mapping.end > address + nbytes:
                raise RangeError(
                    f"{call}({address:#x}, {nbytes}) would cut the mapping of {mapping.nbytes} bytes at "
                    f"{mapping.address:#x}; it takes whole mappings only"
                )
        if not gaps:
            ends = [address, *(mapping.end for mapping in due)]
            starts = [*(mapping.address for mapping in due), address + nbytes]
            for end, start in zip(ends, starts, strict=True):
                if end != start:
                    raise RangeError(f"{call}({address:#x}, {nbytes}): nothing is mapped from {end:#x} to {start:#x}")
        return due

    def accessible(self, call: str, address: int, nbytes: int, access: Access) -> list[Mapping]:
        """Return the mappings of a span that may be accessed so. The kernel's own answer would be SIGSEGV."""
        if nbytes <= 0:
            if nbytes:
                raise RangeError(f"{call}: {nbytes} bytes")
            return []
        end = address + nbytes
        mapping = self.mappings.get(address)
        if mapping is None:
            over = self._over_zeros(address, end, access)
            if over is not None:
                return over
            mapping = self.mapping_at(call, address)
        found = [mapping]
        while True:
            if mapping.access < access:
                raise UsageError(
                    f"{call} of {nbytes} bytes at {address:#x}: access to {mapping.address:#x} until {mapping.end:#x} "
                    f"is {mapping.access.name}; it takes {access.name}"
                )
            if mapping.end >= end:
                return found
            after = self.mappings.get(mapping.end)
            if after is None or after.reservation is not mapping.reservation:
                over = self._over_zeros(address, end, access)
                if over is not None:
                    return over
                raise RangeError(f"{call} of {nbytes} bytes at {address:#x}: nothing is mapped at {mapping.end:#x}")
            mapping = after
            found.append(mapping)

    def _over_zeros(self, address: int, end: int, access: Access) -> list[Mapping] | None:
        """Return the mappings of a span that may be read, since the rest of it reads as zeros; None if it may not."""
        reservation = self.reservations.find(address)
        if reservation is None or not reservation.reads_zero or end > reservation.end or access > Access.READ:
            return None
        found = reservation.within(address, end)
        return found if all(mapping.access >= access for mapping in found) else None

    def take(self, address: int, nbytes: int) -> list[Mapping]:
        """Return the mappings of a span, which this caller takes back; :func:`give_back` lets somebody try again."""
        due = [mapping for mapping in self.whole("mem_unmap", address, nbytes, gaps=True) if not mapping.is_leaving]
        taken = list(itertools.takewhile(Mapping.take, due))
        if not due or len(taken) < len(due):
            give_back(taken)
            raise UsageError(f"mem_unmap({address:#x}, {nbytes}): another thread is at some of it")
        return taken

    def reserved(self, call: str, address: int, nbytes: int) -> Reservation:
        """Return the reservation that is exactly this span."""
        reservation = self.reservations.at.get(address)
        if reservation is None or reservation.nbytes != nbytes or reservation.is_leaving:
            found = f"it has {reservation.nbytes} bytes" if reservation else "no reservation begins there"
            raise UsageError(f"{call}({address:#x}, {nbytes}): {found}; name exactly what was reserved")
        return reservation

    def live(self, handles: int = 0, mappings: int = 0) -> LiveObjects:
        """Count what is out, and what a driver knows besides. Memory that was imported twice counts twice: two
        descriptors, which nobody has compared."""
        mapped, held = list(self.mappings.values()), list(self.handles.values())
        memories = {
            id(memory): memory.nbytes for memory in (*held, *(one.memory for one in mapped)) if memory.is_memory
        }
        count = len(self.reservations.at)
        return LiveObjects(count, len(held) + handles, len(mapped) + mappings, sum(memories.values()))

    def has(self, reservation: Reservation) -> bool:
        """Whether `reservation` is still out."""
        return self.reservations.at.get(reservation.address) is reservation

    def whole_memory(self, call: str, nbytes: int, offset: int, handle: int) -> Memory:
        """Return the memory of a handle that is to be mapped, which takes all of it."""
        memory = self.memory(call, handle)
        if offset or nbytes != memory.nbytes:
            raise RangeError(
                f"{call}: {nbytes} bytes at offset {offset} of an allocation of {memory.nbytes} bytes; an allocation "
                f"is mapped whole, from offset 0"
            )
        return memory

    def claim(self, call: str, mapping: Mapping) -> int:
        """Write down a mapping that is about to be made, keep its memory, and return what the memory's `hold` does.
        Raises RangeError, with nothing written down, if something is mapped there or the reservation goes meanwhile."""
        memory, reservation, address = mapping.memory, mapping.reservation, mapping.address
        try:
            held = memory.hold(mapping)
            if not reservation.mappings.add(mapping):
                raise RangeError(f"{call}: something is mapped at {address:#x} already; unmap it first")
            self.mappings[address] = mapping
            self.ends[mapping.end] = mapping
            # Written down first, looked for conflicts afterwards, so that two threads cannot both miss the other.
            others = 0
            if len(reservation.mappings.at) > 1 and not self._follows(mapping):
                others = len(reservation.within(address, mapping.end)) - 1
            is_out = self.reservations.at.get(reservation.address) is reservation
            if others or reservation.is_leaving or not is_out:
                raise RangeError(
                    f"{call}: {mapping.nbytes} bytes at {address:#x} overlap "
                    + (f"{others} other mappings; unmap them first" if others else "a reservation that was just freed")
                )
        except BaseException:
            self.withdraw(mapping)
            raise
        return held

    def _follows(self, mapping: Mapping) -> bool:
        """Whether a written-down mapping follows a settled one and no other begins in it: then the row needs no search.
        A span that reaches in from before would overlap the settled mapping too; its writer sees that one, or this."""
        at, granule = mapping.reservation.mappings.at, self.granule
        before = self.ends.get(mapping.address)
        if before is None or not before.is_settled or at.get(before.address) is not before or not granule:
            return False
        inside = range(mapping.address + granule, mapping.end, granule)
        return max(at) == mapping.address if len(at) <= len(inside) else at.keys().isdisjoint(inside)

    def withdraw(self, mapping: Mapping) -> None:
        """Let go of the memory of what was written down and did not come about, or is gone, and take it out."""
        mapping.memory.drop(mapping)
        # In the opposite order, so that the base becomes free for a new mapping only when nothing of this one is left.
        # `ends` is a shortcut: an entry lost to a race costs a search.
        for index, key in ((self.mappings, mapping.address), (self.ends, mapping.end)):
            if index.get(key) is mapping:  # not if it never came in, because another begins there
                index.pop(key, None)
        mapping.reservation.mappings.remove(mapping)
