"""One user asks for more than is done at once, faster than it is done. As other users, with real connections."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.support.other_users import needs_root
from tests.support.users import GREEDY, MODEST, open_to_all, peers

from vram.keeper import messages as m

if TYPE_CHECKING:
    from tests.support.peers import Peer

pytestmark = [
    pytest.mark.slow,
    needs_root,
]  # goes with the fair shares of a keeper

ROOM = 64 << 20  # bytes by which a keeper may grow while it is asked for what it does not do at once


@contextlib.contextmanager
def flooding(made: list[Peer], message: bytes) -> Iterator[list[int]]:
    """Send a message over all of these connections, again and again, and read what comes back; yields how many."""
    sent = [0]
    over = threading.Event()

    def flood() -> None:
        for peer in made:
            peer.sock.setblocking(False)
        while not over.is_set():
            for peer in made:
                with contextlib.suppress(BlockingIOError):
                    peer.sock.send(message)
                    sent[0] += 1
                with contextlib.suppress(BlockingIOError):
                    while peer.sock.recv(65536):
                        pass

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield sent
    finally:
        over.set()
        thread.join()


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another user"])
def test_a_keeper_does_not_grow_with_what_it_is_asked_for(beside: bool) -> None:
    """Leases that are not there, given back: 4,096 in each message."""
    with open_to_all() as keeper, contextlib.ExitStack() as stack:
        hostile = stack.enter_context(peers(keeper, GREEDY, 20))
        if beside:
            stack.enter_context(peers(keeper, MODEST, 1))
        before = resident(keeper.pid)
        with flooding(hostile, m.encode(m.Release(0, list(range(1_000, 5_096))))) as sent:
            while sent[0] < 1_500:
                grown = resident(keeper.pid) - before
                assert grown < ROOM, f"it has grown by {grown >> 20} MiB for {sent[0]} messages"
