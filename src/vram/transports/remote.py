"""Transports between two processes: memory is described once, and after that its id is enough.

Memory is :mod:`vram.handover`'s; here are the places, the window, the receipts, and the exchange. An end reads what
the other one says when it receives, waits or sends; nothing runs in between. A sender that is ahead by
:data:`~vram.transports.wire.WINDOW` messages waits, so that neither end fills the exchange with unread messages.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from msgspec import structs

from ..arrays import Array
from ..arrays.hints import StreamLike
from ..arrays.streams import as_stream
from ..errors import (
    PeerGoneError,
    ProtocolError,
    ReleaseWarning,
    UnsupportedError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from ..handover.exports import Export, ExportTable, refer
from ..handover.imports import ImportTable
from ..handover.messages import Closed, EventIs, MemoryPart, NextPart, Part, Reference, Shared, Unmap, Unref
from ..handover.outbox import Outbox
from ..handover.remote_refs import RefToken, RemoteRefs, unreturned
from ..handover.stream_events import StreamEvents
from ..lifetime import let_in, shielded, take, unwinding
from ..memory.foreign import ForeignRegion
from ..open_files import close_fds
from ..sharing.mapping import device_name
from ..spec import Location
from .contract import ExportedBuffer
from .endpoint import Endpoint
from .exchanges import Exchange, wait_until
from .places import as_array, check_fits, check_place, ready, shown_on
from .wire import MOST_OF_A_KIND, VERSION, WINDOW, Handle, Hello, Message, Received, decode, decode_handle, encode

MAX_MEMORIES = 4096  # that the other end may have described at a time
_MOMENT = 0.2  # seconds for the end of a connection to show, when its memory is gone already
_SLICE = 2e-3  # seconds between two looks, where another thread hears the other end
_LINGER = 1.0  # seconds for the other end to say that it is done, when this one is closed
# Messages that are heard where nobody waits, or no longer: more than an end that keeps to the window leaves unread, and
# a peer that says other things without end keeps nobody beyond that, nor for longer than this, in seconds: what a
# message brings may take as long to close as whoever sent it likes. The rest waits in the exchange.
_MOST_AT_ONCE = 4 * WINDOW
_MOST_LATE = 1.0


ACKED_ELSEWHERE = "another thread tells the other end what was received, and that reads nothing"


class _Arrived:
    """An array that came and was not received yet, and the event after which it may be read; 0 if at once."""

    __slots__ = ("array", "event")

    is_dropped = False

    def __init__(self, array: Array, event: int) -> None:
        self.array, self.event = array, event

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return self.array.nbytes

    def close(self) -> None:
        """Drop the array."""
        self.array.close()


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
        "_acking", "_awaited", "_came", "_close_fds", "_exchange", "_exports", "_imports", "_inbox", "_is_back",
        "_learning", "_memory_is_on", "_origin", "_outbox", "_owes", "_peer", "_reading", "_received_count", "_refs",
        "_sending", "_sent_count", "_stream_events", "_taken", "_taking", "_warm", "timeout",
    )  # fmt: skip

    needs_fds: ClassVar[bool]
    copies: ClassVar[bool] = False  # whether what is received is a copy in any case
    carries: ClassVar[frozenset[str]] = frozenset({"vmm"})  # what made the memory; see selection.select

    @shielded
    def __init__(
        self, src: Location | str, dst: Location | str, exchange: Exchange, *, timeout: float | None = None
    ) -> None:
        super().__init__(src, dst)
        self._exchange = exchange
        self._memory_is_on = self.src
        self.timeout = timeout
        self._origin = os.urandom(16)
        self._peer = b""  # the other end's, from its Hello on
        self._inbox: deque[Any] = deque()
        self._is_back = False  # whether one is in there that the other end was told is received
        self._came: tuple[bytes, list[int]] | None = None  # taken off the exchange, and not dealt with
        self._owes = False  # whether the other end waits to hear that a part of memory was taken
        self._outbox = Outbox(MOST_OF_A_KIND)  # finalizers put into it; it goes with the next call
        self._exports = ExportTable(self._outbox.unmap, by_handle=True)
        self._imports = ImportTable(self._outbox.unref, user=self.dst)
        self._refs = RemoteRefs()
        self._stream_events = StreamEvents()
        self._warm = 0  # memory by handle that was sent last: open there, and mostly sent again; 0 is none
        self._sent_count = self._taken = self._received_count = 0
        self._awaited = 0  # parts of memory that the other end has not taken yet
        # None of them is ever taken by a finalizer. Reading and receipts have locks of their own: a sender that waits
        # for the other end must not keep another thread from telling it what was received.
        self._reading, self._taking, self._sending, self._acking, self._learning = (threading.Lock() for _ in range(5))
        try:
            if self.needs_fds and not exchange.carries_fds:
                raise UnsupportedError(
                    f"the {self.kind} transport", "an exchange that carries file descriptors: SocketExchange",
                    f"{type(exchange).__name__}, which carries bytes only",
                )  # fmt: skip
            with contextlib.suppress(PeerGoneError):  # what it said before may still be there to be received
                exchange.send(encode(Hello(VERSION, self.kind, self._origin)), timeout=timeout)
        except BaseException as error:
            with unwinding(error):
                self._claim.release()
            raise

    @property
    def exchange(self) -> str:
        """What carries the bytes, and what the messages, in words."""
        return f"{self.method}; messages over {getattr(self._exchange, 'way', type(self._exchange).__name__)}"

    @property
    @shielded
    def ready(self) -> bool:
        """Whether both ends are open, and this one has heard the other's greeting. Does not wait.

        Raises
        ------
        ProtocolError
            If the other end is no such transport, or one of another version.
        """
        if self.is_closed:
            return False
        with contextlib.suppress(PeerGoneError):
            if not self._peer:
                self._listen()
            return bool(self._peer) and not self._exchange.is_gone()
        return False

    # -- what differs -------------------------------------------------------------------------------------------
    def _check_memory(self, array: Array) -> None:
        """Raise UsageError if an array's memory does not travel this way."""

    # -- the contract -------------------------------------------------------------------------------------------
    @shielded
    def export(self, buffer: Array) -> ExportedBuffer:
        """Return a handle to a buffer for who brings it to the other end; see the contract."""
        array = self._of_ours(buffer)
        ready(array, None)
        with _held(self._sending):
            export = self._exports.export(array)
        return self._handle_of(array, export)

    def exported_handle(self, buffer: Array) -> ExportedBuffer | None:
        """Return the handle of a buffer whose memory was exported or sent before, or None; see the contract."""
        array = self._of_ours(buffer)
        export = self._exports.known(array.region)
        return None if export is None else self._handle_of(array, export)

    @shielded
    def import_(self, handle: ExportedBuffer) -> Array:
        """Open the memory that a handle of the other end describes; see the contract.

        The descriptors in it stay the caller's. The memory is opened once, however often and in whatever way it comes.
        """
        self._check_handle(handle)
        said = decode_handle(handle.payload)
        self._until(lambda: bool(self._peer), self.timeout, "the other end did not greet")
        if said.origin != self._peer:
            raise UsageError("a handle was brought to an end that is not connected with the one that made it")
        self._learn(said.part, list(handle.fds))
        return self._array(said.reference, None)

    @shielded
    def send(self, buffer: Array, stream: StreamLike | None = None) -> None:
        """Hand a buffer at the source over; see the contract. With a stream its event goes along, and nobody waits."""
        started = time.perf_counter()
        array = self._of_ours(buffer)
        if stream is None:
            ready(array, None)
        elif array.region.users[0].kind == "host":
            ready(array, stream)  # says that there is none
        with _held(self._sending):
            self._listen()
            self._until(lambda: self._sent_count - self._taken < WINDOW, self.timeout, "the other end received nothing")
            self._tell()
            self._hand_over(array, None if stream is None else as_stream(stream))
            self._sent_count += 1
        self._count_sent(array.nbytes, time.perf_counter() - started)

    def recv(
        self, buffer: Array | None = None, stream: StreamLike | None = None, *, timeout: float | None = None
    ) -> Array:
        """Return what the other end sent: its own memory, or a copy of it in a buffer; see the contract."""
        return _receive([self], buffer, stream, timeout)

    def _unreceive(self, came: Any) -> None:
        """Keep what was received, and the other end told of, for another try."""
        with self._acking:
            self._received_count -= 1
            self._is_back = True
        self._put_back(came)

    def _put_back(self, came: Any) -> None:
        if not came.is_dropped:
            with self._taking:
                self._inbox.appendleft(came)

    @shielded
    def synchronize(self, *, timeout: float | None = None) -> None:
        """Return when the other end has received all that this one sent; see the contract."""
        self.handle  # noqa: B018  (the check)
        self._listen()
        self._tell()
        self._until(lambda: self._taken >= self._sent_count, timeout, "the other end has not received everything")

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Give everything back, and the exchange; see the contract.

        Memory of ``cudaMalloc`` or of a pool that was sent, and that the other end still uses a second later, is kept
        for as long as this process lives, with a ReleaseWarning: the other end can no longer say that it is done.
        """
        left = self._linger() if self._claim.handle.is_open else 0  # not in a forked child, which owns none of it
        was_open = self._claim.handle.is_open
        super().close(strict=strict)
        if not was_open:
            return
        self._exchange.close()
        with self._taking:
            while self._inbox:
                self._inbox.popleft().close()
        with self._reading:  # whoever read has been told by the exchange that it is closed
            if self._came is not None:
                close_fds(self._came[1])
            self._imports.close()
        self._exports.close()
        self._stream_events.close()
        if left:
            unreturned.append(self._refs)
            warnings.warn(
                f"{self!r} is closed while the other end uses {left} arrays of memory that lives only as long as its "
                f"maker: they are kept until this process ends. Have the other end drop them, or close, first",
                ReleaseWarning, stacklevel=3,
            )  # fmt: skip
        else:
            self._refs.close()

    def _linger(self) -> int:
        """Wait for the work that events stand for, and for the other end to be done with what it may not outlive.
        Return how many arrays it still uses."""
        try:
            self._stream_events.synchronize()
            self._until(lambda: not self._refs, _LINGER if self._refs else 0, "")
        except VramError:  # it does not, it is gone, or what it says makes no sense
            pass
        with contextlib.suppress(VramError):
            return 0 if self._exchange.is_gone() else len(self._refs)
        return 0

    # -- this end's memory --------------------------------------------------------------------------------------
    def _of_ours(self, buffer: object) -> Array:
        self.handle  # noqa: B018  (the check)
        try:
            array = as_array(buffer, copies=self.copies)
        except UsageError as error:
            if not self.copies and not isinstance(buffer, Array):
                error.add_note("The shm transport copies whatever is on a GPU")
            raise
        check_place("the buffer", array, self.src)
        self._check_memory(array)
        return array

    def _handle_of(self, array: Array, export: Export) -> ExportedBuffer:
        start = array.offset
        kept = array.region.pin(start, start + array.nbytes, "exported")
        part, fds = export.whole()
        handle = Handle(self._origin, part, refer(export.id, export.count, array))
        return ExportedBuffer(self.kind, encode(handle), tuple(fds), (kept, array))

    def _hand_over(self, array: Array, stream: int | None) -> None:
        """Describe an array to the other end, and its memory if that does not know it yet. With the sending lock."""
        event = 0 if stream is None else self._record(array, stream)
        export = self._introduce(array)
        keep = self._refs.keep(array, export.id) if export.data else 0
        try:
            if keep and export.id != self._warm:
                if self._warm:
                    self._outbox.idle(self._warm)
                self._warm = export.id
            self._say(Shared(refer(export.id, export.sent, array), keep, event))
        except BaseException:
            if keep:
                self._drop_ref(keep, 1)
            raise

    def _record(self, array: Array, stream: int) -> int:
        """Record an event on a stream and return its number, after the other end was told what it is."""
        number, entry = self._stream_events.record(array.region, stream)
        if entry is not None:
            self._say(EventIs(number, entry))
            self._stream_events.told(number)
        return number

    def _introduce(self, array: Array) -> Export:
        export = self._exports.export(array)
        if export.sent < export.count or export.sent < 0:
            kept = export.keep()
            try:
                for part, fds in export.parts(max(export.sent, 0)):
                    # One part on its way at a time: descriptors that nobody reads are limited, for all of this user.
                    self._until(lambda: not self._awaited, self.timeout, "the other end takes no descriptors")
                    self._say(Part(part), fds)
                    export.sent = part.first + len(part.descriptor.segments)
                    self._awaited += not part.last
            finally:
                kept.release()
        return export

    def _drop_ref(self, number: int, times: int) -> None:
        """The other end is done with what was kept for it."""
        memory = self._refs.decref(number, times)
        if memory is not None:
            self._outbox.idle(memory)

    def _release_idle(self, memory: int) -> None:
        """Have the other end close what it uses no more, unless it was sent last."""
        if memory != self._warm and self._refs.is_idle(memory):
            self._exports.release(memory)

    # -- what is said -------------------------------------------------------------------------------------------
    def _say(self, message: object, fds: list[int] | tuple[int, ...] = ()) -> None:
        self._exchange.send(encode(message), fds, timeout=self.timeout)

    def _tell(self) -> None:
        """Tell the other end what is unmapped or dropped here, as far as it reads. Never waits for it."""
        # Whoever has the lock may wait for an end that reads nothing: then the next call tells it.
        if self._outbox and self._acking.acquire(True, _SLICE):
            try:
                self._outbox.tell(self._exchange, self._release_idle)
            finally:
                self._acking.release()

    def _acknowledge(self, message: object, deadline: float | None) -> None:
        """Say what the other end waits for, or will, in the time of the call that does so. Raises WaitTimeoutError if
        the other end reads nothing: it was not said, and the next call says it."""
        with contextlib.suppress(PeerGoneError):  # nobody waits for it any more
            self._exchange.send(encode(message), timeout=self.timeout if deadline is None else _left(deadline))

    def _say_received(self, deadline: float | None) -> None:
        """Tell the other end that one more message was received; if this raises, that is not counted."""
        if not take(self._acking, _left(deadline)):
            raise WaitTimeoutError(ACKED_ELSEWHERE)
        self._received_count += 1
        try:
            self._acknowledge(Received(self._received_count), deadline)
            self._is_back = False
        except BaseException:  # told of it or not, the other end is told of the same number again, which does no harm
            self._received_count -= 1
            self._is_back = True
            raise
        finally:
            self._acking.release()

    # -- what is heard ------------------------------------------------------------------------------------------
    def _until(self, is_done: Callable[[], bool], timeout: float | None, what: str) -> None:
        """Hear the other end until something is so."""
        deadline = None if timeout is None else time.monotonic() + timeout
        late = 0
        while not is_done():
            let_in()
            left = None if deadline is None else deadline - time.monotonic()
            late += left is not None and left <= 0
            try:
                if late > _MOST_AT_ONCE or (late > 1 and _is_late(deadline)):
                    raise WaitTimeoutError("the other end says other things without end")
                # Whoever else hears the other end may hear what is waited for here, and then go on hearing.
                if self._reading.acquire(True, _SLICE if left is None else max(min(left, _SLICE), 0.0)):
                    try:
                        if not is_done():
                            self.handle  # noqa: B018  (closed meanwhile?)
                            self._hear(deadline)
                    finally:
                        self._reading.release()
                elif left is not None and left <= 0:
                    raise WaitTimeoutError("somebody else hears the other end")
            except WaitTimeoutError:
                raise WaitTimeoutError(f"{what} for {round(timeout or 0, 3):g} s") from None

    def _listen(self) -> None:
        """Hear what is there already, a bounded part of it, for a bounded time."""
        if not self._reading.acquire(False):
            return
        began = time.monotonic()
        try:
            with contextlib.suppress(WaitTimeoutError):
                for heard in range(_MOST_AT_ONCE):
                    if heard and _is_late(began):
                        break
                    self._hear(0.0)
        finally:
            self._reading.release()

    def _hear(self, deadline: float | None) -> None:
        """Take one message off the exchange and deal with it, after the acknowledgement of an earlier part of memory.
        If Ctrl-C comes while memory is opened, the message is dealt with the next time."""
        self._say_taken(deadline)
        came, self._came = self._came, None
        if came is None:
            try:
                came = self._exchange.recv(timeout=_left(deadline))
            except PeerGoneError:
                self._refs.close()  # nobody uses it there any more
                raise
        try:
            self._deal_with(*came)
        except BaseException as error:
            if isinstance(error, Exception):
                close_fds(came[1])
            else:
                self._came = came
            raise
        self._say_taken(deadline)

    def _say_taken(self, deadline: float | None) -> None:
        """Acknowledge a part of memory, if one is to be."""
        if self._owes:
            self._acknowledge(NextPart(), deadline)  # of one that is gone the next look says so
            self._owes = False

    def _deal_with(self, payload: bytes, fds: list[int]) -> None:
        message = decode(payload)
        if fds and not isinstance(message, Part):
            raise ProtocolError(f"{len(fds)} descriptors came with a {type(message).__name__}, which has none")
        if isinstance(message, Hello):
            self._greet(message)
        elif not self._peer:
            raise ProtocolError(f"the other end began with a {type(message).__name__}, without a Hello")
        elif isinstance(message, Shared):
            self._inbox.append(self._arrived(message))
        elif isinstance(message, Received):
            # The one that is just being sent may have been received before that is counted.
            if not self._taken <= message.count <= self._sent_count + self._sending.locked():
                raise ProtocolError(f"{message.count} messages are said to be received of {self._sent_count}")
            self._taken = message.count
        elif isinstance(message, NextPart):
            if not self._awaited:
                raise ProtocolError("the other end says that it took a part of memory; none was sent")
            self._awaited -= 1
        elif isinstance(message, Unref):
            for number, times in message.arrays:
                self._drop_ref(number, times)
        elif isinstance(message, Part):
            self._learn(message.part, fds)
            self._owes = not message.part.last
            close_fds(fds)
        else:
            self._deal_with_ends(message)

    def _deal_with_ends(self, message: Message) -> None:
        """Do what a message says about memory that is gone, or of an event."""
        if isinstance(message, Unmap):
            with self._learning:
                for number in message.memories:
                    if not self._imports.release(number):
                        continue
                    self._outbox.unmapped(number)
        elif isinstance(message, Closed):
            for number in message.memories:
                self._refs.closed(number)
        elif not isinstance(message, EventIs):
            raise ProtocolError(f"a {type(message).__name__} came, which is not said on the {self.kind} transport")
        else:
            with self._while_it_lives():
                self._stream_events.learn(message.number, message.event)

    def _greet(self, message: Hello) -> None:
        if message.kind != self.kind or message.version != VERSION:
            raise ProtocolError(
                f"the other end is a {message.kind!r} transport, version {message.version}; this is "
                f"{self.kind!r}, version {VERSION}"
            )
        self._peer = message.origin

    # -- the other end's memory ---------------------------------------------------------------------------------
    def _learn(self, part: MemoryPart, fds: list[int]) -> None:
        """Open memory, or what it has grown by, as far as it is not open already. `fds` are lent."""
        if part.descriptor.device != device_name(self._memory_is_on):
            raise ProtocolError(
                f"memory came from a device {part.descriptor.device!r:.80}, which is not {self._memory_is_on}"
            )
        with self._learning:
            known = self._imports.known(part.memory)
            if 0 <= part.first < known:  # somebody brought it by hand
                part.descriptor.check()
                part, fds = _from(part, fds, known)
                if not part.descriptor.segments:
                    return
            if known < 0 and len(self._imports.numbers()) >= MAX_MEMORIES:
                raise ProtocolError(f"the other end described more than {MAX_MEMORIES} memories")
            with self._while_it_lives():
                self._imports.learn(part, fds)

    @contextlib.contextmanager
    def _while_it_lives(self) -> Iterator[None]:
        """Say of what cannot be opened, since its maker is gone, that its maker is gone."""
        try:
            yield
        except ProtocolError as error:
            # It goes with its maker, and a moment later the connection does.
            with contextlib.suppress(WaitTimeoutError):
                wait_until(lambda: self._exchange.is_gone() or None, _MOMENT, "")
                raise PeerGoneError(
                    f"the process that made the memory is gone, and the memory with it: {error}"
                ) from None
            raise

    def _arrived(self, message: Shared) -> _Arrived:
        if len(self._inbox) >= WINDOW + self._is_back:
            raise ProtocolError(f"more than {WINDOW} messages came that were not received")
        token = RefToken(message.keep, self._outbox.unref) if message.keep else None
        return _Arrived(self._array(message.reference, token), message.event)

    def _array(self, reference: Reference, token: RefToken | None) -> Array:
        """Return the array that the other end means. A wrong one is the other end's mistake (S7)."""
        array = self._imports.new_array(reference, token)
        if array is None:
            raise ProtocolError(f"an array came on memory {reference.memory}, which was not described")
        return array

    def _taken_by(self, came: Any, wanted: Array | None, stream: object, deadline: float | None) -> Array | None:
        """Return what came once it may be used, or its copy in the buffer that is wanted; None if it was given up."""
        array: Array = came.array
        self._check_alive(array)
        if wanted is None:
            self._wait(came, None if stream is None else as_stream(stream))
            return array
        self._wait(came, None)
        ready(wanted, stream)
        if array.nbytes:
            array.region.driver.copy(wanted.address, array.address, array.nbytes)
            self._check_alive(array)  # what was read before the other end died is right, and nobody knows when
        return shown_on(wanted, array.dtype, array.shape)

    def _wait(self, came: _Arrived, stream: int | None) -> None:
        """Have a stream wait for the work that fills an array, or wait here as long as whoever does it is there."""
        if came.event:
            self._stream_events.wait(came.event, came.array.region, stream, self._check_filler)
            came.event = 0

    def _check_filler(self) -> None:
        if self._exchange.is_gone():
            raise PeerGoneError("the process that was filling the memory is gone, and nobody knows how far it came")

    def _check_alive(self, array: Array) -> None:
        """Raise if what was received cannot be used, since it lived only as long as its sender."""
        if isinstance(array.region, ForeignRegion) and self._exchange.is_gone():
            raise PeerGoneError("the process that made the memory is gone, and its memory with it")

    def _imported(self) -> int:
        return len(self._imports.numbers())


