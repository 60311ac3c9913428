"""The contract of a transport: what moves bytes from one place to another. One vocabulary for all of them.

A place is a :class:`~vram.spec.Location`: ``"host"``, ``"cuda:0"``. Arrays are moved, and arrays arrive.

====== ============================== ======================================= ====================================
kind   between                        what ``recv`` gives       what it takes
====== ============================== ======================================= ====================================
ipc    GPUs, two processes            the sender's own memory, mapped here    memory of cudaMalloc, or of a pool; peers
vmm    GPUs or host, two processes    the sender's own memory, mapped here    memory with file descriptors; peers
shm    any two places, two processes  a copy, through shared host memory      a socket between them
peer   GPUs, one process              a copy, by the GPUs alone               peers, or one GPU
staged any two places, one process    a copy, through pinned host memory      nothing
====== ============================== ======================================= ====================================

Order (S10)
-----------
``send`` waits for the work that fills the buffer: all work of the GPUs that may write to it. A caller that
names the `stream` that fills it waits for that alone, and with `ipc` and `vmm` for nothing: an interprocess event goes
along (where the driver has none left the stream is waited for), and ``recv`` has the stream that it was given
wait for it, on the GPU, or waits itself. So without a stream the bytes are there when it returns, and with one when
that stream comes to them. Into a buffer it always returns when they are there: both the sender's event and the stream
that still works on the buffer are waited for.

The sender leaves the buffer as it is until the other end has received it; between processes
``synchronize`` waits for that. Messages arrive in the order in which they were sent.

An array received into a buffer of one's own is copied, by every transport. An array received without one is on memory
of the sender's where the table says so: it changes when the sender writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
    """The time of a transfer between two places, fitted to what was measured here with a small and a large one.

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
    """Counts of one direction: how many messages, their bytes, and the seconds spent in the calls."""

    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def plus(self, nbytes: int, seconds: float) -> Traffic:
        """Return it with one more message."""
        return Traffic(self.messages + 1, self.nbytes + nbytes, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of an end of a transport so far.

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
        A description of it; empty for transports within one process.
    fds : tuple of int
        Descriptors that travel with it. They are lent: duplicate or send them while this object lives.
    keeps : object
        An object that keeps memory and descriptors alive: hold on to this object until the other end has imported it.
    """

    kind: str
    payload: bytes = b""
    fds: tuple[int, ...] = ()
    keeps: object = None
