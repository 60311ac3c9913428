"""Over memory of the host that two processes map: reaches everything, between any two places of one machine.

The sender's end has a ring of shared memory. It copies a chunk in and says where it is, while the other end copies the
chunk before it out: with two or more in the ring both are busy at once. Each end pins the ring for its own GPU; where
that is refused the copies go through it as plain memory.

A transfer that breaks off half-way, by Ctrl-C or a timeout, is one that was never sent or not yet received. Its
sender begins the next one, which says that this one was given up. Its receiver goes on where it was.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from functools import partial
from typing import Any, NoReturn

from .. import driver as drivers
from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..arrays.numpy_on_use import np
from ..arrays.shapes import nbytes_of
from ..arrays.streams import stream_synchronize
from ..errors import DriverError, PeerGoneError, ProtocolError, UsageError, WaitTimeoutError
from ..handover.exports import known_dtype
from ..handover.messages import Reference, Shared
from ..lifetime import let_in, noted, own, shielded, take, unwinding
from ..spec import HOST, Location, parse_size
from .contract import Estimate, ExportedBuffer, No, Yes
from .endpoint import fresh
from .exchanges import Exchange, SocketExchange
from .local import fit_with
from .measure import measured
from .places import ready, refusal, shown_on, unless
from .remote import ACKED_ELSEWHERE, RemoteTransport, _held, _is_late, _left
from .staged import SLOT, SLOTS
from .wire import WINDOW, Chunk, Drained, Message

_ALIGNED = 64  # bytes: where in the ring a chunk may begin
_MOST_CHUNKS = 4096  # of an array, that the other end may have said and this one not read
# Of all arrays, those that were given up included: those stay until what was said before them is read, and the other
# end is told. A ring has as much room as its maker likes.
_MOST_IN_RING = 2 * _MOST_CHUNKS
_MEASURING = 60.0  # seconds


class _Bytes:
    """Bytes in the other end's ring: where they belong, where they are, how many, and what is read with them."""

    __slots__ = ("address", "at", "is_read", "nbytes", "stop")

    def __init__(self, at: int, address: int, nbytes: int, stop: int) -> None:
        self.at, self.address, self.nbytes, self.stop = at, address, nbytes, stop
        self.is_read = False


class _Incoming:
    """An array that comes in chunks, and how far it was read."""

    __slots__ = ("chunks", "done", "dtype", "is_dropped", "is_ours", "nbytes", "said", "shape", "target")

    def __init__(self, dtype: Any, shape: tuple[int, ...], nbytes: int, first: _Bytes) -> None:
        self.dtype, self.shape, self.nbytes = dtype, shape, nbytes
        self.chunks: deque[_Bytes] = deque([first])
        self.said = first.nbytes  # bytes in all that the other end has put into the ring
        self.done = 0
        self.target: Array | None = None
        self.is_ours = False  # whether the target was made here
        self.is_dropped = False

    def close(self) -> None:
        """Drop what was received so far."""
        target, self.target = self.target, None
        if target is not None and self.is_ours:
            target.close()


