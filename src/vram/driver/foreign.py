"""The contract about memory that others made: what a driver may know of it, and the ways in which it travels.

Capabilities in the manner of :mod:`.protocol`, whose rules hold here too: flat, integers and bytes in and out, no
policy. People do not choose how their memory was allocated, and each way is shared differently:

==========================  ==========================================  =============================================
made with                   :attr:`PointerInfo.kinds`                   leaves the process by
==========================  ==========================================  =============================================
``cuMemCreate``             what it was created with: POSIX_FD, ...     :meth:`Foreign.mem_adopt`, then ``mem_export``
``cuMemAlloc``              LEGACY_IPC                                  :meth:`LegacyIpc.ipc_export`, 64 bytes
``cuMemAllocAsync``         POOL, if its pool was created to be shared  the pool's descriptor, and 64 bytes a pointer
anything else               NONE                                        nothing: copy it
==========================  ==========================================  =============================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..spec import Access, HandleKind, Location

# Bytes of one allocation of a pool, at most, that another process opens. Measured with driver 580 on an H100: 5 GiB
# works, and 8 GiB ends the process that opens it with SIGSEGV, inside the driver.
MAX_POOL_ALLOCATION = 5 << 30
HANDLE_BYTES = 64  # of CUipcMemHandle, CUipcEventHandle and CUmemPoolPtrExportData


@dataclass(frozen=True, slots=True)
class PointerInfo:
    """What a driver knows of the memory at an address, whoever made it.

    Attributes
    ----------
    base, nbytes : int
        The allocation that the address lies in; of virtual memory management the one mapping.
    location : Location
        Where it is.
    kinds : HandleKind
        How it can leave the process; NONE if in no way.
    made_by : {"vmm", "legacy", "pool", "host", "managed", "opened"}
        The family of calls that made it: ``cuMemCreate``, ``cuMemAlloc``, a pool, memory of the host that the driver
        knows, or ``cuMemAllocManaged``; or that opened another process's ``cuMemAlloc`` memory.
    identity : int
        A number that no other allocation of this process has, or had (``CU_POINTER_ATTRIBUTE_BUFFER_ID``).
    access : Access
        What the memory's own GPU may do there.
    pool : int
        The driver's number of the pool; 0 if it is of none.
    """

    base: int
    nbytes: int
    location: Location
    kinds: HandleKind
    made_by: str
    identity: int
    access: Access
    pool: int = 0


@runtime_checkable
class Foreign(Protocol):
    """A driver that knows memory which it did not make through this library.

    What such memory is worked on with (copies, fills) goes through a window: a span of addresses that somebody else
    keeps mapped. Windows are counted among :attr:`LiveObjects.mappings <vram.driver.protocol.LiveObjects.mappings>`.
    """

    def pointer_info(self, address: int) -> PointerInfo:
        """Say what is at an address. Asks the driver's attributes; tries nothing.

        Raises
        ------
        UsageError
            If the driver knows nothing there.
        """

    def pointer_identity(self, address: int) -> int:
        """Return :attr:`PointerInfo.identity` of what is at an address: one question instead of ten.

        Raises
        ------
        UsageError
            If the driver knows nothing there.
        """

    def mem_adopt(self, address: int) -> int:
        """Return a handle (to be released once) to the allocation that somebody else mapped at `address`.

        It holds the memory, not the mapping: that goes when its owner unmaps it.

        Raises
        ------
        UsageError
            If what is there was not made with virtual memory management.
        """

    def window_open(self, address: int, nbytes: int, location: Location, access: Access) -> int:
        """Write down a span that somebody else keeps mapped for `location`; return a number, to be closed once."""

    def window_close(self, window: int) -> None:
        """Strike out a window. Takes no blocking lock."""


@runtime_checkable
class LegacyIpc(Protocol):
    """A driver whose allocations can be opened in another process by 64 bytes.

    The memory lives as long as its maker lets it: freeing it while it is open elsewhere is undefined, says the CUDA
    manual. And the bytes are no secret and not checked: measured, a changed one opened another address.
    """

    def ipc_export(self, address: int) -> bytes:
        """Return the 64 bytes for the allocation that `address` is the base of.

        Raises
        ------
        UsageError
            If it is not memory of ``cuMemAlloc``, or not its base.
        """

    def ipc_open(self, handle: bytes, nbytes: int | None, location: Location) -> int:
        """Open an allocation of another process for a GPU, and return its address here, a window of `nbytes`.

        The same allocation opened twice has the same address, and is closed as often as it was opened.

        Parameters
        ----------
        nbytes : int or None
            The size of the whole allocation, as its owner stated it. None if nobody did: then the window is all of it,
            whose size :meth:`Foreign.pointer_info` tells.

        Raises
        ------
        ProtocolError
            If the bytes are no such handle, what they name is not the base of an allocation, or has not `nbytes`.
        UsageError
            If this very process made the memory: it is there already, and the driver opens it only elsewhere.
        """

    def ipc_close(self, address: int) -> None:
        """Undo one :meth:`ipc_open`. The caller sees to it that nothing works on it any more."""

    def ipc_create(self, nbytes: int, location: Location) -> int:
        """Allocate by ``cuMemAlloc``, and return the address, a window of `nbytes`; freed once, by :meth:`ipc_free`.

        For libraries that share no other memory. Its contents are undefined.

        Parameters
        ----------
        nbytes : int
            The size in bytes, at least 1.
        location : Location
            The GPU.

        Raises
        ------
        OutOfMemoryError
            If there is no room.
        UsageError
            If `nbytes` is no size.
        """

    def ipc_free(self, address: int) -> None:
        """Free what :meth:`ipc_create` made. The caller sees to it that nobody works on it any more, anywhere.

        Raises
        ------
        UsageError
            If `address` is not one that :meth:`ipc_create` returned, or was freed before.
        """


@runtime_checkable
class InterprocessEvents(Protocol):
    """A driver whose events another process can wait for."""

    def event_export(self, event: int) -> bytes:
        """Return the 64 bytes for an event of ``event_create(interprocess=True)``.

        Raises
        ------
        UsageError
            If it was not made so, or by another process.
        """

    def event_import(self, handle: bytes, location: Location) -> int:
        """Return another process's event, of the GPU at `location`; ``event_destroy`` gives it back.

        Raises
        ------
        ProtocolError
            If the bytes are no handle of an event.
        UsageError
            If this very process made the event.
        """


@runtime_checkable
class Pools(Protocol):
    """A driver with stream-ordered pools. Everything happens under the context of the pool's GPU.

    A pool made with a handle kind can be opened in another process, and then each of its pointers. Whoever opened a
    pointer frees it before its maker does, and the same pointer is never opened twice: measured, the first free
    unmaps both.
    """

    def pool_create(self, location: Location, handle_kinds: HandleKind) -> int:
        """Make a pool, which the caller destroys once.

        Raises
        ------
        UnsupportedError
            If the device has no pools, or none that leave the process so.
        """

    def pool_destroy(self, pool: int) -> None:
        """Give back a pool of :meth:`pool_create` or :meth:`pool_import`. Nothing of it may be out any more."""

    def pool_export(self, pool: int, kind: HandleKind) -> int:
        """Return a new descriptor (close-on-exec) of a pool, ours or another library's. The caller owns it.

        Raises
        ------
        UsageError
            If it was not created to leave the process in that way.
        """

    def pool_import(self, fd: int, kind: HandleKind, location: Location) -> int:
        """Return the pool behind `fd`, which stays the caller's; nothing can be allocated from it.

        Raises
        ------
        ProtocolError
            If it is no descriptor of a pool.
        UsageError
            If it is no open descriptor at all.
        """

    def pool_set_access(self, pool: int, access: Access, locations: Sequence[Location]) -> None:
        """Let other GPUs access what a pool holds, now and later."""

    def pool_allocate(self, pool: int, nbytes: int, stream: int) -> int:
        """Return the address of `nbytes`, ready for work that comes on `stream` later.

        Raises
        ------
        OutOfMemoryError
            If there is not enough.
        UsageError
            If the pool was imported, or that is no stream of its GPU.
        """

    def pool_free(self, address: int, stream: int) -> None:
        """Give memory of :meth:`pool_allocate` back, after what is on `stream` now.

        Not what was opened: see :meth:`pool_close_pointer`.
        """

    def pool_export_pointer(self, address: int) -> bytes:
        """Return the 64 bytes for an allocation of a pool, by its base, once the pool itself was exported.

        Raises
        ------
        UsageError
            If it is no such base, or the pool cannot leave the process, or was not exported before (measured).
        UnsupportedError
            If it is larger than :data:`MAX_POOL_ALLOCATION`.
        """

    def pool_open_pointer(self, pool: int, handle: bytes, nbytes: int) -> int:
        """Open an allocation of an imported pool, and return its address here, a window of `nbytes`.

        Raises
        ------
        ProtocolError
            If the bytes are none of that pool, or what they name has not `nbytes` or is on another GPU than was said.
        UnsupportedError
            If it is larger than :data:`MAX_POOL_ALLOCATION`.
        UsageError
            If it is open already.
        """

    def pool_close_pointer(self, address: int) -> None:
        """Undo :meth:`pool_open_pointer`, and return when it is done. Nothing may work on it any more."""
