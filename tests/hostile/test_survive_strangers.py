"""What strangers leave to a keeper that survives, and to its guardian: it stops neither what others gave back, nor the
start of the next keeper."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import numpy as np
import pytest
from tests.support.deadlines import SOON, until
from tests.support.memfds import make_memfd
from tests.support.other_users import OTHER, needs_root
from tests.support.peers import Peer
from tests.support.users import GREEDY, being

import vram
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.connection import Connection
from vram.keeper.guardian import __file__ as GUARDIAN
from vram.keeper.leases import Segment
from vram.keeper.private import KeeperProcess, short_directory
from vram.keeper.settling import Settling, Unsettled
from vram.open_files import close_fds
from vram.sharing.channel import Channel

pytestmark = pytest.mark.slow  # goes with the log of calls

KIB4 = Segment(4096)
CONNECTIONS = 6  # more than a guardian ever had threads that close


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


@contextlib.contextmanager
def lingering() -> Iterator[int]:
    """A TCP socket whose last close takes an hour, or as long as this block."""
    with socket.socket() as listening, socket.socket() as near:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        near.connect(listening.getsockname())
        far, _ = listening.accept()
        with far:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    near.send(bytes(1 << 16))
            yield near.detach()


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


def memory_of(pid: int) -> int:
    """How many pieces of memory of these tests a process has open."""
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(one))
    return sum("memfd:test" in one for one in found)


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


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


def test_who_says_without_end_what_comes_again_is_disconnected(keeper: KeeperProcess) -> None:
    """The keeper kept each number."""
    with contextlib.closing(Channel.connect(keeper.path)) as channel, KeeperClient.connect(keeper.path) as other:
        channel.send(m.encode(m.Hello(m.PROTOCOL, "by hand")))
        assert isinstance(m.decode_reply(channel.take(timeout=SOON)[0]), m.Welcome)
        os.kill(other.statistics().pid, signal.SIGKILL)
        said = m.decode_reply(channel.take(timeout=SOON)[0])
        if isinstance(said, m.Welcome):  # perhaps it had not been greeted
            said = m.decode_reply(channel.take(timeout=SOON)[0])
        assert isinstance(said, m.Recovered)
        for first in (0, 4096):
            calls = list(range(first + 1, first + 4097))
            channel.send(m.encode(m.Repeating(0, said.keeper, calls, [], True)))
        found = m.decode_reply(channel.take(timeout=SOON)[0])
        assert isinstance(found, m.Error)
        assert "more than 4096 calls" in str(found)
        until(lambda: other.statistics().connections == 1, what="the end of the connection")


class _Peer:
    session = SimpleNamespace(waiters={})


def test_only_what_may_come_again_is_remembered_as_answered() -> None:
    peer = cast("Connection", _Peer())
    settling = Settling(None)
    unsettled = settling.waiting[peer] = Unsettled(7, {}, None)
    for call in (1, 2):  # waited when the keeper died, and it is not known yet what comes
        settling.answers(peer, call, None)
    assert settling.is_over(peer, m.encode(m.Repeating(0, 7, [2, 3])))
    for call in (3, 4):
        settling.answers(peer, call, None)
    assert unsettled.answered == {2, 3}
    assert settling.is_over(peer, m.encode(m.Attach(2, "w")))
    assert (unsettled.answered, unsettled.due) == ({3}, {3})


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


# -- a takeover by another user ---------------------------------------------------------------------------------------
def _ask_without_end(path: str, tells: int) -> NoReturn:
    """Ask a keeper to be taken over, as another user, and say what it answers. In a process of its own."""
    try:
        os.setgroups([])
        os.setresgid(OTHER, OTHER, OTHER)
        os.setresuid(OTHER, OTHER, OTHER)
        while True:
            for word in (m.Takeover(1), m.Takeover(1, 0, os.getpid())):
                with contextlib.suppress(OSError, AssertionError):  # killed meanwhile, before or after the greeting
                    peer = Peer(path)
                    reply = peer.ask(m.encode(word))
                    if isinstance(reply, m.Recovered):  # killed after the greeting: the next keeper is asked as well
                        peer.send(m.encode(m.Repeating(0, reply.keeper)))
                        reply = peer.ask(m.encode(word))
                    while isinstance(reply, m.Welcome):  # of the keeper that died, and of the next one
                        reply = m.decode_reply(peer.sock.recv(1 << 16))
                    got = reply.kind if isinstance(reply, m.Error) else type(reply).__name__
                    os.write(tells, f"{got}\n".encode())
                    peer.sock.close()
    finally:
        os._exit(1)


@needs_root
def test_who_asks_to_take_over_while_the_keeper_is_killed_gets_nothing(keeper: KeeperProcess) -> None:
    """Another user asks without end, in both forms; the keeper dies again and again, in the middle of its answers."""
    path = keeper.path
    told, tells = os.pipe()
    asking = os.fork()
    if not asking:
        _ask_without_end(path, tells)
    os.close(tells)
    with contextlib.ExitStack() as stage:
        stage.callback(os.waitpid, asking, 0)
        stage.callback(os.kill, asking, signal.SIGKILL)
        said = stage.enter_context(open(told))
        vram.publish("kept", {"a": np.full(8, 7)}, keeper=path)
        lease = vram.attach("kept", keeper=path)
        answers = []
        for _ in range(5):
            answers += [said.readline().strip() for _ in range(3)]
            with KeeperClient.connect(path) as one:
                pid = one.statistics().pid
            os.kill(pid, signal.SIGKILL)
        answers += [said.readline().strip() for _ in range(20)]
    assert set(answers) <= {"AccessDeniedError", "NoneType"}, answers
    assert "AccessDeniedError" in answers
    assert lease["a"].numpy().tolist() == [7] * 8
    lease.close()
    with vram.attach("kept", keeper=path, timeout=SOON) as again:
        assert again["a"].numpy().tolist() == [7] * 8
    assert vram.statistics(keeper=path).leases <= 1
    close_client(path)
