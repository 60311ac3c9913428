"""HIGH: what was decided, and waits for the loop's next turn, is lost with a takeover in this one.

Whoever waited has a lease in the books and never hears of it; who watched a version never hears of the next.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from tests.support.keeper_here import serving
from tests.support.peers import Peer, running

from vram.keeper import messages as m
from vram.keeper import takeover
from vram.keeper.private import short_directory
from vram.keeper.server import KeeperServer
from vram.testing.keeper import AT_ONCE, SOON, memfds

pytestmark = pytest.mark.slow  # goes with takeover by a successor

WATCHERS = 40


def test_what_was_decided_in_the_turn_of_a_takeover_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publication and the takeover are read in the same turn of the loop."""
    with short_directory() as place, memfds(1) as fds, running(f"{place}/k") as keeper:
        publisher = Peer(keeper.path)
        publication = m.Publish(1, "w", [m.SegmentRow(4096, 1, 0)], ["host"])
        assert isinstance(publisher.ask(m.encode(publication), fds), m.Published)
        watchers = [Peer(keeper.path) for _ in range(WATCHERS)]
        for peer in watchers:
            assert peer.ask(m.encode(m.Watch(1, "w", 1))) == m.Done(1)
        greet = takeover.greet

        def with_a_publication(*arguments: Any) -> m.Welcome:
            welcome = greet(*arguments)
            os.kill(keeper.pid, signal.SIGSTOP)
            publisher.send(m.encode(publication), fds)
            threading.Timer(0.3, os.kill, (keeper.pid, signal.SIGCONT)).start()  # both are there by then
            return welcome

        monkeypatch.setattr(takeover, "greet", with_a_publication)
        successor = KeeperServer(keeper.path)
        assert takeover.take_over(successor) is not None
        with serving(successor):
            assert publisher.hear() == m.Published(1, 2)
            told = 0
            for peer in watchers:
                peer.sock.settimeout(AT_ONCE)
                try:
                    told += peer.hear() == m.Notice(0, "w", 1, "replaced", 2)
                except TimeoutError:
                    break
            for peer in [publisher, *watchers]:
                peer.close()
        assert keeper.process.wait(SOON) == 0
        assert told == WATCHERS
