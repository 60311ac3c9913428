"""The requests that a client repeats when the keeper that it asked has died and another goes on.

The next keeper says ``Recovered``, after all that the dead one had answered. The client says ``Repeating`` with the
numbers of the calls that come again, each from the thread that waits, so each takes effect once. Messages without a
number are said again unless a later answer shows that they were heard; to repeat them does no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from . import messages as m

_MOST = 4096  # messages without a number that are kept, and numbers in one message
_GIVEN_UP = 1024  # calls that were given up, and are remembered


class Repeats:
    """The requests of one connection that are not known to be done. Calls in `due` are sent again by waiting threads,
    each of which has its descriptors. `keeper` is the number of the keeper that was told last what comes (0: none)."""

    def __init__(self) -> None:
        self.due: set[int] = set()
        self.keeper = 0
        self._given_up: deque[int] = deque(maxlen=_GIVEN_UP)
        self.sent: dict[int, tuple[bytes, Sequence[int], int]] = {}
        self._said: deque[tuple[int, bytes]] = deque(maxlen=_MOST)
        self._last = 0

    def sends(self, call: int, payload: bytes, fds: Sequence[int]) -> None:
        """Note a call that is about to be sent. Called with the lock for sending, as all but :meth:`over`."""
        self.sent[call] = payload, fds, self._last

    def says(self, payload: bytes) -> None:
        """Note a message without a number that is about to be sent."""
        self._last += 1
        self._said.append((self._last, payload))

    def over(self, call: int, *, is_answered: bool) -> None:
        """Forget a call; one that was answered shows that what was said before was heard."""
        sent = self.sent.pop(call, None)
        self.due.discard(call)
        if sent is None:
            return
        if not is_answered:
            self._given_up.append(call)
        else:
            said, until = self._said, sent[2]
            while said and said[0][0] <= until:
                said.popleft()

    def begin(self, keeper: int) -> list[bytes]:
        """Return what is to be said at once to that keeper, before :meth:`begun`. Nothing if that was said."""
        if keeper == self.keeper:
            return []
        self.keeper = 0
        self.due = set(self.sent)
        calls, given_up = sorted(self.due), list(self._given_up)
        said = [payload for _, payload in list(self._said)]
        for start in range(0, max(1, len(calls)), _MOST):
            more = start + _MOST < len(calls)
            words = m.Repeating(0, keeper, calls[start : start + _MOST], [] if more else given_up, more)
            said.append(m.encode(words))
        return said

    def begun(self, keeper: int) -> None:
        """From now on the calls that are due are sent."""
        self.keeper = keeper

    def take(self, call: int) -> tuple[bytes, Sequence[int]] | None:
        """Return what a call is to be sent as once more, if it is."""
        if call not in self.due or not self.keeper:
            return None
        self.due.discard(call)
        sent = self.sent.get(call)
        return None if sent is None else sent[:2]
