"""The contract between the house and one kind of memory.

Flat, synchronous, integers in and out, in the CUDA driver API's own words. A driver has no policy: it neither rounds
nor retries, and it does not remember who needs what; that is :mod:`vram.memory`. Every driver enforces the rules
below, which GPUs were measured to follow; code proven on the host driver therefore holds on a GPU.
:class:`vram.testing.DriverContract` checks it. A driver with more than these calls is one of two: a
:class:`HostMemory`, whose addresses the CPU can touch, or a :class:`DeviceMemory`, on which devices work on their own.

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

Memory that others made
-----------------------
People do not choose how their memory was allocated, and each way is shared differently:

==========================  ==========================================  =============================================
made with                   :attr:`PointerInfo.kinds`                   leaves the process by
==========================  ==========================================  =============================================
``cuMemCreate``             what it was created with: POSIX_FD, ...     ``mem_adopt``, then ``mem_export``
``cuMemAlloc``              LEGACY_IPC                                  ``ipc_export``, 64 bytes
``cuMemAllocAsync``         POOL, if its pool was created to be shared  the pool's descriptor, and 64 bytes a pointer
anything else               NONE                                        nothing: copy it
==========================  ==========================================  =============================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from ..spec import Access, AllocationFlags, HandleKind, Location

# Seconds within which the kernel has granted a seal or not, where nobody goes on asking: it waits 0.15 s for pages that
# are pinned. Meanwhile it maps nothing.
UNDECIDED = 1.0
# Bytes of one allocation of a pool, at most, that another process opens. Measured with driver 580 on an H100: 5 GiB
# works, and 8 GiB ends the process that opens it with SIGSEGV, inside the driver.
MAX_POOL_ALLOCATION = 5 << 30
HANDLE_BYTES = 64  # of CUipcMemHandle, CUipcEventHandle, CUmemPoolPtrExportData and CUmemFabricHandle


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device: its stable name across processes (UUID), what it is called, and its memory in bytes."""

    uuid: str
    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Granularity:
    """The granularity of sizes and addresses in bytes: multiples of `minimum`, better of `recommended`."""

    minimum: int
    recommended: int


@dataclass(frozen=True, slots=True)
class MemoryProperties:
    """Properties of an allocation. `nbytes` is None where the driver cannot tell; `flags` were granted."""

    location: Location
    handle_kinds: HandleKind
    nbytes: int | None
    flags: AllocationFlags = AllocationFlags.NONE


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """Counts of what a driver has given out in this process and not taken back; `nbytes` of physical memory."""

    reservations: int
    handles: int
    mappings: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Support:
    """The list of a place's capabilities: a field is empty where it works, else it says why not. Found out by doing,
    but `multicast`, `legacy_ipc` and `pools` by version and attributes, since a trial needs a context or does harm."""

    vmm: str
    posix_fd: str
    fabric: str
    compressible: str
    gpu_direct_rdma: str
    tile_pool: str
    hw_decompress: str
    multicast: str
    legacy_ipc: str
    pools: str

    def missing(self) -> dict[str, str]:
        """Return what does not work, by name, and why."""
        return {field.name: why for field in fields(self) if (why := getattr(self, field.name))}


