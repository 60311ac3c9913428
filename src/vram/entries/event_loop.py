"""Waiting in an event loop: no thread waits meanwhile, and whoever is cancelled has left nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, TypeVar

from ..errors import ClosedError, PeerGoneError, WaitTimeoutError


class Given(Protocol):
    """A reader's lease, as it is known here."""

    def close(self) -> None:
        """Give it up."""


_L = TypeVar("_L", bound=Given)
_G = TypeVar("_G", bound=Given, covariant=True)


class Followed(Protocol[_G]):
    """A follower, as it is known here."""

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""

    @property
    def bells(self) -> Any:
        """What is released to wake those who wait."""

    def newer(self, seen: int) -> tuple[int, _G | None]:
        """Return the number of the current version, and a lease on it if it is another than was seen."""


_F = TypeVar("_F")
_C = TypeVar("_C", covariant=True)


class Frames(Protocol[_C]):
    """The frames of a ring, as they are known here."""

    @property
    def is_at_end(self) -> bool:
        """Whether there is none any more."""

    def next(self, *, timeout: float | None) -> _C:
        """Return the next one."""

    def wait(self, timeout: float | None, over: Sequence[object]) -> None:
        """Wait until there is one, or something in `over`."""

    def interrupt(self) -> None:
        """Have who waits look again."""


class Bell:
    """Wakes a task of an event loop, from any thread; it hangs among the locks of those who wait without one."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def release(self) -> None:
        """Ring it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._ring)

    def _ring(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def acquire(self) -> None:
        """Wait until it was rung."""
        await self._future


class Versions(AsyncIterator[_L]):
    """The versions of a follower, one after the other, in an event loop."""

    __slots__ = ("_follower", "_given", "_seen")

    def __init__(self, follower: Followed[_L]) -> None:
        self._follower = follower
        self._given: _L | None = None
        self._seen = 0

    async def __anext__(self) -> _L:
        follower, given = self._follower, self._given
        if given is not None:
            given.close()  # as of the iterator without a loop
        while True:
            if follower.is_closed:
                raise StopAsyncIteration
            bell = Bell()
            follower.bells.append(bell)  # before the look: what comes in between rings it
            try:
                self._seen, lease = follower.newer(self._seen)
                if lease is not None:
                    self._given = lease
                    return lease
                await bell.acquire()
            except ClosedError:
                if not follower.is_closed:  # in a forked child
                    raise
            finally:
                with contextlib.suppress(ValueError):
                    follower.bells.remove(bell)


class Coming(AsyncIterator[_F]):
    """The frames of a ring as an async iterator.
    A thread waits for the next frame, since no descriptor tells of a word in shared memory; cancelling ends it."""

    __slots__ = ("_frames",)

    def __init__(self, frames: Frames[_F]) -> None:
        self._frames = frames

    async def __anext__(self) -> _F:
        frames = self._frames
        try:
            while True:
                try:
                    return frames.next(timeout=0.0)
                except WaitTimeoutError:
                    await _wait(frames)
        except PeerGoneError:
            if frames.is_at_end:
                raise StopAsyncIteration from None
            raise


async def _wait(frames: Frames[Any]) -> None:
    loop = asyncio.get_running_loop()
    come: asyncio.Future[None] = loop.create_future()
    over: list[bool] = []
    failed: list[BaseException] = []  # not the future's, which would hold what holds it

    def tell() -> None:
        if not come.done():
            come.set_result(None)

    def run() -> None:
        try:
            frames.wait(None, over)
        except BaseException as error:  # noqa: BLE001  (it is whose who waits)
            failed.append(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=run, name="vram: waiting for a frame", daemon=True).start()
    try:
        await come
    except BaseException:
        over.append(True)
        frames.interrupt()
        raise
    if failed:
        raise failed.pop()
