"""Connections of a keeper in this process, and what is counted for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vram.keeper.connection import Connection
from vram.keeper.in_flight import InFlight
from vram.keeper.server import KeeperServer
from vram.testing.keeper import SOON


def within(server: KeeperServer, act: Callable[[], None]) -> None:
    """Do something in the keeper's thread."""
    done = threading.Event()

    def do() -> None:
        act()
        done.set()

    server.loop.call_soon_threadsafe(do)
    assert done.wait(SOON)


def of(server: KeeperServer, label: str) -> Connection:
    (found,) = [one for one in server.connections.values() if one.session and one.session.label == label]
    return found


OWN = 77  # who runs the keeper, as far as it knows


class Peer:
    """What shares know of a connection."""

    def __init__(self, shares: InFlight, uid: int) -> None:
        self.shares = shares
        self.share = shares.of(uid)
        self.in_flight = self.unread = 0
        self.hoards = self.reads = False

    def has_read_all(self) -> bool:
        if self.reads:
            self.shares.landed(self)
        return self.reads

    def takes(self, count: int) -> int:
        """Have so many sent, one by one, as far as it goes; return how many were."""
        sent = 0
        while sent < count and self.shares.has_room(self.share, 1):
            self.shares.count(self, 1)
            sent += 1
        return sent


def shares_of(limit: int) -> InFlight:
    return InFlight(limit, is_own=lambda uid: uid == OWN, now=lambda: 0.0)
