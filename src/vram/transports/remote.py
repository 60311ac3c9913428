"""Transports between two processes: an array channel over an exchange, with places, a window, and handles.

An end reads what the other one says when it receives, waits or sends; nothing runs in between. A sender that is ahead
by :data:`WINDOW` messages waits, so that neither end fills the exchange with unread messages.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import msgspec

from .. import driver as drivers
from ..arrays import Array
from ..arrays.hints import StreamLike
from ..errors import (
    ClosedError,
    PeerGoneError,
    ProtocolError,
    ReleaseWarning,
    UnsupportedError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from ..handover.conversation import Conversation, Failure, deadline_in
from ..handover.exports import Export, refer
from ..handover.messages import Handle, decode_handle, encode
from ..lifetime import held, shielded
from ..memory.allocation import or_else
from ..memory.foreign import ForeignRegion, way_of
from ..memory.kinds import BY_MAKER, OWN
from ..spec import HOST, Location
from .contract import ExportedBuffer, No, Yes
from .endpoint import Transport
from .exchanges import Exchange, SocketExchange, wait_until
from .places import SHM, check_fits, name_place, on_gpus, ready, seen, shown_on

VERSION = 3
WINDOW = 64  # messages that were sent and not received: then the sender waits
MEASURING = 60.0  # seconds that a transfer may take which is measured
_MOMENT = 0.2  # seconds for the end of a connection to show, when its memory is gone already


class Came(msgspec.Struct):
    """A message that came and was not received yet; `is_told` if the other end was told that it was."""

    value: Any
    nbytes: int
    is_told: bool = False


class RemoteTransport(Transport):
    """One end of a transport between two processes.

    Raises UnsupportedError if it is not available between the two places, or the exchange cannot carry what it needs.

    Parameters
    ----------
    src, dst : Location or str
        From where to where, the same at both ends; as this process names them.
    exchange : Exchange
        The exchange that leads to the other end. Received over: it is closed with this end. The caller's still if this
        fails.
    timeout : float, optional
        Seconds to wait for the other end in :meth:`send`; for ever by default.
    """

    __slots__ = ("_exchange", "_greeting", "_origin", "_peer", "_sending", "_sent_count", "_talk", "timeout")

    carries: ClassVar[frozenset[str]] = frozenset({OWN.made_by})  # what made the memory; see selection.select

    @shielded
    def __init__(
        self, src: Location | str, dst: Location | str, exchange: Exchange, *, timeout: float | None = None
    ) -> None:
        super().__init__(src, dst)
        with or_else(self._claim.release):
            if all(why := [self.refusal(made_by, exchange, self.src, self.dst) for made_by in self.carries]):
                raise UnsupportedError(f"the {self.kind} transport", "an exchange that carries its memory", why[0])
            self._exchange = exchange
            self._talk = Conversation(exchange, self._mapped_for)
            self.timeout = timeout
            self._origin = os.urandom(16)
            self._peer = b""  # the other end's, from its greeting on
            self._sent_count = 0
            self._sending, self._greeting = threading.Lock(), threading.Lock()  # never taken by a finalizer
            with contextlib.suppress(PeerGoneError):  # what it said before may still be there to be received
                self._talk.send([VERSION, self.kind, self._origin], None, deadline_in(timeout))

    @property
    def exchange(self) -> str:
        """The carriers of the bytes and of the messages, in words."""
        return f"{self.method}; messages over {getattr(self._exchange, 'way', type(self._exchange).__name__)}"

    @property
    @shielded
    def ready(self) -> bool:
        """Whether both ends are open, and this one has heard the other's greeting; see the contract."""
        if self.is_closed:
            return False
        with contextlib.suppress(PeerGoneError):
            return (bool(self._peer) or self._listen()) and not self._exchange.is_gone()
        return False

    # -- what differs -------------------------------------------------------------------------------------------
    @property
    def _mapped_for(self) -> Location:
        """The place that works on the other end's memory here."""
        return self.dst

    @classmethod
    def refusal(cls, made_by: str, exchange: Exchange, src: Location, dst: Location) -> str:
        """Say why memory of a maker does not go over an exchange to a place, in this way; empty if it does."""
        if made_by not in cls.carries:
            makers = " and ".join(BY_MAKER[one].makes for one in sorted(cls.carries))
            return f"it carries memory of {makers} only: select(..., memory={sorted(cls.carries)[0]!r})"
        way = OWN if cls.copies else BY_MAKER[made_by]
        if way.has_fd and not exchange.carries_fds:
            return f"a file descriptor goes along, and {type(exchange).__name__} carries bytes only: use SocketExchange"
        if way.at_home and src != dst:
            return f"memory of {way.makes} on {src} is opened there and not on {dst}: {SHM}"
        return ""

    def _check_memory(self, array: Array) -> None:
        """Raise UsageError if an array's memory does not travel this way."""
        if self.copies:
            return
        way = way_of(array.region)
        if way is None:
            raise UsageError(f"{array!r} is memory that leaves its process in no way: copy it into memory of your own")
        if way.made_by not in self.carries:
            its_way = f"goes {way.goes}, with the {way.transport} transport"
            raise UsageError(f"{array!r} is memory of {way.makes}, which {its_way}")
        if why := self.refusal(way.made_by, self._exchange, self.src, self.dst):
            raise UsageError(f"{array!r} does not go there: {why}")

    def _hand_over(self, array: Array, stream: StreamLike | None) -> None:
        """Send an array; with the sending lock."""
        self._say(array, stream)

    def _accepted(self, found: object, shown: Any) -> Came:
        """Return what is to be received of what came. Raises ProtocolError for what is not said on this transport."""
        if not isinstance(shown, Array):
            raise ProtocolError(f"a {type(shown).__name__} came, which is not said on the {self.kind} transport")
        if shown.region.location != self.src:
            raise ProtocolError(f"memory came that is on {shown.region.location}, and not on {self.src}")
        return Came(found, shown.nbytes)

    def _taken_by(self, wanted: Array | None, stream: StreamLike | None, deadline: float | None) -> tuple[Array, Any]:
        """Return what came once it may be used, or its copy in the buffer that is wanted; and what to put back."""
        came = self._next(wanted, deadline)
        try:
            array: Array = self._talk.finished(came.value, None if wanted is not None else stream, deadline)
            self._check_alive(array)
            if wanted is not None:
                ready(wanted, stream)
                if array.nbytes:
                    array.region.driver.copy(wanted.address, array.address, array.nbytes)
                    self._check_alive(array)  # what was read before that is right, and nobody knows when it was
        except BaseException:
            self._put_back(came)
            raise
        self._told(came)
        return array if wanted is None else shown_on(wanted, array.dtype, array.shape), came

    # -- the contract -------------------------------------------------------------------------------------------
    def _exported(self, array: Array) -> ExportedBuffer:
        with held(self._talk.sending):
            export = self._talk.exports.export(array)
        return self._handle_of(array, export)

    def _known_handle(self, array: Array) -> ExportedBuffer | None:
        export = self._talk.exports.known(array.region)
        return None if export is None else self._handle_of(array, export)

    def _brought(self, handle: ExportedBuffer) -> Array:
        said = decode_handle(handle.payload)
        self._until(self._is_greeted, self.timeout, "the other end did not greet")
        if said.origin != self._peer:
            raise UsageError("a handle was brought to an end that is not connected with the one that made it")
        self._talk.imports.learn(said.part, list(handle.fds))
        return self._talk.imports.array(said.reference)

    def _post(self, array: Array, stream: StreamLike | None) -> None:
        """Send an array. With a stream its event goes along, and nobody waits."""
        if stream is not None and array.region.users[0].kind == "host":
            ready(array, stream)  # says that there is none
        with held(self._sending):
            self._listen()
            self._until(self._has_window, self.timeout, "the other end received nothing")
            self._hand_over(array, stream)

    @shielded
    def synchronize(self, *, timeout: float | None = None) -> None:
        """Return when the other end has received all that this one sent; see the contract."""
        self.handle  # noqa: B018  (the check)
        self._listen()
        self._until(
            lambda: self._talk.received >= self._sent_count, timeout, "the other end has not received everything"
        )

    def _closed(self) -> None:
        with contextlib.suppress(VramError):
            self._talk.stream_events.synchronize()
        if left := self._talk.end(self, self._exchange.close):
            warnings.warn(left, ReleaseWarning, stacklevel=4)

    # -- this end's memory --------------------------------------------------------------------------------------
    def _handle_of(self, array: Array, export: Export) -> ExportedBuffer:
        start = array.offset
        kept = array.region.pin(start, start + array.nbytes, "exported")
        part, fds = export.whole()
        handle = Handle(self._origin, part, refer(export.id, export.count, array))
        return ExportedBuffer(self.kind, encode(handle), tuple(fds), (kept, array))

    @classmethod
    @contextlib.contextmanager
    def _ends(cls, src: Location, dst: Location) -> Iterator[tuple[Any, Any]]:
        one, other = SocketExchange.pair()
        with one, other, cls(src, dst, one, timeout=MEASURING) as sender, cls(src, dst, other) as receiver:
            yield sender, receiver

    # -- what is said and heard ---------------------------------------------------------------------------------
    def _has_window(self) -> bool:
        return self._sent_count - self._talk.received < WINDOW

    def _say(self, value: object, stream: StreamLike | None = None) -> None:
        self._sent_count += 1  # first: it may be received before this goes on
        try:
            self._talk.send(value, stream, deadline_in(self.timeout))
        except BaseException:
            self._sent_count -= 1  # it was not said
            raise

    def _until(self, is_so: Callable[[], object], timeout: float | None, what: str) -> None:
        """Hear the other end until something is so."""
        try:
            self._talk.hear_until(is_so, deadline_in(timeout), what)
        except ClosedError:
            self.handle  # noqa: B018  (says that it was this end)
            raise

    def _listen(self) -> bool:
        """Hear what is there already, and return whether the other end has greeted."""
        with contextlib.suppress(WaitTimeoutError, PeerGoneError):
            self._until(lambda: False, 0, "")
        return self._is_greeted()

    def _is_greeted(self) -> bool:
        """Whether the other end's greeting came, which is the first that it says."""
        with self._greeting:
            if not self._peer and self._talk.inbox:
                self._greet(self._shown(self._talk.inbox.popleft()))
        return bool(self._peer)

    def _shown(self, found: object) -> Any:
        """Return what came. A wrong message is the other end's mistake (S7), unless its memory went with its maker."""
        if not isinstance(found, Failure):
            return self._talk.shown(found)
        if isinstance(found.error, ProtocolError):
            with contextlib.suppress(WaitTimeoutError):  # the memory goes first, and a moment later the connection does
                wait_until(lambda: self._exchange.is_gone() or None, _MOMENT, "")
                raise PeerGoneError(
                    f"the process that made the memory is gone, and the memory with it: {found.error}"
                ) from None
        raise found.error from None

    def _greet(self, said: object) -> None:
        if not isinstance(said, list) or len(said) != 3 or not isinstance(said[2], bytes):
            raise ProtocolError(f"the other end began with a {type(said).__name__}, without a greeting")
        version, kind, origin = said
        if kind != self.kind or version != VERSION:
            raise ProtocolError(
                f"the other end is a {kind!r:.40} transport, version {version!r:.20}; this is {self.kind!r}, "
                f"version {VERSION}"
            )
        self._peer = origin

    def _next(self, wanted: Array | None, deadline: float | None) -> Came:
        """Take what came first, once there is something and it fits into what is wanted."""
        found: object = None
        while found is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._until(lambda: self._is_greeted() and self._talk.inbox, left, "no message came")
            with contextlib.suppress(IndexError):  # another thread was faster
                found = self._talk.inbox.popleft()
        came = found if isinstance(found, Came) else self._accepted(found, self._shown(found))
        if wanted is not None:
            try:
                check_fits(wanted, came.nbytes, self.dst)
            except UsageError:
                self._put_back(came)
                raise
        return came

    def _told(self, came: Came) -> None:
        """Tell the other end, as soon as it reads, that one more message was received."""
        if not came.is_told:
            came.is_told = True
            self._talk.outbox.append(("received", None))
            self._talk.send_outbox()

    def _put_back(self, came: Came) -> None:
        self._talk.inbox.appendleft(came)

    def _take_back(self, came: Any, array: Array) -> None:
        self._put_back(came)

    def _check_alive(self, array: Array) -> None:
        """Raise if what was received cannot be used, since it lived only as long as its sender."""
        if isinstance(array.region, ForeignRegion) and array.region.is_imported and self._exchange.is_gone():
            raise PeerGoneError("the process that made the memory is gone, and its memory with it")

    def _imported(self) -> int:
        return len(self._talk.imports.regions)


