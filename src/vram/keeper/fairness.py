"""Whose request is answered next, where several users ask: they share a keeper's time, not its connections.

No I/O and no clock: the caller says what time it is, how long each request took, and keeps the work that waits.

* Whoever asks alone is answered at once, whatever it costs.
* Beside others each user has a share of the time, and some in advance: within that, requests are answered at once.
* So are those of a user who pauses at least as long as its requests take, with one other user who asks, and longer with
  more: who asks one after the other and does something in between is not greedy, whatever it comes to. A long request
  counts by its square (:data:`LONG`): others find it under way that much more often, and for longer.
* What is beyond it waits: of one user in the order in which it came, and of several users so that each gets as much
  time as the others (start-time fair queueing).
* As long as somebody is there who keeps within the share, the others get theirs and no more, even if the keeper is idle
  in between. Otherwise that one would find somebody else's request under way whenever it asked.
* Where nobody keeps within the share, there is no idle time: one after the other.

Nobody starves: what a user owes is bounded and shrinks while it waits, so that it is within its share again after
:data:`LONGEST` seconds and four times what its last request took.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

__all__ = ["ADVANCE", "LONG", "LONGEST", "MOST", "RECENT", "RESERVED", "SHARE", "Fairness"]

SHARE: Final = 0.125  # of the time, for each user
ADVANCE: Final = 0.005  # seconds of work that a user may owe and still be answered at once
MOST: Final = 0.010  # seconds of work that a user can owe before its last request: it may have been alone so far
LONG: Final = 0.00005  # seconds of work, from which on a request counts for more than it takes
RECENT: Final = 10.0  # seconds for which a user who made a request counts as company
ASKING: Final = 1.0  # seconds for which a user who was served counts as one who asks; the first
CROWD: Final = 32  # of them are counted, no more: a stranger may be thousands
RESERVED: Final = 0.1  # seconds for which time is kept free for a user who keeps within the share
LONGEST: Final = (MOST - ADVANCE) / SHARE
_NOTHING = 1e-9  # seconds, for rounding errors

T = TypeVar("T")


class _User(Generic[T]):
    __slots__ = ("asked", "at", "clock", "free", "owed", "waiting")

    def __init__(self, now: float) -> None:
        self.owed = 0.0
        self.at = now
        self.asked = 0.0  # seconds of work, less the pauses between
        self.free = now  # since when nothing is done for it
        self.clock = 0.0  # what it took, on a scale that all who wait share
        self.waiting: OrderedDict[T, None] = OrderedDict()

    def owes(self, now: float) -> float:
        return max(0.0, self.owed - (now - self.at) * SHARE)

    def asks(self, now: float, others: int) -> float:
        return max(0.0, self.asked - max(0.0, now - self.free) / max(1, others))


class Fairness(Generic[T]):
    """The time that users owe, and their work that waits."""

    def __init__(self) -> None:
        self._users: OrderedDict[int, _User[T]] = OrderedDict()  # in the order in which they were served last
        self._modest: OrderedDict[int, float] = OrderedDict()  # when who keeps within the share was served, as above
        self._waiting: dict[int, _User[T]] = {}
        self._clock = 0.0  # where that scale is: that of who was answered last

    def may(self, uid: int, now: float) -> bool:
        """Whether a request of this user that came just now is answered at once."""
        user = self._users.get(uid)
        if user is None:
            return True
        if user.waiting:  # not before what came before it
            return False
        return self._is_modest(uid, user, now) or not self._has_company(uid, now)

    def keeps_share(self, uid: int, now: float) -> bool:
        """Whether this user has asked for no more than its share, or asks alone."""
        user = self._users.get(uid)
        return user is None or user.owes(now) <= ADVANCE or not self._has_company(uid, now)

    def spent(self, uid: int, seconds: float, now: float, *, waited: bool = False) -> None:
        """Note how long a request took, and whether it had waited."""
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = _User(now)
        modest = not waited and self._is_modest(uid, user, now)
        user.asked = min(MOST, user.asks(now, self._others(uid, now))) + seconds * max(1.0, seconds / LONG)
        user.free = now + seconds
        user.owed, user.at = min(MOST, user.owes(now)) + seconds, now
        user.clock += seconds
        self._users.move_to_end(uid)
        if modest:
            self._modest[uid] = now
            self._modest.move_to_end(uid)
        self._forget(now)

    def wait(self, uid: int, work: T, *, first: bool = False) -> None:
        """Queue work that :meth:`may` not be done yet, behind or before the user's other work."""
        user = self._waiting[uid] = self._users[uid]
        if not user.waiting:
            user.clock = max(user.clock, self._clock)
        user.waiting[work] = None
        if first:
            user.waiting.move_to_end(work, last=False)

    def drop(self, uid: int, work: T) -> None:
        """Take work out of the queue, if it is there."""
        user = self._waiting.get(uid)
        if user is not None and user.waiting.pop(work, self) is None and not user.waiting:
            del self._waiting[uid]

    def next(self, now: float) -> T | None:
        """Take the work that is due, if any is."""
        ready = [uid for uid, user in self._waiting.items() if self._delay(uid, user, now) <= _NOTHING]
        if not ready:
            return None
        uid = min(ready, key=lambda uid: self._waiting[uid].clock)
        user = self._waiting[uid]
        self._clock = max(self._clock, user.clock)
        work, _ = user.waiting.popitem(last=False)
        if not user.waiting:
            del self._waiting[uid]
        return work

    def delay(self, now: float) -> float | None:
        """Return in how many seconds :meth:`next` has something, if nothing else happens; None if nothing waits."""
        return min((self._delay(uid, user, now) for uid, user in self._waiting.items()), default=None)

    def _delay(self, uid: int, user: _User[T], now: float) -> float:
        beyond = user.owes(now) - ADVANCE
        if beyond <= 0:
            return 0.0
        served = next((at for other, at in reversed(self._modest.items()) if other != uid), None)
        if served is None:
            return 0.0
        return max(0.0, min(beyond / SHARE, served + RESERVED - now))

    def _is_modest(self, uid: int, user: _User[T], now: float) -> bool:
        return user.owes(now) <= ADVANCE or user.asks(now, self._others(uid, now)) <= ADVANCE

    def _others(self, uid: int, now: float) -> int:
        """Return how many other users were served just now, and may ask again at any time."""
        count = 0
        for other, user in reversed(self._users.items()):
            if now - user.at >= ASKING or count == CROWD:
                break
            count += other >= 0 and other != uid  # what the keeper does for no user has nobody who waits for it
        return count

    def _has_company(self, uid: int, now: float) -> bool:
        last = next((user for other, user in reversed(self._users.items()) if other != uid), None)
        return last is not None and now - last.at < RECENT

    def _forget(self, now: float) -> None:
        """Forget users who have made no request for long."""
        uid, user = next(iter(self._users.items()))
        if now - user.at >= RECENT and not user.waiting:
            del self._users[uid]
            self._modest.pop(uid, None)
