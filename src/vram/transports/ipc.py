"""Memory of cudaMalloc between two processes: 64 bytes of its base, with offset and length beside them.

The memory lives as long as its maker lets it: what is received is right only while the sender lives and keeps it. So
whatever comes from a sender that is gone is refused, although the driver may still show something there.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .. import driver as drivers
from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..errors import PeerGoneError, ProtocolError, UsageError, WaitTimeoutError
from ..handover.messages import Part
from ..lifetime import Claim, Handle, own
from ..memory import Region
from ..memory.capabilities import legacy
from ..memory.foreign import ForeignRegion
from ..sharing.legacy_ipc import IpcMemHandle, open_counted
from ..sharing.mapping import device_name
from ..spec import Location
from .contract import Estimate, ExportedBuffer, No, Yes
from .exchanges import Exchange, SocketExchange, wait_until
from .local import fit_with
from .measure import measured
from .places import COPY_FIRST, as_array, check_place, on_gpus, ready, unless
from .remote import RemoteTransport, array_on
from .vmm import VmmTransport
from .wire import Allocation

__all__ = ["IpcTransport"]

_MOMENT = 0.2  # seconds


class _Exported(Struct, frozen=True, array_like=True):
    """A handle's payload: the allocation, and the array in it."""

    allocation: Allocation
    offset: Annotated[int, Meta(ge=0, le=2**62)]
    nbytes: Annotated[int, Meta(ge=0, le=2**62)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**62)], ...], Meta(max_length=64)]


_decode = msgspec.msgpack.Decoder(_Exported).decode


