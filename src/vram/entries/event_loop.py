"""Waiting in an event loop: no thread waits meanwhile, and whoever is cancelled has left nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ..errors import ClosedError, PeerGoneError, WaitTimeoutError

if TYPE_CHECKING:
    from .followed import FollowedLease
    from .follower import Follower
    from .frames import Frame, Frames


class Versions(AsyncIterator["FollowedLease"]):
    """The versions of a follower, one after the other, in an event loop."""

    __slots__ = ("_follower", "_given", "_seen")

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._given: FollowedLease | None = None
        self._seen = 0

    async def __anext__(self) -> FollowedLease:
        follower, given = self._follower, self._given
        if given is not None:
            given.close()  # as of the iterator without a loop
        come = asyncio.Event()
        ring = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, come.set)
        while not follower.is_closed:
            come.clear()
            follower.bells.append(ring)  # before the look: what comes in between rings it
            try:
                self._seen, self._given = follower.newer(self._seen)
                if self._given is not None:
                    return self._given
                await come.wait()
            except ClosedError:
                if not follower.is_closed:  # in a forked child
                    raise
            finally:
                with contextlib.suppress(ValueError):
                    follower.bells.remove(ring)
        raise StopAsyncIteration


class Coming(AsyncIterator["Frame"]):
    """The frames of a ring as an async iterator.
    A thread waits for the next frame, since no descriptor tells of a word in shared memory; cancelling ends it."""

    __slots__ = ("_frames",)

    def __init__(self, frames: Frames) -> None:
        self._frames = frames

    async def __anext__(self) -> Frame:
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


async def _wait(frames: Frames) -> None:
    loop, come = asyncio.get_running_loop(), asyncio.Event()
    over: list[bool] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            frames.wait(over=over)
        except BaseException as error:  # noqa: BLE001  (it is whose who waits)
            failed.append(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(come.set)

    threading.Thread(target=run, name="vram: waiting for a frame", daemon=True).start()
    try:
        await come.wait()
    except BaseException:
        over.append(True)
        frames.interrupt()
        raise
    if failed:
        raise failed.pop()
