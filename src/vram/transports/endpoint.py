"""One end of a transport: what each promises, and what all share."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from ..arrays import Array
from ..arrays.hints import StreamLike
from ..errors import UnsupportedError, UsageError
from ..lifetime import Owned, own, shielded
from ..spec import Location
from .contract import Estimate, ExportedBuffer, No, Statistics, Traffic, Yes
from .measure import measured
from .places import as_array, name_place


class Transport(Owned, ABC):
    """One end of a transport, or both where it is within one process. Closed when its block ends; arrays in use keep
    their memory. Its promises about order are in :mod:`~vram.transports.contract`.

    `src` and `dst` are where what is sent lies, and where what is received lies or is mapped to, as this process names
    them. Raises UnsupportedError with the reason if it is not available between the two.
    """

    __slots__ = ("_counting", "_received", "_sent", "dst", "src")

    kind: ClassVar[str]
    method: ClassVar[str] = "a way of its own"  # what carries the bytes, in words

    def __init__(self, src: Location | str, dst: Location | str) -> None:
        answer = type(self).available(src, dst)
        if isinstance(answer, No):
            raise UnsupportedError(
                f"the {self.kind} transport from {src} to {dst}",
                "two places that it can work between",
                f"{src} and {dst}: {answer.reason}",
            )
        self.src = name_place(src)
        self.dst = name_place(dst)
        self._sent = self._received = Traffic()
        self._counting = threading.Lock()
        self._claim = own(f"{self.kind} transport from {self.src} to {self.dst}", None)

    @classmethod
    @abstractmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether it works between two places, as this process sees them. Makes nothing. Raises UsageError for text
        that names no place.
        """

    @abstractmethod
    def export(self, buffer: Array) -> ExportedBuffer:
        """Export a buffer at the source, for who brings the handle to the other end. Waits for the work that fills it.

        A transport that copies between processes exports a copy of the buffer as it is now. Raises UsageError for a
        buffer that is not at the source, or is memory that does not travel this way.
        """

    @abstractmethod
    def exported_handle(self, buffer: Array) -> ExportedBuffer | None:
        """Return the handle of a buffer whose memory, as it is now, this end has exported or sent before; None for any
        other buffer, and always where what is exported is a copy. Exports nothing, and waits for nothing.
        """

    @abstractmethod
    def import_(self, handle: ExportedBuffer) -> Array:
        """Return the array that a handle of the other end means, at the destination. Raises UsageError for a handle of
        another transport or connection, ProtocolError for what is no handle.
        """

    @abstractmethod
    def send(self, buffer: Array, stream: StreamLike | None = None) -> None:
        """Hand a buffer at the source over. It returns when the message is gone; see above for streams.

        `stream` is what fills the buffer, see :attr:`vram.Array.stream`; by default all work of its GPUs is waited for.
        Raises UsageError for a buffer that is not at the source, or is memory that does not travel this way,
        PeerGoneError if the other process is gone.
        """

    @abstractmethod
    def synchronize(self, *, timeout: float | None = None) -> None:
        """Return when what this end began is done, and between processes when all that it sent was received. Raises
        WaitTimeoutError after so many seconds.
        """

    @classmethod
    @abstractmethod
    def _ends(cls, src: Location, dst: Location) -> AbstractContextManager[tuple[Any, Any]]:
        """Make a sender and a receiver in this process, which may be one, to measure with."""

    @classmethod
    def measure(cls, src: Location, dst: Location) -> Estimate:
        """Return what a transfer takes between two places that it is available for; measured once."""
        return measured(cls.kind, src, dst, cls._ends, cls._carry)

    @staticmethod
    def _carry(sender: Any, receiver: Any, source: Array, target: Array, nbytes: int) -> None:
        """Move so many bytes, to measure that."""
        with source[:nbytes] as part:
            sender.send(part)
        receiver.recv(target)

    @abstractmethod
    def _taken_by(self, wanted: Array | None, stream: StreamLike | None, deadline: float | None) -> tuple[Array, Any]:
        """Return what came once it may be used, or its copy in the buffer that is wanted; and what to take back."""

    @abstractmethod
    def _take_back(self, came: Any, array: Array) -> None:
        """Have what was received, and nobody got, come again."""

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
        return _receive([self], buffer, stream, timeout)

    @property
    def exchange(self) -> str:
        """The carrier of the bytes, and between processes that of the messages, in words: which method was taken."""
        return self.method

    @property
    def ready(self) -> bool:
        """Whether it can be used at once: it is open, and between processes the other end is there. Does not wait.
        Raises ProtocolError if that is no such transport.
        """
        return not self.is_closed

    @shielded
    def estimate(self) -> Estimate:
        """Return what a transfer takes: measured here between these two places, once, and remembered."""
        return self.measure(self.src, self.dst)

    def statistics(self) -> Statistics:
        """Return what this end has done so far. Also after it was closed."""
        with self._counting:
            return Statistics(self._sent, self._received, self._imported())

    def __repr__(self) -> str:
        done = self.statistics()
        state = "closed" if self.is_closed else f"{done.sent.messages} sent, {done.received.messages} received"
        return f"<{type(self).__name__} {self.src} to {self.dst}, {state}>"

    def _check_handle(self, handle: object) -> None:
        """Raise unless this end is open and was given a handle of its kind."""
        self.handle  # noqa: B018  (the check)
        if not isinstance(handle, ExportedBuffer):
            raise UsageError(f"import_ takes what export() gave, an ExportedBuffer, not {handle!r:.60}")
        handle.check(self.kind)

    def _imported(self) -> int:
        return 0

    def _count_sent(self, nbytes: int, seconds: float) -> None:
        with self._counting:
            self._sent = self._sent.plus(nbytes, seconds)

    def _count_received(self, nbytes: int, seconds: float) -> None:
        with self._counting:
            self._received = self._received.plus(nbytes, seconds)


@shielded(undo=lambda taken, array: taken[0]._take_back(taken[1], array))
def _receive(taken: list[Any], buffer: Array | None, stream: StreamLike | None, timeout: float | None) -> Array:
    """Receive by the end in a list, which has afterwards what is taken back if nobody gets the array."""
    end: Transport = taken[0]
    end.handle  # noqa: B018  (the check)
    started = time.perf_counter()
    wanted = None if buffer is None else as_array(buffer, copies=True)
    array, came = end._taken_by(wanted, stream, None if timeout is None else time.monotonic() + timeout)
    taken.append(came)
    end._count_received(array.nbytes, time.perf_counter() - started)
    return array
