"""Between two GPUs of one process, or within one: the GPU at the destination reads the source's memory itself.

Where memory is not mapped for that GPU, the driver lends it the right to read for as long as a copy takes. Imported
memory is mapped a second time, for that GPU alone, which is coherent with the first mapping.
"""

from __future__ import annotations

from ..arrays import Array
from ..arrays.views import close_when_unused
from ..errors import UsageError
from ..memory import Region
from ..memory.foreign import ForeignRegion
from ..spec import Location
from .contract import No, Yes
from .local import LocalTransport, Message
from .places import STAGED, on_gpus


class PeerTransport(LocalTransport):
    """Copies between two GPUs that reach each other's memory, or within one, in one process.

    :meth:`import_` gives the very memory, mapped for the destination's GPU.
    """

    __slots__ = ()

    kind = "peer"
    method = "copies by the GPUs themselves"

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether both places are GPUs of this process that reach each other; see the contract."""
        return on_gpus("peer is between GPUs", src, dst, STAGED)

    def _move(self, message: Message, array: Array) -> None:
        message.driver.copy(array.address, message.address, message.nbytes)

    def _brought(self, array: Array) -> Array:
        region = array.region
        if self.dst in region.users or not array.nbytes:
            return Array(region, array.dtype, array.shape, offset=array.offset)
        if isinstance(region, ForeignRegion) and region.made_by != "vmm":
            raise UsageError(
                f"{array!r} was not made with virtual memory management, so it cannot be mapped for {self.dst}; "
                f"send it, which copies"
            )
        allocations, _ = region.segments(0, region.nbytes)
        alias = Region.from_allocations(
            region.driver, allocations, access=region.access, users=[self.dst], managed=True
        )
        try:
            return Array(alias, array.dtype, array.shape, offset=array.offset)
        finally:
            close_when_unused(alias)
