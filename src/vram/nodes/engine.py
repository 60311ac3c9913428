"""The contract of an engine, which moves bytes from node to node.

In the carrier :meth:`Engine.offer` prepares the memory of one version; :attr:`Offering.data` goes to the readers, where
:meth:`Engine.open` returns a :class:`Reading`. The reader checks the digest of each piece, and a piece that fails is
overwritten by the next try. The halves ask each other by :meth:`~.connection.Connection.ask` and
:meth:`Offering.answer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..spec import Location
from .connection import Connection
from .messages import Piece


class Span(NamedTuple):
    """Mapped memory and its `offset` in a replica, in bytes; `location` has the GPU's ordinal in this process.
    `view` has the same bytes where the CPU can touch them, else None."""

    offset: int
    address: int
    nbytes: int
    location: Location
    view: memoryview | None


class Offering(Protocol):
    """The memory of one version that an engine offers to all readers; many threads call it at a time.
    An optional method `forget(answers)` is called once when the connection of a reader ends, with its last 16 answers
    that are not empty: no reader waits for what they promised."""

    @property
    def data(self) -> bytes:
        """Bytes for the reader's half: at most 1 MiB."""
        ...

    def answer(self, asked: bytes) -> bytes:
        """Answer what a reader's half asked; what it says is not to be believed. Raises a VramError to refuse."""
        ...

    def close(self) -> None:
        """Let go of everything. Called once; readers may still be at it, whose pieces fail then."""
        ...


class Reading(Protocol):
    """The reader's half of an engine at work over one connection, for one thread.
    An optional attribute `why` (str) says why it does not use its fastest way; it is looked at after each piece."""

    def read(self, piece: Piece, into: Span, timeout: float) -> None:
        """Fill `into` with a piece within `timeout` seconds; it is on the host unless the engine reaches other places.
        Raises PeerGoneError if the other node is gone, WaitTimeoutError if it is too slow, BusyError if other readers
        have all that it takes: nothing was read then, and the piece is asked for again as long as anything comes."""
        ...

    def close(self) -> None:
        """End it. Called once."""
        ...


class Engine(Protocol):
    """A way to move bytes between nodes."""

    name: str

    def reaches(self, location: Location) -> bool:
        """Whether a reader's half can write to such a place; if not, pieces are staged in memory of the host."""
        ...

    def offer(self, spans: Sequence[Span]) -> Offering:
        """Prepare memory to be read; it stays mapped until the offering is closed.
        Raises UnsupportedError if the engine cannot move such memory: it is not offered then."""
        ...

    def open(self, data: bytes, link: Connection) -> Reading:
        """Begin to read what was offered, over the connection of one thread to the carrier.
        Raises UnsupportedError if the engine cannot: it is not used then.
        Raises ProtocolError if :meth:`offer` never makes such `data`."""
        ...
