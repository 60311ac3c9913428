"""A user who sends a keeper all it can of files that never close: ``python -m <this> SOCKET FILE UID``.

A process of its own, since whoever has such a file open can start no other one: exec closes what it does not pass on.
It says ``ready``, and keeps everything open until its input ends; it ends itself once the daemon of the file is dead.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys

from tests.support.peers import Peer
from tests.support.users import being

from vram.keeper import messages as m

CONNECTIONS, MESSAGES, EACH = 60, 4, 200


def flood(path: str, fds: list[int]) -> list[Peer]:
    """Over connections that stay, that go, and that have not greeted."""
    peers = []
    for number in range(CONNECTIONS):
        peer = Peer(path, greet=False)
        peers.append(peer)
        with contextlib.suppress(OSError):
            if number % 3:
                peer.ask(m.encode(m.Hello(1, 1)))
            for call in range(1, MESSAGES + 1):
                peer.send(m.encode(m.Publish(call, "bad", [m.SegmentRow(4096, 1, 0)] * len(fds), ["host"])), fds)
        if number % 3 == 2:
            peer.close()
    return peers


def main(path: str, file: str, uid: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # so many may be in flight
    fds = [os.open(file, os.O_RDWR)] * EACH
    with being(uid):
        peers = flood(path, fds)
    print("ready", flush=True)
    sys.stdin.read()
    assert peers


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
