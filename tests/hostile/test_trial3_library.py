"""What the third trial broke in the library of an honest caller."""

from __future__ import annotations

import socket

import pytest
from tests.hostile.fuse_files import unanswered_files
from tests.hostile.test_keeper_fairness import GREEDY, being, open_to_all
from tests.hostile.test_keeper_hostile import Peer
from tests.hostile.test_trial3_keeper import SOON, locked_for_ever, needs_fuse, needs_root
from tests.keeper_here import later

import vram
from vram.keeper import messages as m
from vram.keeper.client import close_client
from vram.sharing.channel import MAX_FDS, MAX_MESSAGE, close_fds

pytestmark = [needs_root, needs_fuse]


@pytest.mark.xfail(
    reason="docs/security.md, What nobody prevents: F_ADD_SEALS waits for the inode's lock, which a writer may hold",
    raises=AssertionError,
    strict=True,
)
def test_a_reader_that_may_write_does_not_hang_its_publisher() -> None:
    """It has a descriptor for writing, and writes from a page that never comes. No interrupt ends the wait."""
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
        assert came
        assert ended, "another user's reader hangs the publisher, in the kernel"
