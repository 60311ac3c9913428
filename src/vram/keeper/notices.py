"""News of versions, above all that one is revoked: what waits for them, and how it is told.

The thread that reads a connection finds the subscriptions that a notice is for; the thread of
:data:`~vram.keeper.background.news` makes their calls. To stop one takes no lock, so that callbacks and finalizers may.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ..sharing.channel import Channel
from .background import news

Key = tuple[str, int]  # name and version


class Subscription:
    """One callback that waits for news of one version, made by :meth:`KeeperClient.watch`.
    `of_all` means any news, and the end of the keeper; otherwise only a revocation counts. `owner` is held weakly."""

    __slots__ = ("__weakref__", "_owner", "_tell", "_there", "is_accepted", "key", "of_all")

    def __init__(self, key: Key, owner: object, tell: Callable[[Any], object], *, of_all: bool = False) -> None:
        self.key = key
        self.of_all = of_all
        self._tell: list[Callable[[Any], object]] = [tell]  # the thread that takes it out may call it, once
        self._there: dict[Subscription, None] = {}
        self.is_accepted = False  # by the keeper
        me = weakref.ref(self)

        def gone(_: object) -> None:
            subscription = me()
            if subscription is not None and news is not None:  # as at the very end of the interpreter
                subscription.stop()

        self._owner = weakref.ref(owner, gone)

    @property
    def is_over(self) -> bool:
        """Whether it was called back, or stopped."""
        return not self._tell

    def enter(self, there: dict[Subscription, None]) -> None:
        """Wait among the subscriptions of a connection. Raises RuntimeError if no thread can be started."""
        news.add(self)
        self._there = there
        there[self] = None

    def stop(self) -> None:
        """Not to be called back any more; a callback that has begun goes on. Idempotent, takes no lock."""
        self._tell.clear()
        self._there.pop(self, None)
        news.discard(self)

    def post(self) -> None:
        """Have it called soon. The connection knows it no more."""
        news.post(self.call)

    def call(self) -> None:
        """Tell the owner, unless that was done or nobody listens."""
        try:
            told, owner = [self._tell.pop()] if self._tell else [], self._owner()
            for tell in told if owner is not None else []:
                tell(owner)
        finally:
            news.discard(self)


class Signal:
    """A descriptor that becomes readable, and stays so, with the first news of a version."""

    __slots__ = ("__weakref__", "_reader", "_writer", "subscription")

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self._reader, self._writer = Channel.pair()  # which look after themselves: forks, the collector

    def fileno(self) -> int:
        """Lend the descriptor to wait on with select, poll or an event loop."""
        return self._reader.fileno()

    def give(self) -> None:
        """Make it readable. It is an end of file, which stays, also if somebody reads."""
        self._writer.close()

    def close(self) -> None:
        """Listen no more, and close the descriptor. Idempotent."""
        if self.subscription is not None:
            self.subscription.stop()
        self._reader.close()
        self._writer.close()
