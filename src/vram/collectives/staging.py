"""Collectives of host arrays through a buffer that all ranks map: each puts its part there, and takes from all."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import ClosedError, UsageError
from . import host
from .signals import Signals
from .symmetric import SymmetricBuffer
from .votes import DisagreementError

if TYPE_CHECKING:
    import numpy as np

_HALF = 4 * 2**20  # bytes that go through the staging buffer at a time, of which it has two
MEET, _MOVED = 1, 2  # what a barrier is about; what the second one of a collective is


class Staging:
    """The host's side of a rank: its meetings with the others, and a buffer that all see.
    ``make(nbytes, deadline)``, a bound method that is held weakly, makes the buffer."""

    def __init__(
        self, rank: int, size: int, name: str, signals: Signals, make: Callable[[int, float], SymmetricBuffer]
    ) -> None:
        self.rank, self.size, self.name = rank, size, name
        self._signals = signals
        self._make = weakref.WeakMethod(make)
        self._buffer: SymmetricBuffer | None = None
        self._half = 0

    def close(self) -> None:
        """Close the buffer; a call that is under way in another thread hears so."""
        if self._buffer is not None:
            self._buffer.close()

    def come(self, about: int, deadline: float) -> None:
        """Wait for all ranks at a call that is about this; raise on every rank if they call different things."""
        others = self._signals.meet(about, deadline)
        if others:
            self._half = 0  # on every rank: some were in the middle of a piece and some not, and nobody reads any now
            raise DisagreementError(
                f"the ranks of the group {self.name!r} do not agree: rank {others[0]} made another call than rank "
                f"{self.rank}, or with another size, type or operation"
            )

    def reduce_shares(self, buffer: SymmetricBuffer, into: SymmetricBuffer, op: str, deadline: float) -> None:
        """Each rank reduces its share of the elements, and writes it to all."""
        about = about_of("all_reduce", op, buffer.dtype, buffer.nbytes, buffer.number, into.number)
        self.come(about, deadline)
        ranks = range(self.size)
        mine = host.share(buffer.nbytes // buffer.dtype.itemsize, self.rank, self.size)
        sources = [buffer.flat(rank)[mine] for rank in ranks]
        host.reduce(op, sources, [into.flat(rank)[mine] for rank in ranks])
        self._signals.wait(self._signals.arrive(_MOVED), deadline)

    def reduce(self, source: Any, target: Any, op: str, deadline: float) -> None:
        """The same through the staging buffer, piece by piece; each rank fetches the shares of the others."""
        about = about_of("all_reduce", op, source.dtype, source.nbytes)
        signals = self._signals
        for start, stop in self._pieces(source.size, source.itemsize, deadline):
            staged = self._staged(source.dtype, stop - start)
            staged[self.rank][:] = source[start:stop]
            self.come(about, deadline)
            mine = host.share(stop - start, self.rank, self.size)
            host.reduce(op, [one[mine] for one in staged], [staged[self.rank][mine]])
            signals.wait(signals.arrive(_MOVED), deadline)
            into = target[start:stop]
            for rank, one in enumerate(staged):
                theirs = host.share(stop - start, rank, self.size)
                into[theirs] = one[theirs]

    def move(
        self,
        about: int,
        source: np.ndarray[Any, Any],
        parts: int,
        take: Callable[[list[np.ndarray[Any, Any]], int, int], None],
        deadline: float,
    ) -> None:
        """Put the source into the staging buffer, piece by piece of each of its parts, and take from those of all:
        `take` gets all ranks' pieces, of shape ``(parts, elements)``, and which elements of a part these are."""
        rows = source.reshape(parts, -1)
        for start, stop in self._pieces(rows.shape[1], rows.itemsize * parts, deadline):
            staged = [one.reshape(parts, -1) for one in self._staged(source.dtype, (stop - start) * parts)]
            staged[self.rank][:] = rows[:, start:stop]
            self.come(about, deadline)
            take(staged, start, stop)

    def _pieces(self, count: int, itemsize: int, deadline: float) -> list[tuple[int, int]]:
        """Return how so many elements go through half the staging buffer, which is made when it is first needed."""
        each = _HALF // itemsize
        if not each:
            raise UsageError(
                f"elements of {itemsize} bytes, all parts together, are more than the {_HALF} staged at once"
            )
        if self._buffer is None:
            make = self._make()
            if make is None:
                raise ClosedError(f"the group {self.name!r} was closed in the middle of a call")
            self._buffer = make(2 * _HALF, deadline)
        return [(start, min(start + each, count)) for start in range(0, count, each)] or [(0, 0)]

    def _staged(self, dtype: np.dtype[Any], count: int) -> list[np.ndarray[Any, Any]]:
        """Return so many elements of the staging buffers of all ranks, of the half whose turn it is. A rank writes here
        again two pieces later: all ranks are at the piece between by then, and done with this one."""
        if self._buffer is None:
            raise ClosedError(f"the group {self.name!r} was closed in the middle of a call")
        staging, start = self._buffer, self._half * _HALF
        self._half ^= 1
        nbytes = count * dtype.itemsize
        return [staging.flat(rank)[start : start + nbytes].view(dtype) for rank in range(self.size)]


def about_of(*what: object) -> int:
    """Return a number for what a call is about, the same on every rank; above MEET and _MOVED."""
    return zlib.crc32(repr(what).encode()) + 16
