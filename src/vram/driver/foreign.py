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


@runtime_checkable
class Foreign(Protocol):
    """A driver that knows memory which it did not make. Copies and fills go through a window: a span that somebody else
    keeps mapped, counted among :attr:`LiveObjects.mappings <vram.driver.protocol.LiveObjects.mappings>`."""

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


@runtime_checkable
class LegacyIpc(Protocol):
    """A driver whose allocations can be opened in another process by 64 bytes, which are neither secret nor checked.
    They keep nothing alive: to free memory that is open elsewhere is undefined, says the CUDA manual."""

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


@runtime_checkable
class InterprocessEvents(Protocol):
    """A driver whose events another process can wait for."""

    def event_export(self, event: int) -> bytes:
        """Return the 64 bytes for an event of ``event_create(interprocess=True)``.
        Raises UsageError if it was not made so, or by another process."""

    def event_import(self, handle: bytes, location: Location) -> int:
        """Return another process's event, of the GPU at `location`; ``event_destroy`` gives it back.
        Raises ProtocolError if the bytes are no handle of an event, UsageError if this very process made the event."""


@runtime_checkable
class Pools(Protocol):
    """A driver with stream-ordered pools; all calls run under the context of the pool's GPU. A pool made with a handle
    kind can be opened in another process, and then each of its pointers. There a pointer is opened only once, and freed
    before its maker frees it: measured, the first of two frees unmaps both."""

    def pool_create(self, location: Location, handle_kinds: HandleKind) -> int:
        """Make a pool, which the caller destroys once.
        Raises UnsupportedError if the device has no pools, or none that leave the process so."""

    def pool_destroy(self, pool: int) -> None:
        """Give back a pool of :meth:`pool_create` or :meth:`pool_import`. Nothing of it may be out any more."""

    def pool_export(self, pool: int, kind: HandleKind) -> int:
        """Return a new descriptor (close-on-exec) of a pool, ours or another library's. The caller owns it.
        Raises UsageError if the pool was not created to leave the process in that way."""

    def pool_import(self, fd: int, kind: HandleKind, location: Location) -> int:
        """Return the pool behind `fd`, which stays the caller's; nothing can be allocated from it.
        Raises ProtocolError if it is no descriptor of a pool, UsageError if it is not open at all."""

    def pool_set_access(self, pool: int, access: Access, locations: Sequence[Location]) -> None:
        """Let other GPUs access what a pool holds, now and later."""

    def pool_allocate(self, pool: int, nbytes: int, stream: int) -> int:
        """Return the address of `nbytes`, ready for work that comes on `stream` later.
        Raises OutOfMemoryError, or UsageError if the pool was imported or the stream is none of its GPU."""

    def pool_free(self, address: int, stream: int) -> None:
        """Give memory of :meth:`pool_allocate` back, after what is on `stream` now.
        Memory that was opened goes by :meth:`pool_close_pointer` instead."""

    def pool_export_pointer(self, address: int) -> bytes:
        """Return the 64 bytes for an allocation of a pool, by its base, once the pool itself was exported (else
        UsageError). Raises UnsupportedError if it is larger than :data:`MAX_POOL_ALLOCATION`."""

    def pool_open_pointer(self, pool: int, handle: bytes, nbytes: int) -> int:
        """Open an allocation of an imported pool, and return its address, a window of `nbytes`. Raises ProtocolError if
        the bytes are of another pool, size or GPU, UsageError if it is open already, and UnsupportedError above
        :data:`MAX_POOL_ALLOCATION`."""

    def pool_close_pointer(self, address: int) -> None:
        """Undo :meth:`pool_open_pointer`, and return when it is done. Nothing may work on it any more."""
