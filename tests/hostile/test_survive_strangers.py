"""What strangers leave to a keeper that survives, and to its guardian: it stops neither what others gave back, nor the
start of the next keeper."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON, until
from tests.support.memfds import make_memfd
from tests.support.peers import Peer
from tests.support.users import GREEDY, being

from vram.keeper import messages as m
from vram.keeper.client import KeeperClient
from vram.keeper.guardian import __file__ as GUARDIAN
from vram.keeper.leases import Segment
from vram.keeper.private import KeeperProcess, short_directory
from vram.open_files import close_fds

pytestmark = pytest.mark.slow  # goes with the log of calls

KIB4 = Segment(4096)


@pytest.fixture
def keeper() -> Iterator[KeeperProcess]:
    """A keeper that is followed, open to all; the process is its guardian."""
    with short_directory() as place:
        os.chmod(place, 0o711)
        made = KeeperProcess(f"{place}/k", ["--mode", "0666", "--survive"])
        try:
            yield made
            assert made.stop() == 0
        finally:
            made.kill()


def serving(keeper: KeeperProcess) -> int:
    """The pid of who serves."""
    with KeeperClient.connect(keeper.path) as one:
        return one.statistics().pid


def leave(keeper: KeeperProcess, fds: list[int]) -> None:
    """End connections of a stranger, in each of which such a socket is unread, which nobody else has."""
    peers = []
    for _ in fds:
        with being(GREEDY):
            peers.append(Peer(keeper.path))
    pid = serving(keeper)
    os.kill(pid, signal.SIGSTOP)
    try:
        for peer, fd in zip(peers, fds, strict=True):
            peer.send(b"\xff no message")
            for call in (1, 2, 3):
                peer.send(m.encode(m.Statistics(call)), [fd])
            os.close(fd)
            peer.close()
    finally:
        os.kill(pid, signal.SIGCONT)


def publish(client: KeeperClient, name: str) -> None:
    fd = make_memfd(content=b"x")
    try:
        client.publish(name, [KIB4], [fd])
    finally:
        os.close(fd)


def test_a_guardian_that_has_no_room_is_replaced_and_nothing_is_lost(keeper: KeeperProcess) -> None:
    """What it had no room for was cut off, which nobody saw until it was needed."""
    with KeeperClient.connect(keeper.path) as client:
        publish(client, "before")
        _, most = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (3, most))
        publish(client, "after")
        assert keeper.process.wait(SOON) in (1, -signal.SIGKILL)  # of the keeper, which sees that it ends
        assert "no room" in keeper.said()
        os.kill(before := serving(keeper), signal.SIGKILL)
        for name in ("before", "after"):
            close_fds(client.attach(name).fds)
        now = serving(keeper)
        assert now != before
        os.kill(now, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{now}").exists(), what="the end of the keeper")
    keeper.stop()
    keeper.stop = lambda *_: 0  # type: ignore[method-assign]  # it did not end as others do


_STARTS = """
import os, resource, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import guardian
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
made, before = guardian.Guardian([sys.argv[2]]), None
for _ in range(2):
    try:
        while True:
            os.dup(0)
    except OSError:
        pass
    if before:
        before.close()  # as main() does, of the keeper that died
    before = made.start()
    assert made.gone() == 0
"""


def test_a_guardian_whose_table_is_full_starts_the_next_keeper() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _STARTS, GUARDIAN, "/bin/true"], capture_output=True, check=False, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- what is said again -----------------------------------------------------------------------------------------------


def test_who_dies_with_the_keeper_is_ended_once(keeper: KeeperProcess) -> None:
    """Twice, its leases were ended in parts of two; the log fitted nothing at the next death, and cost all clients
    their connections, with their leases and claims."""
    with KeeperClient.connect(keeper.path) as client:
        publish(client, "w")
        held = client.attach("w")
        close_fds(held.fds)
        program = "import sys, time; from vram.keeper.client import KeeperClient\n"
        program += "one = KeeperClient.connect(sys.argv[1]); held = [one.attach('w') for _ in range(100)]\n"
        program += "print(flush=True); time.sleep(3600)"
        with subprocess.Popen([sys.executable, "-c", program, keeper.path], stdout=subprocess.PIPE) as dying:
            assert dying.stdout is not None
            assert dying.stdout.readline()
            pid = client.statistics().pid
            os.kill(pid, signal.SIGSTOP)
            dying.kill()
            dying.wait(SOON)
            os.kill(pid, signal.SIGKILL)
        until(lambda: client.statistics().leases == 1, what="the end of the leases of who died")
        os.kill(client.statistics().pid, signal.SIGKILL)
        assert client.statistics().leases == 1
        client.release([held.lease_id])
