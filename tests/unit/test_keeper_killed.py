"""A killed process that does not go is told from others; those that are one are in tests/hostile (they need FUSE)."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vram.errors import BusyError
from vram.keeper.bind import Listener
from vram.keeper.killed import was_killed
from vram.keeper.private import short_directory
from vram.testing.keeper import until

pytestmark = pytest.mark.slow  # goes with the claims of killed processes

_EXIT = {"x86_64": 60, "aarch64": 93}.get(platform.machine(), 0)  # SYS_exit, of one thread

# A server whose main thread has ended, and whose other thread serves.
_WITHOUT_LEADER = """
import ctypes, socket, sys, threading
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.bind(sys.argv[1])
sock.listen()
def serve():
    while True:
        sock.accept()[0].close()
threading.Thread(target=serve).start()
ctypes.CDLL(None).syscall(int(sys.argv[2]), 0)
"""


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as place:
        yield f"{place}/k"


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


@contextlib.contextmanager
def zombie(sock: socket.socket | None = None) -> Iterator[int]:
    """A child that nobody has waited for; it listens on a socket that is ours too, and dies."""
    child = os.fork()
    if child == 0:
        if sock is not None:
            sock.listen(16)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        until(lambda: state(child) == "Z")
        yield child
    finally:
        os.waitpid(child, 0)


def test_who_lives_or_is_gone_is_not_taken_for_killed() -> None:
    with zombie() as child:
        assert not was_killed(child), "a zombie has closed everything"
    assert not was_killed(child), "a pid that is not there"
    assert not was_killed(os.getpid())
    assert not was_killed(None)
    assert not was_killed(0)


def test_a_socket_whose_listener_died_and_that_another_process_has_is_left_alone(path: str) -> None:
    """As after a takeover whose successor died: who serves on is not who listened last."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours:
        ours.bind(path)
        with zombie(ours) as child, pytest.raises(BusyError, match=f"pid {child}"):
            Listener(path)
        assert os.path.exists(path)
    os.unlink(path)


@pytest.mark.skipif(not _EXIT, reason="the number of exit(2) is not known here")
def test_a_server_whose_main_thread_alone_has_ended_is_left_alone(path: str) -> None:
    server = subprocess.Popen([sys.executable, "-c", _WITHOUT_LEADER, path, str(_EXIT)])
    try:
        until(lambda: os.path.exists(path) and state(server.pid) == "Z")
        assert not was_killed(server.pid), "its other thread serves"
        with pytest.raises(BusyError, match=f"pid {server.pid}"):
            Listener(path)
    finally:
        server.kill()
        server.wait()
    os.unlink(path)
