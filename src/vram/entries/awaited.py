"""The verbs that wait, for event loops: attach, borrow, recv and follow, to be awaited.

A lease that was asked for wakes the loop when it comes; it is asked for and mapped in the thread for following
(:mod:`vram.keeper.background`), so that a large mapping does not stop the loop. What a channel receives the loop itself
waits for. Cancelling takes back what was asked for, and gives back what comes all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import PeerGoneError, WaitTimeoutError
from ..keeper.background import following
from ..keeper.client import KeeperClient, PendingLease
from ..keeper.leases import Attachment
from ..keeper.paths import find_path
from ..keeper.rules import check_version
from ..spec import Location, check_timeout
from . import borrow as borrowing
from .attach import user_of
from .followed import FollowedLease
from .follower import Follower, as_wanted
from .frames import Frames
from .keepers import TIMEOUT, check_flag, wait_for_keeper, where_is
from .lease import Lease, wire_access

if TYPE_CHECKING:
    from ..arrays.hints import StreamLike
    from ..handover.array_channel import ArrayChannel
    from ..keeper.session import Keeper

_FIRST_LOOK, _LAST_LOOK = 0.001, 0.05  # seconds between two looks for what nobody tells of, such as a path
_INSTANT = 0.001  # seconds that are left where time is over: 0 is to ask without waiting, which is refused otherwise
_SELDOM = 0.25  # seconds after which a channel is looked into though nothing came: work of a GPU may be done by then

_T = TypeVar("_T")
_L = TypeVar("_L", Lease, Follower)


class _Time:
    """The time that a call may take: `timeout` in seconds, None without an end, 0 to ask without waiting."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout
        self._pause = _FIRST_LOOK

    @property
    def left(self) -> float | None:
        """The seconds that are left; 0 only where nothing waits at all."""
        return self.timeout if not self.timeout else max(_INSTANT, (self._end or 0.0) - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether it is over."""
        return self._end is not None and time.monotonic() >= self._end

    async def pause(self) -> None:
        """Wait before the next look for what nobody tells of."""
        await asyncio.sleep(self._pause)
        self._pause = min(self._pause * 1.5, _LAST_LOOK)


async def _in_thread(call: Callable[[], _T], undo: Callable[[_T], object]) -> _T:
    """Make a call in the thread for following, which may map memory; a result that comes too late is undone."""
    loop = asyncio.get_running_loop()
    come: asyncio.Future[None] = loop.create_future()
    found: list[_T] = []
    failed: list[BaseException] = []  # not the future's, which would hold what holds it
    user = object()
    gone: list[bool] = []  # nobody waits any more

    def drop() -> None:
        with contextlib.suppress(IndexError):  # nothing came, or another thread was quicker
            undo(found.pop())

    def tell() -> None:
        if gone:
            drop()
        elif not come.done():
            come.set_result(None)

    def run() -> None:
        try:
            if not gone:
                found.append(call())
        except BaseException as error:  # noqa: BLE001  (it is the caller's)
            failed.append(error)
        try:
            if gone:
                drop()
            loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop is closed
            drop()
        finally:
            following.discard(user)

    following.add(user)
    following.post(run)
    try:
        await come
    except BaseException:
        gone.append(True)
        drop()  # what came in the moment in which this was cancelled
        raise
    if failed:
        raise failed.pop()
    return found.pop()


async def _attached(
    name: str,
    keeper: Keeper | str | os.PathLike[str] | None,
    asked: dict[str, Any],
    limit: _Time,
    mapped: Callable[[KeeperClient, Attachment, float | None], _L],
) -> _L:
    """Wait for a keeper, and for the lease that is asked for there, and map it."""
    loop = asyncio.get_running_loop()
    come = asyncio.Event()

    def ring() -> None:
        loop.call_soon_threadsafe(come.set)

    def ask() -> PendingLease:
        client, _ = wait_for_keeper(keeper, 0.0)
        return PendingLease(client, name, ring, timeout=limit.left, **asked)

    def look() -> _L | None:
        found = pending.take()
        return None if found is None else mapped(pending.client, found, limit.left)

    def close(late: _L | None) -> None:
        if late is not None:
            late.close()

    while True:
        try:
            pending: PendingLease = await _in_thread(ask, PendingLease.cancel)
            break
        except PeerGoneError as error:
            if limit.is_over:
                if not limit.timeout:
                    raise
                raise PeerGoneError(f"{error} (none was there for {limit.timeout:g} s)") from None
        await limit.pause()
    client = pending.client
    try:
        async with asyncio.timeout(None if limit.left is None else limit.left + client.grace) as waiting:
            while True:
                await come.wait()
                come.clear()
                found = await _in_thread(look, close)
                if found is not None:
                    waiting.reschedule(None)  # it is here, and in time
                    return found
    except TimeoutError:
        raise WaitTimeoutError(f"the keeper at {client.path} did not answer in time") from None
    finally:
        pending.cancel()


async def attach(
    name: str,
    *,
    access: str = "r",
    version: int | None = None,
    expect: Mapping[str, str] | None = None,
    timeout: float | None = 0.0,
    device: str | Location | None = None,
    owner: int | str | None = None,
    follow: bool = False,
    wake: bool = False,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Lease:
    """Attach a published entry, as :func:`vram.attach` does, without stopping the event loop.

    Cancelling it, as :func:`asyncio.timeout` does, gives everything back. Parameters, what is returned and what is
    raised are those of :func:`vram.attach`.
    """
    if version is not None:
        check_version(version)
    follow = check_flag(follow, "follow")
    wanted = as_wanted(name, access, expect, False, device, owner, wake)

    def mapped(client: KeeperClient, attachment: Attachment, left: float | None) -> Lease:
        return wanted.mapped(client, attachment, left, Lease, follow=follow)

    asked = {**wanted.asked, "version": version}
    return await _attached(wanted.name, keeper, asked, _Time(check_timeout(timeout)), mapped)


async def borrow(
    at: str | os.PathLike[str],
    *,
    access: str = "r",
    timeout: float | None = TIMEOUT,
    device: str | Location | None = None,
    stream: StreamLike | None = None,
) -> Lease:
    """Borrow what another process lends at a path, as :func:`vram.borrow` does, without stopping the event loop.

    Cancelling it gives everything back. Parameters, what is returned and what is raised are those of
    :func:`vram.borrow`.
    """
    wire_access(access)
    user_of(device)
    path = borrowing.as_path(at)
    limit = _Time(check_timeout(timeout))

    def ask() -> Lease:
        return borrowing.borrow(path, access=access, timeout=0.0, device=device, stream=stream)

    while True:
        try:
            return await _in_thread(ask, Lease.close)
        except WaitTimeoutError:
            if limit.is_over:
                raise
        await limit.pause()


async def follow(
    name: str,
    *,
    on_version: Callable[[Lease], object] | None = None,
    access: str = "r",
    expect: Mapping[str, str] | None = None,
    same_arrays: bool = False,
    timeout: float | None = TIMEOUT,
    device: str | Location | None = None,
    owner: int | str | None = None,
    wake: bool = False,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Follower:
    """Attach the current version of an entry and each newer one, as :func:`vram.follow` does: the first is awaited.

    Parameters, what is returned and what is raised are those of :func:`vram.follow`.
    """
    wanted = as_wanted(name, access, expect, same_arrays, device, owner, wake, on_version)
    where = None if keeper is None else find_path(where_is(keeper)[0])[0]

    def followed(client: KeeperClient, attachment: Attachment, left: float | None) -> Follower:
        return Follower(wanted, wanted.mapped(client, attachment, left, FollowedLease), where, on_version)

    return await _attached(wanted.name, keeper, wanted.asked, _Time(check_timeout(timeout)), followed)


async def attach_ring(
    name: str,
    *,
    timeout: float | None = 0.0,
    expect: Mapping[str, str] | None = None,
    owner: int | str | None = None,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Frames:
    """Attach a ring as :meth:`vram.Ring.attach` does, without stopping the event loop: ``async for frame in frames``.

    Cancelling it gives everything back. Parameters, what is returned and what is raised are those of
    :meth:`vram.Ring.attach`.
    """
    return Frames(await attach(name, timeout=timeout, expect=expect, owner=owner, keeper=keeper))


async def recv(channel: ArrayChannel, *, stream: StreamLike | None = None, timeout: float | None = None) -> Any:
    """Receive what the other end of a channel sent next, as ``channel.recv`` does, without stopping the event loop.

    Whoever is cancelled has received nothing: it is there for the next call.

    Parameters
    ----------
    channel : ArrayChannel
    stream, timeout
        As of :meth:`vram.ArrayChannel.recv`.

    Raises
    ------
    WaitTimeoutError, PeerGoneError, ProtocolError
        As :meth:`vram.ArrayChannel.recv`.
    """
    seconds = check_timeout(timeout)
    deadline = None if seconds is None else time.monotonic() + seconds
    loop = asyncio.get_running_loop()
    pause, is_readable = _FIRST_LOOK, False
    while True:
        left = None if deadline is None else deadline - time.monotonic()
        try:
            return channel.recv(stream=stream, timeout=0.0)
        except WaitTimeoutError:
            if left is not None and left <= 0:
                raise
        most = _SELDOM if left is None else min(_SELDOM, left)
        if is_readable:  # and yet nothing is to be had: another part of it, or what it waits for, has to come first
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LAST_LOOK)
        is_readable = await _is_readable(loop, channel.fileno(), most)


async def _is_readable(loop: asyncio.AbstractEventLoop, fd: int, most: float) -> bool:
    """Wait until something can be received, for so many seconds at most; return whether it can."""
    ours = os.dup(fd)  # several may wait for one channel, and a loop has one reader for each number
    come: asyncio.Future[None] = loop.create_future()
    try:
        loop.add_reader(ours, _mark, come)
        done, _ = await asyncio.wait([come], timeout=most)
        return bool(done)
    finally:
        loop.remove_reader(ours)
        os.close(ours)


def _mark(come: asyncio.Future[None]) -> None:
    if not come.done():
        come.set_result(None)
