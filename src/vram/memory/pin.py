"""Pins: what views hold instead of the region they look at (invariant I6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ClosedError, RangeError
from ..lifetime import Claim, Handle

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Pin", "Span"]


class Span:
    """What a pin keeps, as the region finds it among the claims on its handle. Internal to this room.

    It does not refer to the pin, which could otherwise never be garbage-collected. `is_live` ends with the release
    itself, while the claim may wait in a queue for a moment: a shrink right after must not be refused for that.
    """

    __slots__ = ("holder", "is_live", "start", "stop")

    def __init__(self, start: int, stop: int, holder: object) -> None:
        self.start = start
        self.stop = stop
        self.holder = holder
        self.is_live = True


class Pin:
    """A claim on a span of a region: made by :meth:`Region.pin <vram.memory.Region.pin>`.

    Keeps the memory, not the region object. Garbage collection releases it too, in any thread.

    Attributes
    ----------
    handle : Handle
        The region's.
    keeps : object
        Anything else that has to live as long as this pin and those taken from it, such as the owner of memory that
        is not ours.
    """

    __slots__ = ("__weakref__", "_claim", "_span", "handle", "keeps")

    def __init__(self, handle: Handle, claim: Claim, span: Span, keeps: object = None) -> None:
        self.handle = handle
        self._claim = claim
        self._span = span
        self.keeps = keeps

    @property
    def is_released(self) -> bool:
        """Whether it was given up."""
        return self._claim.is_released

    @property
    def start(self) -> int:
        """Offset in the region where the span begins, in bytes."""
        return self._span.start

    @property
    def stop(self) -> int:
        """Offset in the region where it ends, in bytes."""
        return self._span.stop

    def subpin(self, start: int, stop: int, holder: str = "pin") -> Pin:
        """Take another pin within this one's span; it works after the region object was closed too.

        Parameters
        ----------
        start, stop : int
            Offsets in the region, in bytes.
        holder : str
            Who looks at them, as BusyError will say.

        Raises
        ------
        RangeError
            If they do not lie within this pin's span.
        ClosedError
            If this pin was released.
        """
        mine = self._span
        if not mine.start <= start <= stop <= mine.stop:
            raise RangeError(f"bytes {start} to {stop} are not within the pinned bytes {mine.start} to {mine.stop}")
        span = Span(start, stop, holder)
        pin = Pin(self.handle, self.handle.claim(holder, span), span, self.keeps)
        if not mine.is_live:  # looked at last: from here on a shrink sees the new span, whatever becomes of this one
            pin.release()
            raise ClosedError(f"the pin of {mine.holder} [{mine.start}:{mine.stop}] was released")
        return pin

    def others(self) -> tuple[str, ...]:
        """Return who else has a pin that overlaps this one."""
        mine = self._span
        spans = (tag for tag in self.handle.tags() if isinstance(tag, Span) and tag.is_live and tag is not mine)
        return tuple(
            f"{span.holder} [{span.start}:{span.stop}]"
            for span in spans
            if max(span.start, mine.start) < min(span.stop, mine.stop)
        )

    def release(self) -> None:
        """Give it up. Idempotent; never waits, never raises."""
        self._span.is_live = False  # first: the claim may wait in a queue
        self._claim.release()
        self.keeps = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        span = self._span
        return f"<Pin {span.holder} [{span.start}:{span.stop}]{', released' if self.is_released else ''}>"

    def __del__(self) -> None:
        span = getattr(self, "_span", None)
        if span is not None:  # not if an interrupt came before the constructor was done
            span.is_live = False
            self._claim.release()  # it would go with this object; an interrupt keeps one finalizer from running (I12)
