"""Between two GPUs of one process, or within one: the GPU at the destination reads the source's memory itself.

Memory that was not mapped for the destination's GPU is mapped a second time, for it alone, when it is first sent: a
second mapping of an allocation is coherent with the first, leaves the rights there alone, and costs one call instead
of two with every copy. It goes with the region, or with the transport.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial

from ..arrays import Array
from ..errors import UsageError
from ..lifetime import Handle, own, shielded
from ..memory import Region
from ..memory.foreign import ForeignRegion
from ..spec import Location
from .contract import No, Yes
from .local import LocalTransport, Message
from .places import STAGED, on_gpus, unless


class PeerTransport(LocalTransport):
    """Copies between two GPUs that reach each other's memory, or within one, in one process.

    :meth:`import_` gives the very memory, mapped for the destination's GPU.
    """

    __slots__ = ("_aliases",)

    kind = "peer"
    method = "copies by the GPUs themselves"

    def __init__(self, src: Location | str, dst: Location | str) -> None:
        super().__init__(src, dst)
        self._aliases = _Aliases(self.dst)

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether both places are GPUs of this process that reach each other; see the contract."""
        return unless(on_gpus("peer is between GPUs", src, dst, STAGED))

    def _keep(self, array: Array) -> Message:
        message = super()._keep(array)
        alias = self._alias(array)
        if alias is not None:
            try:
                pin = alias.pin(array.offset, array.offset + array.nbytes, "sent by peer")
            except BaseException:
                message.release()
                raise
            message.address = alias.address + array.offset
            message.pins = (*message.pins, pin)
        return message

    def _alias(self, array: Array) -> Region | None:
        """Return the second mapping of an array's region; None where none is needed, or none can be."""
        region = array.region
        if self.dst in region.users or not array.nbytes:
            return None
        if isinstance(region, ForeignRegion) and region.made_by != "vmm":
            return None  # reachable by the contexts of the two GPUs, which the driver sees to
        return self._aliases.of(region)

    def _move(self, message: Message, array: Array) -> None:
        message.driver.copy(array.address, message.address, message.nbytes)

    def _brought(self, array: Array) -> Array:
        if self.dst in array.region.users or not array.nbytes:
            return Array(array.region, array.dtype, array.shape, offset=array.offset)
        alias = self._alias(array)
        if alias is None:
            raise UsageError(
                f"{array!r} was not made with virtual memory management, so it cannot be mapped for {self.dst}; "
                f"send it, which copies"
            )
        return Array(alias, array.dtype, array.shape, offset=array.offset)

    def _imported(self) -> int:
        return len(self._aliases.by_region)

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Give everything back; see the contract."""
        super().close(strict=strict)
        self._aliases.close()


class _Aliases:
    """The second mappings, by the handle of the region that they are of."""

    def __init__(self, user: Location) -> None:
        self._user = user
        self._lock = threading.RLock()  # finalizers come to _drop only, which takes none
        self.by_region: dict[Handle, tuple[Region, Handle, tuple[object, ...]]] = {}

    def of(self, region: Region) -> Region:
        handle = region.handle
        with self._lock:
            known = self.by_region.get(handle)
            if known is not None:
                alias, token, layout = known
                if layout == region.layout and alias.access is region.access:
                    return alias
                handle.drop_dependency(token)  # it has grown or shrunk since, or was frozen
            allocations, _ = region.segments(0, region.nbytes)
            alias = Region.from_allocations(
                region.driver, allocations, access=region.access, users=[self._user], managed=True
            )
            claim = own(f"second mapping of {handle.label}", partial(_drop, weakref.ref(self), handle, alias))
            try:
                handle.depend(claim.handle)
                self.by_region[handle] = alias, claim.handle, region.layout
            finally:
                claim.release()  # from here on the region alone keeps it
            return alias

    def close(self) -> None:
        for handle, (_, token, _) in self.by_region.copy().items():
            handle.drop_dependency(token)


def _drop(table: weakref.ref[_Aliases], handle: Handle, alias: Region) -> None:
    """Undo a second mapping. Regions outlive transports, so the table is held weakly."""
    found = table()
    if found is not None and handle in found.by_region and found.by_region[handle][0] is alias:
        found.by_region.pop(handle, None)
    alias.close()
