"""The contract between the house and one kind of memory.

Flat, synchronous, integers in and out, in the CUDA driver API's own words. A driver has no policy: it neither rounds
nor retries, and it does not remember who needs what; that is :mod:`vram.memory`. What every driver enforces alike is
the rule book below, which is what GPUs were measured to do; code proven on the host driver therefore holds on a GPU.
:class:`vram.testing.DriverContract` checks it.

The rules
---------
* A size or address that is not a multiple of the granularity is refused (:class:`~vram.errors.AlignmentError`).
* An allocation is mapped whole: offset 0 and its full size. It may be mapped more than once; the mappings are coherent.
* ``mem_unmap`` covers whole mappings; several, with gaps between them, may go in one call. Half a mapping is refused.
* ``mem_set_access`` covers whole mappings without a gap; several adjacent ones may go in one call.
* ``address_free`` names exactly what ``address_reserve`` returned, with nothing mapped in it.
* ``mem_release`` while mapped is fine: the memory lives until the last unmap.
* Memory can be exported only by a kind that was asked for when it was created.

The states of an address
------------------------
::

    free --reserve--> reserved --map--> mapped, no access --set_access--> accessible
    free <---free---- reserved <------------unmap---------------------------

Touching an address that is not accessible faults. Errors of use are :class:`~vram.errors.UsageError` and its children
and leave everything as it was; what nobody could foresee is :class:`~vram.errors.DriverError`.

Thread safety: every method may be called from any thread. Two threads that work on the same object at the same time
are the caller's mistake; the driver's own books survive it. Methods that undo something (``address_free``,
``mem_release``, ``mem_unmap``) take no blocking lock, since finalizers reach them (invariant I3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..spec import Access, HandleKind, Location

__all__ = [
    "CopyOnWrite",
    "DeviceInfo",
    "Driver",
    "Granularity",
    "HostAddressable",
    "Identity",
    "LiveObjects",
    "MemoryProperties",
    "Sealing",
]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device: its stable name across processes (UUID), what it is called, and its memory in bytes."""

    uuid: str
    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Granularity:
    """What sizes and addresses must be multiples of, in bytes: at least `minimum`, best `recommended`."""

    minimum: int
    recommended: int


@dataclass(frozen=True, slots=True)
class MemoryProperties:
    """What the driver knows of an allocation. `nbytes` is None where the driver cannot tell."""

    location: Location
    handle_kinds: HandleKind
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """Counts of what a driver has given out in this process and not taken back; `nbytes` of physical memory."""

    reservations: int
    handles: int
    mappings: int
    nbytes: int


