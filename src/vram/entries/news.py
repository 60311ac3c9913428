"""The news that a lease hears of its version and of newer ones: by callbacks, and by a descriptor to wait on."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import UsageError
from ..lifetime import take, unwinding

if TYPE_CHECKING:
    from ..keeper.background import Signal, Subscription
    from ..keeper.client import KeeperClient
    from .lease import Lease

_L = TypeVar("_L", bound="Lease")


class News:
    """The subscriptions of a lease, the callbacks that they are for, and whether each is for all news; the signal.
    `moving` is had by a thread that goes on to a newer version; no finalizer takes it."""

    __slots__ = ("callbacks", "moving", "signal", "subscriptions")

    def __init__(self) -> None:
        self.moving = threading.RLock()
        self.signal: Signal | None = None
        self.subscriptions: list[Subscription] = []
        self.callbacks: list[tuple[Callable[[Any], object], bool]] = []

    def listen(
        self, lease: _L, tell: Callable[[Callable[[_L], object], _L], object], callback: Callable[[_L], object], *,
        of_all: bool = False,
    ) -> None:  # fmt: skip
        """Have `tell` called, with a callback and the lease, for news of the version that it is on or goes to."""
        if not callable(callback):
            raise UsageError(f"callback {callback!r:.80} cannot be called; it takes the lease")
        told: Any = functools.partial(tell, callback)
        take(self.moving)  # a callback that comes meanwhile is for the version that the lease goes on to
        try:
            key = lease._leased.name, lease.version
            self.subscriptions.append(lease._client.watch(key, lease, told, of_all=of_all))
            self.callbacks.append((told, of_all))
        finally:
            self.moving.release()
        if lease.is_closed:  # meanwhile, by another thread or by the callback
            self.stop()

    def listen_anew(self, lease: Lease, client: KeeperClient, version: int) -> list[Subscription]:
        """Subscribe for all callbacks to another version, or for none. Raises ClosedError as well."""
        made: list[Subscription] = []
        try:
            for tell, of_all in self.callbacks:
                made.append(client.watch((lease.name, version), lease, tell, of_all=of_all))
            lease.handle  # noqa: B018  (which says that it was closed)
        except BaseException as error:
            with unwinding(error):
                for subscription in made:
                    subscription.stop()
            raise
        return made

    def replace(self, subscriptions: list[Subscription]) -> None:
        """Go on with other subscriptions: the signal has told of this version, and tells nothing of the next."""
        for subscription in self.subscriptions:
            if subscription not in subscriptions:
                subscription.stop()
        self.subscriptions = subscriptions
        signal, self.signal = self.signal, None
        if signal is not None:
            signal.close()

    def stop(self) -> None:
        """End all subscriptions."""
        while self.subscriptions:
            with contextlib.suppress(IndexError):  # another thread was quicker
                self.subscriptions.pop().stop()

    def close(self) -> None:
        """Hear nothing more."""
        self.stop()
        if self.signal is not None:
            self.signal.close()
