"""Any number of descriptors in parts, each acknowledged before the next (S4); for clients, keepers and channels.

One message has room for 253 descriptors, and how many may be on their way unread is limited per user, for all processes
of that user together. So a sender has one part under way: a peer that does not read costs no more than that.

The caller knows the messages and the connection. A sender asks :class:`Sender` for the next part, and tells it what the
other side has acknowledged; where the other side asks for each part, :func:`next_part` says what is in it. A
receiver puts each part into a :class:`Collector`. A part that lost descriptors on its way never gets here: receiving
it raises (:class:`~vram.sharing.channel.DescriptorsLostError`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import InternalError, ProtocolError
from .channel import MAX_FDS, OwnedFds


def next_part(total: int, start: int, most: int = MAX_FDS) -> slice:
    """Return which of `total` descriptors, at most `most`, are in the part that begins with number `start`; for none in
    all there is one empty part. Raises ProtocolError for a start that a peer made up."""
    if not 0 <= start < max(total, 1):
        raise ProtocolError(f"descriptor {start} of {total} was asked for")
    return slice(start, min(start + most, total))


def check_next(offset: int, have: int, what: str) -> None:
    """Raise :class:`ProtocolError` unless what begins at `offset` comes next after those that are here."""
    if offset != have:
        raise ProtocolError(f"{what} from {offset} on came after {have}")


@dataclass(slots=True)
class Sender:
    """Iterates over the parts of `total` descriptors; each but the first comes once the one before was acknowledged.
    The other side says that it has descriptors up to `acknowledged`."""

    total: int
    most: int = MAX_FDS
    sent: int = 0
    acknowledged: int = 0

    def __iter__(self) -> Iterator[slice]:
        while self.sent < self.total:
            if self.acknowledged != self.sent:
                raise InternalError(f"{self.acknowledged} of {self.sent} descriptors that were sent are acknowledged")
            start, self.sent = self.sent, min(self.sent + self.most, self.total)
            yield slice(start, self.sent)

    def acknowledge(self, received: int) -> None:
        """Take note of how many the other side has: all that were sent, or it raises :class:`ProtocolError`."""
        if received != self.sent:
            raise ProtocolError(f"the other side has {received} descriptors, and {self.sent} of {self.total} were sent")
        self.acknowledged = received


@dataclass(slots=True)
class Unread:
    """Counts a connection's parts: a part asks for an acknowledgement if another follows, or if `unasked` descriptors
    would fill a message. The caller counts `sent` and `unasked`, and `taken` after :meth:`check`."""

    sent: int = 0
    taken: int = 0
    unasked: int = 0

    def asks(self, count: int, *, is_last: bool) -> bool:
        """Whether a part of so many descriptors is to ask for an acknowledgement."""
        return not is_last or self.unasked + count > MAX_FDS

    @property
    def is_awaited(self) -> bool:
        """Whether the other side has still to take a part."""
        return self.sent > self.taken

    def check(self) -> None:
        """Raise :class:`ProtocolError` if there is no part that the other side could acknowledge."""
        # Not >=: one that was sent just now may be acknowledged before it is counted.
        if self.taken > self.sent:
            raise ProtocolError(f"{self.taken + 1} parts were acknowledged, and {self.sent} were sent")


class Collector(OwnedFds):
    """Descriptors that come in parts, `total` in the end; the list closes what is in it when it is dropped.
    With `is_armed` false, somebody else closes them (I9)."""

    def __init__(self, total: int, *, is_armed: bool = True) -> None:
        super().__init__()
        self.total = total
        self.is_armed = is_armed

    @property
    def is_complete(self) -> bool:
        """Whether all are here."""
        return len(self) >= self.total

    def check(self, offset: int, fds: list[int]) -> None:
        """Raise :class:`ProtocolError` unless these are the next, at least one and no more than there will be."""
        check_next(offset, len(self), "descriptors")
        if not 0 < len(fds) <= self.total - len(self):
            raise ProtocolError(f"{len(fds)} descriptors came, and {len(self)} of {self.total} are here")

    def take(self, offset: int, fds: list[int]) -> None:
        """Take the next part over, which empties the caller's list. If :meth:`check` raises, nothing is taken."""
        self.check(offset, fds)
        self += fds
        fds.clear()

    def detach(self) -> list[int]:
        """Give those that are here away: the caller closes them."""
        fds = list(self)
        self.clear()
        return fds
