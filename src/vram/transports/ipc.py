"""Memory that lives only as long as its maker, between two processes: of cudaMalloc by 64 bytes, of a pool by those and
the pool's descriptor.

Its sender keeps it until the other end has said that it is done. Memory of a sender that is gone
is refused, although the driver may still show something there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..arrays import Array
from ..errors import UsageError
from ..handover.by_handle import goes_by_handle
from ..memory.foreign import ForeignRegion
from ..spec import HandleKind, Location
from .contract import No, Yes
from .places import SHM, on_gpus
from .remote import RemoteTransport
from .vmm import VmmTransport


class IpcTransport(RemoteTransport):
    """Hands over memory of cudaMalloc, such as PyTorch's by default: over a socket, named pipes, or shared memory.

    See :class:`~vram.transports.remote.RemoteTransport` for the parameters. Memory of a pool that was made to be
    shared goes over a socket only, which carries the pool's descriptor, and to the
    GPU that it is on. The sender keeps the memory until the other end has said, with a call of its own, that it dropped
    the arrays on it.
    """

    __slots__ = ()

    kind = "ipc"
    method = "memory that both processes map, by 64-byte handle"
    needs_fds = False
    carries = frozenset({"legacy", "pool"})

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether both places are GPUs that reach each other; see the contract."""
        return on_gpus("ipc is for memory of cudaMalloc, on GPUs", src, dst, SHM)

    @classmethod
    @contextlib.contextmanager
    def _ends(cls, src: Location, dst: Location) -> Iterator[tuple[Any, Any]]:
        """With memory of our own: the driver opens a handle in other processes only, and once; after that a message is
        an id, as in the vmm transport, and the bytes take the same wires."""
        with VmmTransport._ends(src, dst) as ends:
            yield ends

    def _check_memory(self, array: Array) -> None:
        region = array.region
        made_by = region.made_by if isinstance(region, ForeignRegion) else "vmm"
        if made_by == "vmm":
            raise UsageError(f"{array!r} is no memory of cudaMalloc: it travels by descriptor, with the vmm transport")
        if not goes_by_handle(region):
            raise UsageError(
                f"{array!r} is no memory of cudaMalloc but {made_by}: copy it into memory of your own first"
            )
        if isinstance(region, ForeignRegion) and HandleKind.POOL in region.kinds:
            if not self._exchange.carries_fds:
                raise UsageError(
                    f"{array!r} is memory of a pool, whose descriptor goes along, and "
                    f"{type(self._exchange).__name__} carries bytes only: use SocketExchange"
                )
            if self.src != self.dst:
                raise UsageError(
                    f"{array!r} is memory of a pool on {self.src}, which is opened there and not on {self.dst}: {SHM}"
                )
