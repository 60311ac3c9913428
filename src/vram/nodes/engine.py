"""What moves bytes from node to node: one small contract, as :mod:`vram.transports` has one for a single machine.

An engine has two halves. In the carrier, :meth:`Engine.offer` gets the memory of one version ready and returns an
:class:`Offering`, whose `data` goes to the readers. In a reader, :meth:`Engine.open` returns a :class:`Reading` for
that, which fills one piece after the other. Neither looks at digests, names or versions: the reader checks each piece,
whoever brought it, and asks for it again elsewhere. What one half has to ask the other while they work goes over the
authenticated connection, by :meth:`Link.ask` and :meth:`Offering.answer`.

An engine that cannot do something says so by :class:`~vram.errors.UnsupportedError` in :meth:`Engine.offer` (it is not
offered then) or :meth:`Engine.open` (it is not used). A piece that did not come is a
:class:`~vram.errors.PeerError`; whatever had arrived of it is overwritten by the next try.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..spec import Location
from .messages import Piece


class Span(NamedTuple):
    """Memory that is mapped in this process, and what of a replica it is.

    Attributes
    ----------
    offset : int
        Where in the replica it lies, in bytes.
    address, nbytes : int
        Where it is mapped, and how long it is.
    location : Location
        The host, or a GPU by the ordinal that it has in this process.
    view : memoryview, or None
        The same bytes, where the CPU can touch them.
    """

    offset: int
    address: int
    nbytes: int
    location: Location
    view: memoryview | None


class Link(Protocol):
    """The authenticated connection of a reader to one node. Of one thread at a time."""

    def fetch(self, piece: Piece, into: memoryview, timeout: float) -> None:
        """Have the bytes of a piece sent on this connection, into memory of the host."""
        ...

    def ask(self, engine: str, data: bytes, timeout: float) -> bytes:
        """Return what the other half of an engine answers, see :meth:`Offering.answer`."""
        ...


class Offering(Protocol):
    """What an engine has ready in the carrier, for all readers of one version. Of many threads at a time.

    It may have a method `forget(answers)`, which is called once when the connection of a reader is over, with the last
    16 answers (a tuple of bytes) that it gave over it and that are not empty: what they promised, nobody waits for.
    """

    @property
    def data(self) -> bytes:
        """What a reader's half has to know: at most 1 MiB."""
        ...

    def answer(self, asked: bytes) -> bytes:
        """Answer what a reader's half asked; what it says is not to be believed. Raises a VramError to refuse."""
        ...

    def close(self) -> None:
        """Let go of everything. Called once; readers may still be at it, whose pieces fail then."""
        ...


class Reading(Protocol):
    """A reader's half at work, over one connection. Of one thread.

    It may have an attribute `why` (str): why it moves bytes in another way than its fastest one; empty if it does not.
    It is looked at after each piece.
    """

    def read(self, piece: Piece, into: Span, timeout: float) -> None:
        """Fill a piece.

        Parameters
        ----------
        piece : Piece
            Which one.
        into : Span
            Where to: exactly the bytes of the piece. On the host unless the engine reaches other places.
        timeout : float
            Seconds that it may take altogether.

        Raises
        ------
        PeerError
            If it did not come: PeerGoneError if the other node is gone, WaitTimeoutError if it was too slow.
        BusyError
            If others have all that it takes, and nothing was read: it is asked for again, as long as anything comes.
        """
        ...

    def close(self) -> None:
        """End it. Idempotent."""
        ...


class Engine(Protocol):
    """A way to move bytes between nodes."""

    name: str

    def reaches(self, location: Location) -> bool:
        """Whether a reader's half can write to such a place; if not, pieces are staged in memory of the host."""
        ...

    def offer(self, spans: Sequence[Span]) -> Offering:
        """Get memory ready to be read. It stays mapped until the offering is closed.

        Raises
        ------
        UnsupportedError
            If it cannot move such memory.
        """
        ...

    def open(self, data: bytes, link: Link) -> Reading:
        """Begin to read what was offered.

        Raises
        ------
        UnsupportedError
            If it cannot, here.
        ProtocolError
            If `data` is nothing that :meth:`offer` says.
        """
        ...
