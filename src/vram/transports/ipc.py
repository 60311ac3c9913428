"""Memory that lives only as long as its maker, between two processes: of cudaMalloc by 64 bytes, of a pool by those and
the pool's descriptor.

Its sender keeps it until the other end has said that it is done. Memory of a sender that is gone
is refused, although the driver may still show something there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..spec import Location
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
