"""Pins: what views hold instead of the region they look at (invariant I6)."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ClosedError, RangeError
from ..lifetime import Claim


class Span(NamedTuple):
    """The bytes that a pin keeps, as the region finds them among the tags of its handle.
    It does not refer to the pin, which could otherwise never be garbage-collected."""

    start: int
    stop: int
    holder: object


class Pin(Claim):
    """A claim on a span of a region: made by :meth:`Region.pin <vram.memory.Region.pin>`, which fills it in.

    Keeps the memory, not the region object. Garbage collection releases it too, in any thread.

    Attributes
    ----------
    handle : Handle
        The region's.
    keeps : object
        Anything else that has to live as long as this pin and those taken from it, such as the owner of memory that
        is not ours.
    """

    __slots__ = ("_span", "keeps")

    _span: Span
    keeps: object

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
            The user of the addresses, as BusyError will say.

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
        pin = self.handle.claim(holder, span, Pin)
        pin._span, pin.keeps = span, self.keeps
        if self._serial <= 0:  # looked at last: from here on a shrink sees the new span, whatever becomes of this one
            pin.release()
            raise ClosedError(f"the pin of {mine.holder} [{mine.start}:{mine.stop}] was released")
        return pin

    def others(self) -> tuple[str, ...]:
        """Return who else has a pin that overlaps this one."""
        mine = self._span
        spans = (tag for tag in self.handle.tags() if isinstance(tag, Span) and tag is not mine)
        return tuple(
            f"{span.holder} [{span.start}:{span.stop}]"
            for span in spans
            if max(span.start, mine.start) < min(span.stop, mine.stop)
        )

    def release(self, *, strict: bool = False) -> None:
        """Give it up. Idempotent; never waits, and never raises unless `strict`: see :meth:`Claim.release`."""
        super().release(strict=strict)
        self.keeps = None

    def __repr__(self) -> str:
        span = self._span
        return f"<Pin {span.holder} [{span.start}:{span.stop}]{', released' if self.is_released else ''}>"
