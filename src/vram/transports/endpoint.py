"""One end of a transport: what each promises, and what all share."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

from ..arrays import Array
from ..arrays.hints import StreamLike
from ..arrays.numpy_on_use import np
from ..errors import UnsupportedError, UsageError
from ..lifetime import Owned, held, let_in, own, shielded
from ..spec import Location
from .contract import Estimate, ExportedBuffer, No, Statistics, Traffic, Yes
from .places import as_array, check_place, fresh, name_place, ready

SMALL = 4 << 10  # bytes
LARGE = 32 << 20
_ROUNDS = {SMALL: 20, LARGE: 4}

_lock = threading.RLock()
_known: dict[tuple[str, Location, Location], Estimate] = {}  # nothing is a constant of a machine


class Transport(Owned, ABC):
    """One end of a transport, or both where it is within one process. Closed when its block ends; arrays in use keep
    their memory. Its promises about order are in :mod:`~vram.transports.contract`.

    `src` and `dst` are where what is sent lies, and where what is received lies or is mapped to, as this process names
    them. Raises UnsupportedError with the reason if it is not available between the two.
    """

    __slots__ = ("_counting", "_received", "_sent", "dst", "src")

    kind: ClassVar[str]
    method: ClassVar[str] = "a way of its own"  # what carries the bytes, in words
    copies: ClassVar[bool] = False  # whether what is received is a copy in any case

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

    @shielded
    def export(self, buffer: Array) -> ExportedBuffer:
        """Export a buffer at the source, for who brings the handle to the other end. Waits for the work that fills it.

        A transport that copies between processes exports a copy of the buffer as it is now. Raises UsageError for a
        buffer that is not at the source, or is memory that does not travel this way.
        """
        array = self._of_ours(buffer)
        ready(array, None)
        return self._exported(array)

    def exported_handle(self, buffer: Array) -> ExportedBuffer | None:
        """Return the handle of a buffer whose memory, as it is now, this end has exported or sent before; None for any
        other buffer, and always where what is exported is a copy. Exports nothing, and waits for nothing.
        """
        return self._known_handle(self._of_ours(buffer))

    @shielded
    def import_(self, handle: ExportedBuffer) -> Array:
        """Return the array that a handle of the other end means, at the destination. Raises UsageError for a handle of
        another transport or connection, ProtocolError for what is no handle.

        Between processes the memory is opened once, however often and in whatever way it comes. The descriptors stay
        the caller's.
        """
        self.handle  # noqa: B018  (the check)
        if not isinstance(handle, ExportedBuffer):
            raise UsageError(f"import_ takes what export() gave, an ExportedBuffer, not {handle!r:.60}")
        if handle.kind != self.kind:
            raise UsageError(f"a handle of the {handle.kind} transport was given to the {self.kind} transport")
        return self._brought(handle)

    @shielded
    def send(self, buffer: Array, stream: StreamLike | None = None) -> None:
        """Hand a buffer at the source over. It returns when the message is gone; see above for streams.

        `stream` is what fills the buffer, see :attr:`vram.Array.stream`; by default all work of its GPUs is waited for.
        Raises UsageError for a buffer that is not at the source, or is memory that does not travel this way,
        PeerGoneError if the other process is gone.
        """
        started = time.perf_counter()
        array = self._of_ours(buffer)
        self._post(array, stream)
        with self._counting:
            self._sent = self._sent.plus(array.nbytes, time.perf_counter() - started)

    @abstractmethod
    def synchronize(self, *, timeout: float | None = None) -> None:
        """Return when what this end began is done, and between processes when all that it sent was received. Raises
        WaitTimeoutError after so many seconds.
        """

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Give everything back, and between processes the exchange. Arrays that were sent and not received are dropped
        within one process. A copy that another thread has under way ends first, or keeps what it needs.

        Memory of ``cudaMalloc`` or of a pool that was sent, and that the other process still uses a second later, is
        kept for as long as this process lives, with a ReleaseWarning: the other end can no longer say that it is done.
        """
        was_open = self._claim.handle.is_open
        super().close(strict=strict)
        if was_open:  # else in a forked child, which owns none of it, and where nobody would ever let go of a lock
            self._closed()

    # -- what differs -------------------------------------------------------------------------------------------
    @abstractmethod
    def _closed(self) -> None:
        """Give back what this end has, once: it was closed just now."""

    def _check_memory(self, array: Array) -> None:
        """Raise UsageError if an array's memory does not travel this way."""

    @abstractmethod
    def _exported(self, array: Array) -> ExportedBuffer:
        """Return a handle to an array of ours that is filled."""

    @abstractmethod
    def _known_handle(self, array: Array) -> ExportedBuffer | None:
        """Return the handle of an array whose memory was exported or sent before, or None."""

    @abstractmethod
    def _brought(self, handle: ExportedBuffer) -> Array:
        """Return what a handle of this kind means as an array at the destination."""

    @abstractmethod
    def _post(self, array: Array, stream: StreamLike | None) -> None:
        """Send an array of ours."""

    @classmethod
    @abstractmethod
    def _ends(cls, src: Location, dst: Location) -> AbstractContextManager[tuple[Any, Any]]:
        """Make a sender and a receiver in this process, which may be one, to measure with."""

    @classmethod
    @shielded
    def measure(cls, src: Location, dst: Location) -> Estimate:
        """Return what a transfer takes between two places that it is available for; measured at the first call."""
        key, lock = (cls.kind, src, dst), _lock
        with held(lock):  # one at a time: two that measure together would measure each other
            found = _known.get(key)
            if found is None:
                with cls._ends(src, dst) as (sender, receiver), fresh(src, (LARGE,), np.dtype("uint8")) as source:
                    with fresh(dst, (LARGE,), np.dtype("uint8")) as target:
                        found = _known[key] = _fit(partial(cls._carry, sender, receiver, source, target))
            return found

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

    def _of_ours(self, buffer: object) -> Array:
        """Return a buffer as an array at the source that travels this way."""
        self.handle  # noqa: B018  (the check)
        array = as_array(buffer, copies=self.copies)
        check_place("the buffer", array, self.src)
        self._check_memory(array)
        return array

    def _imported(self) -> int:
        return 0


