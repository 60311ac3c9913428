"""What every end of a transport has: places, counts, one owner."""

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


class Endpoint(Owned, ABC):
    """The part of :class:`~vram.transports.contract.Transport` that all share. Raises UnsupportedError with the reason
    where it is not available."""

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
        """Say whether it works between two places; see :class:`~vram.transports.contract.Transport`."""

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
        """Return what was sent; see the contract."""
        return _receive([self], buffer, stream, timeout)

    @property
    def exchange(self) -> str:
        """What carries the bytes, in words."""
        return self.method

    @property
    def ready(self) -> bool:
        """Whether this transport is open: within one process it has no other end to wait for."""
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
    end: Endpoint = taken[0]
    end.handle  # noqa: B018  (the check)
    started = time.perf_counter()
    wanted = None if buffer is None else as_array(buffer, copies=True)
    array, came = end._taken_by(wanted, stream, None if timeout is None else time.monotonic() + timeout)
    taken.append(came)
    end._count_received(array.nbytes, time.perf_counter() - started)
    return array
