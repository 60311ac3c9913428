"""Memory by file descriptor, between two processes: of GPUs and of the host. The receiver maps what the sender made.

The memory stays as long as anybody has it mapped, whatever becomes of its maker.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .. import driver as drivers
from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..arrays.views import close_when_unused
from ..errors import ProtocolError, UsageError, VramError
from ..handover.exports import ExportTable
from ..handover.messages import Part
from ..memory import Region
from ..memory.foreign import ForeignRegion
from ..sharing.descriptor import MemoryDescriptor
from ..sharing.mapping import describe, device_name, extend_memory, map_memory
from ..spec import HOST, Access, HandleKind, Location
from .contract import Estimate, ExportedBuffer, No, Yes
from .exchanges import Exchange, SocketExchange
from .local import fit_with
from .measure import measured
from .places import COPY_FIRST, as_array, check_place, name_place, on_gpus, ready, refusal, unless
from .remote import RemoteTransport, array_on
from .wire import Allocation

__all__ = ["VmmTransport"]


class _Exported(Struct, frozen=True, array_like=True):
    """A handle's payload: memory by its segments, and the array on it."""

    descriptor: MemoryDescriptor
    writable: bool
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**62)], ...], Meta(max_length=64)]


_decode = msgspec.msgpack.Decoder(_Exported).decode


class VmmTransport(RemoteTransport):
    """Hands over memory that file descriptors stand for: what vram makes, and PyTorch's expandable segments.

    See :class:`~vram.transports.remote.RemoteTransport` for the parameters. What is received without a buffer is the
    sender's memory: writable here if the sender could write to it. Memory of more than 253 segments is described in
    parts, each after the other end has taken the one before: it has to be receiving meanwhile.
    """

    __slots__ = ("_exports",)

    kind = "vmm"
    needs_fds = True

    def __init__(
        self, src: Location | str, dst: Location | str, exchange: Exchange, *, timeout: float | None = None
    ) -> None:
        super().__init__(src, dst, exchange, timeout=timeout)
        self._exports = ExportTable(self._retired.append)

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether the destination can map the source's memory; see the contract."""
        if Location.parse(src) == Location.parse(dst) == HOST:
            return unless(refusal(HOST))
        refused = on_gpus("vmm maps memory of the host for the host and of a GPU for GPUs", src, dst, COPY_FIRST)
        if refused is not None:
            return refused
        home = name_place(src)
        try:
            drivers.get(home).mem_granularity(home, HandleKind.POSIX_FD)
        except VramError as error:
            return No(str(error))
        return Yes()

    @classmethod
    def measure(cls, src: Location, dst: Location) -> Estimate:
        """Return what a transfer takes; measured once, with both ends in this process.

        The memory is mapped here a second time and copied out of there, so these are the same wires; what is missing
        is the time that the system takes to wake another process.
        """

        def loop(fit: object) -> Estimate:
            ends = SocketExchange.pair()
            with ends[0], ends[1]:
                with cls(src, dst, ends[0]) as sender, cls(src, dst, ends[1]) as receiver:
                    return fit_with(sender, receiver, fit)

        return measured(cls.kind, src, dst, loop)

    # -- this end's memory --------------------------------------------------------------------------------------
    def export(self, buffer: Array) -> ExportedBuffer:
        """Return descriptors of a buffer's memory and what describes it; see the contract."""
        self.handle  # noqa: B018  (the check)
        array = as_array(buffer)
        check_place("the buffer", array, self.src)
        _check_way(array)
        ready(array, None)
        region, start = array.region, array.offset
        kept = region.pin(start, start + array.nbytes, "exported")
        descriptor, fds = describe(region, start, start + array.nbytes)
        writable = region.access is Access.READ_WRITE
        said = _Exported(descriptor, writable, dtype_name(array.dtype), array.shape)
        return ExportedBuffer(self.kind, msgspec.msgpack.encode(said), tuple(fds), kept)

    def _introduce(self, array: Array) -> int:
        _check_way(array)
        lent = self._exports.export(array)
        if lent.sent < len(lent.fds) or lent.sent < 0:
            kept = lent.keep()
            try:
                for part, fds in lent.parts(max(lent.sent, 0)):
                    sent = part.first + len(fds)
                    # One part on its way at a time: descriptors that nobody reads are limited, for all of this user.
                    self._until(lambda: not self._awaited, self.timeout, "the other end takes no descriptors")
                    self._say(Part(part), fds)
                    lent.sent = sent  # no interrupt comes before all of it is noted (I12)
                    self._awaited += not part.last
            finally:
                kept.release()
        return lent.id

    # -- the other end's ----------------------------------------------------------------------------------------
    def import_(self, handle: ExportedBuffer) -> Array:
        """Map the memory that a handle describes; see the contract. Its descriptors stay the caller's."""
        self._check_handle(handle)
        try:
            said = _decode(handle.payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a handle of the vmm transport that is none: {error!s:.200}") from None
        region = self._mapped(said.descriptor, list(handle.fds), said.writable, follow=False)
        try:
            return array_on(region, said.dtype, said.shape, said.descriptor.offset, said.descriptor.nbytes)
        finally:
            close_when_unused(region)  # now, or with the last array on it

    def _learn(self, message: Part | Allocation, fds: list[int], *, again: bool = False) -> None:
        if not isinstance(message, Part):
            raise ProtocolError("memory came by its 64 bytes on a transport of file descriptors")
        part = message.part
        region, _ = self._memories.get(part.memory, (None, None))
        known = 0 if region is None else len(region.layout)
        if again and region is not None and known == part.first + len(part.descriptor.segments):
            return
        if part.first != known:
            raise ProtocolError(f"segments of memory {part.memory} from {part.first} on came after {known}")
        if region is None:
            region = self._mapped(part.descriptor, fds, part.writable, follow=True)
            drop = partial(close_when_unused, region)
            self._memories[part.memory] = region, drop
        else:
            part.descriptor.check()
            extend_memory(region, part.descriptor.segments, fds)

    def _mapped(self, descriptor: MemoryDescriptor, fds: list[int], writable: bool, *, follow: bool) -> Region:
        descriptor.check()
        if descriptor.device != device_name(self.src):
            raise ProtocolError(f"memory came from a device {descriptor.device!r:.80}, which is not {self.src}")
        return map_memory(descriptor, fds, access="rw" if writable else "r", follow=follow, user=self.dst)

    def close(self, *, strict: bool = False) -> None:
        """Give everything back, and the exchange; see the contract."""
        was_open = self._claim.handle.is_open
        super().close(strict=strict)
        if was_open:
            self._exports.close()


def _check_way(array: Array) -> None:
    """Say which way memory travels that no descriptor stands for."""
    region = array.region
    if isinstance(region, ForeignRegion) and region.made_by != "vmm":
        way = {"legacy": "it travels by its 64 bytes, with the ipc transport"}.get(
            region.made_by, "copy it into memory of your own first"
        )
        raise UsageError(f"{array!r} is memory of another kind ({region.made_by}), which has no descriptor: {way}")
