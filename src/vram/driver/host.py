"""Memory of the host: memfd and mmap, under the rules of a GPU.

Physical memory is a memfd of a sealed size (:mod:`.memfds`). Mapping puts it over a part of a reserved range, unmapping
puts ``PROT_NONE`` back (:mod:`.addresses`).

Reservations, handles and mappings are noted in :mod:`.books`, without locks, because finalizers reach the undo calls
(invariant I3). The order in every call: first the checks; then the books, which have one winner; then the system call,
after whose failure the books are corrected (I4).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..errors import AccessDeniedError, ProtocolError, UsageError
from ..open_files import is_read_only
from ..spec import HOST, Access, AllocationFlags, HandleKind, Location
from . import forks, libc, memfds
from .addresses import PROTECTION, HostBooks, collapse, populate, read_zeros, reserve
from .arguments import (
    GRANULARITY,
    check_access,
    check_address,
    check_alignment,
    check_apart,
    check_byte,
    check_flags,
    check_kinds,
    check_location,
    check_size,
    not_exported,
)
from .available import AvailableMemory
from .books import Mapping, Memory, Reservation, duplicate, give_back
from .memfds import is_decided, look, place_again
from .protocol import DeviceInfo, Granularity, LiveObjects, MemoryProperties, Support
from .seals import seal

_T = TypeVar("_T")

_GRANULARITY = Granularity(GRANULARITY, GRANULARITY)
_SHARED = libc.MAP_SHARED | libc.MAP_FIXED
_NONE = "only memory of a GPU has that, and this is memory of the host"
_SUPPORT = Support(
    vmm="", posix_fd="", fabric=_NONE, compressible=_NONE, gpu_direct_rdma=_NONE, tile_pool=_NONE, hw_decompress=_NONE,
    multicast=_NONE, legacy_ipc=_NONE, pools=_NONE,
)  # fmt: skip
_PRIVATE = libc.MAP_PRIVATE | libc.MAP_NORESERVE | libc.MAP_FIXED
_PAGE, _PAGES_AT_ONCE = os.sysconf("SC_PAGESIZE"), 1 << 18
# The highest byte of a page's word in /proc/PID/pagemap (proc_pid_pagemap(5)): 0x80 present, 0x40 swapped, 0x20 of a
# file or shared. A page that was copied when it was written is present or swapped, and neither of a file nor shared.
_SHARED_PAGE = bytes(byte for byte in range(256) if byte & 0x20 or not byte & 0xC0)
_GAP = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE | libc.MAP_FIXED_NOREPLACE


class HostDriver:
    """The :class:`~vram.driver.protocol.Driver` of host memory on Linux, with the optional protocols for host memory.
    After a fork the child's handles are inert (I7), but inherited shared mappings stay readable: nothing is undone."""

    name = "host"

    def __init__(self) -> None:
        self.books = HostBooks()
        self._available = AvailableMemory()

    # -- devices ------------------------------------------------------------------------------------------------
    def device_count(self) -> int:
        return 1

    def device_info(self, location: Location) -> DeviceInfo:
        check_location(location)
        # Memory can be shared within one running kernel: that is the identity of this "device".
        uuid = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return DeviceInfo(f"HOST-{uuid}", f"host memory ({os.uname().machine})", self._available.info()[1])

    def support(self, location: Location) -> Support:
        check_location(location)
        return _SUPPORT

    def canonical(self, location: Location) -> Location:
        check_location(location)
        return HOST

    def mem_info(self, location: Location) -> tuple[int, int]:
        check_location(location)
        return self._available.info()

    def mem_granularity(
        self, location: Location, handle_kinds: HandleKind, flags: AllocationFlags = AllocationFlags.NONE
    ) -> Granularity:
        if location is not HOST or handle_kinds is not HandleKind.POSIX_FD:  # seldom, here and below
            check_kinds(location, handle_kinds)
        if flags is not AllocationFlags.NONE:
            check_flags(flags)
        return _GRANULARITY

    # -- addresses ----------------------------------------------------------------------------------------------
    def address_reserve(self, nbytes: int, *, alignment: int = 0, address: int = 0) -> int:
        if nbytes <= 0 or nbytes % GRANULARITY:  # asked here and not there, here and below: it is seldom so
            check_size("address_reserve", nbytes)
        if alignment or address:
            check_alignment("address_reserve", alignment)
            check_address("address_reserve", address, alignment or GRANULARITY, "")
        base = reserve(nbytes, alignment or GRANULARITY, address)
        if base == -1:
            raise libc.failure(f"mmap of {nbytes} bytes of addresses")
        self.books.reservations.add(Reservation(base, nbytes))
        return base

    def address_free(self, address: int, nbytes: int) -> None:
        if self.books.late:
            self.books.catch_up()
        reservation = self.books.reserved("address_free", address, nbytes)
        inside = list(reservation.mappings.at.values())
        if inside and all(mapping.is_leaving for mapping in inside):
            # The thread that works on them unmaps them next, and then frees the reservation.
            if self.books.late.setdefault(reservation, me := object()) is not me:
                raise UsageError(f"address_free({address:#x}, {nbytes}): another thread freed it")
            reservation.is_leaving = True
            self.books.catch_up()
        elif inside:
            raise UsageError(
                f"address_free({address:#x}, {nbytes}): {len(inside)} mappings are in it; unmap them first"
            )
        elif not self.books.free(reservation):
            if ctypes.get_errno():
                raise libc.failure(f"munmap({address:#x}, {nbytes})")
            raise UsageError(
                f"address_free({address:#x}, {nbytes}): another thread freed it, or mapped something in it"
            )

    def address_zero(self, address: int, nbytes: int) -> None:
        reservation = self.books.reserved("address_zero", address, nbytes)
        if reservation.mappings.at:
            raise UsageError(f"address_zero({address:#x}, {nbytes}): something is mapped in it already")
        if not read_zeros(reservation):
            raise libc.failure(f"mprotect({address:#x}, {nbytes}) to READ")

    # -- physical memory ----------------------------------------------------------------------------------------
    def mem_create(
        self, nbytes: int, location: Location, handle_kinds: HandleKind, flags: AllocationFlags = AllocationFlags.NONE
    ) -> int:
        check_flags(flags)
        return self._create("mem_create", nbytes, location, handle_kinds, self.books.new_handle)

    def mem_release(self, handle: int) -> None:
        memory = self.books.handles.pop(handle, None)
        if memory is None:
            raise UsageError(f"mem_release({handle}): no such handle; each is released once")
        memory.drop(handle)

    def mem_retain(self, address: int) -> int:
        return self.books.new_handle(self.books.mapping_at("mem_retain", address).memory)

    def mem_properties(self, handle: int) -> MemoryProperties:
        memory = self.books.memory("mem_properties", handle)
        return MemoryProperties(HOST, memory.kinds, memory.nbytes)

    # -- mappings -----------------------------------------------------------------------------------------------
    def mem_map(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        memory = self.books.whole_memory("mem_map", nbytes, offset, handle)
        self._map("mem_map", address, memory, access=Access.NONE, private=False)

    def mem_map_private(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        memory = self.books.whole_memory("mem_map_private", nbytes, offset, handle)
        self._map("mem_map_private", address, memory, access=Access.NONE, private=True)

    def mem_drop_writes(self, address: int, nbytes: int) -> None:
        if libc.madvise(address, nbytes, libc.MADV_DONTNEED):  # of a private mapping of a file: madvise(2)
            raise libc.failure(f"madvise(MADV_DONTNEED) of {nbytes} bytes at {address:#x}")

    def child_since(self, serial: int) -> float | None:
        return forks.child_since(serial)

    def mem_is_written(self, address: int, nbytes: int) -> bool:
        first, last = address // _PAGE, (address + nbytes - 1) // _PAGE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
                for page in range(first, last + 1, _PAGES_AT_ONCE):
                    found = os.pread(pagemap.fileno(), 8 * min(_PAGES_AT_ONCE, last + 1 - page), 8 * page)
                    if not found[7::8].translate(None, _SHARED_PAGE):
                        continue
                    return True
        except OSError:  # no /proc here
            return True
        return False

    def mem_map_new(
        self, address: int, nbytes: int, location: Location, handle_kinds: HandleKind, access: Access,
        flags: AllocationFlags = AllocationFlags.NONE, *, inherited: bool = True,
    ) -> None:  # fmt: skip
        if type(access) is not Access:
            check_access("mem_map_new", access)
        if flags is not AllocationFlags.NONE:
            check_flags(flags)
        put = partial(self._map, "mem_map_new", address, access=access, private=False, inherited=inherited)
        self._create("mem_map_new", nbytes, location, handle_kinds, put)

    def mem_map_import(
        self, address: int, nbytes: int, fd: int, kind: HandleKind, access: Access, *, private: bool,
        location: Location | None = None, until: float | None = None,
    ) -> None:  # fmt: skip
        if location is not None and location is not HOST:
            check_location(location)
        if type(access) is not Access:
            check_access("mem_map_import", access)
        put = partial(self._map, "mem_map_import", address, access=access, private=private, until=until)
        self._import("mem_map_import", fd, kind, nbytes, put)

    def mem_unmap(self, address: int, nbytes: int) -> None:
        if self.books.late:
            self.books.catch_up()
        taken = self.books.take(address, nbytes)
        try:
            if not self.books.unmap(taken, address, nbytes):
                raise libc.failure(f"mmap of PROT_NONE over {nbytes} bytes at {address:#x}")
        except BaseException:
            give_back(taken)
            raise

    def mem_set_access(self, address: int, nbytes: int, access: Access, locations: Sequence[Location]) -> None:
        check_access("mem_set_access", access)
        if not locations:
            raise UsageError("mem_set_access: no location was named")
        for location in locations:
            check_location(location)
        due = self.books.whole("mem_set_access", address, nbytes, gaps=False)
        code = self.books.protect(due, address, nbytes, access)
        if not code:
            return
        if code == errno.EACCES:
            raise _read_only(f"mem_set_access({address:#x}, {nbytes}, {access.name})")
        raise libc.failure(f"mprotect({address:#x}, {nbytes}) to {access.name}", code)

    def mem_get_access(self, address: int, location: Location) -> Access:
        check_location(location)
        return self.books.mapping_at("mem_get_access", address).access

    # -- other processes ----------------------------------------------------------------------------------------
    def mem_export(self, handle: int, kind: HandleKind) -> int:
        memory = self.books.memory("mem_export", handle)
        if kind != HandleKind.POSIX_FD or memory.kinds != HandleKind.POSIX_FD:
            raise not_exported(f"mem_export({handle})", kind, memory.kinds)
        memory.identify()
        return duplicate(memory.fd())

    def mem_import(self, fd: int, kind: HandleKind, nbytes: int) -> int:
        return self._import("mem_import", fd, kind, nbytes, self.books.new_handle)

    def mem_identity(self, fd: int) -> tuple[int, int]:
        return (stat := look("mem_identity", fd)[0]).st_dev, stat.st_ino

    def mem_seal(self, handle: int) -> None:
        seal(f"mem_seal({handle})", self.books.memory("mem_seal", handle), self.books)

    def mem_is_sealed(self, handle: int) -> bool:
        return is_read_only(self.books.memory("mem_is_sealed", handle).fd())

    # -- bytes --------------------------------------------------------------------------------------------------
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self.books.accessible("copy", source, nbytes, Access.READ)
        self.books.accessible("copy", destination, nbytes, Access.READ_WRITE)
        check_apart(destination, source, nbytes)
        ctypes.memmove(destination, source, nbytes)

    def copy_in(self, destination: int, source: memoryview) -> None:
        self.books.accessible("copy_in", destination, source.nbytes, Access.READ_WRITE)
        with libc.lent("copy_in", source, writable=False) as start:
            ctypes.memmove(destination, start, source.nbytes)

    def copy_out(self, destination: memoryview, source: int) -> None:
        self.books.accessible("copy_out", source, destination.nbytes, Access.READ)
        with libc.lent("copy_out", destination, writable=True) as start:
            ctypes.memmove(start, source, destination.nbytes)

    def fill(self, address: int, value: int, nbytes: int) -> None:
        check_byte(value)
        self.books.accessible("fill", address, nbytes, Access.READ_WRITE)
        ctypes.memset(address, value, nbytes)

    def synchronize(self, location: Location) -> None:
        if location is not HOST:
            check_location(location)

    def buffer(self, address: int, nbytes: int, *, readonly: bool) -> memoryview:
        self.books.accessible("buffer", address, nbytes, Access.READ if readonly else Access.READ_WRITE)
        return libc.view(address, nbytes, readonly=readonly)

    def populate(self, address: int, nbytes: int) -> None:
        for mapping in self.books.accessible("populate", address, nbytes, Access.READ):
            populate(mapping, max(address, mapping.address), min(address + nbytes, mapping.end))

    def collapse(self, address: int, nbytes: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        for mapping in self.books.accessible("collapse", address, nbytes, Access.READ_WRITE):
            collapse(mapping, max(address, mapping.address), min(address + nbytes, mapping.end), until)

    # -- books --------------------------------------------------------------------------------------------------
    def live(self) -> LiveObjects:
        self.books.catch_up()
        return self.books.live()

    # -- inside -------------------------------------------------------------------------------------------------
    def _create(self, call: str, nbytes: int, location: Location, kinds: HandleKind, use: Callable[[Memory], _T]) -> _T:
        """Make memory, and return what its first use does; memory that nobody uses then is given back."""
        if location is not HOST or kinds is not HandleKind.POSIX_FD:
            check_kinds(location, kinds)
        if nbytes <= 0 or nbytes % GRANULARITY:
            check_size(call, nbytes)
        self._available.check(f"{call}({nbytes})", nbytes)
        memory = Memory(memfds.make(nbytes), nbytes, kinds, None)
        try:
            return use(memory)
        except BaseException:
            memory.drop(None)
            raise

    def _import(self, call: str, fd: int, kind: HandleKind, nbytes: int, use: Callable[[Memory], _T]) -> _T:
        """Open memory, the first `nbytes` of it, and return what its first use does, as in :meth:`_create`."""
        if kind != HandleKind.POSIX_FD:
            check_kinds(HOST, kind)
            raise UsageError(f"{call}: kind must be POSIX_FD")
        if nbytes <= 0 or nbytes % GRANULARITY:
            check_size(call, nbytes)
        identity, seals = memfds.check(call, fd, nbytes, GRANULARITY)
        is_sealed = (seals & libc.F_SEAL_WRITE) != 0
        memory = Memory(duplicate(fd), nbytes, kind, identity, is_sealed=is_sealed)
        try:
            return use(memory)
        except BaseException:
            memory.drop(None)
            raise

    def _map(
        self, call: str, address: int, memory: Memory, *, access: Access, private: bool, until: float | None = None,
        inherited: bool = True,
    ) -> None:  # fmt: skip
        nbytes = memory.nbytes
        if address < 0 or address % GRANULARITY:
            check_address(call, address)
        reservation = self.books.reservation_at(call, address, nbytes)
        if not self.books.pages:
            self.books.take_ballast()
        if self.books.late:
            self.books.await_late(reservation, address, address + nbytes)
        mapping = Mapping(address, memory, reservation, private)
        mapping.turn.acquire()
        try:
            fd = self.books.claim(call, mapping)
            if memory.identity is not None and not private:
                mapping.is_final = memory.is_sealed or is_read_only(fd)
            flags = _PRIVATE if private else _SHARED
            if inherited:
                placed = libc.mmap(address, nbytes, PROTECTION[access], flags, fd, 0)
            else:
                mapping.is_inherited = False
                placed = libc.map_uninherited(address, nbytes, PROTECTION[access], flags, fd)
            if placed == -1 and ctypes.get_errno() == errno.EPERM:
                placed = place_again(address, nbytes, access, flags, fd, until)
            if placed == -1:
                raise _refused(f"{call} of {nbytes} bytes at {address:#x}", fd, access, ctypes.get_errno())
            mapping.access = access
            mapping.is_settled = True
            mapping.token.append(None)
        except BaseException:
            if not mapping.is_gone:
                # Refused; and kernels before 6.12 can leave a hole behind a mapping that failed late.
                self.books.put_back(address, nbytes, reservation)
                self.books.withdraw(mapping)
            raise
        finally:
            mapping.turn.release()
            if self.books.late:
                self.books.catch_up()

    def after_fork_in_child(self) -> None:
        """Fill the gaps of mappings that were not inherited: the kernel would give addresses away that the books have
        taken. Memory that has been mapped there since, for children as well, stays as it is."""
        for mapping in self.books.mappings.values():
            if not mapping.is_inherited:
                libc.mmap(mapping.address, mapping.nbytes, libc.PROT_NONE, _GAP, -1, 0)


def _refused(call: str, fd: int, access: Access, code: int) -> Exception:
    """Return the error for an mmap that the kernel refused."""
    if code not in (errno.EACCES, errno.EPERM):
        return libc.failure(f"mmap for {call}", code)
    if code == errno.EPERM and not is_decided(fd):
        return ProtocolError(
            f"{call}: somebody asks for the memory to be sealed against writing, again and again, and meanwhile the "
            f"kernel maps it for nobody; try again when its owner is done"
        )
    if access is Access.READ_WRITE and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
        return _read_only(call)
    return ProtocolError(f"{call}: the memory's descriptor does not allow reading")


def _read_only(call: str) -> AccessDeniedError:
    return AccessDeniedError(
        f"{call}: the memory is read-only here, by a seal or a read-only descriptor; map it privately (copy on write) "
        f"to write to a copy"
    )
