"""Physical memory: made here or imported, one class, one undo."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from ..driver.protocol import DeviceMemory, Driver, HostMemory, MemoryProperties
from ..errors import UnsupportedError, UsageError
from ..lifetime import Claim, Handle, Label, Owned, own, shielded, unwinding
from ..spec import AllocationFlags, AllocationSpec, HandleKind, Location, format_size
from . import capabilities, checks
from .kinds import OWN

if TYPE_CHECKING:
    from typing import Self

_T = TypeVar("_T")


@contextmanager
def or_else(undo: Callable[[], object]) -> Iterator[None]:
    """Call something if a block fails; what fails then, too, becomes a note on the first error (I4)."""
    try:
        yield
    except BaseException as error:
        with unwinding(error):
            undo()
        raise


def acquire(
    label: Label, make: Callable[[], _T], back: Callable[[_T], object], *, depends: Iterable[Handle] = ()
) -> tuple[Claim, _T]:
    """Make something by one call; return the first claim on it and what the call returned, which `back` takes to undo
    it. The handle is there before the call, and nothing is left if that fails (I4)."""
    made: list[_T] = []
    claim = own(label, partial(_undo_made, made, back), depends=depends)
    try:
        made.append(make())
    except BaseException as error:  # or_else spelt out: all memory comes by here
        with unwinding(error):
            claim.release()
        raise
    return claim, made[0]


def _undo_made(made: list[_T], back: Callable[[_T], object]) -> None:
    for one in made:
        back(one)


class Memory:
    """The part that all facades of one allocation share; for this room only.
    It has no claim on the counted handle: each holder of it makes sure that somebody has a claim."""

    __slots__ = (
        "driver", "driver_handle", "exported", "fabric", "first_mapped", "flags", "handle", "handle_kinds", "homes",
        "is_lent", "location", "lock", "nbytes", "sealed", "serial",
    )  # fmt: skip

    def __init__(
        self,
        driver: Driver,
        driver_handle: int,
        nbytes: int,
        location: Location,
        kinds: HandleKind,
        handle: Handle,
        flags: AllocationFlags = AllocationFlags.NONE,
    ) -> None:
        self.driver = driver
        self.driver_handle = driver_handle
        self.nbytes = nbytes
        self.location = location
        self.homes: tuple[Location, ...] = (location,)  # whose access to a mapping is meant where nobody is named
        self.handle_kinds = kinds
        self.flags = flags
        self.handle = handle
        self.exported: dict[HandleKind, int] = {}
        self.fabric = b""  # the 64 bytes, once somebody asked for them
        self.is_lent = False  # the driver's own handle: whoever has that can export it, too
        self.sealed = False  # by this process, through this object; is_sealed() asks the driver
        self.serial = 0  # once somebody asked for it
        # Serial number of the first mapping of a region that anybody may have got by a fork; it outlives that mapping,
        # since what is mapped anew is the same memory. 0: none.
        self.first_mapped = 0
        self.lock = threading.RLock()  # never reached from a finalizer

    @property
    def has_left(self) -> bool:
        """Whether somebody else may have it: from then on nobody here knows all that happens to it."""
        return bool(self.exported or self.fabric or self.is_lent)


class Exportable(Owned):
    """Memory or a multicast object, which other processes can open: by a descriptor, or by 64 bytes."""

    __slots__ = ("_memory",)

    _memory: Memory

    @property
    def driver(self) -> Driver:
        """The driver that made it."""
        return self._memory.driver

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._memory.nbytes

    @property
    def handle_kinds(self) -> HandleKind:
        """How it can leave this process."""
        return self._memory.handle_kinds

    @property
    def driver_handle(self) -> int:
        """The handle for the ``mem_`` methods of :attr:`driver`; the handle of CUDA is :attr:`native_handle`.

        Raises ClosedError or ForkedError when that means nothing any more.
        """
        self.handle  # noqa: B018  (the check)
        return self._memory.driver_handle

    @property
    def native_handle(self) -> int:
        """The handle of the driver's own API: a ``CUmemGenericAllocationHandle`` of CUDA, for calls of your own.

        It is lent: good until this object is closed, and not to be released. Calls with it are not counted here, and
        this object is taken for exported from then on.

        Raises
        ------
        UnsupportedError
            If the driver has no such handles, as that of the host.
        """
        self.handle  # noqa: B018  (the check)
        memory = self._memory
        calls = capabilities.devices(memory.driver, "handles of CUDA", "A descriptor stands for it: export()")
        found = calls.mem_native_handle(memory.driver_handle)
        memory.is_lent = True
        return found

    @shielded
    def export(self, kind: HandleKind = HandleKind.POSIX_FD) -> int:
        """Lend a descriptor of this object: duplicate or send it, never close it.

        Made at the first call and kept, since that can cost near a millisecond; closed with the object.

        Raises
        ------
        UsageError
            If it was not created to leave the process this way.
        """
        handle = self.handle
        memory = self._memory
        with memory.lock:
            fd = memory.exported.get(checks.kinds(kind))
            if fd is None:
                with handle.claim("export"):  # another thread may close this object while the driver works
                    fd = memory.driver.mem_export(memory.driver_handle, kind)
                    handle.keep(lambda: f"exported descriptor of {handle.label}", partial(os.close, fd))
                    memory.exported[kind] = fd
            return fd

    @shielded
    def export_fabric(self) -> bytes:
        """Return the 64 bytes by which another machine opens this object; see :meth:`import_fabric`.

        They travel in any way, and keep nothing alive: keep this object until it was opened there. The system
        decides who may open it: both processes must be allowed to use the same IMEX channel.

        Raises
        ------
        UsageError
            If it was created without FABRIC among its handle kinds.
        UnsupportedError
            If the driver has no such handles.
        """
        handle, memory = self.handle, self._memory
        calls = fabric(memory.driver)
        if not memory.fabric:
            with handle.claim("export"):  # another thread may close this object while the driver works
                memory.fabric = calls.mem_export_fabric(memory.driver_handle)
        return memory.fabric


class PhysicalAllocation(Exportable):
    """Bytes without an address: a whole number of granules, counted, mapped as a whole, shared by descriptor.

    Made by :meth:`create` or :meth:`import_`. Closing it gives up this object's claim; the memory itself goes when no
    mapping, no other claim and no exported descriptor, in any process, holds it any more.
    """

    __slots__ = ("_warn_on_leak",)

    def __init__(self, memory: Memory, claim: Claim, *, managed: bool = False) -> None:
        self._memory = memory
        self._warn_on_leak = not managed
        self._claim = claim

    @classmethod
    @shielded
    def create(
        cls,
        driver: Driver,
        nbytes: int | str | AllocationSpec,
        location: Location | str | None = None,
        *,
        handle_kinds: HandleKind | None = None,
        flags: AllocationFlags | None = None,
    ) -> Self:
        """Make zeroed memory.

        Parameters
        ----------
        driver : Driver
            The driver that serves `location`.
        nbytes : int, str or AllocationSpec
            Size in bytes, a positive multiple of the driver's granularity; or all that is asked for in one value, and
            then nothing else.
        location : Location or str
            Where the memory lives.
        handle_kinds : HandleKind
            How it must be able to leave this process; this cannot be chosen later. NONE for never. By default POSIX_FD.
        flags : AllocationFlags
            Its purpose, such as GPUDirect RDMA. :attr:`flags` says what of that the driver granted.

        Raises
        ------
        AlignmentError, UsageError
            For a size or place that cannot be, naming the nearest that can.
        OutOfMemoryError
            If there is not enough.
        UnsupportedError
            If the driver or the device lacks one of `handle_kinds` or `flags`: with what it takes, and what to do.
        """
        if isinstance(nbytes, AllocationSpec):
            spec = nbytes
            if any(other is not None for other in (location, handle_kinds, flags)):
                raise UsageError("an AllocationSpec says all that is asked for: leave the other arguments out")
            nbytes, location, handle_kinds, flags = spec.nbytes, spec.location, spec.handle_kinds, spec.flags
        if location is None:
            raise UsageError('say where the memory is to be, such as location="cuda:0", or pass an AllocationSpec')
        place = checks.place(driver, location)
        kinds = checks.kinds(OWN.kind if handle_kinds is None else handle_kinds)
        meant = checks.flags(AllocationFlags.NONE if flags is None else flags)
        return cls(*create_memory(driver, checks.size(nbytes, "nbytes"), place, kinds, meant))

    @classmethod
    @shielded
    def import_(cls, driver: Driver, fd: int, nbytes: int | str, *, kind: HandleKind = HandleKind.POSIX_FD) -> Self:
        """Open memory that another process (or this one) exported.

        Parameters
        ----------
        fd : int
            The descriptor. It is lent: it stays the caller's and may be closed afterwards.
        nbytes : int or str
            Size in bytes of the allocation, as its owner stated it; the driver checks it.

        Raises
        ------
        ProtocolError
            If the descriptor is not such memory, is smaller than `nbytes`, or could be truncated under its reader.
        """
        size = checks.size(nbytes, "nbytes")
        call = partial(checks.driver_of(driver).mem_import, fd, checks.kinds(kind), size)
        return cls(*_open(driver, size, None, call))

    @classmethod
    @shielded
    def import_fabric(cls, driver: Driver, data: bytes, nbytes: int | str, location: Location | str) -> Self:
        """Open memory by the 64 bytes that :meth:`export_fabric` gave, in another process or on another machine.

        Parameters
        ----------
        data : bytes
            The 64 bytes of a ``CUmemFabricHandle``.
        nbytes : int or str
            Size in bytes of the whole allocation, as its owner stated it. The driver does not tell; a wrong one is
            refused when it is mapped.
        location : Location or str
            The GPU that will work on it. The memory is said to be there if its own GPU is not one of this process.

        Raises
        ------
        ProtocolError
            If the bytes name no memory.
        UnsupportedError
            If the driver knows no such handles (before CUDA 12.3), or this process may not use the IMEX channel.
        """
        calls, place, size = fabric(driver), checks.place(driver, location), checks.size(nbytes, "nbytes")
        return cls(*_open(driver, size, None, partial(calls.mem_import_fabric, checks.handle_bytes(data), size, place)))

    @classmethod
    def of(cls, memory: Memory | PhysicalAllocation, holder: str = "lent") -> Self:
        """Return one more facade of an allocation, with a claim of its own. Forgetting to close it does no harm.

        Raises
        ------
        UsageError
            If `memory` is no allocation.
        """
        if isinstance(memory, PhysicalAllocation):
            memory = memory._memory
        elif not isinstance(memory, Memory):
            raise UsageError(f"memory must be a PhysicalAllocation, not {type(memory).__name__}")
        return cls(memory, memory.handle.claim(holder), managed=True)

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def location(self) -> Location:
        """Where it lives."""
        return self._memory.location

    @property
    def flags(self) -> AllocationFlags:
        """The uses that it was made for, as far as the driver granted them."""
        return self._memory.flags

    def properties(self) -> MemoryProperties:
        """Ask the driver what it knows of this memory: place, handle kinds, size and flags.

        Of memory of a GPU it is ``cuMemGetAllocationPropertiesFromHandle`` that answers. The driver tells no size, and
        no handle kinds of memory that was imported: these are what this library knows.
        """
        with self.handle.claim("properties"):  # another thread may close this object while the driver answers
            return self._memory.driver.mem_properties(self._memory.driver_handle)

    def __repr__(self) -> str:
        memory = self._memory
        kinds = (memory.handle_kinds.name or "none").lower()
        if memory.flags:
            kinds += f", {(memory.flags.name or hex(memory.flags)).lower()}"
        state = ", closed" if self.is_closed else ", exported" if memory.has_left else ""
        return f"<PhysicalAllocation {memory.location} {format_size(memory.nbytes)}, {kinds}{state}>"

    @shielded
    def identity(self) -> tuple[int, int] | None:
        """Return a pair that two allocations share exactly if they are the same memory; None if nobody can tell."""
        self.handle  # noqa: B018  (the check)
        driver = self._memory.driver
        if OWN.kind not in self._memory.handle_kinds or not isinstance(driver, HostMemory):
            return None
        memory = self._memory
        fd = memory.exported.get(OWN.kind)
        if fd is not None:
            return driver.mem_identity(fd)
        fd = memory.driver.mem_export(memory.driver_handle, OWN.kind)
        try:
            return driver.mem_identity(fd)
        finally:
            os.close(fd)

    @property
    def serial(self) -> int:
        """A number for this memory that no other has, on any machine: chosen at random when first asked for.

        It tells who was told of this memory before that it is the same. It is no identity that a driver vouches for.
        """
        self.handle  # noqa: B018  (the check)
        memory = self._memory
        with memory.lock:
            memory.serial = memory.serial or int.from_bytes(os.urandom(7), "little") + 1
            return memory.serial

    # -- read-only for good -------------------------------------------------------------------------------------
    @shielded
    def seal(self) -> None:
        """Make the memory read-only for everybody and for good, this process's own mappings included.

        Raises
        ------
        UnsupportedError
            If the driver's memory has no such thing.
        """
        handle = self.handle
        if not can_seal(self._memory.driver):
            raise UnsupportedError(
                f"sealing {handle.label}",
                "a kernel that enforces it",
                f"the {self._memory.driver.name} driver, which cannot",
                "Map it with Access.READ where it must not be written; that is no security boundary",
            )
        seal_memory(self._memory)

    @property
    def is_sealed(self) -> bool:
        """Whether the memory was made read-only for good, here or in another process."""
        self.handle  # noqa: B018  (the check)
        return is_sealed(self._memory)


class Received(NamedTuple):
    """Memory that another process sent, not opened yet; `fd` is lent, and the driver checks `nbytes`, its owner's word.
    `until` (``time.monotonic``) bounds the wait for a pending seal, over several regions."""

    fd: int
    nbytes: int
    handle_kinds: HandleKind = HandleKind.POSIX_FD
    until: float | None = None


def create_memory(
    driver: Driver, nbytes: int, location: Location, kinds: HandleKind, flags: AllocationFlags = AllocationFlags.NONE
) -> tuple[Memory, Claim]:
    """Make memory, from arguments that were checked, and return it with the first claim on it."""
    made = partial(driver.mem_create, nbytes, location, kinds, flags)
    if flags:  # some are wishes
        memory, claim = _open(driver, nbytes, location, made)
        memory.flags &= flags
        return memory, claim
    claim, raw = acquire(partial(_label, nbytes, location), made, driver.mem_release)
    return Memory(driver, raw, nbytes, location, kinds, claim.handle), claim


@shielded
def retain_memory(driver: Driver, address: int, nbytes: int, location: Location) -> tuple[Memory, Claim]:
    """Get hold of memory that only a mapping holds so far, and return it with the first claim on it."""
    return _open(driver, nbytes, location, partial(driver.mem_retain, address))


@shielded
def adopt_memory(driver: Driver, address: int, nbytes: int, location: Location) -> tuple[Memory, Claim]:
    """Get hold of memory that another library mapped, and return it with the first claim on it."""
    return _open(driver, nbytes, location, partial(capabilities.foreign(driver).mem_adopt, address))


def _open(driver: Driver, nbytes: int, where: Location | None, make: Callable[[], int]) -> tuple[Memory, Claim]:
    """Open memory, of which the driver says what it is; `where` is None for memory that is imported."""
    claim, raw = acquire(partial(_label, nbytes, where or f"{driver.name}, imported"), make, driver.mem_release)
    with or_else(claim.release):
        found = driver.mem_properties(raw)
    memory = Memory(driver, raw, nbytes, found.location, found.handle_kinds, claim.handle, found.flags)
    return memory, claim


def _label(nbytes: int, where: object) -> str:
    return f"allocation of {format_size(nbytes)} on {where}"


def fabric(driver: Driver) -> DeviceMemory:
    """Return the driver as one whose memory another machine can open."""
    return capabilities.devices(driver, "64-byte handles of the fabric", "Share it by descriptor: export()")


def can_seal(driver: Driver) -> bool:
    """Whether a driver's memory can be made read-only for good."""
    return capabilities.has(type(driver), HostMemory)


def seal_memory(memory: Memory) -> None:
    """Seal an open allocation of a driver that can."""
    driver = cast("HostMemory", memory.driver)
    driver.mem_seal(memory.driver_handle)
    memory.sealed = True


def is_sealed(memory: Memory) -> bool:
    """Ask the driver whether an open allocation is sealed; False where there is no such thing."""
    driver = memory.driver
    return can_seal(driver) and cast("HostMemory", driver).mem_is_sealed(memory.driver_handle)