class IpcTransport(RemoteTransport):
    """Hands over memory of cudaMalloc, such as PyTorch's by default: over a socket, named pipes, or shared memory.

    See :class:`~vram.transports.remote.RemoteTransport` for the parameters. The sender keeps the memory until
    :meth:`synchronize` has returned and, where the other end received it without a buffer, until that end is closed.
    """

    __slots__ = ("_numbers", "_openings", "_told")

    kind = "ipc"
    needs_fds = False

    def __init__(
        self, src: Location | str, dst: Location | str, exchange: Exchange, *, timeout: float | None = None
    ) -> None:
        super().__init__(src, dst, exchange, timeout=timeout)
        self._numbers = itertools.count(1)
        self._told: dict[Handle, tuple[int, Handle]] = {}
        self._openings: dict[int, Claim] = {}

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether both places are GPUs that reach each other; see the contract."""
        return unless(on_gpus("ipc is for memory of cudaMalloc, on GPUs", src, dst, COPY_FIRST))

    @classmethod
    def measure(cls, src: Location, dst: Location) -> Estimate:
        """Return what a transfer takes; measured once, with memory of our own, in this process.

        The driver opens such a handle in other processes only, and a handle is opened once: after that a message is an
        id, as in :class:`VmmTransport`, and the bytes come from the same memory over the same wires.
        """

        def loop(fit: object) -> Estimate:
            ends = SocketExchange.pair()
            with ends[0], ends[1]:
                with VmmTransport(src, dst, ends[0]) as sender, VmmTransport(src, dst, ends[1]) as receiver:
                    return fit_with(sender, receiver, fit)

        return measured(cls.kind, src, dst, loop)

    # -- this end's memory --------------------------------------------------------------------------------------
    def export(self, buffer: Array) -> ExportedBuffer:
        """Return the 64 bytes of a buffer's allocation and where in it the buffer is; see the contract."""
        self.handle  # noqa: B018  (the check)
        array = as_array(buffer)
        check_place("the buffer", array, self.src)
        allocation = self._allocation(_legacy(array), 1)
        ready(array, None)
        region, start = array.region, array.offset
        kept = region.pin(start, start + array.nbytes, "exported")
        said = _Exported(allocation, start, array.nbytes, dtype_name(array.dtype), array.shape)
        return ExportedBuffer(self.kind, msgspec.msgpack.encode(said), (), kept)

    def _introduce(self, array: Array) -> int:
        region = _legacy(array)
        handle = region.handle
        known = self._told.get(handle)
        if known is not None:
            return known[0]
        number = next(self._numbers)
        self._say(self._allocation(region, number))  # first: what was not said must not be referred to
        claim = own(f"memory {number} lent to another process", _Retire(weakref.ref(self), handle, number))
        try:
            handle.depend(claim.handle)
            self._told[handle] = number, claim.handle
        finally:
            claim.release()  # from here on the region alone keeps it
        return number

    def _allocation(self, region: ForeignRegion, number: int) -> Allocation:
        handle = IpcMemHandle.of(region.address, driver=region.driver)
        return Allocation(number, device_name(region.location), handle.to_bytes(), handle.allocation_nbytes)

    # -- the other end's ----------------------------------------------------------------------------------------
    def import_(self, handle: ExportedBuffer) -> Array:
        """Open the memory that a handle describes; see the contract. Closed with the last array on it."""
        self._check_handle(handle)
        try:
            said = _decode(handle.payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a handle of the ipc transport that is none: {error!s:.200}") from None
        region, claim = self._opened(said.allocation)
        try:
            array = array_on(region, said.dtype, said.shape, said.offset, said.nbytes)
        except BaseException:
            claim.release()
            raise
        if array.pin is not None:
            array.pin.keeps = claim  # and with it every view
        return array

    def _learn(self, message: Part | Allocation, fds: list[int], *, again: bool = False) -> None:
        if not isinstance(message, Allocation):
            raise ProtocolError("memory came by file descriptor on a transport of 64-byte handles")
        if again and message.memory in self._memories:
            return
        if message.memory in self._memories:
            raise ProtocolError(f"memory {message.memory} was described twice")
        try:
            region, claim = self._opened(message)
        except ProtocolError as error:
            # The memory goes with its maker, and a moment later the connection does.
            with contextlib.suppress(WaitTimeoutError):
                wait_until(lambda: self._exchange.is_gone() or None, _MOMENT, "")
                raise PeerGoneError(
                    f"the process that made the memory is gone, and the memory with it: {error}"
                ) from None
            raise
        drop = partial(self._let_go, message.memory)
        self._openings[message.memory] = claim
        self._memories[message.memory] = region, drop

    def _keep_open(self, array: Array, number: int) -> None:
        if array.pin is not None:
            array.pin.keeps = self._openings[number].handle.claim("received array")  # and so does every view

    def _let_go(self, number: int) -> None:
        claim = self._openings.pop(number, None)  # none after an interrupt: then it went with the claim
        if claim is not None:
            claim.release()

    def _opened(self, allocation: Allocation) -> tuple[Region, Claim]:
        if allocation.device != device_name(self.src):
            raise ProtocolError(f"memory came from a device {allocation.device!r:.80}, which is not {self.src}")
        driver = drivers.get(self.dst)
        legacy(driver)
        return open_counted(driver, allocation.handle, allocation.nbytes, self.dst)

    def _check_alive(self) -> None:
        if self._exchange.is_gone():
            raise PeerGoneError("the process that made the memory is gone, and cudaMalloc memory with it")

    def close(self, *, strict: bool = False) -> None:
        """Give everything back, and the exchange; see the contract."""
        was_open = self._claim.handle.is_open
        super().close(strict=strict)
        if was_open:
            for handle, (_, token) in tuple(self._told.items()):
                handle.drop_dependency(token)


class _Retire:
    """The undo of memory that was told of. Holds the transport weakly: regions outlive transports."""

    __slots__ = ("_handle", "_number", "_transport")

    def __init__(self, transport: weakref.ref[IpcTransport], handle: Handle, number: int) -> None:
        self._transport, self._handle, self._number = transport, handle, number

    def __call__(self) -> None:
        transport = self._transport()
        if transport is not None:
            transport._told.pop(self._handle, None)
            transport._retired.append(self._number)


def _legacy(array: Array) -> ForeignRegion:
    """Return the region of an array on memory of cudaMalloc; say which way other memory travels."""
    region = array.region
    if isinstance(region, ForeignRegion) and region.made_by == "legacy":
        return region
    made_by = region.made_by if isinstance(region, ForeignRegion) else "vmm"
    if made_by == "vmm":
        raise UsageError(f"{array!r} is no memory of cudaMalloc: it travels by file descriptor, with the vmm transport")
    raise UsageError(f"{array!r} is no memory of cudaMalloc but {made_by}: copy it into memory of your own first")
