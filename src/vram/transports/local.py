"""Transports within one process: what was sent waits in a queue, and is copied when it is received."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

from ..arrays import Array
from ..arrays.hints import StreamLike
from ..arrays.views import close_when_unused
from ..errors import ClosedError, UsageError, WaitTimeoutError
from ..lifetime import let_in
from ..memory import Region
from ..memory.allocation import or_else
from ..memory.foreign import ForeignRegion
from ..spec import Location
from .contract import ExportedBuffer, No, Yes
from .endpoint import Transport
from .places import STAGED, check_fits, fresh, on_gpus, ready, shown_on

_SLICE = 0.1  # seconds of a wait, before Ctrl-C is let in


class LocalTransport(Transport):
    """Both ends of a transport, in one process. Any thread may send, any may receive."""

    __slots__ = ("_seen", "_there", "_waiting")

    copies = True

    def __init__(self, src: Location | str, dst: Location | str) -> None:
        super().__init__(src, dst)
        self._waiting: deque[Array] = deque()  # what was sent; each keeps its memory until it was received
        self._seen: weakref.WeakSet[Region] = weakref.WeakSet()  # exported
        self._there = threading.Condition()  # never taken by a finalizer

    @abstractmethod
    def _move(self, source: Array, array: Array) -> None:
        """Copy all of an array to the beginning of one at the destination, and return when it is there."""

    def _exported(self, array: Array) -> ExportedBuffer:
        self._seen.add(array.region)
        return ExportedBuffer(self.kind, keeps=array)

    def _known_handle(self, array: Array) -> ExportedBuffer | None:
        return ExportedBuffer(self.kind, keeps=array) if array.region in self._seen else None

    def _brought(self, handle: ExportedBuffer) -> Array:
        if not isinstance(handle.keeps, Array):
            raise UsageError(f"the {self.kind} transport is within one process, and so are its handles")
        return self._at_destination(handle.keeps)

    def _at_destination(self, array: Array) -> Array:
        with _kept(array) as source:
            return self._received_into(source, None, None)

    def _post(self, array: Array, stream: StreamLike | None) -> None:
        """Keep an array until it is received: it is read then."""
        ready(array, stream)
        source = _kept(array)
        with self._there:
            if self.is_closed:
                source.close()
                raise ClosedError(f"{self!r} was closed")
            self._waiting.append(source)
            self._there.notify_all()

    def _taken_by(self, wanted: Array | None, stream: StreamLike | None, deadline: float | None) -> tuple[Array, Any]:
        source = self._next(wanted, deadline)
        try:
            return self._received_into(source, wanted, stream), (source, wanted is None)
        except BaseException:
            self._put_back(source)
            raise

    def _take_back(self, came: Any, array: Array) -> None:
        source, is_ours = came
        if is_ours:
            array.close()
        self._put_back(source)

    def _next(self, wanted: Array | None, deadline: float | None) -> Array:
        """Take what was sent first, once there is something and it fits into what is wanted."""
        with self._there:
            while not self._waiting:
                self.handle  # noqa: B018  (closed meanwhile?)
                left = _SLICE if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise WaitTimeoutError("nothing was sent in time")
                self._there.wait(min(left, _SLICE))
                let_in()
            if wanted is not None:
                check_fits(wanted, self._waiting[0].nbytes, self.dst)
            return self._waiting.popleft()

    def _put_back(self, source: Array) -> None:
        """Keep what was sent for another try."""
        with self._there:
            self._waiting.appendleft(source)
            self._there.notify_all()

    def _received_into(self, source: Array, buffer: Array | None, stream: object) -> Array:
        if buffer is not None:
            ready(buffer, stream)
            if source.nbytes:
                self._move(source, buffer)
            return shown_on(buffer, source.dtype, source.shape)
        made = fresh(self.dst, source.shape, source.dtype)
        with or_else(made.close):
            if source.nbytes:
                self._move(source, made)
        return made

    def synchronize(self, *, timeout: float | None = None) -> None:
        """Return when what this transport began is done: what was received is there when `recv` returns."""
        self.handle  # noqa: B018  (the check; there is nothing else to wait for)

    def _closed(self) -> None:
        with self._there:
            while self._waiting:
                self._waiting.popleft().close()
            self._there.notify_all()

    @classmethod
    @contextlib.contextmanager
    def _ends(cls, src: Location, dst: Location) -> Iterator[tuple[Any, Any]]:
        with cls(src, dst) as both:
            yield both, both


def _kept(array: Array) -> Array:
    """Return an array of its own on the same bytes, which keeps them."""
    return Array(array.region, array.dtype, array.shape, offset=array.offset)


class PeerTransport(LocalTransport):
    """Copies between two GPUs that reach each other's memory, or within one, in one process.

    The GPU at the destination reads the source's memory itself. Where that is not mapped for it, the driver lends it
    the right to read for as long as a copy takes. :meth:`import_` gives the very memory, mapped for the destination's
    GPU: a second time, for that GPU alone, which is coherent with the first mapping.
    """

    __slots__ = ()

    kind = "peer"
    method = "copies by the GPUs themselves"

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        """Say whether both places are GPUs of this process that reach each other; see the contract."""
        return on_gpus("peer is between GPUs", src, dst, STAGED)

    def _move(self, source: Array, array: Array) -> None:
        source.region.driver.copy(array.address, source.address, source.nbytes)

    def _at_destination(self, array: Array) -> Array:
        region = array.region
        if self.dst in region.users or not array.nbytes:
            return _kept(array)
        if isinstance(region, ForeignRegion) and region.made_by != "vmm":
            raise UsageError(
                f"{array!r} was not made with virtual memory management, so it cannot be mapped for {self.dst}; "
                f"send it, which copies"
            )
        allocations, _ = region.segments(0, region.nbytes)
        alias = Region.from_allocations(
            region.driver, allocations, access=region.access, users=[self.dst], managed=True
        )
        try:
            return Array(alias, array.dtype, array.shape, offset=array.offset)
        finally:
            close_when_unused(alias)
