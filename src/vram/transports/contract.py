"""The contract of a transport: what moves bytes from one place to another. One vocabulary for all of them.

A place is a :class:`~vram.spec.Location`: ``"host"``, ``"cuda:0"``. What is moved is an array; what arrives is one.

====== ============================== ======================================= ====================================
kind   between                        what :meth:`Transport.recv` gives       what it takes
====== ============================== ======================================= ====================================
ipc    GPUs, two processes            the sender's own memory, mapped here    memory of cudaMalloc, or of a pool; peers
vmm    GPUs or host, two processes    the sender's own memory, mapped here    memory with file descriptors; peers
shm    any two places, two processes  a copy, through shared host memory      a socket between them
peer   GPUs, one process              a copy, by the GPUs alone               peers, or one GPU
staged any two places, one process    a copy, through pinned host memory      nothing
====== ============================== ======================================= ====================================

Order (S10)
-----------
:meth:`Transport.send` waits for the work that fills the buffer: all work of the GPUs that may write to it. Who names
the `stream` that fills it waits for that alone, and with `ipc` and `vmm` for nothing: an interprocess event goes along
(where the driver has none left the stream is waited for), and :meth:`Transport.recv` has the stream that it was given
wait for it, on the GPU, or waits itself. So without a stream the bytes are there when it returns, and with one when
that stream comes to them. Into a buffer it always returns when they are there: both the sender's event and the stream
that still works on the buffer are waited for.

The sender leaves the buffer as it is until the other end has received it; between processes
:meth:`Transport.synchronize` waits for that. Messages arrive in the order in which they were sent.

What is received into a buffer of one's own is copied, by every transport. What is received without one is on memory of
the sender's where the table says so: it changes when the sender writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from ..arrays import Array
from ..arrays.hints import StreamLike
from ..errors import UsageError
from ..spec import Location

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True)
class Yes:
    """It works between the two places. True."""

    def __bool__(self) -> Literal[True]:
        return True


@dataclass(frozen=True, slots=True)
class No:
    """It does not. False, with the reason."""

    reason: str

    def __bool__(self) -> Literal[False]:
        return False


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a transfer between two places takes, fitted to what was measured here with a small and a large one.

    Attributes
    ----------
    bandwidth : float
        Bytes a second.
    latency : float
        Seconds that a transfer of next to nothing takes.
    """

    bandwidth: float
    latency: float

    def seconds(self, nbytes: int) -> float:
        """Return how long a transfer of so many bytes should take, in seconds."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went one way: how many messages, their bytes, and the seconds spent in the calls."""

    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def plus(self, nbytes: int, seconds: float) -> Traffic:
        """Return it with one more message."""
        return Traffic(self.messages + 1, self.nbytes + nbytes, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What an end of a transport has done so far.

    Attributes
    ----------
    sent, received : Traffic
        In one process both ends are one.
    imported : int
        Memories of the other end, or of the other place, that are mapped here.
    """

    sent: Traffic = field(default_factory=Traffic)
    received: Traffic = field(default_factory=Traffic)
    imported: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ExportedBuffer:
    """A handle to a buffer, for people who bring it to the other end themselves.

    Attributes
    ----------
    kind : str
        The transport that it is of.
    payload : bytes
        What describes it; empty for transports within one process.
    fds : tuple of int
        Descriptors that travel with it. They are lent: duplicate or send them while this object lives.
    keeps : object
        What keeps memory and descriptors alive: hold on to this object until the other end has imported it.
    """

    kind: str
    payload: bytes = b""
    fds: tuple[int, ...] = ()
    keeps: object = None

    def check(self, kind: str) -> None:
        """Raise :class:`~vram.errors.UsageError` unless it is of that transport."""
        if self.kind != kind:
            raise UsageError(f"a handle of the {self.kind} transport was given to the {kind} transport")


class Transport(Protocol):
    """One end of a transport, or both where it is within one process. Closed when its block ends."""

    kind: ClassVar[str]

    @property
    def src(self) -> Location:
        """Where what is sent lies."""

    @property
    def dst(self) -> Location:
        """Where what is received lies, or is mapped to."""

    @property
    def exchange(self) -> str:
        """What carries the bytes, and between processes what the messages, in words: which method was taken."""

    @property
    def ready(self) -> bool:
        """Whether it can be used at once: it is open, and between processes the other end is there. Does not wait.
        Raises ProtocolError if that is no such transport.
        """

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether it works between two places, as this process sees them. Makes nothing. Raises UsageError for text
        that names no place.
        """

    def export(self, buffer: Array) -> ExportedBuffer:
        """Export a buffer at the source, for who brings the handle to the other end. Waits for the work that fills it.

        A transport that copies between processes exports a copy of the buffer as it is now. Raises UsageError for a
        buffer that is not at the source, or is memory that does not travel this way.
        """

    def exported_handle(self, buffer: Array) -> ExportedBuffer | None:
        """Return the handle of a buffer whose memory, as it is now, this end has exported or sent before; None for any
        other buffer, and always where what is exported is a copy. Exports nothing, and waits for nothing.
        """

    def import_(self, handle: ExportedBuffer) -> Array:
        """Return the array that a handle of the other end means, at the destination. Raises UsageError for a handle of
        another transport or connection, ProtocolError for what is no handle.
        """

    def send(self, buffer: Array, stream: StreamLike | None = None) -> None:
        """Hand a buffer at the source over. It returns when the message is gone; see above for streams.

        `stream` is what fills the buffer, see :attr:`vram.Array.stream`; by default all work of its GPUs is waited for.
        Raises UsageError for a buffer that is not at the source, or is memory that does not travel this way,
        PeerGoneError if the other process is gone.
        """

    def recv(
        self, buffer: Array | None = None, stream: StreamLike | None = None, *, timeout: float | None = None
    ) -> Array:
        """Return what was sent, in the order of sending. The bytes are there when it returns, or for `stream`.

        Parameters
        ----------
        buffer : Array, optional
            Where the bytes go, at the destination; a longer one is filled from its beginning.
        stream : optional
            With `buffer`: what still works on it, which is waited for; by default all work of its GPUs. Without: what
            will read the array, and waits for the work that fills it.
        timeout : float, optional
            Seconds to wait for a message, all of it; for ever by default.

        Returns
        -------
        Array
            Of the type and shape of what was sent: `buffer` itself if it is that already, or an array on its memory.

        Raises
        ------
        UsageError
            If the buffer is too small, read-only, or not at the destination. The message stays, for another one.
        WaitTimeoutError, PeerGoneError
            If nothing came in time, or the other process is gone. Nothing is lost: the next call goes on from there.
        """

    def synchronize(self, *, timeout: float | None = None) -> None:
        """Return when what this end began is done, and between processes when all that it sent was received. Raises
        WaitTimeoutError after so many seconds.
        """

    def estimate(self) -> Estimate:
        """Return what a transfer takes: measured here between these two places, once, and remembered."""

    def statistics(self) -> Statistics:
        """Return what this end has done so far. Also after it was closed."""

    def close(self) -> None:
        """Give everything back, and the exchange; arrays that are in use keep their memory. Idempotent."""

    def __enter__(self) -> Self:
        """Return itself; closed at the end of the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
