"""A file that hangs whoever asks for it keeps nobody from being served. It ends with the daemon of its file system."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support.fuse_files import unanswered_files
from tests.support.locked_files import SOON, locked_for_ever, needs_fuse
from tests.support.memfds import WRITABLE, make_memfd
from tests.support.other_users import _become, needs_root
from tests.support.peers import Peer
from tests.support.users import GREEDY, MODEST, being, open_to_all

from vram.keeper import messages as m
from vram.keeper.private import KeeperProcess

SEQPACKET = socket.SOCK_SEQPACKET
LOCKS = 100_000  # a close takes milliseconds then, and those of one message seconds

pytestmark = [pytest.mark.slow, needs_root, needs_fuse]  # goes with lanes of closing


@contextlib.contextmanager
def attacker(act: Callable[[], object], then: Callable[[], object] | None = None) -> Iterator[None]:
    """Have another process of another user do something before the block, and something during it; it keeps what it
    has open until the end of the block."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            _become(GREEDY)
            kept = act()
            os.write(writer, b"r")
            if then is not None:
                then()
            time.sleep(60)
            assert kept
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            if pipe.read(1) != b"r":
                raise RuntimeError("the attack did not begin")
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def answers(peer: Peer, request: bytes, fds: list[int] | None = None) -> bool:
    """Whether the keeper answers soon."""
    peer.sock.settimeout(SOON)
    peer.send(request, fds)
    try:
        return peer.hear() is not None
    except TimeoutError:
        return False


def publication(count: int, *, name: str = "bad", size: int = 4096, writable: bool = False) -> bytes:
    return m.encode(m.Publish(1, name, [m.SegmentRow(size, 1, 0)] * count, ["host"], writable=writable))


def as_modest(keeper: KeeperProcess) -> Peer:
    with being(MODEST):
        return Peer(keeper.path)


# -- the lock of an inode, which another process may hold for ever ---------------------------------------------------


def test_a_file_whose_inode_is_locked_does_not_hang_the_keeper() -> None:
    fd = make_memfd(4096, seals=WRITABLE)
    try:
        with open_to_all() as keeper, unanswered_files() as files:
            other = as_modest(keeper)
            with locked_for_ever(files.place, fd):
                with being(GREEDY):
                    bad = Peer(keeper.path)
                bad.send(publication(1, writable=True), [fd])
                time.sleep(0.2)
                came = answers(other, m.encode(m.Statistics(1)))
                assert files.is_served
                files.die()
            other.close()
            bad.close()
            assert came, "everybody waits for a lock that one user holds"
    finally:
        os.close(fd)
