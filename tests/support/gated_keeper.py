"""A keeper whose requests wait at a gate."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.keeper_here import serving
from tests.support.servers import make

from vram.keeper import messages as m
from vram.keeper.connection import Connection
from vram.keeper.fairness import Fairness
from vram.keeper.server import KeeperServer
from vram.sharing.channel import Channel
from vram.testing.keeper import SOON, until

NOBODY_HERE = 12_345  # another user, for the keeper's count of them


class Gate(Fairness[Connection]):
    """Keeps everything waiting while it is shut."""

    shut = False
    shuts_after: int | None = None  # so many turns, if ever

    def may(self, uid: int, now: float) -> bool:
        return not (self.shut and uid >= 0) and super().may(uid, now)  # below zero is what no user asked for

    def next(self, now: float) -> Connection | None:
        due = None if self.shut else super().next(now)
        if due is not None and self.shuts_after is not None:
            self.shuts_after -= 1
            self.shut = self.shuts_after <= 0
        return due

    def delay(self, now: float) -> float | None:
        return None if self.shut else super().delay(now)

    @property
    def waits(self) -> int:
        return sum(len(user.waiting) for user in self._waiting.values())


@contextlib.contextmanager
def gated(path: str, **options: Any) -> Iterator[tuple[KeeperServer, Gate]]:
    """A keeper that another user is connected to as well, as far as it knows."""
    server = make(path, connections=20)
    for name, value in options.items():
        setattr(server, name, value)
    server.turns.fairness = gate = Gate()
    server.by_user[NOBODY_HERE] = 1
    with serving(server):
        try:
            yield server, gate
        finally:
            gate.shut = False


def within(server: KeeperServer, act: Callable[[], object]) -> None:
    """Have the keeper's thread do something."""
    done = threading.Event()

    def run() -> None:
        act()
        done.set()

    server.loop.call_soon_threadsafe(run)
    assert done.wait(SOON)


def reopen(server: KeeperServer, gate: Gate) -> None:
    def act() -> None:
        gate.shut = False
        server.turns._wake(0.0)

    within(server, act)


def raw(stack: contextlib.ExitStack, path: str, *, greet: bool = True) -> Channel:
    channel = stack.enter_context(contextlib.closing(Channel.connect(path, SOON)))
    if greet:
        say(channel, m.Hello(1, 1))
        assert isinstance(hear(channel), m.Welcome)
    return channel


def say(channel: Channel, message: object, fds: list[int] | None = None) -> None:
    channel.send(m.encode(message), fds or [], timeout=SOON)


def hear(channel: Channel) -> m.Reply:
    return m.decode_reply(channel.recv(timeout=SOON)[0])


def wait_for(gate: Gate, count: int) -> None:
    until(lambda: gate.waits == count, what=f"{count} that wait")
