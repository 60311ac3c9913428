"""What each user may have in flight, and in queues: its own share, whatever the others do.

The kernel counts descriptors that were sent and not read per sending user, so all that a keeper sends counts against
the keeper's user, up to RLIMIT_NOFILE (root's are not limited). Who does not read must not use up what others need.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Protocol

from ..errors import QuotaError
from .limits import Quotas, limit_called, over

__all__ = ["InFlight", "Receiver", "Share"]

_QUEUED = limit_called("queued_bytes")
# Connections that are asked at once whether they have read, and seconds between two times for the same user: one with
# thousands that do not read must not keep the loop busy.
_LOOK_AT, _LOOK_AGAIN = 64, 0.01


class Receiver(Protocol):
    """A connection, as far as it is counted here.

    Attributes
    ----------
    in_flight : int
        Descriptors sent to it since it was last known to have read everything.
    unread : int
        Bytes sent to it that may be unread: not less than the kernel counts.
    hoards : bool
        Whether that was much of what its user may leave unread, when it was polled last.
    share : Share
        That of its user.
    """

    in_flight: int
    unread: int
    hoards: bool
    share: Share

    def has_read_all(self) -> bool:
        """Whether nothing that was sent is still unread; it has told by :meth:`InFlight.found`."""
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
        Bytes in the queues of its connections, and how many may be; inf of who runs the keeper.
    sent : int
        Bytes in the sockets of its connections, as far as is known: at least as many as there are. They may be as many
        as in the queues.
    unread : dict
        Its connections with descriptors in flight, the one that was polled longest ago first.
    receivers : dict
        Its connections with bytes in their sockets, in the same order.
    """

    __slots__ = ("asked", "count", "looked", "max_queued", "queued", "receivers", "reserved", "sent", "unread")

    def __init__(self, reserved: int, max_queued: float) -> None:
        self.count = 0
        self.reserved = reserved
        self.queued = 0
        self.max_queued = max_queued
        self.sent = 0
        self.unread: dict[Receiver, None] = {}
        self.receivers: dict[Receiver, None] = {}
        self.looked = self.asked = float("-inf")  # at those, and at these

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
        self._quotas = Quotas()
        self.queued = 0  # bytes in the queues of all connections
        self._looked = float("-inf")

    def of(self, uid: int) -> Share:
        """Return a user's share: the same one until :meth:`forget`."""
        share = self._shares.get(uid)
        if share is None:
            own = self._is_own(uid)  # the user who runs the keeper has no ceiling
            most = None if own else self._quotas.user_queued_bytes
            share = Share(self.reserve if own else 0, float("inf") if most is None else most)
            self._shares[uid] = share
        return share

    def forget(self, uid: int) -> None:
        """The user has no connection any more."""
        self._shares.pop(uid, None)

    def limit(self, quotas: Quotas) -> None:
        """Have other ceilings for what waits in queues, of those who connect from now on."""
        self._quotas = quotas

    def queued_of(self, uid: int) -> int:
        """Return how many bytes wait in the queues of a user's connections."""
        share = self._shares.get(uid)
        return 0 if share is None else share.queued

    def enqueue(self, share: Share, nbytes: int) -> None:
        """So many bytes more wait in a queue of this user; a negative number: so many less."""
        share.queued += nbytes
        self.queued += nbytes

    def refusal(self, uid: int, share: Share, asked: int) -> QuotaError | None:
        """Return why so many bytes, which were counted last, may not wait; None if they may.

        Of what all may have together one user may have as much as it leaves free: half while it is alone, and who
        comes next finds some, whatever the others do.
        """
        if share.queued > share.max_queued:
            most = int(share.max_queued)
            return over(_QUEUED, f"uid {uid}", most, share.queued - asked, asked, of_user=True)
        total = self._quotas.max_queued_bytes
        if total is None or self.queued + (0 if self._is_own(uid) else share.queued) <= total:
            return None
        more = f". One user may have as much of it as it leaves free: uid {uid} has {share.queued - asked} bytes"
        return over(_QUEUED, "the keeper", total, self.queued - asked, asked, of_user=False, more=more)

    def count(self, connection: Receiver, count: int) -> None:
        """So many descriptors were sent."""
        if not count:
            return
        connection.in_flight += count
        connection.share.unread[connection] = None
        self._add(connection.share, count)

    def found(self, connection: Receiver, nbytes: int) -> None:
        """So many bytes that were sent are unread, as the kernel says."""
        share = connection.share
        share.sent += nbytes - connection.unread
        connection.unread = nbytes
        if not nbytes:
            self.landed(connection)
            return
        share.receivers[connection] = None
        # Half of what each would have: with so many there is always one that has more, and who has little is not it.
        connection.hoards = 2 * nbytes * len(share.receivers) > share.max_queued

    def landed(self, connection: Receiver) -> None:
        """The peer has read everything, or nobody will know."""
        connection.share.sent -= connection.unread
        connection.unread = 0
        connection.hoards = False
        connection.share.receivers.pop(connection, None)
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
        self._look(share.unread)
        if not self._fits(share, count) and now - self._looked >= _LOOK_AGAIN:
            self._looked = now
            for other in [one for one in self._shares.values() if one is not share and one.excess]:
                self._look(other.unread)
        return self._fits(share, count)

    def has_room_for(self, share: Share, nbytes: int) -> bool:
        """Whether the sockets of this user may take so many bytes more, after polling those that may have read."""
        if share.sent + nbytes <= share.max_queued:
            return True
        now = self._now()
        if now - share.asked < _LOOK_AGAIN:
            return False
        share.asked = now
        self._look(share.receivers)
        return share.sent + nbytes <= share.max_queued

    def _fits(self, share: Share, count: int) -> bool:
        wanted = max(0, share.count + count - share.reserved)
        return not wanted or wanted <= self.room - self._used

    def _look(self, among: dict[Receiver, None]) -> None:
        for connection in list(islice(among, _LOOK_AT)):
            if not connection.has_read_all():
                among[connection] = among.pop(connection)
