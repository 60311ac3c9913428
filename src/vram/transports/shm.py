"""Over memory of the host that two processes map: reaches everything, between any two places of one machine.

The sender's end has a ring of shared memory. It copies a piece in and sends that piece of the ring, while the other end
copies the piece before it out: with two or more in the ring both are busy at once. Each end pins the ring for its own
GPU; where that is refused the copies go through it as plain memory. Space that the other end has received is free
again.

A transfer that breaks off half-way, by Ctrl-C or a timeout, is one that was never sent or not yet received. Its sender
begins the next one from its first byte, which gives this one up. Its receiver goes on where it was.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from functools import partial
from typing import Any, cast

from .. import driver as drivers
from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..arrays.hints import StreamLike
from ..arrays.numpy_on_use import np
from ..arrays.shapes import nbytes_of
from ..arrays.share import copy
from ..errors import DriverError, PeerGoneError, ProtocolError, UsageError, WaitTimeoutError
from ..handover.exports import known_dtype
from ..lifetime import let_in, noted, own, take
from ..memory.allocation import or_else
from ..memory.pinned import pin
from ..spec import HOST, Location, round_up
from .contract import ExportedBuffer, No, Yes
from .exchanges import Exchange
from .places import check_fits, fresh, ready, seen, shown_on
from .remote import MEASURING, Came, RemoteTransport
from .staged import SLOT, SLOTS, slot_of

_ALIGNED = 64  # bytes: where in the ring a piece may begin


class _Piece(Came):
    """Bytes of an array of `nbytes`: `value` is the piece of the ring with them, which belong at `at` in the array."""

    at: int = 0
    dtype: Any = None
    shape: tuple[int, ...] = ()


class _Incoming:
    """An array that comes in pieces, and how far it was read."""

    def __init__(self, first: _Piece) -> None:
        self.dtype, self.shape, self.nbytes = first.dtype, first.shape, first.nbytes
        self.done = 0
        self.target: Array | None = None
        self.is_ours = False  # whether the target was made here

    @property
    def is_complete(self) -> bool:
        """Whether all of it was read."""
        return self.target is not None and self.done >= self.nbytes

    def go_on(self, wanted: Array | None, place: Location) -> Array:
        """Return where the array is received: what is wanted, or memory of its own. The result goes along."""
        before = self.target
        if before is not None and (before is wanted or (wanted is None and self.is_ours)):
            return before
        target = fresh(place, self.shape, self.dtype) if wanted is None else wanted
        if before is not None and self.done and target.address != before.address:
            target.region.driver.copy(target.address, before.address, self.done)
        self.close()
        self.target, self.is_ours = target, wanted is None
        return target

    def close(self) -> None:
        """Drop what was received so far."""
        target, self.target = self.target, None
        if target is not None and self.is_ours:
            target.close()


class ShmTransport(RemoteTransport):
    """Copies between any two places of two processes, through memory of the host that both map.

    See :class:`~vram.transports.remote.RemoteTransport` for the other parameters. A received array is a copy, which
    outlives its sender. A stream is waited for (S10), at both ends. An array of more bytes than the ring has is under
    way until the other end receives it: :meth:`send` returns when the last of it is in the ring, and from then on the
    buffer may be written to again.

    Parameters
    ----------
    slots : int
        How many pieces the ring has room for, at least two.
    slot : int or str
        The bytes of each.
    """

    __slots__ = (
        "_claimed", "_copying", "_freed", "_incoming", "_ring", "_said", "_slot", "_slots", "_theirs", "_under_way",
    )  # fmt: skip

    kind = "shm"
    method = "copies through shared memory of the host"
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
        self._slots, self._slot = slots, round_up(slot_of(slots, slot), _ALIGNED)
        self._ring: _Ring | None = None  # ours, made when something is sent
        self._theirs: _Ring | None = None  # the other end's
        self._claimed = self._freed = 0  # bytes of ours that were used so far, and that the other end has received
        self._under_way: deque[tuple[int, int]] = deque()  # messages by number, and what is free once they are received
        self._said: tuple[object, ...] = ()  # what would go on with the piece that came last
        self._incoming: deque[_Incoming] = deque()  # what was begun, or received and nobody got it
        self._copying = threading.Lock()  # held by who receives; no finalizer takes it
        super().__init__(src, dst, exchange, timeout=timeout)

    @property
    def _mapped_for(self) -> Location:
        return HOST

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether this process sees both places; see the contract."""
        return seen(src, dst)

    @staticmethod
    def _carry(sender: Any, receiver: Any, source: Array, target: Array, nbytes: int) -> None:
        """In two threads, as two processes would, where the bytes do not fit into the ring."""
        if nbytes <= sender._slots * sender._slot:
            RemoteTransport._carry(sender, receiver, source, target, nbytes)
            return

        def send() -> None:
            with contextlib.suppress(PeerGoneError):
                sender.send(part)

        with source[:nbytes] as part:
            thread = threading.Thread(target=send)
            thread.start()
            try:
                receiver.recv(target, timeout=MEASURING)
            except BaseException:
                receiver.close()  # or the thread waits for it
                raise
            finally:
                thread.join()

    # -- the contract -------------------------------------------------------------------------------------------
    def _exported(self, array: Array) -> ExportedBuffer:
        """Return a handle to a copy of an array as it is now, in shared memory of its own."""
        shared = copy(array, device=HOST)
        with or_else(shared.close):
            return super()._exported(shared)

    def _known_handle(self, array: Array) -> ExportedBuffer | None:
        return None  # what is exported is a copy, and of an array that may have changed since there is none

    def _brought(self, handle: ExportedBuffer) -> Array:
        with super()._brought(handle) as shared:
            return copy(shared, device=self.dst)

    def _closed(self) -> None:
        super()._closed()
        with self._sending, self._copying:  # whoever has one has been told by the exchange that it is closed
            while self._incoming:
                self._incoming.pop().close()
            for ring in (self._ring, self._theirs):
                if ring is not None:
                    ring.close()
                    ring.array.close()

    # -- sending ------------------------------------------------------------------------------------------------
    def _hand_over(self, array: Array, stream: StreamLike | None) -> None:
        """Copy an array into the ring, piece by piece, as the other end makes room."""
        ready(array, stream)
        if self._ring is None:
            ring = fresh(HOST, (self._slots * self._slot,), np.dtype("uint8"))
            with or_else(ring.close):
                self._ring = _Ring(ring, self.src)
        size, at = self._ring.array.nbytes, 0
        while True:
            let_in()
            # As much as fits before the end of the ring, at most.
            start = round_up(self._claimed, _ALIGNED)
            nbytes = min(array.nbytes - at, self._slot, size - start % size)
            self._until(
                partial(self._has_room, start + nbytes - size), self.timeout,
                "the other end took nothing out of the shared memory",
            )  # fmt: skip
            offset = start % size
            with self._ring.array[offset : offset + nbytes] as piece:
                if nbytes:
                    self._ring.copy(piece.address, array.address + at, nbytes)
                self._say((piece, at, dtype_name(array.dtype), array.shape))
            self._claimed = start + nbytes
            self._under_way.append((self._sent_count, self._claimed))
            at += nbytes
            if at >= array.nbytes:
                return

    def _has_room(self, needed: int) -> bool:
        """Whether as many bytes of the ring are free as were used up to `needed`, and the window has room."""
        while self._under_way and self._under_way[0][0] <= self._talk.received:
            self._freed = self._under_way.popleft()[1]
        return needed <= self._freed and self._has_window()

    # -- receiving ----------------------------------------------------------------------------------------------
    def _accepted(self, found: object, shown: Any) -> Came:
        """Return a piece that came. A wrong one is the other end's mistake (S7)."""
        if type(shown) is not tuple or len(shown) != 4:
            raise ProtocolError(f"a {type(shown).__name__} came, which is not said on a transport that copies")
        there, at, name, shape = shown
        if not (isinstance(there, Array) and type(at) is int and type(name) is str and type(shape) is tuple):
            raise ProtocolError("a piece of an array came that is made up of something else")
        dtype = known_dtype(name)
        try:
            total = nbytes_of(shape, dtype)
        except (UsageError, TypeError) as error:
            raise ProtocolError(f"an array came that cannot be: {error}") from None
        if (
            not 0 <= at <= at + there.nbytes <= total
            or bool(there.nbytes) != bool(total)
            or (at and (at, dtype, shape) != self._said)
        ):
            raise ProtocolError(f"bytes {at} to {at + there.nbytes} of {total} came: that cannot be")
        if self._theirs is not None and self._theirs.array.region is not there.region:
            raise ProtocolError("bytes came in other memory than those before")
        self._said = at + there.nbytes, dtype, shape
        return _Piece(there, total, at=at, dtype=dtype, shape=shape)

    def _taken_by(self, wanted: Array | None, stream: StreamLike | None, deadline: float | None) -> tuple[Array, Any]:
        """Copy an array out of the ring as it comes, from where an earlier try came to. One thread at a time: what was
        received is free."""
        if not take(self._copying, None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise WaitTimeoutError("another thread receives, and what it waits for did not come in time")
        try:
            if wanted is not None:
                ready(wanted, stream)
            while not (self._incoming and self._incoming[0].is_complete):
                let_in()
                self._take_piece(wanted, deadline)
            came = self._incoming[0]
            if wanted is not None:
                check_fits(wanted, came.nbytes, self.dst)
            target = came.go_on(wanted, self.dst)
            self._incoming.popleft()
            return target if wanted is None else shown_on(wanted, came.dtype, came.shape), came
        finally:
            self._copying.release()

    def _take_piece(self, wanted: Array | None, deadline: float | None) -> None:
        """Copy the next piece, and tell the other end that it was received."""
        piece = cast("_Piece", self._next(wanted, deadline))
        there = piece.value
        try:
            if not piece.at:
                while self._incoming:  # given up by its sender
                    self._incoming.pop().close()
                self._incoming.append(_Incoming(piece))
            array = self._incoming[0]
            target = array.go_on(wanted, self.dst)
            if there.nbytes:
                self._ring_of(there).copy(target.address + piece.at, there.address, there.nbytes)
            array.done = piece.at + there.nbytes
        except BaseException:
            self._put_back(piece)
            raise
        self._told(piece)

    def _ring_of(self, some: Array) -> _Ring:
        """Return the other end's ring, pinned for the GPU here when it is first used."""
        if self._theirs is None:
            whole = Array(some.region, np.dtype("uint8"), (some.region.nbytes,))
            self._theirs = _Ring(whole, self.dst)
        return self._theirs

    def _take_back(self, came: Any, array: Array) -> None:
        self._incoming.appendleft(came)


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
        with or_else(self._claim.release):
            with contextlib.suppress(DriverError):  # too much is locked, or this system locks nothing that is shared
                # To the end of the mapping: whole pages, which the driver wants.
                self._claim.handle.adopt(pin(driver, array.region.address, array.region.mapped, place))
                self.is_pinned = True
            self._stream = driver.stream_create(place)
            self._claim.handle.keep(f"stream on {place}", partial(driver.stream_destroy, self._stream))

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
