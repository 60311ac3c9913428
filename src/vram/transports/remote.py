"""Transports between two processes: memory is described once, and after that its id is enough.

An end reads what the other one says when it receives, waits or sends; nothing runs in between. At most
:data:`~vram.transports.wire.WINDOW` messages are under way, so neither end ever fills the exchange with what nobody
reads: a sender that is further ahead waits until the other end has received.

Memory that was described to this end is opened once and kept under its sender's number, until the sender says that it
is gone there, or either end is closed. Arrays on it that are in use keep it on their own.

An interrupt (I12) loses no message. What was taken off the exchange stays until it was dealt with, in steps that may be
repeated; what must not be done twice ends in two steps without a call between them. An exchange raises what it has not
sent, so what was sent is counted in the step after the return.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from ..arrays import Array
from ..arrays.dtypes import dtype_name, dtype_of
from ..arrays.shapes import nbytes_of
from ..errors import PeerGoneError, ProtocolError, UnsupportedError, UsageError, WaitTimeoutError
from ..handover.messages import Part
from ..lifetime import uninterrupted, unwinding
from ..memory import Region
from ..sharing.channel import close_fds
from ..spec import Location
from .endpoint import Endpoint
from .exchanges import Exchange
from .places import as_array, check_fits, check_place, ready, shown_on
from .wire import MAX_UNMAPPED, VERSION, WINDOW, Allocation, Hello, NextPart, Received, Sent, Unmap, decode, encode

__all__ = ["RemoteTransport"]

MAX_MEMORIES = 4096  # that the other end may have described at a time


class _Came:
    """A message that was taken off the exchange, and how far it was dealt with."""

    __slots__ = ("fds", "is_answered", "is_begun", "is_learned", "payload")

    def __init__(self, payload: bytes, fds: list[int]) -> None:
        self.payload = payload
        self.fds = fds
        self.is_begun = self.is_learned = self.is_answered = False


class RemoteTransport(Endpoint):
    """One end of a transport between two processes.

    Parameters
    ----------
    src, dst : Location or str
        From where to where, the same at both ends; as this process names them.
    exchange : Exchange
        What leads to the other end. Received over: it is closed with this end. The caller's still if this fails.
    timeout : float, optional
        Seconds to wait for the other end in :meth:`send`; for ever by default.

    Raises
    ------
    UnsupportedError
        If it is not available between the two places, or the exchange cannot carry what it needs.
    """

    __slots__ = (
        "_acking", "_awaited", "_came", "_exchange", "_greeted", "_inbox", "_is_back", "_memories", "_reading",
        "_received_count", "_retired", "_sending", "_sent_count", "_taken", "_taking", "timeout",
    )  # fmt: skip

    needs_fds: ClassVar[bool]

    def __init__(
        self, src: Location | str, dst: Location | str, exchange: Exchange, *, timeout: float | None = None
    ) -> None:
        super().__init__(src, dst)
        self._exchange = exchange
        self.timeout = timeout
        self._greeted = False
        self._inbox: deque[Array] = deque()
        self._is_back = False  # whether one is in there that the other end was told is received
        self._came: list[_Came | tuple[bytes, list[int]]] = []  # one, taken off the exchange and not dealt with yet
        self._memories: dict[int, tuple[Region, Callable[[], object]]] = {}
        self._retired: deque[int] = deque()  # finalizers append to it
        self._sent_count = self._taken = self._received_count = 0
        self._awaited = 0  # parts of memory that the other end has not taken yet
        # None of them is ever taken by a finalizer. Reading and receipts have locks of their own: a sender that waits
        # for the other end must not keep another thread from telling it what was received.
        self._reading, self._taking, self._sending, self._acking = (threading.Lock() for _ in range(4))
        try:
            if self.needs_fds and not exchange.carries_fds:
                raise UnsupportedError(
                    f"the {self.kind} transport", "an exchange that carries file descriptors: SocketExchange",
                    f"{type(exchange).__name__}, which carries bytes only",
                )  # fmt: skip
            with contextlib.suppress(PeerGoneError):  # what it said before may still be there to be received
                exchange.send(encode(Hello(VERSION, self.kind)), timeout=timeout)
        except BaseException as error:
            with unwinding(error):
                self._claim.release()
            raise

    # -- what differs -------------------------------------------------------------------------------------------
    @abstractmethod
    def _introduce(self, array: Array) -> int:
        """Return the number of an array's memory; describe it to the other end if it does not know it yet."""

    @abstractmethod
    def _learn(self, message: Part | Allocation, fds: list[int], *, again: bool = False) -> None:
        """Open memory that the other end described. `fds` are lent.

        Parameters
        ----------
        again : bool
            Whether an interrupt came the last time, when it may have been opened all the same.
        """

    def _keep_open(self, array: Array, number: int) -> None:
        """Have an array keep what it lies on open, if its own pin does not."""

    def _check_alive(self) -> None:
        """Raise if what was received cannot be used, since its sender is gone."""

    # -- the contract -------------------------------------------------------------------------------------------
    def send(self, buffer: Array, stream: object = None) -> None:
        """Hand a buffer at the source over; see the contract."""
        started = time.perf_counter()
        self.handle  # noqa: B018  (the check)
        array = as_array(buffer)
        check_place("the buffer", array, self.src)
        ready(array, stream)
        with self._sending:
            self._listen()
            self._until(lambda: self._sent_count - self._taken < WINDOW, self.timeout, "the other end received nothing")
            self._tell_retired()
            number = self._introduce(array)
            self._say(Sent(number, array.offset, array.nbytes, dtype_name(array.dtype), array.shape))
            self._sent_count += 1
        self._count_sent(array.nbytes, time.perf_counter() - started)

    def recv(self, buffer: Array | None = None, stream: object = None, *, timeout: float | None = None) -> Array:
        """Return what the other end sent: its own memory, or a copy of it in a buffer; see the contract."""
        self.handle  # noqa: B018  (the check)
        wanted = None if buffer is None else as_array(buffer)
        came: Array | None = None
        try:
            while came is None:
                self._until(lambda: bool(self._inbox), timeout, "no message came")
                with self._taking:
                    if not self._inbox:  # another thread was faster
                        continue
                    if wanted is not None:
                        check_fits(wanted, self._inbox[0].nbytes, self.dst)
                    came = uninterrupted(self._inbox.popleft)
            started, nbytes = time.perf_counter(), came.nbytes
            self._check_alive()
            found = came
            if wanted is not None:
                ready(wanted, stream)
                if nbytes:
                    came.region.driver.copy(wanted.address, came.address, nbytes)
                    self._check_alive()  # what was read before the other end died is right, and nobody knows when
                found = shown_on(wanted, came.dtype, came.shape)
            self._count_received(nbytes, time.perf_counter() - started)
            self._say_received()
        except BaseException:
            if came is not None:
                with self._taking:
                    self._inbox.appendleft(came)  # it stays, for another try
            raise
        if wanted is not None:
            came.close()
        return found

    def _say_received(self) -> None:
        """Tell the other end that one more message was received; if this raises, that is not counted."""
        is_counted = False
        try:
            with self._acking:
                self._received_count += 1
                is_counted = True
                with contextlib.suppress(PeerGoneError):  # nobody waits for it any more
                    self._exchange.send(encode(Received(self._received_count)), timeout=self.timeout)
                self._is_back = False
        except BaseException:
            if is_counted:  # told of it or not, the other end is told of the same number again, which does no harm
                self._received_count -= 1
                self._is_back = True
            raise

    def synchronize(self, *, timeout: float | None = None) -> None:
        """Return when the other end has received all that this one sent; see the contract."""
        self.handle  # noqa: B018  (the check)
        self._tell_retired()
        self._until(lambda: self._taken >= self._sent_count, timeout, "the other end has not received everything")

    def close(self, *, strict: bool = False) -> None:
        """Give everything back, and the exchange; see the contract."""
        was_open = self._claim.handle.is_open
        super().close(strict=strict)
        if not was_open:  # or in a forked child, which owns none of it
            return
        self._exchange.close()
        with self._taking:
            while self._inbox:
                self._inbox[0].close()
                self._inbox.popleft()
        with self._reading:  # whoever read has been told by the exchange that it is closed
            for came in self._came:
                close_fds(came.fds if isinstance(came, _Came) else came[1])
            for number in tuple(self._memories):
                self._forget(number)

    # -- what is said -------------------------------------------------------------------------------------------
    def _say(self, message: object, fds: list[int] | tuple[int, ...] = ()) -> None:
        self._exchange.send(encode(message), fds, timeout=self.timeout)

    def _tell_retired(self) -> None:
        """Tell the other end of memory that is unmapped here."""
        while self._retired:
            numbers: list[int] = []
            try:
                with contextlib.suppress(IndexError):
                    while len(numbers) < MAX_UNMAPPED:
                        (_,) = map(numbers.append, map(deque.popleft, (self._retired,)))  # in one step (I12)
                if numbers:
                    self._say(Unmap(tuple(numbers)))
                    del numbers[:]
            finally:
                self._retired.extend(numbers)  # twice does no harm

    # -- what is heard ------------------------------------------------------------------------------------------
    def _until(self, is_done: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Hear the other end until something is so."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not is_done():
            left = None if deadline is None else deadline - time.monotonic()
            held = False
            try:
                held = uninterrupted(self._reading.acquire, True, -1 if left is None else max(left, 0.0))
                if not held:
                    raise WaitTimeoutError("somebody else hears the other end")
                if not is_done():
                    self.handle  # noqa: B018  (closed meanwhile?)
                    self._hear(left if left is None else max(left, 0.0))
            except WaitTimeoutError:
                raise WaitTimeoutError(f"{what} for {timeout or 0:g} s") from None
            finally:
                if held:
                    self._reading.release()

    def _listen(self) -> None:
        """Hear what is there already."""
        held = False
        try:
            held = uninterrupted(self._reading.acquire, False)
            with contextlib.suppress(WaitTimeoutError):
                while held:
                    self._hear(0)
        finally:
            if held:
                self._reading.release()

    def _hear(self, timeout: float | None) -> None:
        """Take one message off the exchange and deal with it, or with the one that an interrupt left."""
        if not self._came:
            self._came += (self._exchange.recv(timeout=timeout),)
        came = self._came[0]
        if not isinstance(came, _Came):
            came = self._came[0] = _Came(*came)
        try:
            self._deal_with(came)
        except Exception:  # no interrupt: it is what the message says, or who sent it
            del self._came[:]
            close_fds(came.fds)
            raise

    def _deal_with(self, came: _Came) -> None:
        """Do what a message says. After an interrupt it is called again, and finds what was done; see the module."""
        message = decode(came.payload)
        if came.fds and not isinstance(message, Part):
            raise ProtocolError(f"{len(came.fds)} descriptors came with a {type(message).__name__}, which has none")
        if isinstance(message, Hello):
            self._greet(message)
        elif not self._greeted:
            raise ProtocolError(f"the other end began with a {type(message).__name__}, without a Hello")
        elif isinstance(message, Sent):
            if len(self._inbox) >= WINDOW + self._is_back:
                raise ProtocolError(f"more than {WINDOW} messages came that were not received")
            array = self._array(message)
            self._inbox += (array,)
            del self._came[:]
            return
        elif isinstance(message, Received):
            if not self._taken <= message.count <= self._sent_count:
                raise ProtocolError(f"{message.count} messages are said to be received of {self._sent_count}")
            self._taken = message.count
        elif isinstance(message, NextPart):
            if not self._awaited:
                raise ProtocolError("the other end says that it took a part of memory; none was sent")
            self._awaited -= 1
            del self._came[:]
            return
        elif isinstance(message, Unmap):
            for number in message.memories:
                self._forget(number)
        elif not came.is_learned:
            if not came.is_begun and len(self._memories) >= MAX_MEMORIES:
                raise ProtocolError(f"the other end described more than {MAX_MEMORIES} memories")
            again, came.is_begun = came.is_begun, True
            self._learn(message, came.fds, again=again)
            came.is_learned = True
        if isinstance(message, Part) and not message.part.last and not came.is_answered:
            with contextlib.suppress(PeerGoneError):  # the next look says so, after what came is read
                self._say(NextPart())
                came.is_answered = True
        close_fds(came.fds)
        del self._came[:]

    def _greet(self, message: Hello) -> None:
        if message.kind != self.kind or message.version != VERSION:
            raise ProtocolError(
                f"the other end is a {message.kind!r} transport, version {message.version}; this is "
                f"{self.kind!r}, version {VERSION}"
            )
        self._greeted = True

    def _array(self, sent: Sent) -> Array:
        """Return the array that the other end means. A wrong one is the other end's mistake (S7)."""
        region, _ = self._memories.get(sent.memory, (None, None))
        if region is None:
            raise ProtocolError(f"an array came on memory {sent.memory}, which was not described")
        array = array_on(region, sent.dtype, sent.shape, sent.offset, sent.nbytes)
        self._keep_open(array, sent.memory)
        return array

    def _forget(self, number: int) -> None:
        found = self._memories.get(number)
        if found is not None:
            found[1]()
            self._memories.pop(number, None)  # afterwards: an interrupt may have it dropped twice, but not left out

    def _imported(self) -> int:
        return len(self._memories)


def array_on(region: Region, dtype: str, shape: tuple[int, ...], offset: int, nbytes: int) -> Array:
    """Return an array that another process described, on memory that is checked already.

    Raises
    ------
    ProtocolError
        If it is none, or does not lie there.
    """
    try:
        kind = dtype_of(dtype)
        if nbytes_of(shape, kind) != nbytes:
            raise ProtocolError(f"an array of {dtype} {shape} is said to have {nbytes} bytes")
        return Array(region, kind, shape, offset=offset)
    except UsageError as error:
        raise ProtocolError(f"another process described an array that cannot be: {error}") from None
