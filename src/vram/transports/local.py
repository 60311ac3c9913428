"""Transports within one process: what was sent waits in a queue, and is copied when it is received."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from ..arrays import Array
from ..arrays.hints import StreamLike
from ..errors import ClosedError, UsageError, WaitTimeoutError
from ..lifetime import let_in, shielded, unwinding
from ..memory import Pin, Region
from ..spec import Location
from .contract import ExportedBuffer
from .endpoint import Transport
from .places import as_array, check_fits, check_place, fresh, ready, shown_on

_SLICE = 0.1  # seconds of a wait, before Ctrl-C is let in


class Message(msgspec.Struct):
    """A sent array: where its bytes are, kept there by a pin until it was received."""

    driver: Any
    address: int
    nbytes: int
    dtype: Any
    shape: tuple[int, ...]
    pin: Pin


class LocalTransport(Transport):
    """Both ends of a transport, in one process. Any thread may send, any may receive."""

    __slots__ = ("_exported", "_there", "_waiting")

    def __init__(self, src: Location | str, dst: Location | str) -> None:
        super().__init__(src, dst)
        self._waiting: deque[Message] = deque()
        self._exported: weakref.WeakSet[Region] = weakref.WeakSet()
        self._there = threading.Condition()  # never taken by a finalizer

    # -- what differs -------------------------------------------------------------------------------------------
    @abstractmethod
    def _move(self, message: Message, array: Array) -> None:
        """Copy a message's bytes to the beginning of an array at the destination, and return when they are there."""

    def _keep(self, array: Array) -> Message:
        """Return a message that keeps an array's memory."""
        region, start = array.region, array.offset
        pin = region.pin(start, start + array.nbytes, f"sent by {self.kind}")
        return Message(region.driver, array.address, array.nbytes, array.dtype, array.shape, pin)

    # -- the contract -------------------------------------------------------------------------------------------
    @shielded
    def export(self, buffer: Array) -> ExportedBuffer:
        """Return a handle to a buffer at the source, for this process; see the contract."""
        self.handle  # noqa: B018  (the check)
        array = as_array(buffer, copies=True)
        check_place("the buffer", array, self.src)
        ready(array, None)
        self._exported.add(array.region)
        return ExportedBuffer(self.kind, keeps=array)

    def exported_handle(self, buffer: Array) -> ExportedBuffer | None:
        """Return the handle of a buffer whose memory was exported before, or None; see the contract."""
        self.handle  # noqa: B018  (the check)
        array = as_array(buffer, copies=True)
        check_place("the buffer", array, self.src)
        return ExportedBuffer(self.kind, keeps=array) if array.region in self._exported else None

    @shielded
    def import_(self, handle: ExportedBuffer) -> Array:
        """Return what a handle means as an array at the destination; see the contract."""
        self._check_handle(handle)
        if not isinstance(handle.keeps, Array):
            raise UsageError(f"the {self.kind} transport is within one process, and so are its handles")
        return self._brought(handle.keeps)

    def _brought(self, array: Array) -> Array:
        message = self._keep(array)
        try:
            return self._received_into(message, None, None)
        finally:
            message.pin.release()

    @shielded
    def send(self, buffer: Array, stream: StreamLike | None = None) -> None:
        """Hand a buffer at the source over; see the contract. It is read when it is received."""
        started = time.perf_counter()
        self.handle  # noqa: B018  (the check)
        array = as_array(buffer, copies=True)
        check_place("the buffer", array, self.src)
        ready(array, stream)
        message = self._keep(array)
        with self._there:
            if self.is_closed:
                message.pin.release()
                raise ClosedError(f"{self!r} was closed")
            self._waiting.append(message)
            self._there.notify_all()
        self._count_sent(array.nbytes, time.perf_counter() - started)

    def _taken_by(self, wanted: Array | None, stream: StreamLike | None, deadline: float | None) -> tuple[Array, Any]:
        message = self._next(wanted, deadline)
        try:
            return self._received_into(message, wanted, stream), (message, wanted is None)
        except BaseException:
            self._put_back(message)
            raise

    def _take_back(self, came: Any, array: Array) -> None:
        message, is_ours = came
        if is_ours:
            array.close()
        self._put_back(message)

    def _next(self, wanted: Array | None, deadline: float | None) -> Message:
        """Take the message that was sent first, once there is one and it fits into what is wanted."""
        with self._there:
            while not self._waiting:
                self.handle  # noqa: B018  (closed meanwhile?)
                left = _SLICE if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimeoutError("nothing was sent in time")
                self._there.wait(min(left, _SLICE))
                let_in()
            if wanted is not None:
                check_fits(wanted, self._waiting[0].nbytes, self.dst)
            return self._waiting.popleft()

    def _put_back(self, message: Message) -> None:
        """Keep a message for another try."""
        with self._there:
            self._waiting.appendleft(message)
            self._there.notify_all()

    def _received_into(self, message: Message, buffer: Array | None, stream: object) -> Array:
        if buffer is not None:
            ready(buffer, stream)
            if message.nbytes:
                self._move(message, buffer)
            return shown_on(buffer, message.dtype, message.shape)
        made = fresh(self.dst, message.shape, message.dtype)
        try:
            if message.nbytes:
                self._move(message, made)
        except BaseException as error:
            with unwinding(error):
                made.close()
            raise
        return made

    def synchronize(self, *, timeout: float | None = None) -> None:
        """Return when what this transport began is done: what was received is there when `recv` returns."""
        self.handle  # noqa: B018  (the check; there is nothing else to wait for)

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Give everything back; see the contract. Arrays that were sent and not received are dropped."""
        was_open = self._claim.handle.is_open
        super().close(strict=strict)
        if not was_open:  # or in a forked child, where nobody would ever let go of the lock
            return
        with self._there:
            while self._waiting:
                self._waiting.popleft().pin.release()
            self._there.notify_all()

    @classmethod
    @contextlib.contextmanager
    def _ends(cls, src: Location, dst: Location) -> Iterator[tuple[Any, Any]]:
        with cls(src, dst) as both:
            yield both, both
