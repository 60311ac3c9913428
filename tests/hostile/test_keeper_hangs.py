"""What one user without privileges can do to all others at a keeper: files that hang, sockets that linger.

Each hung, starved or ended a keeper once. What hangs here ends with the daemon of the file system, or the time that a
socket lingers.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.fuse_files import unanswered_files
from tests.support.locked_files import SOON, locked_for_ever, needs_fuse
from tests.support.other_users import _become, needs_root
from tests.support.peers import Peer
from tests.support.users import GREEDY, MODEST, being, open_to_all

from vram.errors import BusyError, PeerGoneError, WaitTimeoutError
from vram.keeper import messages as m
from vram.keeper.bind import Listener
from vram.keeper.client import KeeperClient
from vram.keeper.killed import was_killed
from vram.keeper.private import KeeperProcess, short_directory
from vram.testing.keeper import WRITABLE, make_memfd, until

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


def is_alive(pid: int) -> bool:
    """Whether anything of a process goes on, be it one of its threads."""
    try:
        return any(
            Path(f"/proc/{pid}/task/{task}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
            for task in os.listdir(f"/proc/{pid}/task")
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def within(seconds: float, is_true: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if is_true():
            return True
        time.sleep(0.05)
    return False


# -- what a message has beyond its room is closed by the kernel, in the loop's thread ---------------------------------


# -- one message of one user stops the publications of all others -----------------------------------------------------


# -- the end of a keeper that closes something -----------------------------------------------------------------------


@contextlib.contextmanager
def killed_while_it_closes() -> Iterator[tuple[KeeperProcess, KeeperClient]]:
    """A keeper that was killed while a thread of it closes a file whose server never answers, and a client of it."""
    with short_directory() as place, unanswered_files() as files:
        os.chmod(place, 0o711)
        keeper = KeeperProcess(f"{place}/k", ["--mode", "0666"])
        try:
            with KeeperClient.connect(keeper.path) as client:

                def act() -> object:
                    never = os.open(f"{files.place}/file", os.O_RDWR)
                    bad = Peer(keeper.path)
                    bad.send(publication(1), [never])
                    return bad

                with attacker(act):
                    try:
                        until(lambda: len(threads(keeper.pid)) > 1)  # it closes: killed sooner, it does so as it ends
                        assert not was_killed(keeper.pid), "it serves"
                        client.statistics()
                        os.kill(keeper.pid, signal.SIGKILL)
                        until(lambda: was_killed(keeper.pid))
                        yield keeper, client
                        assert files.is_served
                        assert was_killed(keeper.pid)
                    finally:
                        files.die()  # before the attacker, who closes its file too
        finally:
            keeper.kill()


def threads(pid: int) -> list[tuple[int, str]]:
    """The threads of a process, and what each does."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has ended meanwhile
            status = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
            found.append((int(thread), status.rsplit(")", 1)[1].split()[0]))
    return found


@pytest.mark.parametrize("options", [[], ["--takeover"]], ids=["started", "takeover"])
def test_where_a_keeper_was_killed_while_it_closes_something_another_one_starts(options: list[str]) -> None:
    """As it is when the kernel is out of memory: the process does not go, and its sockets stay open."""
    with killed_while_it_closes() as (keeper, _):
        successor = KeeperProcess(keeper.path, options)
        try:
            with KeeperClient.connect(keeper.path) as client:
                assert client.server_pid == successor.pid
                assert client.statistics().entries == 0
        finally:
            successor.kill()


def test_who_connects_to_a_keeper_that_was_killed_while_it_closes_something_is_told() -> None:
    with killed_while_it_closes() as (keeper, _):
        with pytest.raises(PeerGoneError, match=rf"pid {keeper.pid}, was killed .* Start a new one with `vram keep"):
            KeeperClient.connect(keeper.path, timeout=1.0)


def test_a_client_of_a_keeper_that_was_killed_while_it_closes_something_is_told_when_it_calls() -> None:
    with killed_while_it_closes() as (keeper, client):
        client.grace = 1.0
        with pytest.raises(WaitTimeoutError, match=rf"did not answer in time; .* pid {keeper.pid}, was killed"):
            client.statistics()


@pytest.mark.parametrize("closes", [True, False], ids=["in close", "in exit"])
def test_a_process_that_was_killed_and_closes_something_is_known(closes: bool) -> None:
    """One of a single thread: it waits in a call of its own, or in the kernel's end of it."""
    with short_directory() as place, unanswered_files() as files, socket.socket(socket.AF_UNIX, SEQPACKET) as sock:
        sock.bind(f"{place}/k")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            sock.listen(16)
            file = os.open(f"{files.place}/file", os.O_RDWR)
            os.write(writer, b"r")
            if closes:
                os.close(file)
            signal.pause()
            os._exit(1)
        sock.close()
        os.close(writer)
        try:
            with open(reader, "rb") as pipe:
                assert pipe.read(1) == b"r"
            until(lambda: threads(child) == [(child, "S")])
            assert not was_killed(child)
            with pytest.raises(BusyError, match=f"pid {child}"):
                Listener(f"{place}/k")
            os.kill(child, signal.SIGKILL)
            until(lambda: threads(child) == [(child, "D")])
            assert was_killed(child)
            made = Listener(f"{place}/k")
            made.unlink()
            made.sock.close()
            assert files.is_served
            assert was_killed(child)
        finally:
            files.die()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_socket_that_another_process_has_too_than_the_one_killed_is_left_alone() -> None:
    """Who listened last is stuck, and who serves is not: it answers, as a keeper does whose successor was killed."""
    with short_directory() as place, unanswered_files() as files, socket.socket(socket.AF_UNIX, SEQPACKET) as sock:
        sock.bind(f"{place}/k")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            sock.listen(16)
            os.open(f"{files.place}/file", os.O_RDWR)
            os.write(writer, b"r")
            signal.pause()
            os._exit(1)
        os.close(writer)
        serving = threading.Thread(target=hang_up_on_two, args=(sock,))
        try:
            with open(reader, "rb") as pipe:
                assert pipe.read(1) == b"r"
            os.kill(child, signal.SIGKILL)
            until(lambda: was_killed(child))
            serving.start()
            with pytest.raises(BusyError, match=f"pid {child}"):
                Listener(f"{place}/k")
            assert was_killed(child)
        finally:
            with socket.socket(socket.AF_UNIX, SEQPACKET) as last:
                last.connect(f"{place}/k")
                serving.join()
            files.die()
            os.waitpid(child, 0)


def hang_up_on_two(sock: socket.socket) -> None:
    for _ in range(2):
        sock.accept()[0].close()


# -- closing memory is not always quick ------------------------------------------------------------------------------
