"""Memory by file descriptor, between two processes: of GPUs and of the host. The receiver maps what the sender made.

The memory stays as long as anybody has it mapped, whatever becomes of its maker.
"""

from __future__ import annotations

from .. import driver as drivers
from ..errors import VramError
from ..memory.kinds import OWN
from ..spec import HOST, Location
from .contract import No, Yes
from .places import SHM, name_place, on_gpus, seen
from .remote import RemoteTransport


class VmmTransport(RemoteTransport):
    """Hands over memory that file descriptors stand for: what vram makes, and PyTorch's expandable segments.

    See :class:`~vram.transports.remote.RemoteTransport` for the parameters. An array received without a buffer is
    the sender's memory: writable here if the sender could write to it. Memory of more than 253 segments is described in
    parts, each after the other end has taken the one before: it has to be receiving meanwhile.
    """

    __slots__ = ()

    kind = "vmm"
    method = "memory that both processes map, by file descriptor"

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether the destination can map the source's memory; see the contract."""
        if Location.parse(src) == Location.parse(dst) == HOST:
            return seen(HOST)
        answer = on_gpus("vmm maps memory of the host for the host and of a GPU for GPUs", src, dst, SHM)
        if isinstance(answer, No):
            return answer
        home = name_place(src)
        try:
            drivers.get(home).mem_granularity(home, OWN.kind)
        except VramError as error:
            return No(str(error))
        return Yes()
