"""The verbs that wait, for event loops: attach, borrow, recv and follow, to be awaited.

A lease is asked for and mapped in the thread for following (:mod:`vram.keeper.background`), so that a large mapping
does not stop the loop. Nobody waits there until it comes. The loop itself waits for messages of a channel. Cancelling
takes back what was asked for, and gives back what comes all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import PeerGoneError, VramError, WaitTimeoutError
from ..keeper.background import following
from ..keeper.client import Attachment, KeeperClient, PendingLease
from ..keeper.paths import find_path
from ..keeper.rules import check_version
from ..spec import Location, check_timeout
from . import borrow as borrowing
from .attach import check_patterns, user_of
from .followed import FollowedLease
from .follower import Follower, as_wanted
from .frames import Frames
from .keepers import FIRST_LOOK, LAST_LOOK, TIMEOUT, check_flag, wait_for_keeper, where_is
from .lease import Lease
from .mapped import wire_access

if TYPE_CHECKING:
    from ..arrays.hints import StreamLike
    from ..handover.array_channel import ArrayChannel
    from ..keeper.private import Keeper

_INSTANT = 0.001  # seconds that are left where time is over: 0 is to ask without waiting, which is refused otherwise
_SELDOM = 0.25  # seconds after which a channel is looked into though nothing came: work of a GPU may be done by then

_T = TypeVar("_T")
_L = TypeVar("_L", Lease, Follower)
_Work = Generator["float | None", None, _T]  # yields when to go on, if not woken before


async def _done(begin: Callable[[Callable[[], None]], _Work[_L]]) -> _L:
    """Have work done in the thread for following, which may map memory; a result that comes too late is closed.
    `begin` is given what wakes the work."""
    loop, come = asyncio.get_running_loop(), asyncio.Event()
    made: list[_L] = []
    failed: list[BaseException] = []
    gone: list[bool] = []  # nobody waits any more

    def wake() -> None:
        following.post(step)

    work = begin(wake)

    def drop() -> None:
        with contextlib.suppress(IndexError):  # nothing came, or another thread was quicker
            made.pop().close()

    def step() -> float | None:
        try:
            if not gone:
                return next(work)
            work.close()
        except StopIteration as end:
            if end.value is not None:  # as it is for who is woken once more at the end
                made.append(end.value)
        except BaseException as error:  # noqa: BLE001  (it is the caller's)
            failed.append(error)
        try:
            if gone:
                drop()
            loop.call_soon_threadsafe(come.set)
        except RuntimeError:  # the loop is closed
            drop()
        following.discard(work)
        return None

    following.add(work)
    wake()
    try:
        await come.wait()
    except BaseException:
        gone.append(True)
        drop()  # what came in the moment in which this was cancelled
        wake()
        raise
    if failed:
        raise failed.pop()
    return made.pop()


def _tried(call: Callable[[], _T], kind: type[VramError], timeout: float | None) -> _Work[_T]:
    """Make a call until it raises that there is nobody no more, or the time is over."""
    end = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_LOOK
    while True:
        try:
            return call()
        except kind:
            if end is not None and time.monotonic() >= end:
                raise
        yield time.monotonic() + pause
        pause = min(pause * 1.5, LAST_LOOK)


def _attached(
    name: str, keeper: Keeper | str | os.PathLike[str] | None, asked: dict[str, Any], timeout: float | None,
    mapped: Callable[[KeeperClient, Attachment, float | None], _L], wake: Callable[[], None],
) -> _Work[_L]:  # fmt: skip
    """Wait for a keeper, and for the lease that is asked for there, and map it."""
    begun = time.monotonic()
    client, _ = yield from _tried(lambda: wait_for_keeper(keeper, 0.0), PeerGoneError, timeout)
    left = timeout and max(_INSTANT, begun + timeout - time.monotonic())
    until = None if left is None else time.monotonic() + left + client.grace
    pending = PendingLease(client, name, wake, timeout=left, **asked)
    try:
        while (found := pending.take()) is None:
            if until is not None and time.monotonic() >= until:
                raise WaitTimeoutError(f"the keeper at {client.path} did not answer in time")
            yield until
    finally:
        pending.cancel()
    return mapped(client, found, left)


async def attach(
    name: str,
    *,
    access: str = "r",
    version: int | None = None,
    expect: Mapping[str, str] | None = None,
    timeout: float | None = 0.0,
    device: str | Location | None = None,
    owner: int | str | None = None,
    only: Sequence[str] | None = None,
    growing: bool = False,
    wake: bool = False,
    wait_for_memory: float | None = 0.0,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Lease:
    """Attach a published entry, as :func:`vram.attach` does, without stopping the event loop.

    Cancelling it, as :func:`asyncio.timeout` does, gives everything back. Parameters, what is returned and what is
    raised are those of :func:`vram.attach`.
    """
    if version is not None:
        check_version(version)
    growing, patience = check_flag(growing, "growing"), check_timeout(wait_for_memory, "wait_for_memory")
    chosen = None if only is None else check_patterns(only, growing=growing)
    wanted = as_wanted(name, access, expect, False, device, owner, wake)

    def mapped(client: KeeperClient, attachment: Attachment, left: float | None) -> Lease:
        return wanted.mapped(client, attachment, left, Lease, growing=growing, only=chosen, patience=patience)

    asked = {**wanted.asked, "version": version}
    return await _done(partial(_attached, wanted.name, keeper, asked, check_timeout(timeout), mapped))


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
    path, seconds = borrowing.as_path(at), check_timeout(timeout)
    once = partial(borrowing.borrow, path, access=access, timeout=0.0, device=device, stream=stream)
    return await _done(lambda _: _tried(once, WaitTimeoutError, seconds))


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

    return await _done(partial(_attached, wanted.name, keeper, wanted.asked, check_timeout(timeout), followed))


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

    A cancelled call has received nothing: it is there for the next call.

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
    pause, is_readable = FIRST_LOOK, False
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
            pause = min(pause * 2, LAST_LOOK)
        is_readable = await _is_readable(channel.fileno(), most)


async def _is_readable(fd: int, most: float) -> bool:
    """Wait until something can be received, for so many seconds at most; return whether it can."""
    loop, come = asyncio.get_running_loop(), asyncio.Event()
    ours = os.dup(fd)  # several may wait for one channel, and a loop has one reader for each number
    try:
        loop.add_reader(ours, come.set)
        async with asyncio.timeout(most):
            return await come.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(ours)
        os.close(ours)