class Driver(Protocol):
    """One kind of memory. See the module for the rules that all methods share."""

    @property
    def name(self) -> str:
        """The :attr:`Location.kind <vram.spec.Location.kind>` that this driver serves."""

    # -- devices ------------------------------------------------------------------------------------------------
    def device_count(self) -> int:
        """Return the number of devices; 1 for the host."""

    def device_info(self, location: Location) -> DeviceInfo:
        """Describe a device. Raises :class:`~vram.errors.UsageError` for one that does not exist."""

    def mem_info(self, location: Location) -> tuple[int, int]:
        """Return (available, total) bytes of physical memory."""

    def mem_granularity(self, location: Location, handle_kinds: HandleKind) -> Granularity:
        """Return the granularity of memory made with these very properties."""

    # -- addresses ----------------------------------------------------------------------------------------------
    def address_reserve(self, nbytes: int, *, alignment: int = 0, address: int = 0) -> int:
        """free -> reserved. Return the base of a range of `nbytes`.

        Parameters
        ----------
        alignment : int
            A power of two; 0 means the granularity.
        address : int
            Where the range should be if that is free; a wish, not a demand. 0 means anywhere.

        Raises
        ------
        AddressSpaceError
            If no such range is left.
        """

    def address_free(self, address: int, nbytes: int) -> None:
        """reserved -> free. The caller sees to it that nothing is mapped and nothing refers to the range."""

    # -- physical memory ----------------------------------------------------------------------------------------
    def mem_create(self, nbytes: int, location: Location, handle_kinds: HandleKind) -> int:
        """Make `nbytes` of zeroed physical memory and return a handle, which the caller must release once.

        Raises
        ------
        OutOfMemoryError
            If there is not enough.
        UnsupportedError
            If the driver cannot make memory that leaves the process in one of `handle_kinds`.
        """

    def mem_release(self, handle: int) -> None:
        """Give a handle back. The memory goes with its last handle, mapping, and exported descriptor, anywhere."""

    def mem_retain(self, address: int) -> int:
        """Return one more handle (to be released once) to the allocation mapped at `address`."""

    def mem_properties(self, handle: int) -> MemoryProperties:
        """Describe an allocation."""

    # -- mappings -----------------------------------------------------------------------------------------------
    def mem_map(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        """reserved -> mapped, no access. `offset` is into the allocation and must be 0, `nbytes` its whole size."""

    def mem_unmap(self, address: int, nbytes: int) -> None:
        """mapped or accessible -> reserved. The caller sees to it that nothing reads or writes there any more."""

    def mem_set_access(self, address: int, nbytes: int, access: Access, locations: Sequence[Location]) -> None:
        """mapped -> accessible (or back, with NONE), for each of `locations`; other locations keep what they have.

        Raises
        ------
        AccessDeniedError
            For writing, if the memory was sealed read-only.
        """

    def mem_get_access(self, address: int, location: Location) -> Access:
        """Return what `location` may do at `address`, which must be mapped."""

    # -- other processes ----------------------------------------------------------------------------------------
    def mem_export(self, handle: int, kind: HandleKind) -> int:
        """Return a new descriptor (close-on-exec) of the allocation. The caller owns and closes it.

        It keeps the physical memory alive on its own, in whichever process holds it.
        """

    def mem_import(self, fd: int, kind: HandleKind, nbytes: int) -> int:
        """Return a handle to the allocation behind `fd`, which stays the caller's.

        Nothing a peer says is believed: a descriptor that is not such memory, that could be truncated under its
        reader, or that is smaller than `nbytes` is refused with :class:`~vram.errors.ProtocolError`.
        """

    # -- bytes --------------------------------------------------------------------------------------------------
    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy between two addresses of this driver; the ranges must not overlap. Returns when it is done."""

    def copy_in(self, destination: int, source: memoryview) -> None:
        """Copy a contiguous buffer of the host to an address."""

    def copy_out(self, destination: memoryview, source: int) -> None:
        """Copy from an address to a writable contiguous buffer of the host."""

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """Set every byte to `value` (0 to 255)."""

    def synchronize(self, location: Location) -> None:
        """Return when all work that was submitted to `location` before is done."""

    # -- books --------------------------------------------------------------------------------------------------
    def live(self) -> LiveObjects:
        """Count what is out in this process."""


@runtime_checkable
class HostAddressable(Protocol):
    """A driver whose addresses the CPU can dereference."""

    def buffer(self, address: int, nbytes: int, *, readonly: bool) -> memoryview:
        """Return the bytes at an accessible range. The caller keeps the mapping alive while the view lives."""

    def populate(self, address: int, nbytes: int) -> None:
        """Touch every page of an accessible range ahead of use, keeping its contents."""


@runtime_checkable
class CopyOnWrite(Protocol):
    """A driver that can map an allocation privately: writes go to copies of the pages that nobody else sees."""

    def mem_map_private(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        """Like :meth:`Driver.mem_map`, but private: may be made writable even if the memory is sealed."""


@runtime_checkable
class Sealing(Protocol):
    """A driver whose kernel can make memory read-only for everybody."""

    def mem_seal(self, handle: int) -> None:
        """Make the memory read-only for good. Nobody, in any process and as any user, can newly map it writable.

        This process's own shared mappings of it become read-only too, at the same addresses and for good. A writable
        mapping that another process made before stays writable.
        """

    def mem_is_sealed(self, handle: int) -> bool:
        """Return whether :meth:`mem_seal` was done to this memory, here or elsewhere."""


@runtime_checkable
class Identity(Protocol):
    """A driver that can tell whether two descriptors are the same memory."""

    def mem_identity(self, fd: int) -> tuple[int, int]:
        """Return a pair that is equal for two open descriptors exactly if they are the same memory."""
