"""Memory of the host: memfd and mmap, under the rules of a GPU.

An address range is a ``PROT_NONE`` mapping. Physical memory is a memfd, sealed against shrinking and growing at once
(a peer that truncates it would kill a mapped reader). Mapping puts the memfd over a part of the range, unmapping puts
``PROT_NONE`` back over it. It is never ``munmap``: another thread could take the hole.

What is out is written down in :mod:`vram.driver.books`, without locks, because finalizers reach the undo calls
(invariant I3). The order in every call: what could refuse first; then the books, which have one winner; then the
system call; and if that fails the books are set right again (I4).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from ..errors import AccessDeniedError, AlignmentError, ProtocolError, RangeError, UnsupportedError, UsageError
from ..spec import HOST, Access, HandleKind, Location, round_up
from . import libc
from .available import AvailableMemory
from .books import Books, Mapping, Memory, Reservation
from .protocol import DeviceInfo, Granularity, LiveObjects, MemoryProperties

__all__ = ["HostDriver"]

GRANULARITY = 2 << 20  # the GPUs' own; the host could do with 4 KiB
_PAGE = 4096
_RESERVED = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
_PRIVATE = libc.MAP_PRIVATE | libc.MAP_NORESERVE
_BOUND = libc.F_SEAL_SHRINK | libc.F_SEAL_GROW
_READ_ONLY = libc.F_SEAL_FUTURE_WRITE | libc.F_SEAL_WRITE
_PROTECTION = {Access.NONE: 0, Access.READ: libc.PROT_READ, Access.READ_WRITE: libc.PROT_READ | libc.PROT_WRITE}
_POPULATE_STEP = 256 << 20  # bytes between two chances for a signal handler to run


class HostDriver:
    """The :class:`~vram.driver.protocol.Driver` of host memory on Linux.

    Also :class:`~vram.driver.protocol.HostAddressable`, :class:`~vram.driver.protocol.CopyOnWrite`,
    :class:`~vram.driver.protocol.Sealing` and :class:`~vram.driver.protocol.Identity`. After a fork the child's
    handles are inert (invariant I7), but shared mappings are inherited: views stay readable, and nothing is undone.
    """

    name = "host"

    def __init__(self) -> None:
        self._books = Books()
        self._available = AvailableMemory()
        self._memfd_flags = libc.MFD_CLOEXEC | libc.MFD_ALLOW_SEALING | libc.MFD_NOEXEC_SEAL
        self._ballast: list[int] = []

    # -- devices ------------------------------------------------------------------------------------------------
    def device_count(self) -> int:
        return 1

    def device_info(self, location: Location) -> DeviceInfo:
        _check_location(location)
        # Memory can be shared within one running kernel: that is the identity of this "device".
        uuid = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return DeviceInfo(f"HOST-{uuid}", f"host memory ({platform.machine()})", self._available.info()[1])

    def mem_info(self, location: Location) -> tuple[int, int]:
        _check_location(location)
        return self._available.info()

    def mem_granularity(self, location: Location, handle_kinds: HandleKind) -> Granularity:
        _check_location(location)
        _check_kinds(handle_kinds)
        return Granularity(GRANULARITY, GRANULARITY)

    # -- addresses ----------------------------------------------------------------------------------------------
    def address_reserve(self, nbytes: int, *, alignment: int = 0, address: int = 0) -> int:
        _check_size("address_reserve", nbytes)
        if alignment == 0:
            alignment = GRANULARITY
        elif alignment < GRANULARITY or alignment & (alignment - 1):
            raise AlignmentError(
                f"address_reserve: alignment {alignment} is not a power of two of at least {GRANULARITY}"
            )
        if address % alignment or address < 0:
            raise AlignmentError(
                f"address_reserve: address {address:#x} is not a multiple of {alignment:#x}; "
                f"the next is {round_up(max(address, 0), alignment):#x}"
            )
        # Recent kernels align large mappings on their own: one call, most of the time.
        base = libc.mmap(address, nbytes, 0, _RESERVED, -1, 0)
        if base != -1 and base % alignment:
            libc.munmap(base, nbytes)
            base = _reserve_aligned(nbytes, alignment)
        if base == -1:
            raise libc.failure(f"mmap of {nbytes} bytes of addresses")
        self._books.reservations.add(Reservation(base, nbytes))
        return int(base)

    def address_free(self, address: int, nbytes: int) -> None:
        reservations = self._books.reservations
        reservation = reservations.at.get(address)
        if reservation is None or reservation.nbytes != nbytes:
            found = "no reservation begins there" if reservation is None else f"it has {reservation.nbytes} bytes"
            raise UsageError(f"address_free({address:#x}, {nbytes}): {found}; free exactly what was reserved")
        if not (inside := len(reservation.mappings.at)):
            # Out of the books before it is out of the kernel: the next reservation may get this very address.
            if not reservations.remove(reservation):
                raise UsageError(f"address_free({address:#x}, {nbytes}): another thread freed it")
            inside = len(reservation.mappings.at)
            if inside:  # mapped meanwhile
                reservations.add(reservation)
        if inside:
            raise UsageError(f"address_free({address:#x}, {nbytes}): {inside} mappings are in it; unmap them first")
        if libc.munmap(address, nbytes):
            error = libc.failure(f"munmap({address:#x}, {nbytes})")
            reservations.add(reservation)
            raise error

    # -- physical memory ----------------------------------------------------------------------------------------
    def mem_create(self, nbytes: int, location: Location, handle_kinds: HandleKind) -> int:
        _check_location(location)
        _check_kinds(handle_kinds)
        _check_size("mem_create", nbytes)
        self._available.check(f"mem_create({nbytes})", nbytes)
        fd = self._memfd(nbytes)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, libc.F_ADD_SEALS, _BOUND)
        except OSError as error:
            os.close(fd)
            raise libc.failure(f"sizing a memfd to {nbytes} bytes", error.errno) from None
        return self._books.new_handle(Memory(fd, nbytes, handle_kinds, None))

    def mem_release(self, handle: int) -> None:
        memory = self._books.handles.pop(handle, None)
        if memory is None:
            raise UsageError(f"mem_release({handle}): no such handle; each is released once")
        memory.drop(handle)

    def mem_retain(self, address: int) -> int:
        return self._books.new_handle(self._books.mapping_at("mem_retain", address).memory)

    def mem_properties(self, handle: int) -> MemoryProperties:
        memory = self._books.memory("mem_properties", handle)
        return MemoryProperties(HOST, memory.kinds, memory.nbytes)

    # -- mappings -----------------------------------------------------------------------------------------------
    def mem_map(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        self._map("mem_map", address, nbytes, offset, handle, private=False)

    def mem_map_private(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        self._map("mem_map_private", address, nbytes, offset, handle, private=True)

    def mem_unmap(self, address: int, nbytes: int) -> None:
        due = self._books.whole("mem_unmap", address, nbytes, gaps=True)
        taken = [mapping for mapping in due if mapping.take()]
        if len(taken) < len(due):
            error: Exception = UsageError(f"mem_unmap({address:#x}, {nbytes}): another thread is at some of it")
        elif self._put_back(address, nbytes):
            for mapping in taken:
                self._books.strike(mapping)
                mapping.memory.drop(mapping)
            return
        else:
            error = libc.failure(f"mmap of PROT_NONE over {nbytes} bytes at {address:#x}")
        for mapping in taken:
            mapping.give_back()
        raise error

    def mem_set_access(self, address: int, nbytes: int, access: Access, locations: Sequence[Location]) -> None:
        protection = _PROTECTION.get(access)
        if protection is None:
            raise UsageError(f"mem_set_access: access {access!r} is not NONE (0), READ (1) or READ_WRITE (3)")
        if not locations:
            raise UsageError("mem_set_access: no location was named")
        for location in locations:
            _check_location(location)
        due = self._books.whole("mem_set_access", address, nbytes, gaps=False)
        if not libc.mprotect(address, nbytes, protection):
            for mapping in due:
                mapping.access = Access(access)
            return
        code = ctypes.get_errno()
        error = libc.failure(f"mprotect({address:#x}, {nbytes}, {protection})", code)
        for mapping in due:  # the kernel has changed those before the one that it refused
            libc.mprotect(mapping.address, mapping.nbytes, _PROTECTION[mapping.access])
        if code == errno.EACCES:
            raise AccessDeniedError(
                f"mem_set_access({address:#x}, {nbytes}, {Access(access).name}): the memory is read-only here, by a "
                f"seal or a read-only descriptor; map it privately (copy on write) to write to a copy"
            )
        raise error

    def mem_get_access(self, address: int, location: Location) -> Access:
        _check_location(location)
        return self._books.mapping_at("mem_get_access", address).access

    # -- other processes ----------------------------------------------------------------------------------------
    def mem_export(self, handle: int, kind: HandleKind) -> int:
        memory = self._books.memory("mem_export", handle)
        if kind != HandleKind.POSIX_FD or memory.kinds != HandleKind.POSIX_FD:
            raise UsageError(
                f"mem_export({handle}, {kind!r}): this memory was created to leave the process as {memory.kinds!r}; "
                f"ask for POSIX_FD at mem_create"
            )
        return _duplicate(memory.fd())

    def mem_import(self, fd: int, kind: HandleKind, nbytes: int) -> int:
        # The handle stands for the first `nbytes`, all of which exist: a sealed size cannot change under its reader.
        _check_kinds(kind)
        if kind != HandleKind.POSIX_FD:
            raise UsageError("mem_import: kind must be POSIX_FD")
        _check_size("mem_import", nbytes)
        stat = _stat("mem_import", fd)
        try:
            seals = fcntl.fcntl(fd, libc.F_GET_SEALS)
        except OSError:
            raise ProtocolError(f"mem_import({fd}): this is no shared memory (memfd)") from None
        if seals & _BOUND != _BOUND:
            raise ProtocolError(
                f"mem_import({fd}): its size could change under a reader (its seals are {seals:#x}); "
                f"it must carry F_SEAL_SHRINK and F_SEAL_GROW"
            )
        size = stat.st_size
        if size < nbytes or size % GRANULARITY:
            raise ProtocolError(
                f"mem_import({fd}): it has {size} bytes; {nbytes} were stated, and its size must be a multiple of "
                f"{GRANULARITY}"
            )
        if libc.filesystem_type(fd) != libc.TMPFS_MAGIC:
            # Pages of a limited pool: a fault that finds the pool empty would kill the reader.
            raise ProtocolError(f"mem_import({fd}): this is no ordinary shared memory (a memfd without MFD_HUGETLB)")
        memory = Memory(_duplicate(fd), nbytes, HandleKind.POSIX_FD, (stat.st_dev, stat.st_ino))
        return self._books.new_handle(memory)

    def mem_identity(self, fd: int) -> tuple[int, int]:
        stat = _stat("mem_identity", fd)
        return stat.st_dev, stat.st_ino

    def mem_seal(self, handle: int) -> None:
        memory = self._books.memory("mem_seal", handle)
        try:
            fcntl.fcntl(memory.fd(), libc.F_ADD_SEALS, libc.F_SEAL_FUTURE_WRITE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise UnsupportedError(
                    "sealing memory read-only", "Linux 5.1 (F_SEAL_FUTURE_WRITE)", f"Linux {platform.release()}"
                ) from None
            if error.errno != errno.EPERM:
                raise libc.failure(f"sealing handle {handle}", error.errno) from None
            if not self.mem_is_sealed(handle):
                raise AccessDeniedError(
                    f"mem_seal({handle}): its descriptor is read-only or its set of seals is closed; only who may "
                    f"write to the memory can seal it"
                ) from None
        # Now nobody can make a writable mapping, but those that exist remain, and so does one that mprotect could
        # open again. Mapping anew over them takes that away, at the same address and without a gap for readers.
        # Unmapping one of them right now would be the caller's mistake, as with any two calls on the same object.
        identity = memory.identity()
        for mapping in tuple(self._books.mappings.values()):
            if mapping.private or mapping.memory.identity() != identity:
                continue
            access = min(mapping.access, Access.READ)
            fd = mapping.memory.fd()
            flags = libc.MAP_SHARED | libc.MAP_FIXED
            if libc.mmap(mapping.address, mapping.nbytes, _PROTECTION[access], flags, fd, 0) == -1:
                # The seal stands, and sealing again goes on from here.
                raise libc.failure(f"mmap of sealed memory at {mapping.address:#x}")
            mapping.access = access

    def mem_is_sealed(self, handle: int) -> bool:
        return bool(fcntl.fcntl(self._books.memory("mem_is_sealed", handle).fd(), libc.F_GET_SEALS) & _READ_ONLY)

    # -- bytes --------------------------------------------------------------------------------------------------
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self._books.accessible("copy", source, nbytes, Access.READ)
        self._books.accessible("copy", destination, nbytes, Access.READ_WRITE)
        if source < destination + nbytes and destination < source + nbytes:
            raise RangeError(f"copy of {nbytes} bytes from {source:#x} to {destination:#x}: the ranges overlap")
        ctypes.memmove(destination, source, nbytes)

    def copy_in(self, destination: int, source: memoryview) -> None:
        self._books.accessible("copy_in", destination, source.nbytes, Access.READ_WRITE)
        try:
            libc.copy_from(destination, source)
        except BufferError as error:
            raise UsageError(f"copy_in: the source must be a contiguous buffer ({error})") from None

    def copy_out(self, destination: memoryview, source: int) -> None:
        self._books.accessible("copy_out", source, destination.nbytes, Access.READ)
        try:
            libc.copy_to(destination, source)
        except BufferError as error:
            raise UsageError(f"copy_out: the destination must be writable and contiguous ({error})") from None

    def fill(self, address: int, value: int, nbytes: int) -> None:
        if not 0 <= value <= 255:
            raise UsageError(f"fill: value {value} is not a byte, 0 to 255")
        self._books.accessible("fill", address, nbytes, Access.READ_WRITE)
        ctypes.memset(address, value, nbytes)

    def synchronize(self, location: Location) -> None:
        _check_location(location)

    def buffer(self, address: int, nbytes: int, *, readonly: bool) -> memoryview:
        self._books.accessible("buffer", address, nbytes, Access.READ if readonly else Access.READ_WRITE)
        return libc.view(address, nbytes, readonly=readonly)

    def populate(self, address: int, nbytes: int) -> None:
        for mapping in self._books.accessible("populate", address, nbytes, Access.READ):
            start = max(address, mapping.address)
            start -= start % _PAGE
            end = min(round_up(address + nbytes, _PAGE), mapping.end)
            writable = mapping.access == Access.READ_WRITE
            while start < end:
                step = min(_POPULATE_STEP, end - start)
                if libc.madvise(start, step, libc.MADV_POPULATE_WRITE if writable else libc.MADV_POPULATE_READ):
                    code = ctypes.get_errno()
                    if code in (errno.EINTR, errno.EAGAIN):
                        continue
                    if code != errno.EINVAL:
                        raise libc.failure(f"madvise({start:#x}, {step}) to populate", code)
                    _touch(mapping, start, step)
                start += step

    # -- books --------------------------------------------------------------------------------------------------
    def live(self) -> LiveObjects:
        mappings = tuple(self._books.mappings.values())
        handles = tuple(self._books.handles.values())
        # What was imported twice counts twice: two descriptors, which nobody has compared.
        memories = {id(memory): memory.nbytes for memory in (*handles, *(mapping.memory for mapping in mappings))}
        return LiveObjects(len(self._books.reservations.at), len(handles), len(mappings), sum(memories.values()))

    # -- inside -------------------------------------------------------------------------------------------------
    def _memfd(self, nbytes: int) -> int:
        while True:
            try:
                return os.memfd_create("vram", self._memfd_flags)
            except OSError as error:
                if error.errno == errno.EINVAL and self._memfd_flags & libc.MFD_NOEXEC_SEAL:  # before Linux 6.3
                    self._memfd_flags &= ~libc.MFD_NOEXEC_SEAL
                    continue
                raise libc.failure(f"memfd_create for {nbytes} bytes", error.errno) from None

    def _map(self, call: str, address: int, nbytes: int, offset: int, handle: int, *, private: bool) -> None:
        memory = self._books.memory(call, handle)
        if offset or nbytes != memory.nbytes:
            raise RangeError(
                f"{call}: {nbytes} bytes at offset {offset} of an allocation of {memory.nbytes} bytes; an allocation "
                f"is mapped whole, from offset 0"
            )
        if address % GRANULARITY:
            raise AlignmentError(
                f"{call}: address {address:#x} is not a multiple of the granularity, {GRANULARITY}; "
                f"the next is {round_up(address, GRANULARITY):#x}"
            )
        reservation = self._books.reservation_at(call, address, nbytes)
        if not self._ballast:
            self._take_ballast()
        mapping = Mapping(address, memory, reservation, private)
        fd = memory.hold(mapping)
        if not self._books.write_down(mapping):
            memory.drop(mapping)
            raise RangeError(f"{call}: something is mapped at {address:#x} already; unmap it first")
        # Written down first, looked for conflicts afterwards, so that two threads cannot both miss the other.
        others = len(reservation.within(address, mapping.end)) - 1 if len(reservation.mappings.at) > 1 else 0
        if others or self._books.reservations.at.get(reservation.address) is not reservation:
            self._books.strike(mapping)
            memory.drop(mapping)
            raise RangeError(
                f"{call}: {nbytes} bytes at {address:#x} overlap "
                + (f"{others} other mappings; unmap them first" if others else "a reservation that was just freed")
            )
        flags = _PRIVATE if private else libc.MAP_SHARED
        if libc.mmap(address, nbytes, 0, flags | libc.MAP_FIXED, fd, 0) != -1:
            mapping.settle()
            return
        code = ctypes.get_errno()
        error = libc.failure(f"mmap of {nbytes} bytes at {address:#x}", code)
        # Kernels before 6.12 can leave a hole behind a mapping that failed late. Mend it, if there is one.
        libc.mmap(address, nbytes, 0, _RESERVED | libc.MAP_FIXED_NOREPLACE, -1, 0)
        self._books.strike(mapping)
        memory.drop(mapping)
        if code in (errno.EACCES, errno.EPERM):
            raise ProtocolError(f"{call}: the descriptor behind handle {handle} does not allow reading")
        raise error

    def _put_back(self, address: int, nbytes: int) -> bool:
        """Whether ``PROT_NONE`` is back over a span."""
        flags = _RESERVED | libc.MAP_FIXED
        if libc.mmap(address, nbytes, 0, flags, -1, 0) != -1:
            return True
        if ctypes.get_errno() != errno.ENOMEM:
            return False
        # At the limit of mappings the kernel refuses even to replace one by one, and an undo that fails is a leak for
        # good. So give it the mapping that we hold for this case.
        try:
            libc.munmap(self._ballast.pop(), _PAGE)
        except IndexError:
            return False
        done: bool = libc.mmap(address, nbytes, 0, flags, -1, 0) != -1
        code = ctypes.get_errno()
        self._take_ballast()
        ctypes.set_errno(code)
        return done

    def _take_ballast(self) -> None:
        """Hold one mapping that can be given up. Not worth an error where there is none to be had."""
        page = libc.mmap(0, _PAGE, 0, _RESERVED, -1, 0)
        if page != -1:
            libc.madvise(page, _PAGE, libc.MADV_DONTDUMP)  # a flag of its own keeps it from merging with neighbours
            self._ballast.append(page)


def _check_location(location: Location) -> None:
    if location is not HOST and location != HOST:
        raise UsageError(f'the host driver serves the location "host" only, not "{location}"')


def _check_kinds(kinds: HandleKind) -> None:
    if int(kinds) not in (HandleKind.NONE, HandleKind.POSIX_FD):
        raise UnsupportedError(
            "host memory that leaves the process in that way", f"a driver for {kinds!r}", "POSIX_FD on the host"
        )


def _check_size(call: str, nbytes: int) -> None:
    if nbytes <= 0 or nbytes % GRANULARITY:
        raise AlignmentError(
            f"{call}: {nbytes} bytes is not a positive multiple of the granularity, {GRANULARITY}; "
            f"the next is {max(round_up(nbytes, GRANULARITY), GRANULARITY)}"
        )


def _stat(call: str, fd: int) -> os.stat_result:
    try:
        return os.fstat(fd)
    except (OSError, OverflowError):
        raise UsageError(f"{call}({fd}): this is no open file descriptor") from None


def _duplicate(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)  # never in the place of a closed standard stream
    except OSError as error:
        raise libc.failure(f"dup({fd})", error.errno) from None


def _reserve_aligned(nbytes: int, alignment: int) -> int:
    """Reserve more, give back both ends. Returns -1 with errno set."""
    wide: int = libc.mmap(0, nbytes + alignment, 0, _RESERVED, -1, 0)
    if wide == -1:
        return -1
    base = round_up(wide, alignment)
    if base > wide:
        libc.munmap(wide, base - wide)
    if wide + alignment > base:
        libc.munmap(base + nbytes, wide + alignment - base)
    return base


def _touch(mapping: Mapping, start: int, nbytes: int) -> None:
    """Populate without the advice (before Linux 5.14): fallocate takes the memory and keeps what is there."""
    if mapping.access == Access.READ_WRITE and not mapping.private:
        try:
            os.posix_fallocate(mapping.memory.fd(), start - mapping.address, nbytes)
        except OSError as error:
            raise libc.failure(f"fallocate of {nbytes} bytes", error.errno) from None
    with libc.view(start, nbytes, readonly=True) as view:
        bytes(view[::_PAGE])
