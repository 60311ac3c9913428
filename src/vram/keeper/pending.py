"""A lease that is asked for and not waited for: it is looked for now and then, by a thread that has more to do.

Whoever waits in :class:`~vram.keeper.rpc_connection.RpcConnection` reads for all. A thread that does not wait hangs up
its bell with the others, and reads itself where there is something to read and nobody who does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import VramError
from . import messages as m
from .failures import raised
from .leases import Attachment

if TYPE_CHECKING:
    from .client import KeeperClient
    from .rpc_connection import Answer

_TURN = 0.001  # seconds that are left to who reads already
_AT_ONCE = 64  # messages that are read before anything else is done


class _Bell:
    """Hangs among the locks of those who wait, and is rung as they are."""

    __slots__ = ("release",)

    def __init__(self, ring: Callable[[], object]) -> None:
        self.release = ring


class PendingLease:
    """A lease that was asked for, for one thread; :meth:`cancel` gives back what comes. `timeout` is in seconds.
    The parameters are those of :meth:`KeeperClient.lease <vram.keeper.client.KeeperClient.lease>`, already checked."""

    def __init__(
        self,
        connection: KeeperClient,
        name: str,
        *,
        timeout: float | None,
        version: int | None = None,
        access: str = "r",
        expect: Mapping[str, str] | None = None,
        owner: int | None = None,
        purpose: str = "",
    ) -> None:
        self.connection = connection
        timeout = None if timeout is None else min(float(timeout), 1e9)
        self._asked = name, version, access, expect, timeout, False, owner, purpose
        wanted = None if expect is None else dict(expect)
        self._call = call = next(connection._calls)
        self._until = None if timeout is None else time.monotonic() + timeout + connection.grace
        request = m.Attach(call, name, version or 0, access, wanted, timeout, False, owner, purpose)
        self._tray: deque[Answer] | None = deque()
        connection._expected[call] = self._tray
        try:
            connection._send(m.encode(request), (), self._until, call)
        except BaseException:
            connection._expected.pop(call, None)
            self._over(is_answered=False)
            raise

    @property
    def has_come(self) -> bool:
        """Whether :meth:`look` has something to say."""
        return bool(self._tray) or self.connection._failure is not None or self._is_due

    @property
    def _is_due(self) -> bool:
        """Whether it is to be asked once more, since another keeper goes on."""
        repeats = self.connection._repeats
        return repeats is not None and self._call in repeats.due

    def _over(self, *, is_answered: bool) -> None:
        if self.connection._repeats is not None:
            self.connection._repeats.over(self._call, is_answered=is_answered)

    def look(self) -> Attachment | None:
        """Return the lease if it has come, else None. Raises what the keeper says instead, or WaitTimeoutError."""
        connection = self.connection
        if not self._tray:
            if connection._failure is not None:
                raise connection._failure_again()
            if self._until is not None and time.monotonic() >= self._until:
                self.cancel()
                raise connection._timed_out()
            if self._is_due:
                connection._ask_again(self._call)
            return None
        connection._expected.pop(self._call, None)
        self._over(is_answered=True)
        answer, self._tray = self._tray.popleft(), None
        if isinstance(answer.reply, m.Error):
            raise raised(answer.reply)
        if answer.lost:
            raise connection._no_room(answer)
        found = connection._attach(*self._asked, come=answer)
        if isinstance(found, Attachment):
            return found
        connection._drop(found)
        raise connection._protocol_error(found.reply)

    def cancel(self) -> None:
        """Wait no more: the keeper is told, and what has come is given back. Idempotent."""
        tray, self._tray = self._tray, None
        connection = self.connection
        if tray is None:
            return
        connection._expected.pop(self._call, None)
        self._over(is_answered=False)
        if tray:
            connection._drop(tray.popleft())
        elif connection._failure is None:
            connection._say_unheard(m.Cancel(0, self._call))


def listen_for(connection: KeeperClient, ring: Callable[[], object]) -> int:
    """Have `ring` called once when another thread has read something; return the descriptor to poll as well."""
    bells: deque[Any] = connection._bells
    if not any(getattr(bell, "release", None) == ring for bell in list(bells)):
        bells.append(_Bell(ring))
    return connection._channel.fileno()


def hear(connection: KeeperClient) -> None:
    """Read what there is, for all who wait, unless somebody does. Never waits."""
    if not connection._reading.acquire(blocking=False):
        time.sleep(_TURN)
        return
    try:
        for _ in range(_AT_ONCE):
            if connection._failure is not None or not connection._channel.wait(0):
                break
            connection._read_one(0)
    except VramError:  # the connection is over, which those who wait will hear; or another thread has closed it
        pass
    finally:
        connection._reading.release()
        connection._wake_waiters()