@shielded(undo=lambda taken, _: taken[0]._unreceive(taken[1]))
def _receive(taken: list[Any], buffer: Array | None, stream: StreamLike | None, timeout: float | None) -> Array:
    """Receive by the transport in a list, which has afterwards what was taken out of its inbox as well."""
    transport: RemoteTransport = taken[0]
    transport.handle  # noqa: B018  (the check)
    deadline = None if timeout is None else time.monotonic() + timeout
    wanted = None if buffer is None else as_array(buffer, copies=True)
    found: Array | None = None
    transport._tell()
    try:
        while found is None:
            transport._until(lambda: bool(transport._inbox), _left(deadline), "no message came")
            with transport._taking:
                if not transport._inbox:  # another thread was faster
                    continue
                if wanted is not None:
                    check_fits(wanted, transport._inbox[0].nbytes, transport.dst)
                taken[1:] = [transport._inbox.popleft()]  # an _Arrived, or what a subclass puts there instead
            started = time.perf_counter()
            found = transport._taken_by(taken[1], wanted, stream, deadline)
        transport._count_received(taken[1].nbytes, time.perf_counter() - started)
        transport._say_received(deadline)
    except BaseException:
        for came in taken[1:]:
            transport._put_back(came)
        raise
    return found


@contextlib.contextmanager
def _held(lock: threading.Lock) -> Iterator[None]:
    """Hold a lock that another thread may hold while it waits for the other end."""
    take(lock)
    try:
        yield
    finally:
        lock.release()


def _left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline, 0 from then on; None where there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _is_late(deadline: float | None) -> bool:
    """Whether a deadline is over for so long that what is there already is left for the next call."""
    return deadline is not None and time.monotonic() - deadline >= _MOST_LATE


def _from(part: MemoryPart, fds: list[int], known: int) -> tuple[MemoryPart, list[int]]:
    """Return what is left of a part of memory whose first segments are known."""
    skipped, whole = known - part.first, part.descriptor
    segments = whole.segments[skipped:]
    left = structs.replace(whole, segments=segments, offset=0, nbytes=sum(one.nbytes for one in segments))
    return structs.replace(part, first=known, descriptor=left), fds[skipped:]