class ShmTransport(RemoteTransport):
    """Copies between any two places of two processes, through memory of the host that both map.

    See :class:`~vram.transports.remote.RemoteTransport` for the other parameters. What is received is a copy, which
    outlives its sender. A stream is waited for (S10), at both ends. An array of more bytes than the ring has is under
    way until the other end receives it: :meth:`send` returns when the last of it is in the ring, and from then on the
    buffer may be written to again.

    Parameters
    ----------
    slots : int
        How many chunks the ring has room for, at least two.
    slot : int or str
        The bytes of each.
    """

    __slots__ = (
        "_claimed", "_drained", "_filling", "_in_ring", "_read_to", "_read_told", "_ring", "_said_to", "_slot",
        "_slots", "_theirs",
    )  # fmt: skip

    kind = "shm"
    method = "copies through shared memory of the host"
    needs_fds = True
    copies = True
    carries = frozenset({"vmm", "legacy", "pool"})

    def __init__(
        self,
        src: Location | str,
        dst: Location | str,
        exchange: Exchange,
        *,
        timeout: float | None = None,
        slots: int = SLOTS,
        slot: int | str = SLOT,
    ) -> None:
        size = parse_size(slot, what="slot")
        if slots < 2 or not size:
            raise UsageError(f"{slots} chunks of {size} bytes: it takes two or more, so that one fills as one empties")
        self._slots, self._slot = slots, -(-size // _ALIGNED) * _ALIGNED
        self._ring: _Ring | None = None  # ours, made when something is sent
        self._theirs: tuple[int, _Ring] | None = None  # the other end's, and its number
        self._claimed = self._drained = 0  # of ours: used so far, and read by the other end
        self._said_to = self._read_to = self._read_told = 0  # of theirs: filled so far, read, and told
        self._in_ring: deque[_Bytes] = deque()  # in the order of the ring, until they and all before are read
        self._filling: _Incoming | None = None  # the last one that came, whole or not
        super().__init__(src, dst, exchange, timeout=timeout)
        self._memory_is_on = HOST

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether this process sees both places; see the contract."""
        return unless(refusal(src, dst))

    @classmethod
    def measure(cls, src: Location, dst: Location) -> Estimate:
        """Return what a transfer takes; measured once, with both ends in this process, in two threads."""

        def loop(fit: object) -> Estimate:
            ends = SocketExchange.pair()
            with ends[0], ends[1]:
                with cls(src, dst, ends[0], timeout=_MEASURING) as sender, cls(src, dst, ends[1]) as receiver:
                    return fit_with(sender, receiver, fit, _at_once)

        return measured(cls.kind, src, dst, loop)

    # -- the contract -------------------------------------------------------------------------------------------
    @shielded
    def export(self, buffer: Array) -> ExportedBuffer:
        """Return a handle to a copy of a buffer as it is now, in shared memory of its own; see the contract."""
        array = self._of_ours(buffer)
        ready(array, None)
        shared = fresh(HOST, array.shape, array.dtype)
        try:
            if array.nbytes:
                with _Ring(shared, self.src) as side:
                    side.copy(shared.address, array.address, array.nbytes)
            with _held(self._sending):
                export = self._exports.export(shared)
            return self._handle_of(shared, export)
        except BaseException as error:
            with unwinding(error):
                shared.close()
            raise

    def exported_handle(self, buffer: Array) -> ExportedBuffer | None:
        """Return None: what is exported is a copy, and of a buffer that may have changed since there is none."""
        self._of_ours(buffer)
        return None

    @shielded
    def import_(self, handle: ExportedBuffer) -> Array:
        """Return a copy of what a handle describes, at the destination; see the contract."""
        with super().import_(handle) as shared:
            made = fresh(self.dst, shared.shape, shared.dtype)
            try:
                if shared.nbytes:
                    with _Ring(shared, self.dst) as side:
                        side.copy(made.address, shared.address, shared.nbytes)
            except BaseException as error:
                with unwinding(error):
                    made.close()
                raise
            return made

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Give everything back, and the exchange; see the contract. A copy that is under way keeps what it needs."""
        was_open = self._claim.handle.is_open
        super().close(strict=strict)
        if not was_open:
            return
        with self._sending:  # whoever has it has been told by the exchange that it is closed
            for ring in (self._ring, None if self._theirs is None else self._theirs[1]):
                if ring is None:
                    continue
                ring.close()
                ring.array.close()

    # -- sending ------------------------------------------------------------------------------------------------
    def _hand_over(self, array: Array, stream: int | None) -> None:
        """Copy an array into the ring, chunk by chunk, as the other end makes room. With the sending lock."""
        if stream is not None:
            stream_synchronize(array.region, stream)
        if self._ring is None:
            nbytes = self._slots * self._slot
            ring = fresh(HOST, (nbytes,), np.dtype("uint8"))
            try:
                self._ring = _Ring(ring, self.src)
            except BaseException as error:
                with unwinding(error):
                    ring.close()
                raise
        ring, total, at = self._ring.array, array.nbytes, 0
        export = self._introduce(ring)
        dtype = dtype_name(array.dtype)
        while True:
            let_in()
            start, nbytes = self._room(ring.nbytes, total - at)
            offset = start % ring.nbytes
            if nbytes:
                self._ring.copy(ring.address + offset, array.address + at, nbytes)
            chunk = Chunk(Reference(export.id, export.sent, offset, dtype, array.shape), at, nbytes, start + nbytes)
            before, self._claimed = self._claimed, chunk.stop  # first: it may be read there before this goes on
            try:
                self._say(chunk)
            except BaseException:
                self._claimed = before  # it was not said
                raise
            at += nbytes
            if at >= total:
                return

    def _room(self, size: int, left: int) -> tuple[int, int]:
        """Return where the next chunk begins, in all, and its bytes, once there is room for it."""
        if not left:
            return self._claimed, 0
        start = -(-self._claimed // _ALIGNED) * _ALIGNED
        nbytes = min(left, self._slot, size - start % size)
        self._until(
            lambda: start + nbytes - self._drained <= size, self.timeout,
            "the other end took nothing out of the shared memory",
        )  # fmt: skip
        return start, nbytes

    # -- receiving ----------------------------------------------------------------------------------------------
    def _deal_with_ends(self, message: Message) -> None:
        if isinstance(message, Chunk):
            self._chunk(message)
        elif isinstance(message, Drained):
            if not self._drained <= message.stop <= self._claimed:
                raise ProtocolError(f"{message.stop} bytes are said to be read of {self._claimed}")
            self._drained = message.stop
        else:
            super()._deal_with_ends(message)

    def _chunk(self, said: Chunk) -> None:
        """Note bytes that are in the other end's ring. A wrong one is the other end's mistake (S7)."""
        reference = said.reference
        dtype = known_dtype(reference.dtype)
        try:
            total = nbytes_of(reference.shape, dtype)
        except UsageError as error:
            raise ProtocolError(f"an array came that cannot be: {error}") from None
        ring = self._ring_of(reference)
        filling, stop = self._filling, said.at + said.nbytes
        if (
            stop > total or bool(said.nbytes) != bool(total)
            or reference.offset + said.nbytes > ring.nbytes
            or not self._said_to + said.nbytes <= said.stop <= self._read_to + ring.nbytes
            or (filling is not None and len(filling.chunks) >= _MOST_CHUNKS)
            or len(self._in_ring) >= _MOST_IN_RING
        ):  # fmt: skip
            raise ProtocolError(f"bytes {said.at} to {stop} of {total} came at {said.stop} of a ring: that cannot be")
        chunk = _Bytes(said.at, ring.address + reference.offset, said.nbytes, said.stop)
        if said.at:
            if filling is None or (filling.said, filling.dtype, filling.shape) != (said.at, dtype, reference.shape):
                raise ProtocolError(f"bytes from {said.at} on came of an array whose bytes before were not said")
            filling.chunks.append(chunk)
            filling.said = stop
        else:
            if filling is not None and filling.said < filling.nbytes:
                self._give_up(filling)
            if len(self._inbox) >= WINDOW + self._is_back:
                raise ProtocolError(f"more than {WINDOW} messages came that were not received")
            self._filling = _Incoming(dtype, reference.shape, total, chunk)
            self._inbox.append(self._filling)
        self._in_ring.append(chunk)
        self._said_to = said.stop

    def _give_up(self, one: _Incoming) -> None:
        """The other end gave up what it was sending, and has begun anew."""
        with self._taking:
            one.is_dropped = True
            if one in self._inbox:
                self._inbox.remove(one)
                for chunk in one.chunks:
                    chunk.is_read = True
                one.close()

    def _ring_of(self, reference: Reference) -> Array:
        """Return the other end's ring, pinned for the GPU here when it is first used."""
        if self._theirs is None:
            with self._array(Reference(reference.memory, reference.segments, 0, "uint8", (1,)), None) as some:
                ring = Array(some.region, np.dtype("uint8"), (some.region.nbytes,))
            self._theirs = reference.memory, _Ring(ring, self.dst)
        number, known = self._theirs
        if number != reference.memory:
            raise ProtocolError(f"bytes came in memory {reference.memory}; those before, in memory {number}")
        return known.array

    def _arrived(self, message: Shared) -> NoReturn:
        raise ProtocolError("memory itself came on a transport that copies")

    def _taken_by(self, came: Any, wanted: Array | None, stream: object, deadline: float | None) -> Array | None:
        """Copy an array out of the ring as it comes, from where an earlier try came to."""
        if wanted is not None:
            ready(wanted, stream)
        self._go_on(came, wanted)
        target: Array = came.target
        taken = 0
        while came.chunks or came.done < came.nbytes:
            let_in()
            self._say_drained(deadline)
            if taken and _is_late(deadline):  # one at least: who gives no time comes further with each call, too
                raise WaitTimeoutError("the rest of a message did not come in time")
            rest = "the rest of a message did not come"
            self._until(lambda: bool(came.chunks) or came.is_dropped, _left(deadline), rest)
            if not came.chunks:  # it was given up
                came.close()
                return None
            chunk = came.chunks[0]
            if chunk.at >= came.done:
                if chunk.nbytes and self._theirs is not None:
                    self._theirs[1].copy(target.address + chunk.at, chunk.address, chunk.nbytes)
                came.done = chunk.at + chunk.nbytes
            chunk.is_read = True
            came.chunks.popleft()
            taken += 1
        self._say_drained(deadline)
        return target if wanted is None else shown_on(wanted, came.dtype, came.shape)

    def _go_on(self, came: Any, wanted: Array | None) -> None:
        """Have an array be received into what is wanted, or into memory of its own; what came of it goes along."""
        before = came.target
        if before is not None and ((wanted is None and came.is_ours) or before is wanted):
            return
        target = fresh(self.dst, came.shape, came.dtype) if wanted is None else wanted
        if before is not None:
            if came.done and target.address != before.address:
                target.region.driver.copy(target.address, before.address, came.done)
            if came.is_ours:
                before.close()
        came.target, came.is_ours = target, wanted is None

    def _say_drained(self, deadline: float | None) -> None:
        """Tell the other end how much of its ring was read. Said twice it does no harm; if this raises, again."""
        if not take(self._acking, _left(deadline)):
            raise WaitTimeoutError(ACKED_ELSEWHERE)
        try:
            while self._in_ring and self._in_ring[0].is_read:  # several threads may read at a time
                self._read_to = self._in_ring.popleft().stop
            if self._read_told != self._read_to:
                self._acknowledge(Drained(self._read_to), deadline)
                self._read_told = self._read_to
        finally:
            self._acking.release()


class _Ring:
    """Shared memory of the host as this process works on it: pinned for its GPU, with a stream there.
    If it is not pinned, the copies go through the driver's own buffers."""

    def __init__(self, array: Array, place: Location) -> None:
        self.array, self.place = array, place
        self.is_pinned = False
        driver: Any = drivers.get(place)
        self._driver = driver
        self._stream = 0
        self._claim = own(f"shared memory for copies to and from {place}", None, depends=[array.region.handle])
        if place == HOST:
            return
        try:
            try:
                # To the end of the mapping: whole pages, which the driver wants.
                driver.host_register(array.region.address, array.region.mapped, place)
            except DriverError:  # too much is locked already, or this system locks none that is shared
                pass
            else:
                self._adopt("pinned memory", partial(driver.host_unregister, array.region.address))
                self.is_pinned = True
            self._stream = driver.stream_create(place)
            self._adopt(f"stream on {place}", partial(driver.stream_destroy, self._stream))
        except BaseException as error:
            with unwinding(error):
                self._claim.release()
            raise

    def _adopt(self, label: str, undo: Any) -> None:
        self._claim.handle.adopt(own(label, undo))

    def __enter__(self) -> _Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy, and return when it is done."""
        using = self._claim.handle.claim("a copy")  # another thread may close it meanwhile
        try:
            if self.place == HOST:
                self._driver.copy(destination, source, nbytes)
                return
            try:
                self._driver.copy_async(destination, source, nbytes, self._stream)
            except BaseException as error:
                with noted(error):  # the GPU may still read or write both
                    self._driver.stream_synchronize(self._stream, self.place)
                raise
            self._driver.stream_synchronize(self._stream, self.place)
        finally:
            using.release()

    def close(self) -> None:
        """Unpin it and give the stream back. Idempotent."""
        self._claim.release()


def _at_once(sender: Any, receiver: Any, source: Array, target: Array, nbytes: int) -> None:
    """Move so many bytes: as two processes would, where they do not fit into the ring."""
    with source[:nbytes] as part:
        if nbytes <= sender._slots * sender._slot:
            sender.send(part)
            receiver.recv(target, timeout=_MEASURING)
            return

        def send() -> None:
            with contextlib.suppress(PeerGoneError):
                sender.send(part)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            receiver.recv(target, timeout=_MEASURING)
        except BaseException:
            receiver.close()  # or the thread waits for it
            raise
        finally:
            thread.join()