@shielded(undo=lambda taken, array: taken[0]._take_back(taken[1], array))
def _receive(taken: list[Any], buffer: Array | None, stream: StreamLike | None, timeout: float | None) -> Array:
    """Receive by the end in a list, which has afterwards what is taken back if nobody gets the array."""
    end: Transport = taken[0]
    end.handle  # noqa: B018  (the check)
    started = time.perf_counter()
    wanted = None if buffer is None else as_array(buffer, copies=True)
    array, came = end._taken_by(wanted, stream, None if timeout is None else time.monotonic() + timeout)
    taken.append(came)
    with end._counting:
        end._received = end._received.plus(array.nbytes, time.perf_counter() - started)
    return array


# -- measured estimates: two sizes through the real thing, and a line through both -------------------------------------
def _fit(transfer: Callable[[int], None]) -> Estimate:
    small, large = _best(transfer, SMALL), _best(transfer, LARGE)
    # Where the large one hardly takes longer, the difference is noise, and may be next to nothing or less: then the
    # large one alone has the say, which is no more than was seen.
    rate = (LARGE - SMALL) / (large - small) if large > 2 * small else LARGE / large
    return Estimate(rate, max(small - SMALL / rate, small / 2))


def _best(transfer: Callable[[int], None], nbytes: int) -> float:
    """Return the least of some rounds, in seconds: what disturbs only ever adds."""
    transfer(nbytes)  # pages, contexts and mappings are made at the first
    best = float("inf")
    for _ in range(_ROUNDS[nbytes]):
        let_in()
        started = time.perf_counter_ns()
        transfer(nbytes)
        best = min(best, max(time.perf_counter_ns() - started, 1) / 1e9)
    return best


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that does not exist here may have held it; what was measured stays true


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
