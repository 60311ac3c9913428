"""The verbs that wait, for event loops: attach, borrow, recv and follow, to be awaited.

What has to be waited for is waited for in the thread of :mod:`vram.keeper.tasks`, one for each keeper however many
calls wait; what is received over a channel, by the loop itself. The mapping is made in that thread, too, so that a
large one does not stop the loop. Cancelling takes back what was asked for, and gives back what comes all the same.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import PeerGoneError, WaitTimeoutError
from ..keeper.leases import Attachment
from ..keeper.paths import find_path
from ..keeper.pending import PendingLease
from ..keeper.rules import check_version
from ..keeper.tasks import worker_of
from ..spec import Location, check_timeout
from . import borrow as borrowing
from .attach import check_access, user_of
from .followed import first_lease
from .follower import Follower, as_wanted, check_callback
from .frames import Frames
from .keepers import TIMEOUT, check_flag, wait_for_keeper, where_is
from .lease import Lease

if TYPE_CHECKING:
    from ..arrays.hints import StreamLike
    from ..handover.array_channel import ArrayChannel
    from ..keeper.session import Keeper

_FIRST_LOOK, _LAST_LOOK = 0.001, 0.05  # seconds between two looks for what nobody tells of, such as a path
_INSTANT = 0.001  # seconds that are left where time is over: 0 is to ask without waiting, which is refused otherwise
_SELDOM = 0.25  # seconds after which a channel is looked into though nothing came: work of a GPU may be done by then

_L = TypeVar("_L", bound=Lease)


class _Call(Generic[_L]):
    """A call that waits in a worker for a coroutine; made and awaited in the event loop. `timeout` is in seconds."""

    def __init__(self, timeout: float | None) -> None:
        self.is_over = False
        self.pending: PendingLease | None = None
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[_L] = self._loop.create_future()
        self._timeout = timeout
        self._begun = time.monotonic()
        self._pause = _FIRST_LOOK

    @property
    def left(self) -> float | None:
        """The seconds that are left; 0 only for who does not wait at all."""
        if not self._timeout:
            return self._timeout
        return max(_INSTANT, self._begun + self._timeout - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return self._timeout is not None and time.monotonic() >= self._begun + self._timeout

    async def wait(self, path: str) -> _L:
        """Have it go on in the worker of a path, and wait for what it comes to."""
        worker = worker_of(path)
        try:
            worker.add(self)
            return await self._future
        except BaseException:
            self.is_over = True
            if self._future.done() and not self._future.cancelled() and self._future.exception() is None:
                self._future.result().close()  # it came in the moment in which this was cancelled
            self._future.cancel()
            worker.wake(self)
            raise
        finally:
            # The error that it has has this frame, which has this call: no collector is to be waited for.
            self._future = self._loop.create_future()
            self._future.cancel()

    def step(self) -> float | None:
        """Try once; see :class:`~vram.keeper.tasks.Task`."""
        if self.is_over:
            if self.pending is not None:
                self.pending.cancel()
                self.pending = None
            return None
        try:
            found = self.attempt()
        except BaseException as error:  # noqa: BLE001  (it is whose who waits)
            self._say(None, error)
            return time.monotonic()
        if found is None:
            if self.pending is not None:
                return None
            self._pause = min(self._pause * 1.5, _LAST_LOOK)
            return time.monotonic() + self._pause
        self._say(found, None)
        return time.monotonic()

    def attempt(self) -> _L | None:
        """Return what was asked for, or None if it is not there yet. Raises what the call raises."""
        raise NotImplementedError

    def _say(self, found: _L | None, error: BaseException | None) -> None:
        self.is_over = True
        try:
            self._loop.call_soon_threadsafe(self._hand_over, found, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            if found is not None:
                found.close()

    def _hand_over(self, found: _L | None, error: BaseException | None) -> None:
        if self._future.done():  # cancelled
            if found is not None:
                found.close()
        elif found is None:
            self._future.set_exception(error or PeerGoneError("nothing came"))
        else:
            self._future.set_result(found)


class _Attaching(_Call[_L]):
    """Waits for a keeper, and for what is to be attached there."""

    def __init__(
        self,
        name: str,
        keeper: Keeper | str | os.PathLike[str] | None,
        asked: dict[str, Any],
        mapped: Callable[[Any, Attachment, float | None], _L],
        timeout: float | None,
    ) -> None:
        super().__init__(timeout)
        self._name, self._keeper, self._asked, self._mapped = name, keeper, asked, mapped

    def attempt(self) -> _L | None:
        pending = self.pending
        if pending is None:
            try:
                client, _ = wait_for_keeper(self._keeper, 0.0)
            except PeerGoneError as error:
                if not self.is_late:
                    return None
                if not self._timeout:
                    raise
                raise PeerGoneError(f"{error} (none was there for {self._timeout:g} s)") from None
            self.pending = pending = PendingLease(client, self._name, timeout=self.left, **self._asked)
        attachment = pending.look()
        if attachment is None:
            return None
        self.pending = None
        return self._mapped(pending.connection, attachment, self.left)


class _Borrowing(_Call[Lease]):
    """Waits for somebody who lends at a path."""

    def __init__(self, ask: Callable[[], Lease], timeout: float | None) -> None:
        super().__init__(timeout)
        self._ask = ask

    def attempt(self) -> Lease | None:
        try:
            return self._ask()
        except WaitTimeoutError:
            if self.is_late:
                raise
            return None


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

    def mapped(client: Any, attachment: Attachment, left: float | None) -> Lease:
        return wanted.mapped(client, attachment, left, Lease, follow=follow)

    asked = {**wanted.asked, "version": version}
    call: _Attaching[Lease] = _Attaching(wanted.name, keeper, asked, mapped, check_timeout(timeout))
    return await call.wait(_path_of(keeper))


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
    check_access(access)
    user_of(device)
    path = borrowing.as_path(at)

    def ask() -> Lease:
        return borrowing.borrow(path, access=access, timeout=0.0, device=device, stream=stream)

    return await _Borrowing(ask, check_timeout(timeout)).wait(find_path(path)[0])


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
    wanted = as_wanted(name, access, expect, same_arrays, device, owner, wake)
    check_callback(on_version)
    path = _path_of(keeper)
    where = None if keeper is None else path
    mapped = functools.partial(first_lease, wanted, where)
    call = _Attaching(wanted.name, keeper, wanted.asked, mapped, check_timeout(timeout))
    return Follower(wanted, await call.wait(path), where, on_version)


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


def _path_of(keeper: Keeper | str | os.PathLike[str] | None) -> str:
    return find_path(where_is(keeper)[0])[0]
