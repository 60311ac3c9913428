"""A reader that may write can keep its publisher waiting."""

from __future__ import annotations

import socket

import pytest
from tests.support.fuse_files import unanswered_files
from tests.support.keeper_here import later
from tests.support.locked_files import SOON, locked_for_ever, needs_fuse
from tests.support.other_users import needs_root
from tests.support.peers import Peer
from tests.support.users import GREEDY, being, open_to_all

import vram
from vram.keeper import messages as m
from vram.keeper.client import close_client
from vram.open_files import close_fds
from vram.sharing.channel import MAX_FDS, MAX_MESSAGE

pytestmark = [pytest.mark.slow, needs_root, needs_fuse]  # goes with lanes of closing


def test_a_reader_that_may_write_keeps_its_publisher_waiting_as_documented() -> None:
    """It has a descriptor for writing, and writes from a page that never comes. No interrupt ends the wait of
    ``F_ADD_SEALS`` for the lock that it holds: docs/security.md says so (What nobody prevents)."""
    with (
        open_to_all() as keeper,
        unanswered_files() as files,
        vram.empty((1 << 18,), "float64", device="host") as array,
    ):
        vram.publish("w", {"x": array}, keeper=keeper.path, writable=True)
        with being(GREEDY):
            bad = Peer(keeper.path)
        bad.send(m.encode(m.Attach(1, "w", access="rw")))
        _, fds, _, _ = socket.recv_fds(bad.sock, MAX_MESSAGE, MAX_FDS)
        with locked_for_ever(files.place, fds[0]):
            thread, came = later(lambda: vram.publish("final", {"x": array}, keeper=keeper.path))
            thread.join(SOON)
            ended = not thread.is_alive()
            assert files.is_served
            files.die()
            thread.join()
        close_fds(fds)
        bad.close()
        close_client(keeper.path)
        assert not ended, "it does not wait any more: docs/security.md says what does not hold"
        assert came, "once nobody holds the lock, it is published"
