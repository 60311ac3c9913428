"""A connection that carries arrays: the memory once, then ids."""

from __future__ import annotations

import contextlib
import operator
import socket
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..arrays import Array
from ..arrays.share import share
from ..arrays.streams import as_stream
from ..driver.protocol import UNDECIDED
from ..errors import (
    ClosedError,
    DriverError,
    PeerGoneError,
    ProtocolError,
    ReleaseWarning,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from ..lifetime import Owned, let_in, shielded, take, waiting
from ..memory import Region
from ..open_files import close_fds
from ..sharing.channel import MAX_MESSAGE, Channel, DescriptorsLostError
from ..sharing.parcels import Unread
from ..spec import check_timeout
from .containers import Packed, has_tuples, named, pack, refuse, unpack
from .exports import ExportTable, nothing, refer
from .imports import ImportTable, UnknownMemoryError
from .messages import (
    AwaitedPart,
    Closed,
    EventIs,
    Mixed,
    NextPart,
    Part,
    Returned,
    Shared,
    Unmap,
    Unref,
    Value,
    decode_message,
    decode_value,
    encode,
)
from .outbox import Outbox
from .remote_refs import RemoteRefs, unreturned
from .stream_events import StreamEvents

if TYPE_CHECKING:
    from ..arrays.hints import StreamLike


class _Ordered:
    """In the inbox in place of an array: one that may be used once an event is done."""

    __slots__ = ("array", "event")

    def __init__(self, array: Array, event: int) -> None:
        self.array, self.event = array, event


class _Mixed:
    """In the inbox in place of a container: some of its arrays may be used once events are done."""

    __slots__ = ("arrays", "tree")

    def __init__(self, tree: msgspec.Raw, arrays: list[Array | _Ordered]) -> None:
        self.tree, self.arrays = tree, arrays


class _Failure:
    """In the inbox in place of a value: what was wrong with a message that a sending thread took off the socket."""

    __slots__ = ("error",)

    def __init__(self, error: VramError) -> None:
        # Without the frames, and without what it was raised from, which has others: they hold the message, the
        # descriptors that came with it, and what their callers hold.
        error.__cause__ = error.__context__ = None
        self.error = error.with_traceback(None)


_HEARD = tuple(b"\x92\xa1" + tag for tag in (b"d", b"f", b"c"))  # Unref, Unmap, Closed
_PATIENCE = 10.0  # seconds that a sender without a deadline waits while nothing more can be received here
_LINGER = 1.0  # seconds for the other end to say that it is done, when this one is closed
_REFERENCE = 96  # bytes of an array in a container, at most, and 9 for each of its dimensions
_SLICE = 0.05  # seconds for which a sender that waits for an answer keeps others from receiving
_TAKEN = encode(NextPart())
# Messages that are dealt with when there is no time left, or none was given: what is there already is taken, and a peer
# that goes on with what puts nothing into the inbox keeps nobody beyond that, nor for more seconds than this: what a
# message brings may take as long to close as whoever sent it likes. The rest waits in the socket.
_MOST_AT_ONCE = 64
_MOST_LATE = 1.0
# Messages, and bytes in them, that a sender which waits for an answer takes for recv: enough for an end that sends a
# good while before it receives, and no more memory than a peer that never answers should have here. What comes after
# them waits in the socket.
_MOST_AHEAD = 4096
_MOST_BYTES_AHEAD = 16 << 20
_ARRAY_AHEAD = 1024  # bytes that an array in a container counts there: its reference has a few, and it is made at once
_MOST_LOST = 4096  # memories of which a part was lost here, and which the other end has still to send anew
# Who only sends listens once in so many messages whether a part of memory was lost at the other end.
_LISTENS = 256


class _LostHereError(ProtocolError):
    """A message cannot be used for what happened at this end: no mistake of the other one."""


_OURS = (_LostHereError, DescriptorsLostError)
_LOST = (DescriptorsLostError, DriverError)  # why a part of memory may not be had, and may be had later


class ArrayChannel(Owned):
    """Sends arrays to another process and back without copying them.

    The first time an array's memory is sent its file descriptors travel; after that an id does, and a hand-over
    costs about as much as any small message. The receiver sees the same memory, read-write unless it was published
    read-only. An array that its owner resized and sends again appears at the same address there. An array that comes
    back to where it was made is the same object, and what is sent again is the same object at the receiver while it
    is in use there.

    Parameters
    ----------
    channel : Channel or socket.socket
        A connection, taken over: a connected ``AF_UNIX``/``SOCK_SEQPACKET`` socket that you have already, or what
        :meth:`pair` or :meth:`connect` makes.

    Notes
    -----
    One thread may send while another receives. What is sent is not copied: sender and receiver must agree on who
    writes when; the message itself orders everything written before it. When the sender closes an array, the
    receiver's own arrays over it stay valid until they are dropped, and can be sent back: what the other end has stays
    known, and allocated, at the end that sent it until the other end has said that it let go, or is gone: both are
    heard with the next send or recv, and the latter when an array that was sent is dropped, too. That holds for memory
    of ``cudaMalloc`` and of pools as long as both ends are open: drop such arrays before you close the end that
    received them.
    """

    __slots__ = (
        "_ahead",
        "_came",
        "_channel",
        "_exports",
        "_imports",
        "_inbox",
        "_is_fresh",
        "_last",
        "_last_keep",
        "_last_message",
        "_last_state",
        "_listens",
        "_lost",
        "_lost_there",
        "_outbox",
        "_owed",
        "_receiving",
        "_remote_refs",
        "_sending",
        "_stream_events",
        "_unread",
        "_warm",
    )

    @shielded
    def __init__(self, channel: Channel | socket.socket) -> None:
        channel = channel if isinstance(channel, Channel) else Channel(channel)
        channel.only_memory = True
        self._channel = channel
        self._exports = ExportTable(_weakly(self._note_unmap), by_handle=True, remembers=True)
        self._imports = ImportTable(_weakly(self._note_unref))
        self._remote_refs = RemoteRefs()
        self._stream_events = StreamEvents()
        self._warm = 0  # memory of others that was sent last: open there, and mostly sent again; 0 is none
        self._outbox = Outbox()
        self._inbox: deque[object] = deque()
        self._ahead = 0  # bytes of the messages that are in there, nearly: what is taken out counts as their mean
        self._is_fresh = True
        self._last: Callable[[], Array | None] = nothing
        self._last_state: tuple[object, ...] = ()
        self._last_message = b""
        self._last_keep = 0
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._unread = Unread()  # parts of memory
        self._lost: set[int] = set()  # memory of the other end of which a part was lost here
        self._lost_there = object()  # another one each time that a part of ours was lost at the other end
        self._listens = _LISTENS
        self._owed = 0  # acknowledgements of parts that came; with the receiving lock
        # A message that was taken off the socket, and was not dealt with: its descriptors, and why some are not here.
        self._came: tuple[bytes, list[int], str] | None = None
        channel.handle  # noqa: B018  (the check)
        channel._warn_on_leak = True  # in a collected cycle its finalizer may come first
        self._claim = channel._claim  # taken over: one claim, whichever of the two is closed

    @classmethod
    @shielded
    def pair(cls) -> tuple[ArrayChannel, ArrayChannel]:
        """Return two ends that are connected with each other.

        One of them can be an argument of a ``multiprocessing`` process: close it here once the process has started.
        """
        one, other = Channel.pair()
        return cls(one), cls(other)

    @classmethod
    @shielded
    def connect(cls, path: str, timeout: float | None = None) -> ArrayChannel:
        """Connect to a listener at a unix socket path; see :meth:`Channel.connect` for the errors."""
        return cls(Channel.connect(path, timeout))

    def fileno(self) -> int:
        """Lend the socket's descriptor, to wait for messages with."""
        return self._channel.fileno()

    def give_away(self) -> int:
        """Lend the socket's descriptor for another process to take this end over; close this object then.

        Raises
        ------
        UsageError
            If something was sent or received here: the other end knows memory by the numbers of this one.
        """
        if not self._is_fresh:
            raise UsageError("this end was used already; hand the end of a channel on before anything is sent on it")
        return self._channel.give_away()

    @shielded
    def send(self, value: Any, *, stream: StreamLike | None = None, timeout: float | None = None) -> None:
        """Send an array, a plain value (None, bool, int, float, str, bytes), or a tuple, list or dict of all these.

        Anything that :func:`vram.share` takes is an array here, such as a tensor on a GPU. Its owner is kept until the
        other end is done with it, if its memory lives only as long as that. Memory goes as whole allocations: the other
        end can read all of them, such as the rest of the array that a slice is of. Containers arrive as they were sent,
        up to 32 in one another, with at most 512 arrays and 64 KiB of everything else; an array that is in one twice is
        the same object twice. If one thing in it cannot be sent, nothing is.

        Parameters
        ----------
        value : object
            What to send, as above.
        stream : int or stream, optional
            The stream whose work fills the memory: the receiver waits for that, by an interprocess event. By default
            this call waits for all work of the GPUs that the memory is on.
        timeout : float or None
            Seconds to wait, for all of it, while the other end does not read; None waits for ever.

        Raises
        ------
        UsageError
            If a value is not one that a channel carries, or is too large, with the path to it.
        UnsupportedError
            If an array's memory cannot leave this process, as that of numpy cannot, with what to do instead.
        PeerGoneError
            If the other end is closed.
        WaitTimeoutError
            If the time passed.
        ProtocolError
            If the other end has to acknowledge memory first, and sends without doing so what nobody receives here:
            receive that, then send again. With a timeout it is a WaitTimeoutError.
        """
        self.handle  # noqa: B018  (before the lock: in a forked child nobody would ever let go of it)
        if timeout is not None:
            timeout = check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        self._listens -= 1
        if self._owed or self._remote_refs or self._remote_refs.idle or self._exports.remembered or self._listens <= 0:
            self._listens = _LISTENS
            self._hear()
        take(self._sending)
        try:
            self._is_fresh = False
            if self._outbox:
                self._outbox.tell(self._channel, self._release_idle)
            if isinstance(value, Array) or _is_shareable(value):
                array = value if isinstance(value, Array) else share(value)
                message = self._refer(array, None if stream is None else as_stream(stream), deadline)
                try:
                    self._channel.send(message, timeout=_left(deadline))
                except BaseException:
                    if self._last_keep:  # from the sending on the other end says when it is done
                        self._take_back(self._last_keep)
                    raise
                return
            if isinstance(value, (tuple, list, dict)) and (packed := _packed(value)) is not None:
                self._send_packed(packed, None if stream is None else as_stream(stream), deadline)
                return
            try:
                message = encode(Value(value))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise refuse(value, _is_array, error) from None
            self._channel.send(message, timeout=_left(deadline))
        except PeerGoneError:
            if self._is_over():
                self._exports.expect_nothing()
                self._remote_refs.close()
            raise
        finally:
            self._sending.release()
            self._send_outbox()

    def recv(self, *, stream: StreamLike | None = None, timeout: float | None = None) -> Any:
        """Receive what the other end sent next.

        Parameters
        ----------
        stream : int or stream, optional
            A stream that is to wait for the work which fills an array, if its sender named a stream. By default this
            call waits for it.
        timeout : float or None
            Seconds to wait; None waits for ever.

        Returns
        -------
        Array, value, or container of these

        Notes
        -----
        Parts of large memory are acknowledged here. Where the other end has no room for that, since it reads nothing,
        the next call does it: who waits for :meth:`fileno` instead comes again after a while.

        Raises
        ------
        WaitTimeoutError
            If nothing came in time, or the work that fills it was not done by then: it comes again. Or if the other end
            has sent memory that takes long to close: while that goes on no more of it is received.
        PeerGoneError
            If the other end is closed.
        ProtocolError
            If what came is not what this end understands. A sender that heard it, while nobody received here, has ended
            the connection. Where this process had no room for descriptors, or could not map memory, the next arrays on
            that memory raise it too, until the other end hears of it, in its next `recv` or some messages later: then
            it sends the memory anew.
        """
        return _receive([self], stream, timeout)

    def _next(self, timeout: float | None, deadline: float | None) -> object:
        """Take out of the inbox what came next, once it is there."""
        self.handle  # noqa: B018  (before the lock, as in send)
        if self._outbox:  # while the other end read nothing there was no telling it
            self._send_outbox()
        self._is_fresh = False
        inbox, left, late = self._inbox, timeout, 0
        take(self._receiving)
        try:
            # Beyond the timeout: what cannot be mapped now is not sent again.
            self._imports.until = None if deadline is None else deadline + UNDECIDED
            while not inbox:
                if deadline is not None:
                    left = deadline - time.monotonic()
                    late += left <= 0
                    if late > _MOST_AT_ONCE or (late > 1 and left <= -_MOST_LATE):
                        raise WaitTimeoutError(f"nothing to receive came for {timeout:g} s, only other messages")
                    left = max(0.0, left)
                let_in()
                self._take(left)
            self._ahead -= self._ahead // len(inbox)
            return inbox.popleft()
        finally:
            self._receiving.release()

    def _finished(self, value: object, stream: StreamLike | None, deadline: float | None) -> Any:
        """Return what was received, once it may be used."""
        if type(value) is _Failure:
            try:
                raise value.error
            finally:
                del value  # as in recv
        if type(value) is _Ordered:
            return self._when_filled(value, None if stream is None else as_stream(stream), deadline)
        if type(value) is _Mixed:
            waits = None if stream is None else as_stream(stream)
            arrays = [self._when_filled(array, waits, deadline) for array in value.arrays]
            return unpack(_parsed(decode_value, value.tree), arrays)
        if type(value) is msgspec.Raw:
            return _parsed(decode_value, value)
        return value

    def _when_filled(self, found: Array | _Ordered, stream: int | None, deadline: float | None) -> Array:
        """Return a received array once what fills it is done, or a stream waits for that."""
        if not isinstance(found, _Ordered):
            return found
        self._stream_events.wait(found.event, found.array.region, stream, partial(_in_time, deadline))
        return found.array

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Close the connection and let go of what the other end shared; arrays that are alive keep their memory.

        Memory of ``cudaMalloc`` or of a pool that was sent, and that the other end still uses a second later, is kept
        for as long as this process lives, with a ReleaseWarning: the other end can no longer say that it is done.
        """
        if self.is_closed:
            return
        if self._remote_refs:
            self._wait_until_returned()
        left = self._leave_behind()
        super().close(strict=strict)
        self._exports.close()
        self._imports.close()
        self._stream_events.close()
        if left:  # last: where warnings are errors it is closed all the same
            warnings.warn(left, ReleaseWarning, stacklevel=3)

    @shielded
    def __del__(self) -> None:
        if hasattr(self, "_claim") and not self.is_closed and (left := self._leave_behind()):
            self._channel._warn_on_leak = False  # one warning, the one that says more
            warnings.warn(left, ReleaseWarning, stacklevel=3)
        else:
            super().__del__()

    def _wait_until_returned(self) -> None:
        """Hear, for a while, what the other end says that it is done with."""
        deadline = time.monotonic() + _LINGER
        while self._remote_refs and (left := deadline - time.monotonic()) > 0:
            let_in()
            if not self._receiving.acquire(True, min(left, _SLICE)):  # whoever receives hears it
                continue
            try:
                self._take(left)
            except (WaitTimeoutError, PeerGoneError, ClosedError):
                return
            except VramError:  # who was to receive that will not
                continue
            finally:
                self._receiving.release()

    def _leave_behind(self) -> str:
        """Let go of what was sent if the other end is gone, or leave it to the process; return what to say of that."""
        kept = self._remote_refs
        try:
            is_over = not kept or self._channel.is_hung_up()
        except VramError:  # closed by another thread, or the parent's, who looks after it
            return ""
        if is_over:
            kept.close()
            return ""
        unreturned.append(kept)
        return (
            f"{self!r} is closed while the other end uses {len(kept)} arrays of memory that lives only as long as its "
            f"maker: they are kept until this process ends. Have the other end drop them, or close, first"
        )

    def __repr__(self) -> str:
        return f"<ArrayChannel, {'closed' if self.is_closed else f'fd {self._channel.fileno()}'}>"

    # -- sending ------------------------------------------------------------------------------------------------
    def _send_packed(self, packed: Packed, stream: int | None, deadline: float | None) -> None:
        """Send a container: all of it, or nothing, and then nothing is exported that was not before (I4)."""
        arrays: list[tuple[str, Array]] = []
        for steps, value in packed.arrays:
            path = named(steps)
            with _at(path):
                arrays.append((path, value if isinstance(value, Array) else share(value)))  # type: ignore[arg-type]
        try:
            size = len(encode(packed.tree)) + sum(_REFERENCE + 9 * len(array.shape) for _, array in arrays)
        except (ValueError, OverflowError) as error:
            raise refuse(packed.value, _is_array, error) from None
        if size > MAX_MESSAGE - 64:
            raise UsageError(
                f"a container of {len(arrays)} arrays and {size} bytes of everything else; a message has "
                f"{MAX_MESSAGE}. Send its parts one by one, or make arrays of what is long"
            )
        before = self._exports.numbers()
        kept: list[int] = []
        try:
            referred = []
            for path, array in arrays:
                with _at(path):
                    referred.append(msgspec.Raw(self._refer(array, stream, deadline)))
                if not self._last_keep:
                    continue
                kept.append(self._last_keep)
            # Each is encoded already, as a message of its own.
            message = encode(Mixed(packed.tree, tuple(referred)))  # type: ignore[arg-type]
            self._channel.send(message, timeout=_left(deadline))
        except BaseException:
            for number in kept:
                self._take_back(number)
            self._last, self._last_keep = nothing, 0
            for number in self._exports.numbers() - before:
                self._exports.release(number)
            raise

    def _refer(self, array: Array, stream: int | None, deadline: float | None) -> bytes:
        """Return the message for an array, after what its receiver needs to know of the memory."""
        region = array.region
        # Whoever receives the array may read it at once (S10). A no-op on the host.
        event = 0
        if stream is None:
            region.synchronize()
        else:
            event = self._record(region, stream, deadline)
        # The same array again is what channels are for. Each of these is replaced, never changed.
        state = (array.shape, region.layout, region.access, self._lost_there)
        is_last = not event and self._last() is array and all(map(operator.is_, state, self._last_state))
        if is_last and (not self._last_keep or self._remote_refs.incref(self._last_keep)):
            return self._last_message
        number = self._imports.number_of(array)
        message = self._introduce(array, number, event, deadline)
        if not event:
            self._last, self._last_state, self._last_message = weakref.ref(array), state, message
            if number != self._imports.number_of(array):  # whoever receives has just forgotten it, and looked too soon
                self._last = nothing
        return message

    def _record(self, region: Region, stream: int, deadline: float | None) -> int:
        """Record an event on a stream and return its number, after its receiver was told what it is."""
        number, entry = self._stream_events.record(region, stream)
        if entry is not None:
            self._channel.send(encode(EventIs(number, entry)), timeout=_left(deadline))
            self._stream_events.told(number)
        return number

    def _introduce(self, array: Array, number: int | None, event: int, deadline: float | None) -> bytes:
        self._last, self._last_keep = nothing, 0
        if number is not None:
            return encode(Returned(refer(number, 0, array)))
        export = self._exports.export(array)
        if export.sent < export.count or export.sent < 0:
            kept = export.keep()
            try:
                for part, fds in export.parts(max(export.sent, 0)):
                    # A peer that does not read must not cost more descriptors than two messages have (S4).
                    self._wait_until_taken(deadline)
                    asks = self._unread.asks(len(fds), is_last=part.last)
                    message = AwaitedPart(part) if asks and part.last else Part(part)
                    self._channel.send(encode(message), fds, timeout=_left(deadline))
                    export.sent = part.first + len(part.descriptor.segments)
                    self._unread.sent += asks
                    self._unread.unasked = 0 if asks else self._unread.unasked + len(fds)
            finally:
                kept.release()
        keep = 0
        if export.data:
            self._last_keep = keep = self._remote_refs.keep(array, export.id)
            if export.id != self._warm:
                if self._warm:
                    self._outbox.idle(self._warm)
                self._warm = export.id
        return encode(Shared(refer(export.id, export.sent, array), keep, event))

    def _wait_until_taken(self, deadline: float | None) -> None:
        """Wait until the other end has taken the parts it was sent, receiving meanwhile what it has to say."""
        expired = False
        full_since = 0.0
        while self._unread.is_awaited:
            if expired:
                raise WaitTimeoutError("the other end took no part of the memory sent to it before the deadline")
            left = _SLICE if deadline is None else max(0.0, min(_SLICE, deadline - time.monotonic()))
            expired = not left  # then one more look
            if self._is_full:  # until another thread receives some of it
                full_since = full_since or time.monotonic()
                if deadline is None and time.monotonic() - full_since >= _PATIENCE:
                    raise ProtocolError(
                        f"the other end sends without acknowledging the memory sent to it: {len(self._inbox)} messages "
                        f"wait here to be received. Receive them, then send again"
                    )
                waiting(time.sleep, min(left, 0.01))
                continue
            full_since = 0.0
            # Whoever receives may be another thread, which then takes the answer; look again soon.
            let_in()
            if not self._receiving.acquire(True, min(left, 0.01)):
                continue
            try:
                self._take(left)
            except WaitTimeoutError:
                pass
            except (PeerGoneError, ClosedError):
                raise
            except VramError as error:  # somebody else's message: its receiver is to hear of it
                self._put_aside(error)
            finally:
                self._receiving.release()

    @property
    def _is_full(self) -> bool:
        """Whether there is as much in the inbox as is taken for :meth:`recv` in advance."""
        return len(self._inbox) >= _MOST_AHEAD or self._ahead >= _MOST_BYTES_AHEAD

    @shielded
    def _note_unmap(self, memory: int) -> None:
        """A memory that was exported is not any more. Reached from finalizers: never waits."""
        self._outbox.unmap(memory)
        self._send_outbox()

    @shielded
    def _note_unref(self, number: int, times: int) -> None:
        """An array that the other end keeps for us is done with. Reached from finalizers: never waits."""
        self._outbox.unref(number, times)
        self._send_outbox()

    def _send_outbox(self) -> None:
        """Tell the other end what is due, unless somebody is sending: they look again when they are done."""
        while self._outbox:
            if not self._sending.acquire(False):
                return
            try:
                if not self._outbox.tell(self._channel, self._release_idle):
                    return
            finally:
                self._sending.release()
        if self._outbox.is_over and self._exports.remembered and self._is_over():
            self._exports.expect_nothing()

    def _is_over(self) -> bool:
        """Whether the other end is gone and nothing that it said is unread. Finalizers reach it: it never waits."""
        if not self._receiving.acquire(False):  # whoever receives hears of it
            return False
        try:
            # Twice: where it closed without having read all, the first look finds that, and the second what it said.
            return self._channel.is_hung_up() and not (self._channel.peek(1) or self._channel.peek(1))
        except VramError:  # closed by another thread, or the parent's
            return False
        finally:
            self._receiving.release()

    def _release_idle(self, memory: int) -> None:
        """Have the other end close what it uses no more, unless it was sent last. Called with the sending lock."""
        if memory != self._warm and self._remote_refs.is_idle(memory):
            self._exports.release(memory)

    def _take_back(self, number: int) -> None:
        """What was kept for the other end did not go there: nobody will say that it is done with."""
        with contextlib.suppress(ProtocolError):  # another thread heard that the other end is gone
            self._hear_dropped(number, 1)

    def _hear_dropped(self, number: int, times: int) -> None:
        memory = self._remote_refs.decref(number, times)
        if memory is not None:
            self._outbox.idle(memory)

    def _hear(self) -> None:
        """Hear what the other end is done with: an end that only sends would keep all that it ever sent.
        No message for :meth:`recv` is taken: somebody may wait for the descriptor to become readable."""
        if not self._receiving.acquire(False):  # whoever receives hears it
            return
        try:
            heard = 0
            until = time.monotonic() + _MOST_LATE
            if self._owed:
                self._acknowledge(0.0)
            while heard < _MOST_AT_ONCE and not self._is_full and self._channel.peek(3) in _HEARD:
                if heard and time.monotonic() >= until:
                    break
                self._take(0)
                heard += 1
        except WaitTimeoutError:
            pass
        except VramError as error:
            self._put_aside(error)
        finally:
            self._receiving.release()

    # -- receiving ----------------------------------------------------------------------------------------------
    def _take(self, timeout: float | None) -> None:
        """Take one message off the socket and deal with it; called with the receiving lock. If Ctrl-C comes while
        memory is mapped, the message is dealt with next time: what follows, or the other end, may depend on it."""
        if self._owed:
            timeout = self._acknowledge(timeout)
        came, self._came = self._came, None
        if came is None:
            try:
                payload, fds = self._channel.take(timeout=timeout)
                came = payload, fds, ""
            except PeerGoneError:
                self._exports.expect_nothing()
                self._remote_refs.close()
                raise
            except DescriptorsLostError as error:
                came = error.payload, [], str(error)
        try:
            self._deal_with(*came)
        except BaseException as error:
            if isinstance(error, VramError):
                close_fds(came[1])
            elif not isinstance(error, Exception):
                self._came = came
            raise

    def _put_aside(self, error: VramError) -> None:
        """Keep for recv what is wrong with a message that a sender took; called with the receiving lock.
        The other end's mistake ends the connection: nobody who receives keeps count of them."""
        self._inbox.append(_Failure(error))
        if not isinstance(error, ProtocolError) or isinstance(error, _OURS):
            return
        self._channel.hang_up()
        if self._remote_refs:  # as in close: the other end may have it open, and can no longer say that it is done
            unreturned.append(self._remote_refs)
            self._remote_refs = RemoteRefs()

    def _acknowledge(self, timeout: float | None) -> float | None:
        """Send what acknowledgements are due, and return the time left; called with the receiving lock. If the other
        end has no room, this waits for its next message as well: it may read none of them and go on sending."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._owed:
            left = _left(deadline)
            try:
                self._channel.send(_TAKEN, timeout=0)
                self._owed -= 1
            except PeerGoneError:  # nobody waits for them; what it said before is received
                self._owed = 0
            except WaitTimeoutError:
                if left == 0 or self._channel.wait(left):
                    break
        return _left(deadline)

    def _deal_with(self, payload: bytes, fds: list[int], lost: str) -> None:
        message = _parsed(decode_message, payload)
        if lost and not isinstance(message, Part):
            raise DescriptorsLostError(lost)
        if fds and not isinstance(message, Part):
            raise ProtocolError(f"{len(fds)} descriptors came with a {type(message).__name__}, which has none")
        if isinstance(message, (Shared, Returned)):
            self._put(self._arrived(message), len(payload))
        elif isinstance(message, Mixed):
            self._put(self._arrived_together(message), len(payload) + _ARRAY_AHEAD * len(message.arrays))
        elif isinstance(message, Value):
            self._put(message.value, len(payload))
        elif isinstance(message, NextPart):
            self._unread.check()
            self._unread.taken += 1
        elif isinstance(message, Part):
            self._learn(message, fds, lost)
        elif isinstance(message, Unmap):
            self._forget(message.memories)
            self._lost.difference_update(message.memories)
        elif isinstance(message, Unref):
            for number, times in message.arrays:
                self._hear_dropped(number, times)
            self._send_outbox()
        elif isinstance(message, Closed):
            for number in message.memories:
                if self._exports.find(number) is not None:  # a part of it was lost there: it is sent anew, as another
                    self._lost_there = object()
                    self._exports.release(number)
                    continue
                self._remote_refs.closed(number)
                self._exports.closed(number)
        elif isinstance(message, EventIs):
            self._stream_events.learn(message.number, message.event)

    def _put(self, found: object, size: int) -> None:
        """Put into the inbox what came in a message of so many bytes."""
        self._ahead = size + (self._ahead if self._inbox else 0)
        self._inbox.append(found)

    def _forget(self, memories: Iterable[int]) -> None:
        """Let go of memory of the other end's, and say so."""
        done = [number for number in memories if self._imports.release(number)]
        self._last = nothing  # after that: an array on such memory is no longer the other end's; see _refer
        for number in done:  # and last: from here on nothing is sent back under these
            self._outbox.unmapped(number)
        self._send_outbox()

    def _learn(self, message: Part, fds: list[int], lost: str) -> None:
        """Map a part of memory, and acknowledge it if its sender waits for that.
        After a failure the sender is told that the memory is not here: before that it sends nothing again."""
        wrong: VramError | None = DescriptorsLostError(lost) if lost else None
        number = message.part.memory
        try:
            # What follows a part that was lost is of no use, and came before its sender could hear of that.
            if wrong is None and number not in self._lost:
                self._imports.learn(message.part, fds)
        except VramError as error:
            wrong = error
        if isinstance(wrong, _LOST) and len(self._lost) < _MOST_LOST:
            self._lost.add(number)
            self._forget((number,))
        if type(message) is AwaitedPart or not message.part.last:  # whoever sent it waits for this, and reads meanwhile
            self._owed += 1
            self._acknowledge(0.0)
        if wrong is not None:
            try:
                raise wrong
            finally:
                wrong = None
        close_fds(fds)

    def _arrived(self, message: Shared | Returned) -> Array | _Ordered | _Failure:
        """Return what a reference to an array means here."""
        if isinstance(message, Shared):
            try:
                array = self._imports.array(message.reference, message.keep)
            except UnknownMemoryError as error:
                if message.reference.memory not in self._lost:
                    raise
                raise _LostHereError(f"a part of its memory was lost at this end: {error}") from None
            return _Ordered(array, message.event) if message.event else array
        local = self._exports.local_array(message.reference, self._remote_refs)
        if local is None:
            number = message.reference.memory
            return _Failure(ClosedError(f"an array of memory {number} came back after it was closed here"))
        return local

    def _arrived_or_not(self, message: Shared | Returned) -> Array | _Ordered | _Failure:
        try:
            return self._arrived(message)
        except VramError as error:
            return _Failure(error)

    def _arrived_together(self, message: Mixed) -> _Mixed | _Failure:
        """Return a container, or what is wrong with one of its arrays. All are looked at: each may be kept for us by
        its sender, who hears that it is done with when it is dropped here."""
        # First what is mapped once more, where Ctrl-C may come: the rest is counted, and not to be begun twice.
        ours = [self._arrived_or_not(one) if isinstance(one, Returned) else None for one in message.arrays]
        arrays: list[Array | _Ordered] = []
        wrong: _Failure | None = None
        for one, known in zip(message.arrays, ours, strict=True):
            found = self._arrived_or_not(one) if known is None else known
            if isinstance(found, _Failure):
                wrong = wrong or found
            else:
                arrays.append(found)
        return wrong or _Mixed(message.value, arrays)


def _put_back(taken: list[Any], _: object) -> None:
    """Have what was received, and nobody got, come again."""
    channel, value = taken
    channel._inbox.appendleft(value)


@shielded(undo=_put_back)
def _receive(taken: list[Any], stream: StreamLike | None, timeout: float | None) -> Any:
    """Receive over the channel in a list, which has afterwards what was taken out of its inbox as well."""
    channel: ArrayChannel = taken[0]
    if timeout is not None:
        check_timeout(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    taken.append(channel._next(timeout, deadline))
    try:
        return channel._finished(taken[1], stream, deadline)
    except BaseException as error:
        value = taken.pop()
        # Ctrl-C, or the sender's work took longer than the deadline: nobody got it, so it comes again.
        if not isinstance(error, VramError) or isinstance(error, WaitTimeoutError):
            channel._inbox.appendleft(value)
        del value  # or an error in there, which keeps this frame, would keep itself and all that its callers hold
        raise


def _parsed(decode: Callable[[Any], Any], said: bytes | msgspec.Raw) -> Any:
    """Return what a message says, or a value in it."""
    try:
        return decode(said)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message between array channels: {error}") from None


def _in_time(deadline: float | None) -> None:
    """Raise once a deadline is over."""
    if deadline is not None and time.monotonic() >= deadline:
        raise WaitTimeoutError("the work that fills the array was not done before the deadline; it comes again")


def _left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline, 0 from then on; None where there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _packed(value: object) -> Packed | None:
    """Take a container apart; None if msgpack has words for all of it."""
    try:
        packed = pack(value, _is_array)
    except UsageError:
        # What it refuses, such as a set or a date, msgpack may have words for; if not, it is refused there.
        if has_tuples(value):
            raise
        return None
    return None if packed.is_plain else packed


def _is_array(value: object) -> bool:
    return isinstance(value, Array) or _is_shareable(value)


@contextlib.contextmanager
def _at(path: str) -> Iterator[None]:
    """Say in an error where in a container the array is that it is about."""
    try:
        yield
    except VramError as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (f"{path}: {error.args[0]}", *error.args[1:])
        raise


def _is_shareable(value: object) -> bool:
    """Whether a value is somebody's array rather than something to be written down."""
    kind = type(value)
    words = ("__dlpack__", "__cuda_array_interface__")
    return any(hasattr(kind, word) for word in words) or words[1] in getattr(value, "__dict__", ())


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return what calls a channel's method without keeping the channel: one that is dropped ends at once."""
    ref = weakref.WeakMethod(method)

    def call(*arguments: int) -> None:
        found = ref()
        if found is not None:
            found(*arguments)

    return call
