"""Where the ranks of a group are in their calls: a page of words of each rank, which only that rank can write.

A rank that arrives stores the number of its call and wakes who waits for it; the others look at the words of all. No
rank waits for a process that is gone, has given up, or is late beyond the deadline: each of the three is an error that
names it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping

from ..driver import words as shared
from ..errors import PeerGoneError, ProtocolError, WaitTimeoutError
from ..lifetime import waiting
from .spoke import gave_up_error, gone_error, name_ranks

# The words of a rank. It stores what a call is about before it stores that it has come to it, for odd and even calls in
# words of their own: nobody comes to the next call but one before all have looked at this one. When it cannot go on it
# stores whose fault that is, plus one: not its own, where it gives up because of another.
ARRIVED, BROKEN, ABOUT = 0, 1, 2
_SLICE = (
    0.05  # seconds after which who sleeps looks whether a rank is gone: nobody else may write the words of the dead
)
_LOOKS = 100  # at a word before who waits for it sleeps, where every rank can have a processor
_IS_ORDERED = platform.machine() == "x86_64"  # so that no fence of `words` asks other processes for a barrier


def make_page(fds: list[int]) -> memoryview:
    """Make the page of this rank, whose descriptor is appended: the caller's to close."""
    if not _IS_ORDERED:
        shared.register()
    return shared.make(fds)


class Signals:
    """The words of all ranks, as one of them sees them: its page `own` (see :func:`make_page`), and the others', whose
    descriptors are lent. `gone` is read whenever a rank is waited for."""

    def __init__(
        self, rank: int, size: int, own: memoryview, fds: Mapping[int, int], gone: Mapping[int, bool], name: str
    ) -> None:
        self._rank, self._own, self._gone, self._name = rank, own, gone, name
        pages = {rank: own}
        for other, fd in fds.items():
            shared.check(fd, f"what rank {other} of the group {name!r} says is its page of words")
            pages[other] = shared.words(fd)
        if sorted(pages) != list(range(size)):
            raise ProtocolError(f"of {size} ranks of the group {name!r} only {sorted(pages)} have a page of words")
        self._pages = [pages[other] for other in range(size)]
        self._at = [shared.address(page) for page in self._pages]
        # A rank that spins while another waits for the processor makes both wait.
        self._looks = _LOOKS if len(pages) <= len(os.sched_getaffinity(0)) else 1

    def arrive(self, about: int) -> int:
        """Say that this rank has come to its next call, which is about `about`; return the number of the call. Raises
        PeerGoneError if this rank has given up: the others wait for it no more, and must not find that it has come."""
        own = self._own
        if own[BROKEN]:
            raise gave_up_error(self.blamed, self._name)
        number = own[ARRIVED] + 1
        own[ABOUT + number % 2] = about
        shared.fence()  # who sees the number sees what this rank wrote before, and it has read what it was to read
        own[ARRIVED] = number
        shared.wake(self._at[self._rank], ARRIVED)
        return number

    def wait(self, number: int, deadline: float) -> None:
        """Wait until all ranks have come to a call, or the deadline (``time.monotonic``). Raises PeerGoneError for a
        missing rank that is gone or has given up, WaitTimeoutError with the missing ranks."""
        for rank, page in enumerate(self._pages):
            for _ in range(self._looks):
                if page[ARRIVED] >= number:
                    break
            else:
                self._sleep(rank, page, number, deadline)

    def _sleep(self, rank: int, page: memoryview, number: int, deadline: float) -> None:
        while (seen := page[ARRIVED]) < number:
            # A rank that went on from this call has seen that all others had come, and then so does this rank. So a
            # rank that is gone, or has given up, before this rank sees that keeps the call from being whole.
            failure = self._failure()
            if failure is not None and page[ARRIVED] < number:
                raise failure
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late(number)
            waiting(shared.wait, self._at[rank], ARRIVED, seen, min(left, _SLICE))

    def _failure(self) -> PeerGoneError | None:
        """Return what keeps some rank from ever coming; None if nothing does."""
        gone = {rank: left for rank, left in dict(self._gone).items() if not (left and self._pages[rank][BROKEN])}
        if gone:
            return gone_error(gone)
        blamed = [page[BROKEN] - 1 for page in self._pages if page[BROKEN]]
        return gave_up_error(blamed[0] % len(self._pages), self._name) if blamed else None

    def _late(self, number: int) -> WaitTimeoutError:
        late = [rank for rank, page in enumerate(self._pages) if page[ARRIVED] < number]
        return WaitTimeoutError(
            f"{name_ranks(late)} of the group {self._name!r} did not come to call {number} in time: every rank makes "
            f"the same calls in the same order"
        )

    def meet(self, about: int, deadline: float) -> list[int]:
        """Wait until all ranks have come to their next call, and return those whose call is about something else.
        If there are such, every rank gets some. Raises what :meth:`wait` does."""
        number = self.arrive(about)
        self.wait(number, deadline)
        slot = ABOUT + number % 2
        return [rank for rank, page in enumerate(self._pages) if page[slot] != about]

    def wake(self) -> None:
        """Have whoever waits, in whatever process, look again."""
        for at in self._at:
            shared.wake(at, ARRIVED)

    def give_up(self, blamed: int) -> None:
        """Say that this rank cannot go on, and because of which: the others do not wait for it."""
        self._own[BROKEN] = blamed + 1
        self.wake()

    @property
    def arrived(self) -> int:
        """How many calls this rank has come to."""
        number: int = self._own[ARRIVED]
        return number

    @property
    def has_given_up(self) -> bool:
        """Whether this rank cannot go on."""
        return bool(self._own[BROKEN])

    @property
    def blamed(self) -> int:
        """Because of which rank this one has given up."""
        rank: int = self._own[BROKEN] - 1
        return rank