@dataclass(frozen=True, slots=True)
class PointerInfo:
    """A driver's knowledge of the memory at an address; `base` and `nbytes` are its allocation's. `made_by` is "vmm",
    "legacy", "pool", "host", "managed" or "opened" (another process's ``cuMemAlloc``). `identity` is never reused in a
    process, `pool` is 0 for none, and `access` is that of the memory's own GPU."""

    base: int
    nbytes: int
    location: Location
    kinds: HandleKind
    made_by: str
    identity: int
    access: Access
    pool: int = 0


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

    def support(self, location: Location) -> Support:
        """Find out what a device really can, once in a process: some milliseconds, and no context.
        Raises OutOfMemoryError or DeviceLostError if that is why something fails: another time it may work."""

    def canonical(self, location: Location) -> Location:
        """Return the one name of a place in this process: a device's ordinal rather than its UUID.
        Raises :class:`~vram.errors.UsageError` for a place that does not exist, or that this process may not see."""

    def mem_info(self, location: Location) -> tuple[int, int]:
        """Return (available, total) bytes of physical memory."""

    def mem_granularity(
        self, location: Location, handle_kinds: HandleKind, flags: AllocationFlags = AllocationFlags.NONE
    ) -> Granularity:
        """Return the granularity of memory made with these very properties. Raises as :meth:`mem_create` does."""

    # -- addresses ----------------------------------------------------------------------------------------------
    def address_reserve(self, nbytes: int, *, alignment: int = 0, address: int = 0) -> int:
        """free -> reserved. Return the base of a range of `nbytes`; `alignment` is a power of two, 0 the granularity.
        `address` is a wish, 0 means anywhere. Raises AddressSpaceError if no such range is left."""

    def address_free(self, address: int, nbytes: int) -> None:
        """reserved -> free. The caller sees to it that nothing is mapped and nothing refers to the range."""

    # -- physical memory ----------------------------------------------------------------------------------------
    def mem_create(
        self,
        nbytes: int,
        location: Location,
        handle_kinds: HandleKind,
        flags: AllocationFlags = AllocationFlags.NONE,
    ) -> int:
        """Make `nbytes` of zeroed physical memory and return a handle, which the caller must release once.
        Raises OutOfMemoryError, or UnsupportedError if the driver lacks one of `handle_kinds` or `flags`."""

    def mem_release(self, handle: int) -> None:
        """Give a handle back. The memory goes with its last handle, mapping, and exported descriptor, anywhere."""

    def mem_retain(self, address: int) -> int:
        """Return one more handle (to be released once) to the allocation mapped at `address`."""

    def mem_properties(self, handle: int) -> MemoryProperties:
        """Describe an allocation, as the driver itself tells it: what was granted, not what was asked for."""

    # -- mappings -----------------------------------------------------------------------------------------------
    def mem_map(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        """reserved -> mapped, no access. `offset` is into the allocation and must be 0, `nbytes` its whole size."""

    def mem_map_new(
        self,
        address: int,
        nbytes: int,
        location: Location,
        handle_kinds: HandleKind,
        access: Access,
        flags: AllocationFlags = AllocationFlags.NONE,
        *,
        inherited: bool = True,
    ) -> None:
        """:meth:`mem_create`, map and set access in one, all or nothing. The mapping alone holds the memory, until
        :meth:`mem_retain`. Forked children inherit host memory; without `inherited` only from its seal on."""

    def mem_map_import(
        self,
        address: int,
        nbytes: int,
        fd: int,
        kind: HandleKind,
        access: Access,
        *,
        private: bool,
        location: Location | None = None,
        until: float | None = None,
    ) -> None:
        """:meth:`mem_import`, map and set access in one, all or nothing; `fd` stays the caller's. `private` maps as
        :meth:`HostMemory.mem_map_private`. Raises ProtocolError for memory that is not at `location`. A pending seal is
        waited for until `until` (``time.monotonic``), by default :data:`UNDECIDED` seconds."""

    def mem_unmap(self, address: int, nbytes: int) -> None:
        """mapped or accessible -> reserved. The caller sees to it that nothing reads or writes there any more."""

    def mem_set_access(self, address: int, nbytes: int, access: Access, locations: Sequence[Location]) -> None:
        """mapped -> accessible (or back, with NONE), for each of `locations`; other locations keep what they have.
        Raises AccessDeniedError for writing to memory that was sealed read-only."""

    def mem_get_access(self, address: int, location: Location) -> Access:
        """Return what `location` may do at `address`, which must be mapped."""

    # -- other processes ----------------------------------------------------------------------------------------
    def mem_export(self, handle: int, kind: HandleKind) -> int:
        """Return a new descriptor (close-on-exec) of the allocation. The caller owns and closes it.
        It keeps the physical memory alive on its own, in any process that holds it."""

    def mem_import(self, fd: int, kind: HandleKind, nbytes: int) -> int:
        """Return a handle to the allocation behind `fd`, which stays the caller's. Raises ProtocolError for a
        descriptor that is not such memory, could be truncated under its reader, or is smaller than `nbytes`."""

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
        """Count the objects of this process that were not released."""


@runtime_checkable
class HostMemory(Protocol):
    """Further calls of a driver whose memory the CPU can touch, and the kernel backs page by page."""

    def buffer(self, address: int, nbytes: int, *, readonly: bool) -> memoryview:
        """Return the bytes at an accessible range. The caller keeps the mapping alive while the view lives."""

    def populate(self, address: int, nbytes: int) -> None:
        """Touch every page of an accessible range ahead of use, keeping its contents."""

    def collapse(self, address: int, nbytes: int, seconds: float) -> None:
        """Back an accessible range by large pages where the system can, keeping its contents. A hint: failure is no
        error. It is slower than touching the pages, so that it ends after `seconds` seconds, or one page later."""

    def mem_map_private(self, address: int, nbytes: int, offset: int, handle: int) -> None:
        """Like :meth:`Driver.mem_map`, but private: may be made writable even if the memory is sealed."""

    def mem_drop_writes(self, address: int, nbytes: int) -> None:
        """Undo all writes to private mappings: they show the bytes of the allocation again, as these are now.
        The caller names whole mappings and keeps other threads from writing meanwhile."""

    def child_since(self, serial: int) -> float | None:
        """Return when a child was forked that has the memory that was mapped when handle `serial` was made, in seconds
        since 1970; None if no such child lives."""

    def mem_is_written(self, address: int, nbytes: int) -> bool:
        """Return whether a page of a private mapping that these bytes touch was written, and is not shared any more."""

    def address_zero(self, address: int, nbytes: int) -> None:
        """Have a reservation, with nothing mapped in it, read as zeros wherever nothing is mapped, without memory.
        Mapping and unmapping replace zeros in one step, so that no reader faults; writing faults as ever."""

    def mem_seal(self, handle: int) -> None:
        """Make the memory read-only for good, for all processes and users; own shared mappings too, which stay in
        place. Raises BusyError, after a second and with nothing changed, while something else can write to it."""

    def mem_is_sealed(self, handle: int) -> bool:
        """Return whether :meth:`mem_seal` was done to this memory, here or elsewhere."""

    def mem_identity(self, fd: int) -> tuple[int, int]:
        """Return a pair that is equal for two open descriptors exactly if they are the same memory."""


@runtime_checkable
class DeviceMemory(Protocol):
    """Further calls of a driver on whose memory devices, and other libraries of the process, work.
    Streams and events are the CUDA driver's numbers, whoever made them; `location` is the stream's device. Copies and
    fills on memory of others go through a window: a span that somebody else keeps mapped, counted as a mapping."""

    # -- the order of a stream ----------------------------------------------------------------------------------
    def stream_create(self, location: Location) -> int:
        """Return a new stream that waits for no other; the caller destroys it."""

    def stream_destroy(self, stream: int) -> None:
        """Give a stream of :meth:`stream_create` back. Work on it goes on to its end."""

    def stream_synchronize(self, stream: int, location: Location) -> None:
        """Return when a stream is done with what was put on it so far."""

    def stream_is_capturing(self, stream: int, location: Location) -> bool:
        """Whether work put on a stream goes into a graph, to run when that is launched, and not now.
        Raises UsageError if it is no stream."""

    def stream_wait(self, stream: int, event: int, location: Location) -> None:
        """Have a stream wait, on the device, until what an event recorded is done. UsageError if it is no stream."""

    def event_create(self, location: Location, *, interprocess: bool = False) -> int:
        """Return a new event without timing; the caller destroys it. `interprocess`: its handle may be shared."""

    def event_record(self, event: int, stream: int) -> None:
        """Have an event stand for what is on a stream now. UsageError if that is not a stream of its device."""

    def event_is_done(self, event: int) -> bool:
        """Whether what an event recorded is done; True if it recorded nothing."""

    def event_synchronize(self, event: int) -> None:
        """Return when what an event recorded is done. Also for events of other libraries, by their number."""

    def event_destroy(self, event: int) -> None:
        """Give an event back. Those who wait for it are not disturbed."""

    def ordinal_of(self, address: int) -> int:
        """Return the ordinal of the device that has the memory at an address, no matter which library made it.
        Raises UsageError for memory that the driver does not know."""

    def copy_async(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy on a stream of :meth:`stream_create`, either side on the host or the device.
        The caller keeps both sides as they are until it is done. Host memory that is not registered makes it wait."""

    def fill_async(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Set bytes on a stream of :meth:`stream_create`."""

    def host_register(self, address: int, nbytes: int, location: Location) -> None:
        """Pin memory of the host, so that the device copies it on its own. Some 0.4 s for a GiB: do it once."""

    def host_unregister(self, address: int) -> None:
        """Undo :meth:`host_register`."""

    def event_export(self, event: int) -> bytes:
        """Return the 64 bytes for an event of ``event_create(interprocess=True)``.
        Raises UsageError if it was not made so, or by another process."""

    def event_import(self, handle: bytes, location: Location) -> int:
        """Return another process's event, of the GPU at `location`; ``event_destroy`` gives it back.
        Raises ProtocolError if the bytes are no handle of an event, UsageError if this very process made the event."""

    # -- kernels ------------------------------------------------------------------------------------------------
    def capability(self, location: Location) -> tuple[int, int]:
        """Return the compute capability of a device: ``(9, 0)`` is that of sm_90."""

    def kernels_load(self, code: bytes, location: Location) -> int:
        """Load machine code (a cubin) and return it as a number; the caller unloads it.
        Raises DriverError for code that is not for this device, or no machine code."""

    def kernels_unload(self, library: int) -> None:
        """Unload what :meth:`kernels_load` loaded. None of its kernels may be running."""

    def kernel(self, library: int, name: str) -> int:
        """Return a kernel by its name, ready to be launched while others run, for as long as its library is loaded."""

    def launch(
        self,
        kernel: int,
        blocks: int,
        threads: int,
        arguments: Sequence[int],
        stream: int,
        location: Location,
        *,
        dependent: bool = False,
    ) -> None:
        """Put a kernel on a stream, with arguments of 64 bits each. Raises UsageError if it is no stream (any more).
        A `dependent` kernel may begin before the kernel before it has ended, and waits for that itself."""

    def launch_copy(self, destination: int, source: int, nbytes: int, stream: int, location: Location) -> None:
        """Put a copy on any library's stream, both sides within reach of that GPU; the copy engines do it.
        Raises UsageError if the stream is none (any more)."""

    # -- handles of the API, and of the fabric ------------------------------------------------------------------
    def mem_native_handle(self, handle: int) -> int:
        """Return the API's own handle of memory or a multicast object: a ``CUmemGenericAllocationHandle`` of CUDA's.
        It is lent: good until `handle` is released, and not the caller's to release."""

    def mem_export_fabric(self, handle: int) -> bytes:
        """Return the 64 bytes for memory, or a multicast object, that was created with FABRIC among its handle kinds.
        Raises UsageError if it was created without FABRIC."""

    def mem_import_fabric(self, data: bytes, nbytes: int, location: Location) -> int:
        """Return a handle to the memory that 64 bytes name, for the GPU at `location`. The driver does not tell the
        size of the allocation: mapping raises ProtocolError for a wrong `nbytes`. Raises ProtocolError if the bytes
        name no memory, and UnsupportedError without such handles in the driver or the right to use the channel."""

    # -- memory that others made --------------------------------------------------------------------------------
    # The 64 bytes of an allocation are neither secret nor checked. They keep nothing alive: to free memory that is open
    # elsewhere is undefined, says the CUDA manual. A pointer of a pool is opened only once, and freed before its maker
    # frees it: measured, the first of two frees unmaps both.
    def pointer_info(self, address: int) -> PointerInfo:
        """Return what the driver's attributes say of an address. Raises UsageError if it knows nothing there."""

    def pointer_identity(self, address: int) -> int:
        """Return :attr:`PointerInfo.identity` of what is at an address: one question to the driver instead of ten.
        Raises UsageError if the driver knows nothing there."""

    def mem_adopt(self, address: int) -> int:
        """Return a handle (to be released once) to the allocation that somebody else mapped at `address`. Its owner
        still unmaps the mapping. Raises UsageError for memory that was not made with virtual memory management."""

    def window_open(self, address: int, nbytes: int, location: Location, access: Access) -> int:
        """Write down a span that somebody else keeps mapped for `location`; return a number, to be closed once."""

    def window_close(self, window: int) -> None:
        """Strike out a window. Takes no blocking lock."""

    def ipc_export(self, address: int) -> bytes:
        """Return the 64 bytes for the allocation that `address` is the base of.
        Raises UsageError if it is not memory of ``cuMemAlloc``, or not its base."""

    def ipc_open(self, handle: bytes, nbytes: int | None, location: Location) -> int:
        """Open an allocation of another process, and return its address, a window of `nbytes` (None: all of it). Opened
        twice it has the same address, and is closed as often. Raises ProtocolError if the bytes name no base of an
        allocation of `nbytes`, UsageError if this very process made the memory: the driver opens it only elsewhere."""

    def ipc_close(self, address: int) -> None:
        """Undo one :meth:`ipc_open`. The caller sees to it that nothing works on it any more."""

    def ipc_create(self, nbytes: int, location: Location) -> int:
        """Allocate at least 1 byte by ``cuMemAlloc``, for libraries that share no other memory; the contents are
        undefined. Return the address, a window of `nbytes`, which :meth:`ipc_free` frees once."""

    def ipc_free(self, address: int) -> None:
        """Free memory of :meth:`ipc_create`, once. The caller sees to it that nobody works on it any more, anywhere.
        Raises UsageError for any other address."""

    def pool_destroy(self, pool: int) -> None:
        """Give back a pool of :meth:`pool_import`. Nothing of it may be out any more."""

    def pool_export(self, pool: int) -> int:
        """Return a new descriptor (close-on-exec) of a pool, ours or another library's. The caller owns it.
        Raises UsageError if the pool was not created to leave the process so."""

    def pool_import(self, fd: int, location: Location) -> int:
        """Return the pool behind `fd`, which stays the caller's; nothing can be allocated from it.
        Raises ProtocolError if it is no descriptor of a pool, UsageError if it is not open at all."""

    def pool_export_pointer(self, address: int) -> bytes:
        """Return the 64 bytes for an allocation of a pool, by its base, once the pool itself was exported (else
        UsageError). Raises UnsupportedError if it is larger than :data:`MAX_POOL_ALLOCATION`."""

    def pool_open_pointer(self, pool: int, handle: bytes, nbytes: int) -> int:
        """Open an allocation of an imported pool, and return its address, a window of `nbytes`. Raises ProtocolError if
        the bytes are of another pool, size or GPU, UsageError if it is open already, and UnsupportedError above
        :data:`MAX_POOL_ALLOCATION`."""

    def pool_close_pointer(self, address: int) -> None:
        """Undo :meth:`pool_open_pointer`, and return when it is done. Nothing may work on it any more."""

    # -- multicast objects --------------------------------------------------------------------------------------
    # A write to one address goes to memory on each GPU of a team. An object is a handle. Until all devices are added,
    # map and bind block for ever: the caller sees to that. Sizes and offsets are multiples of the granularity. Objects
    # are made only with VRAM_MULTICAST=on: that can take a host out.
    def multicast_check(self, location: Location) -> None:
        """Raise :class:`~vram.errors.UnsupportedError` unless multicast is on and the GPU at `location` has it."""

    def multicast_granularity(self, num_devices: int, nbytes: int, handle_kinds: HandleKind) -> Granularity:
        """Return the granularity of such an object, of what is bound to it, and of the address that it is mapped to.
        Also while multicast is off. Raises UnsupportedError if the driver or every device lacks multicast."""

    def multicast_create(self, num_devices: int, nbytes: int, handle_kinds: HandleKind) -> int:
        """Make an object for a team of `num_devices` GPUs, and return a handle, which the caller must release once.
        Raises UnsupportedError if multicast is off, or the driver or every device lacks it."""

    def multicast_import(self, fd: int, nbytes: int) -> int:
        """Return a handle to the object behind `fd`, which stays the caller's. Raises as :meth:`multicast_create` does,
        and ProtocolError for a descriptor of memory. The caller states the size; mapping refuses a wrong one."""

    def multicast_import_fabric(self, data: bytes, nbytes: int) -> int:
        """:meth:`multicast_import` by the 64 bytes that :meth:`mem_export_fabric` gives for an object."""

    def multicast_add_device(self, handle: int, location: Location) -> None:
        """Add a GPU to the team, for good; each once."""

    def multicast_bind_mem(
        self, handle: int, location: Location, offset: int, nbytes: int, memory_handle: int, memory_offset: int
    ) -> None:
        """Have writes to [`offset`, `offset` + `nbytes`) go to memory too, on the GPU of the team at `location`.
        Memory that cannot leave the process can only be bound to an object that cannot either."""

    def multicast_bind_address(self, handle: int, location: Location, offset: int, nbytes: int, address: int) -> None:
        """:meth:`multicast_bind_mem` for the memory mapped at an address of this driver, within one mapping."""

    def multicast_unbind(self, handle: int, location: Location, offset: int, nbytes: int) -> None:
        """Undo a bind of memory on the GPU at `location`; `offset` and `nbytes` are those of the bind, exactly.
        The caller checks them: anything else is undefined in the driver. Takes no blocking lock."""
