"""The ways out of a process. A new handle kind is a row here, the calls of its driver, and its form on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

from ..driver.protocol import MAX_POOL_ALLOCATION, DeviceMemory
from ..errors import InternalError
from ..spec import HandleKind, Location


def _no_handle(*_: object) -> NoReturn:
    raise InternalError("memory that goes by file descriptor was to go by a handle")


class Way(NamedTuple):
    """A handle kind by which memory is shared, and what it asks of the way to the other process."""

    kind: HandleKind
    made_by: str  # the family of driver calls, as PointerInfo names it
    makes: str  # these calls, in words
    goes: str  # what goes to the other process, in words
    transport: str  # the transport that hands the memory itself over
    has_fd: bool  # whether a descriptor goes along: then an exchange of bytes alone does not carry it
    is_kept: bool  # whether the memory outlives its maker, so that a keeper can hold it
    # Where such memory cannot leave its process: why, and what to do.
    lacking: tuple[str, str] = ("memory that the driver does not share", "Copy it into memory of vram: vram.copy(...)")
    at_home: bool = False  # whether it is opened on the very GPU that it is on, and on no other
    most: int = 1 << 62  # bytes of an allocation that can be opened
    by_handle: bool = False  # whether it goes by 64 bytes; the descriptor that goes along is then that of its pool
    export: Callable[[DeviceMemory, int], bytes] = _no_handle  # return the 64 bytes of the allocation at an address
    enter: Callable[[DeviceMemory, bytes, int | None, Location, int], int] = _no_handle  # open it; the last is the pool
    leave: Callable[[DeviceMemory], Callable[[int], object]] = _no_handle  # return what closes it

    @property
    def has_pool(self) -> bool:
        """Whether the descriptor of its pool goes along with the 64 bytes."""
        return self.has_fd and self.by_handle


# In the order in which they are taken. The first is that of all memory that vram makes.
WAYS = (
    Way(
        HandleKind.POSIX_FD, "vmm", "cuMemCreate", "by file descriptor", "vmm", has_fd=True, is_kept=True,
        lacking=(
            "memory made with handle type 0, or imported from another process, which alone can share it",
            "Ask for POSIX_FD when it is made, or copy with vram.copy()",
        ),
    ),
    Way(
        HandleKind.LEGACY_IPC, "legacy", "cudaMalloc", "by a 64-byte handle", "ipc", has_fd=False, is_kept=False,
        by_handle=True,
        export=lambda driver, address: driver.ipc_export(address),
        enter=lambda driver, data, nbytes, user, _: driver.ipc_open(data, nbytes, user),
        leave=lambda driver: driver.ipc_close,
    ),
    Way(
        HandleKind.POOL, "pool", "a stream-ordered pool", "by its pool's file descriptor and a 64-byte handle", "ipc",
        has_fd=True, is_kept=False, at_home=True, most=MAX_POOL_ALLOCATION,
        lacking=(
            "memory of a pool made without a handle type, as the default pool of cudaMallocAsync is",
            "Allocate from a pool made with a handle type (cudaMemPoolCreate), or copy with vram.copy()",
        ),
        by_handle=True,
        export=lambda driver, address: driver.pool_export_pointer(address),
        enter=lambda driver, data, nbytes, _, pool: driver.pool_open_pointer(pool, data, nbytes or 0),
        leave=lambda driver: driver.pool_close_pointer,
    ),
)  # fmt: skip
OWN, LEGACY = WAYS[:2]
BY_NUMBER = {int(one.kind): one for one in WAYS}
BY_MAKER = {one.made_by: one for one in WAYS}
OTHERS = {  # the makers of memory that has no way, in words
    "opened": "another process, and opened here", "host": "another library as page-locked memory of the host",
    "managed": "another library as managed memory", "other": "this process for itself",
    "unknown": "nobody that the driver knows",
}  # fmt: skip


def way(kinds: HandleKind, nbytes: int = 0) -> Way | None:
    """Return how memory goes that can leave its process as `kinds`, in an allocation of `nbytes`; None if it cannot."""
    for one in WAYS:
        if one.kind & kinds and nbytes <= one.most:
            return one
    return None