class VmmTransport(RemoteTransport):
    """Hands over memory that file descriptors stand for: what vram makes, and PyTorch's expandable segments.

    See :class:`RemoteTransport` for the parameters. An array received without a buffer is
    the sender's memory: writable here if the sender could write to it. Memory of more than 253 segments is described in
    parts, each after the other end has taken the one before: it has to be receiving meanwhile.
    """

    __slots__ = ()

    kind = "vmm"
    method = "memory that both processes map, by file descriptor"

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether the destination can map the source's memory; see the contract."""
        if Location.parse(src) == Location.parse(dst) == HOST:
            return seen(HOST)
        answer = on_gpus("vmm maps memory of the host for the host and of a GPU for GPUs", src, dst, SHM)
        if isinstance(answer, No):
            return answer
        home = name_place(src)
        try:
            drivers.get(home).mem_granularity(home, OWN.kind)
        except VramError as error:
            return No(str(error))
        return Yes()


class IpcTransport(RemoteTransport):
    """Hands over memory of cudaMalloc, such as PyTorch's by default: over a socket, named pipes, or shared memory.

    See :class:`RemoteTransport` for the parameters. Memory of a pool that was made to be
    shared goes over a socket only, which carries the pool's descriptor, and to the
    GPU that it is on. The sender keeps the memory until the other end has said, with a call of its own, that it dropped
    the arrays on it.
    """

    __slots__ = ()

    kind = "ipc"
    method = "memory that both processes map, by 64-byte handle"
    carries = frozenset({"legacy", "pool"})

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether both places are GPUs that reach each other; see the contract."""
        return on_gpus("ipc is for memory of cudaMalloc, on GPUs", src, dst, SHM)

    @classmethod
    @contextlib.contextmanager
    def _ends(cls, src: Location, dst: Location) -> Iterator[tuple[Any, Any]]:
        """With memory of our own: the driver opens a handle in other processes only, and once; after that a message is
        an id, as in the vmm transport, and the bytes take the same wires."""
        with VmmTransport._ends(src, dst) as ends:
            yield ends
