"""Arrays over a connection: the memory once, then ids. The engine of :class:`ArrayChannel`, transports and pickles.

It exports, imports, and follows growth; counts what may not be freed while it is used elsewhere; orders hand-overs by
events; keeps a sender from having more descriptors unread than one message has; and knows both orders of death.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from ..arrays import Array
from ..arrays.share import share
from ..arrays.streams import as_stream
from ..driver.protocol import UNDECIDED
from ..errors import ClosedError, DriverError, PeerGoneError, ProtocolError, UsageError, VramError, WaitTimeoutError
from ..lifetime import let_in, shielded, take
from ..open_files import close_fds
from ..sharing.channel import MAX_MESSAGE, DescriptorsLostError, OwnedFds
from ..sharing.parcels import Unread
from ..spec import Location, check_timeout
from . import messages as m
from .containers import SCALARS, Packed, named, refuse, unpack
from .exports import ExportTable, nothing, refer, weakly
from .imports import ImportTable
from .remote_refs import RemoteRefs, unreturned
from .stream_events import StreamEvents


class Found(msgspec.Struct):
    """In the inbox: what may be used once events are done, each of the GPU that works on a region here."""

    arrays: list[Any]
    waits: list[tuple[int, Any]]
    tree: msgspec.Raw | None = None  # a container, or the array itself


class Failure:
    """In the inbox in place of a value: what was wrong with a message."""

    __slots__ = ("error",)

    def __init__(self, error: VramError) -> None:
        # Without the frames, and without what it was raised from, which has others: they hold the message, the
        # descriptors that came with it, and what their callers hold.
        error.__cause__ = error.__context__ = None
        self.error = error.with_traceback(None)


_HEARD = tuple(b"\x92\xa1" + tag for tag in (b"d", b"f", b"c", b"k"))  # Unref, Unmap, Closed, Received
_LINGER = 1.0  # seconds for the other end to say that it is done, when this one is closed
_REFERENCE = 96  # bytes of an array in a container, at most, and 9 for each of its dimensions
_SLICE = 5e-3  # seconds between two looks, where another thread hears the other end
_TAKEN = m.encode(m.NextPart())
_LISTENS = 256  # an end that only sends listens once in so many messages


class Conversation:
    """One end of a connection, which its owner closes after it. `link` is a channel, or whatever brings messages;
    without a ``peek``, only who waits or receives hears the other end. With a `device` what comes is mapped for it, and
    is a new array each time; without, what is in use is the same object when it comes again. `decode` knows the
    messages that may come; those between endpoints are for who receives."""

    def __init__(
        self, link: Any, device: Location | None = None, decode: Callable[[bytes], object] = m.decode_message
    ) -> None:
        self.link = link
        self._is_channel = hasattr(link, "peek")  # others take locks, for which finalizers must not wait
        self._peek: Callable[[int], bytes] = link.peek if self._is_channel else lambda _: b""
        self._recv: Callable[..., tuple[bytes, list[int]]] = link.take if self._is_channel else link.recv
        note = weakly(self.note)
        self.exports = ExportTable(partial(note, "unmap"), is_channels=True)
        self._decode = decode
        self._is_asked = decode is not m.decode_message  # between endpoints
        dropped = None if self._is_asked else partial(note, "unref")
        self.imports = ImportTable(dropped, user=device, is_fresh=device is not None)
        self.remote_refs = RemoteRefs()
        self.stream_events = StreamEvents()
        self.warm = 0  # memory of others that was sent last: open there, and mostly sent again; 0 is none
        self.outbox: deque[tuple[str, Any]] = deque()  # by kind, see `note`; finalizers put something in
        self._is_lost = False  # what was in the outbox was for an end that is gone
        self.inbox: deque[object] = deque()
        self.is_fresh = True
        self.received = 0  # of what was sent, as far as the other end tells
        self._last: Callable[[], Array | None] = nothing
        self._last_state: tuple[object, ...] = ()
        self._last_message = b""
        self._last_keep = 0
        self.sending = threading.Lock()
        self.receiving = threading.Lock()
        self._unread = Unread()  # parts of memory
        self._lost_there = object()  # another one each time that a part of ours was lost at the other end
        self._listens = _LISTENS
        self._owed = 0  # acknowledgements of parts that came; with the receiving lock
        self._came: tuple[bytes, list[int], str] | None = None  # taken off the connection, and not dealt with

    # -- sending ------------------------------------------------------------------------------------------------
    def send(self, value: Any, stream: object, deadline: float | None) -> None:
        """Send an array, a value, or a container; see :meth:`ArrayChannel.send`."""
        self._listens -= 1
        if self._owed or self.remote_refs or self.remote_refs.idle or self.exports.remembered or self._listens <= 0:
            self._listens = _LISTENS
            self._hear()
        if not self.sending.acquire(False):
            take(self.sending)
        try:
            self.is_fresh = False
            if self.outbox:
                self._tell(0.0)
            if isinstance(value, (tuple, list, dict)):
                if not (packed := Packed(value, _is_array)).is_plain:
                    self._send_packed(packed, None if stream is None else as_stream(stream), deadline)
                    return
            elif isinstance(value, Array) or (type(value) not in SCALARS and _is_shareable(value)):
                array = value if isinstance(value, Array) else share(value)
                message = self._refer(array, None if stream is None else as_stream(stream), deadline)
                try:
                    self.link.send(message, timeout=None if deadline is None else _left(deadline))
                except BaseException:
                    if self._last_keep:  # from the sending on the other end says when it is done
                        self._take_back(self._last_keep)
                    raise
                return
            try:
                message = m.encode(m.Value(value))
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise refuse(value, _is_array, error) from None
            self.link.send(message, timeout=None if deadline is None else _left(deadline))
        except PeerGoneError:
            if self._is_over():
                self._expect_nothing()
            raise
        finally:
            self.sending.release()
            if self.outbox or self._is_lost:
                self.send_outbox()

    def _send_packed(self, packed: Packed, stream: int | None, deadline: float | None) -> None:
        """Send a container: all of it, or nothing, and then nothing is exported that was not before (I4)."""
        arrays: list[tuple[str, Array]] = []
        for steps, value in packed.arrays:
            path = named(steps)
            with _at(path):
                arrays.append((path, value if isinstance(value, Array) else share(value)))  # type: ignore[arg-type]
        try:
            size = len(m.encode(packed.tree)) + sum(_REFERENCE + 9 * len(array.shape) for _, array in arrays)
        except (ValueError, OverflowError) as error:
            raise refuse(packed.value, _is_array, error) from None
        if size > MAX_MESSAGE - 64:
            raise UsageError(
                f"a container of {len(arrays)} arrays and {size} bytes of everything else; a message has "
                f"{MAX_MESSAGE}. Send its parts one by one, or make arrays of what is long"
            )
        before = set(self.exports.by_id)
        kept: list[int] = []
        try:
            referred = []
            for path, array in arrays:
                with _at(path):
                    referred.append(msgspec.Raw(self._refer(array, stream, deadline)))
                if self._last_keep:
                    kept.append(self._last_keep)
            # Each is encoded already, as a message of its own.
            message = m.encode(m.Mixed(packed.tree, tuple(referred)))  # type: ignore[arg-type]
            self.link.send(message, timeout=_left(deadline))
        except BaseException:
            for number in kept:
                self._take_back(number)
            self._last, self._last_keep = nothing, 0
            for number in self.exports.by_id.keys() - before:
                self.exports.release(number)
            raise

    def _refer(self, array: Array, stream: int | None, deadline: float | None) -> bytes:
        """Return the message for an array, after what its receiver needs to know of the memory."""
        region = array.region
        # The receiver of the array may read it at once (S10). A no-op on the host.
        event = 0
        if stream is None:
            region.synchronize()
        else:
            event, entry = self.stream_events.record(region, stream)
            if entry is not None:
                self.link.send(m.encode(m.EventIs(event, entry)), timeout=_left(deadline))
                self.stream_events.told.add(event)  # not before: it may have to be tried again
        # The same array again is what channels are for. Each of these is replaced, never changed.
        state = (array.shape, region.layout, region.access, self._lost_there)
        is_last = not event and self._last() is array and all(map(operator.is_, state, self._last_state))
        if is_last and (not self._last_keep or self.remote_refs.incref(self._last_keep)):
            return self._last_message
        number = self.imports.number_of(array)
        message = self._introduce(array, number, event, deadline)
        if not event:
            self._last, self._last_state, self._last_message = weakref.ref(array), state, message
            if number != self.imports.number_of(array):  # whoever receives has just forgotten it, and looked too soon
                self._last = nothing
        return message

    def _introduce(self, array: Array, number: int | None, event: int, deadline: float | None) -> bytes:
        self._last, self._last_keep = nothing, 0
        if number is not None:
            return m.encode(m.Returned(refer(number, 0, array)))
        export = self.exports.export(array)
        if export.sent < export.count or export.sent < 0:
            kept = export.keep()
            try:
                while (found := export.part(max(export.sent, 0))) is not None:
                    part, fds = found
                    # A peer that does not read must not cost more descriptors than two messages have (S4).
                    self.hear_until(
                        lambda: not self._unread.is_awaited,
                        deadline,
                        "the other end took no part of the memory sent to it",
                    )
                    asks = self._unread.asks(len(fds), is_last=part.last)
                    self.link.send(m.encode(m.Part(part, asks)), fds, timeout=_left(deadline))
                    export.sent = part.first + len(part.descriptor.segments)
                    self._unread.sent += asks
                    self._unread.unasked = 0 if asks else self._unread.unasked + len(fds)
                    if part.last:
                        break
            finally:
                kept.release()
        keep = 0
        if export.data:
            self._last_keep = keep = self.remote_refs.keep(array, export.id)
            if export.id != self.warm:
                if self.warm:
                    self.outbox.append(("idle", self.warm))
                self.warm = export.id
        return m.encode(m.Shared(refer(export.id, export.sent, array), keep, event))

    @shielded
    def note(self, kind: str, what: object) -> None:
        """Have the other end told, as soon as it reads and nobody sends. Reached from finalizers: never waits.

        By kind: ``unmap``, a memory that was exported is not any more, and the other end is to close it; ``unmapped``,
        a memory that was to be unmapped is closed here; ``unref``, of what came under a number so many arrays are done
        with; ``received``, one more array was received; ``unpickled``, one more on a memory, by the thread there that
        pickled it; ``idle``, the other end uses a memory no more, and whoever sends next decides whether it stays open
        there."""
        self.outbox.append((kind, what))
        if self._is_channel:
            self.send_outbox()

    def send_outbox(self, timeout: float = 0.0) -> None:
        """Tell the other end what is due, unless somebody is sending: they look again when they are done."""
        while self.outbox:
            if not self.sending.acquire(False):
                return
            try:
                if not self._tell(timeout):
                    return
            finally:
                self.sending.release()
        if self._is_lost and self.exports.remembered and self._is_over():
            self.exports.expect_nothing()

    def _tell(self, timeout: float) -> bool:
        """Say all that is due; False if the other end does not read. Called with the sending lock."""
        due = self.outbox
        while due:
            kind, what = due[0]
            if kind == "idle":  # have the other end close what it uses no more, unless it was sent last
                due.popleft()
                if what != self.warm and what in self.remote_refs.idle:
                    self.exports.release(what)  # which may put something in
                continue
            # By index: others append meanwhile. At least one of a kind, and those of the kind that follow it.
            count = 1
            while count < min(len(due), m.MOST_SENT) and due[count][0] == kind:
                count += 1
            told = m.TOLD.get(kind)
            message = m.Received(count) if told is None else told(tuple([due[at][1] for at in range(count)]))
            try:
                self.link.send(m.encode(message), timeout=timeout)
            except WaitTimeoutError:
                return False
            except (VramError, OSError):  # the end of the connection makes the other end forget everything
                self._is_lost = True
                due.clear()
                return True
            for _ in range(count):
                due.popleft()
        return True

    def _is_over(self) -> bool:
        """Whether the other end is gone and nothing that it said is unread. Finalizers reach it: it never waits."""
        if not self.receiving.acquire(False):  # whoever receives hears of it
            return False
        try:
            # Twice: where it closed without having read all, the first look finds that, and the second what it said.
            return bool(self.link.is_gone()) and not (self._peek(1) or self._peek(1))
        except VramError:  # closed by another thread, or the parent's
            return False
        finally:
            self.receiving.release()

    def _take_back(self, number: int) -> None:
        """The array kept for the other end did not go there: nobody will say that it is done with."""
        with contextlib.suppress(ProtocolError):  # another thread heard that the other end is gone
            self._hear_dropped(number, 1)

    def _hear_dropped(self, number: int, times: int) -> None:
        memory = self.remote_refs.decref(number, times)
        if memory is not None:
            self.outbox.append(("idle", memory))

    def _hear(self) -> None:
        """Hear what the other end is done with: an end that only sends would keep all that it ever sent.
        No message for :meth:`recv` is taken: somebody may wait for the descriptor to become readable."""
        if not self.receiving.acquire(False):  # whoever receives hears it
            return
        try:
            if self._owed:
                self._acknowledge()
            while self._peek(3) in _HEARD:
                self.hear_next(0)
        except VramError:  # the end, of which who sends or receives hears
            pass
        finally:
            self.receiving.release()

    def _expect_nothing(self) -> None:
        """The other end is gone, and everything that it said was heard."""
        self.exports.expect_nothing()
        self.remote_refs.close()

    # -- receiving ----------------------------------------------------------------------------------------------
    def next(self, deadline: float | None) -> object:
        """Take out of the inbox what came next, once it is there: for :meth:`finished`."""
        self.is_fresh = False
        inbox = self.inbox
        while True:
            if not inbox:
                self.hear_until(inbox.__len__, deadline, "nothing to receive came")
            try:
                return inbox.popleft()
            except IndexError:  # another thread was quicker
                pass

    def shown(self, found: object) -> Any:
        """Return something out of the inbox as it is now, though an array in it may not be filled yet."""
        if type(found) is Found:
            return found.arrays[0] if found.tree is None else unpack(_parsed(m.decode_value, found.tree), found.arrays)
        return _parsed(m.decode_value, found) if type(found) is msgspec.Raw else found

    def finished(self, found: object, stream: object, deadline: float | None) -> Any:
        """Return what was received, once it may be used."""
        if type(found) is Failure:
            try:
                raise found.error
            finally:
                del found  # or the error, which keeps this frame, would keep itself and all that its callers hold
        if type(found) is Found and found.waits:
            waiter = None if stream is None else as_stream(stream)
            for event, region in found.waits:
                self.stream_events.wait(event, region, waiter, partial(self._check_filler, deadline))
        return self.shown(found)

    def _check_filler(self, deadline: float | None) -> None:
        """Raise where there is no use in waiting for the work that fills an array."""
        if self.link.is_gone():
            raise PeerGoneError("the process that was filling the memory is gone, and nobody knows how far it came")
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeoutError("the work that fills the array was not done before the deadline; it comes again")

    def hear_until(self, is_so: Callable[[], object], deadline: float | None, what: str) -> None:
        """Hear the other end until something is so. Raises WaitTimeoutError with `what` at the deadline."""
        if self.outbox:  # while the other end read nothing there was no telling it
            self.send_outbox()
        while not is_so():
            let_in()
            left = None if deadline is None else deadline - time.monotonic()
            is_late = left is not None and left <= 0
            try:
                # Another thread that hears the other end may hear what is waited for here, and then go on hearing.
                if self.receiving.acquire(True, _SLICE if left is None else max(0.0, min(left, _SLICE))):
                    try:
                        if not is_so():
                            # Beyond the timeout: what cannot be mapped now is not sent again.
                            self.imports.until = None if deadline is None else deadline + UNDECIDED
                            self.hear_next(left)
                    finally:
                        self.receiving.release()
                elif is_late:
                    raise WaitTimeoutError("another thread hears the other end")
            except WaitTimeoutError as error:
                if is_late:
                    raise WaitTimeoutError(f"{what} in time: {error}") from None

    def hear_next(self, timeout: float | None) -> None:
        """Take one message off the connection and deal with it; what is wrong with it is for who receives. Called with
        the receiving lock. If Ctrl-C comes while memory is mapped, the message is dealt with next time."""
        if self._owed and not self._acknowledge():
            timeout = _SLICE if timeout is None else min(timeout, _SLICE)
        came, self._came = self._came, None
        if came is None:
            try:
                payload, fds = self._recv(timeout=None if timeout is None else max(0.0, timeout))
                came = payload, OwnedFds(fds) if fds and type(fds) is list else fds, ""
            except PeerGoneError:
                self._expect_nothing()
                raise
            except DescriptorsLostError as error:
                came = error.payload, [], str(error)
            except ProtocolError as error:
                self.inbox.append(Failure(error))
                return
        try:
            self._deal_with(*came)
        except VramError as error:
            self.inbox.append(Failure(error))
        except BaseException as error:
            if not isinstance(error, Exception):
                self._came = came
            raise
        if came[1]:
            close_fds(came[1])

    def _acknowledge(self) -> bool:
        """Send what acknowledgements are due, as far as there is room, and return whether that was all; called with
        the receiving lock."""
        try:
            while self._owed:
                self.link.send(_TAKEN, timeout=0)
                self._owed -= 1
        except PeerGoneError:  # nobody waits for them; what it said before is received
            self._owed = 0
        except WaitTimeoutError:
            return False
        return True

    def _deal_with(self, payload: bytes, fds: list[int], lost: str) -> None:
        message = _parsed(self._decode, payload)
        if isinstance(message, (m.Shared, m.Returned)):
            waits: list[tuple[int, Any]] = []
            found: object = self._arrived(message, waits)
            if waits:
                found = Found([found], waits)
        elif isinstance(message, m.Value):
            found = message.value
        elif isinstance(message, m.Mixed):
            found = self._arrived_together(message)
        elif isinstance(message, m.ASKED):
            found = message
        elif isinstance(message, m.Part):
            self._learn(message, fds, lost)
            return
        else:
            found = None
        if lost:
            raise DescriptorsLostError(lost)
        if fds:
            raise ProtocolError(f"{len(fds)} descriptors came with a {type(message).__name__}, which has none")
        if found is not None:
            self.inbox.append(found)
        elif isinstance(message, m.NextPart):
            self._unread.check()
            self._unread.taken += 1
        elif isinstance(message, m.Received):
            self.received += message.times
        elif isinstance(message, m.Unmap):
            self._forget(message.memories)
        elif isinstance(message, m.Unref):
            for number, times in message.arrays:
                self._hear_dropped(number, times)
            self.send_outbox()
        elif isinstance(message, m.Closed):
            for number in message.memories:
                if number in self.exports.by_id:  # a part of it was lost there: it is sent anew, as another
                    self._lost_there = object()
                    self.exports.release(number)
                    continue
                self.remote_refs.closed(number)
                self.exports.closed(number)
        elif isinstance(message, m.EventIs):
            self.stream_events.learn(message.number, message.event)

    def _forget(self, memories: Iterable[int]) -> None:
        """Let go of memory of the other end's, and say so."""
        done = [number for number in memories if self.imports.release(number)]
        self._last = nothing  # after that: an array on such memory is no longer the other end's; see _refer
        for number in () if self._is_asked else done:  # and last: from here on nothing is sent back under these
            self.outbox.append(("unmapped", number))
        self.send_outbox()

    def _learn(self, message: m.Part, fds: list[int], lost: str) -> None:
        """Map a part of memory, and acknowledge it if its sender waits for that."""
        try:
            if lost:
                raise DescriptorsLostError(lost)
            self.imports.learn(message.part, fds)
        except VramError as error:
            self.inbox.append(Failure(error))
            # Its sender hears that it is not here, and sends it anew.
            if isinstance(error, (DescriptorsLostError, DriverError)):
                self._forget((message.part.memory,))
        if self._is_asked:
            self.inbox.append(message)
        if message.asks:  # its sender waits for this, and reads
            self._owed += 1
            self._acknowledge()

    def _arrived(self, message: m.Shared | m.Returned, waits: list[tuple[int, Any]]) -> Array | Failure:
        """Return what a reference to an array means here, and note the event that it waits for."""
        if isinstance(message, m.Shared):
            array = self.imports.array(message.reference, message.keep)
            if message.event:
                waits.append((message.event, array.region))
            return array
        local = self.exports.local_array(message.reference, self.remote_refs)
        if local is None:
            number = message.reference.memory
            return Failure(ClosedError(f"an array of memory {number} came back after it was closed here"))
        return local

    def _arrived_together(self, message: m.Mixed) -> Found | Failure:
        """Return a container, or what is wrong with one of its arrays. All are looked at: each may be kept for us by
        its sender, who hears that it is done with when it is dropped here."""
        found = Found([None] * len(message.arrays), [], message.value)
        wrong: list[Failure] = []
        # First what is mapped once more, where Ctrl-C may come: the rest is counted, and not to be begun twice.
        for at, one in sorted(enumerate(message.arrays), key=lambda numbered: isinstance(numbered[1], m.Shared)):
            try:
                array = self._arrived(one, found.waits)
            except VramError as error:
                array = Failure(error)
            if isinstance(array, Failure):
                wrong.append(array)
            found.arrays[at] = array
        return wrong[0] if wrong else found

    # -- the end ------------------------------------------------------------------------------------------------
    def end(self, who: object, close: Callable[[], object]) -> str:
        """Hear, for a while, what the other end is done with, `close` the link, and forget everything; return what to
        warn of, last: where warnings are errors it is closed all the same."""
        if self.remote_refs:
            with contextlib.suppress(VramError):
                self.hear_until(lambda: not self.remote_refs, time.monotonic() + _LINGER, "")
        left = self.leave_behind(who)
        close()
        self.close()
        return left

    def leave_behind(self, who: object) -> str:
        """Let go of what was sent if the other end is gone, or leave it to the process; return what to say of that."""
        kept = self.remote_refs
        try:
            is_over = not kept or self.link.is_gone()
        except VramError:  # closed by another thread, or the parent's, who looks after it
            return ""
        if is_over:
            kept.close()
            return ""
        unreturned.append(kept)
        return (
            f"{who!r} is closed while the other end uses {len(kept)} arrays of memory that lives only as long as its "
            f"maker: they are kept until this process ends. Have the other end drop them, or close, first"
        )

    def close(self) -> None:
        """Forget everything, after the link was closed; arrays that are alive keep their memory."""
        self.inbox.clear()
        self.exports.close()
        self.imports.close()
        self.stream_events.close()


def _parsed(decode: Callable[[Any], Any], said: bytes | msgspec.Raw) -> Any:
    """Return what a message says, or a value in it."""
    try:
        return decode(said)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a message between array channels: {error}") from None


def deadline_in(timeout: float | None) -> float | None:
    """Return when so many seconds are over; None for never. Raises UsageError for what is no time."""
    if timeout is None:
        return None
    check_timeout(timeout)
    return time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    """Return the seconds until a deadline, 0 from then on; None where there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


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
