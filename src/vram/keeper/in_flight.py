"""What each user may have in flight, and in queues: its own share, whatever the others do.

The kernel counts descriptors that were sent and not read per sending user, so all that a keeper sends counts against
the keeper's user, up to RLIMIT_NOFILE (root's are not limited). Who does not read must not use up what others need.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Protocol

__all__ = ["MAX_QUEUED_OF_USER", "InFlight", "Receiver", "Share"]

MAX_QUEUED_OF_USER = 16 * 1024 * 1024  # bytes of answers that all connections of one user may leave unread
# Connections that are asked at once whether they have read, and seconds between two times for the same user: one with
# thousands that do not read must not keep the loop busy.
_LOOK_AT, _LOOK_AGAIN = 64, 0.01


class Receiver(Protocol):
    """A connection, as far as it is counted here.

    Attributes
    ----------
    in_flight : int
        Descriptors sent to it since it was last known to have read everything.
    share : Share
        That of its user.
    """

    in_flight: int
    share: Share

    def has_read_all(self) -> bool:
        """Whether nothing that was sent is still unread; if so, it has said so by :meth:`InFlight.landed`."""
        ...


class Share:
    """What one user has left unread: the sum over its connections, closed ones included.

    Attributes
    ----------
    count : int
        Descriptors in flight, as far as is known: at least as many as there are.
    reserved : int
        So many of them are nobody else's to use.
    queued, max_queued : float
        Bytes in the queues of its connections, and how many may be.
    unread : dict
        Its connections with descriptors in flight, the one that was polled longest ago first.
    """

    __slots__ = ("count", "looked", "max_queued", "queued", "reserved", "unread")

    def __init__(self, reserved: int, max_queued: float) -> None:
        self.count = 0
        self.reserved = reserved
        self.queued = 0
        self.max_queued = max_queued
        self.unread: dict[Receiver, None] = {}
        self.looked = float("-inf")

    @property
    def excess(self) -> int:
        """How many of them are taken from the pool that all users share."""
        return max(0, self.count - self.reserved)


class InFlight:
    """Limits the descriptors in flight of each user.

    Half of what the process may have is for all users together. One may have as many as it leaves free: a quarter of
    all, while it is alone. With `n` users that do not read, each has one part of `n + 1`, and so does whoever comes
    next. A quarter more is for the keeper's own user only. The last quarter is not given out: the kernel counts what
    other processes of the keeper's user have in flight as well.

    Parameters
    ----------
    limit : int
        Descriptors that the process may have in flight.
    is_own : callable
        Whether a uid is that of the user who runs the keeper.
    now : callable
        The time in seconds.
    """

    def __init__(self, limit: int, *, is_own: Callable[[int], bool], now: Callable[[], float]) -> None:
        self.room = limit // 2
        self.reserve = limit // 4
        self._is_own = is_own
        self._now = now
        self._shares: dict[int, Share] = {}
        self._used = 0  # the sum of every share's excess
        self._looked = float("-inf")

    def of(self, uid: int) -> Share:
        """Return a user's share: the same one until :meth:`forget`."""
        share = self._shares.get(uid)
        if share is None:
            own = self._is_own(uid)  # the user who runs the keeper has no ceiling
            share = Share(self.reserve if own else 0, float("inf") if own else MAX_QUEUED_OF_USER)
            self._shares[uid] = share
        return share

    def forget(self, uid: int) -> None:
        """The user has no connection any more."""
        self._shares.pop(uid, None)

    def count(self, connection: Receiver, count: int) -> None:
        """So many descriptors were sent."""
        if not count:
            return
        connection.in_flight += count
        connection.share.unread[connection] = None
        self._add(connection.share, count)

    def landed(self, connection: Receiver) -> None:
        """The peer has read everything, or nobody will know."""
        if connection.in_flight:
            self._add(connection.share, -connection.in_flight)
            connection.in_flight = 0
            del connection.share.unread[connection]

    def _add(self, share: Share, count: int) -> None:
        before = share.excess
        share.count += count
        self._used += share.excess - before

    def has_room(self, share: Share, count: int) -> bool:
        """Whether so many more may be sent to this user, after polling those that may have read meanwhile."""
        if self._fits(share, count):
            return True
        now = self._now()
        if now - share.looked < _LOOK_AGAIN:
            return False
        share.looked = now
        self._look(share)
        if not self._fits(share, count) and now - self._looked >= _LOOK_AGAIN:
            self._looked = now
            for other in [one for one in self._shares.values() if one is not share and one.excess]:
                self._look(other)
        return self._fits(share, count)

    def _fits(self, share: Share, count: int) -> bool:
        wanted = max(0, share.count + count - share.reserved)
        return not wanted or wanted <= self.room - self._used

    def _look(self, share: Share) -> None:
        for connection in list(islice(share.unread, _LOOK_AT)):
            if not connection.has_read_all():
                share.unread[connection] = share.unread.pop(connection)
