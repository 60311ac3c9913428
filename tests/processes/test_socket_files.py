"""The socket's file, in a directory where another user may change everything at any moment.

Nothing that a keeper or a lender does there may reach a file that it did not make: no chmod, no chown, no unlink.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tests.support.other_users import OTHER, as_user, keeper_of

import vram
from vram.errors import BusyError, UsageError, VramError
from vram.keeper import bind
from vram.keeper.bind import Listener, Permissions
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import KeeperProcess, short_directory
from vram.keeper.rpc_connection import open_channel
from vram.keeper.server import KeeperServer
from vram.keeper.takeover import take_over
from vram.sharing.channel import connect

pytestmark = pytest.mark.slow  # goes with sockets in shared directories

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
STEPS = 400  # more lines than listening takes


@pytest.fixture
def place() -> Iterator[str]:
    with short_directory() as directory:
        yield directory


@contextlib.contextmanager
def at_every_line(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with a count before each line of the listener's module that this thread runs."""
    count = 0

    def line(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            act(count)
        return line

    def call(frame: FrameType, event: str, argument: object) -> Any:
        return line if frame.f_code.co_filename == bind.__file__ else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def umask_now() -> str:
    return next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))


def serves(path: str) -> bool:
    with KeeperClient.connect(path, label="test") as client:
        return client.list() == []


class Intruder:
    """Acts as another user, in this very thread."""

    def __init__(self, path: str, target: str) -> None:
        self.path, self.target = path, target
        self.swaps = 0

    def swap(self) -> None:
        """Put a symbolic link to the target in the place of every socket that is there."""
        os.seteuid(OTHER)
        try:
            for there, _, files in os.walk(os.path.dirname(self.path)):  # what it may look into
                for name in (self.path, *(os.path.join(there, file) for file in files)):
                    with contextlib.suppress(OSError):
                        if stat.S_ISSOCK(os.lstat(name).st_mode):
                            os.rename(name, f"{name}.was")
                            os.symlink(self.target, name)
                            self.swaps += 1
                            os.unlink(f"{name}.was")
        finally:
            os.seteuid(0)


@root_only
@pytest.mark.parametrize("group", [None, str(OTHER)], ids=["no group", "a group"])
def test_no_file_of_root_changes_when_the_path_is_swapped_at_any_line(place: str, group: str | None) -> None:
    secret = f"{place}/secret"
    theirs = f"{place}/theirs"
    os.mkdir(theirs)
    os.chown(theirs, OTHER, OTHER)
    os.chmod(place, 0o755)
    Path(secret).write_text("root's")
    os.chmod(secret, 0o600)
    swaps = 0
    for step in range(1, STEPS):
        path = f"{theirs}/k{step}"
        intruder = Intruder(path, secret)
        reached = 0

        def act(count: int, step: int = step, intruder: Intruder = intruder) -> None:
            nonlocal reached
            reached = count
            if count == step:
                intruder.swap()

        with at_every_line(act), contextlib.suppress(VramError):
            made = Listener(path, mode=0o666, group=group)
            made.unlink()
            made.sock.close()
        swaps += intruder.swaps
        found = os.stat(secret)
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o600, 0), f"changed by a swap before line {step}"
        if reached < step:
            break
    else:
        pytest.fail("it never ended")
    assert swaps, "the path was there at no line: nothing was tested"


@root_only
def test_a_racer_in_its_own_directory_changes_nothing_of_roots(place: str) -> None:
    """With real system calls, for a bounded time: a link is put in the place of the path as fast as it goes."""
    secret = f"{place}/secret"
    theirs = f"{place}/theirs"
    os.mkdir(theirs)
    os.chown(theirs, OTHER, OTHER)
    os.chmod(place, 0o755)
    Path(secret).write_text("root's")
    os.chmod(secret, 0o600)
    path = f"{theirs}/k"
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            while True:
                with contextlib.suppress(OSError):
                    os.symlink(secret, f"{theirs}/link")
                with contextlib.suppress(OSError):
                    os.lstat(path)
                    os.rename(f"{theirs}/link", path)
                with contextlib.suppress(OSError):
                    if not stat.S_ISSOCK(os.lstat(path).st_mode):
                        os.unlink(path)
        finally:
            os._exit(0)
    tries = 0
    try:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            tries += 1
            with contextlib.suppress(VramError):
                made = Listener(path, mode=0o666)
                made.unlink()
                made.sock.close()
            assert stat.S_IMODE(os.stat(secret).st_mode) == 0o600, f"changed after {tries} tries"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert tries > 20


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o177, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666, 0o200])
def test_the_mode_is_right_whatever_the_umask_is_and_that_is_not_touched(place: str, mode: int, umask: int) -> None:
    before = os.umask(umask)
    said = umask_now()
    seen: set[str] = set()
    try:
        with at_every_line(lambda _: seen.add(umask_now())):
            made = Listener(f"{place}/k", mode=mode)
    finally:
        os.umask(before)
    assert mode_of(f"{place}/k") == mode
    assert seen == {said}
    made.unlink()
    made.sock.close()
    assert os.listdir(place) == []


def test_the_socket_is_there_with_its_mode_and_listens_from_the_first_moment(place: str) -> None:
    path = f"{place}/k"
    wrong: list[str] = []

    def act(_: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if mode_of(path) != 0o660:
                wrong.append(oct(mode_of(path)))
            connect(path, 0.1).close()

    with at_every_line(act):
        made = Listener(path, mode=0o660)
    assert not wrong
    made.unlink()
    made.sock.close()


@root_only
@pytest.mark.parametrize("what", ["directory", "file", "link", "lock on the directory"])
def test_what_another_user_left_in_a_shared_directory_stops_no_keeper(place: str, what: str) -> None:
    """As in /tmp: everybody may make files there, and remove their own only."""
    os.chmod(place, 0o1777)
    path = f"{place}/k"
    lock = f"{place}/.k.0"  # what the listener would make
    holds = -1
    if what == "directory":
        as_user(OTHER, lambda: os.mkdir(lock, 0o777))
        holds = os.open(lock, os.O_RDONLY)
    elif what == "file":
        as_user(OTHER, lambda: Path(lock).touch())
    elif what == "link":
        as_user(OTHER, lambda: os.symlink("/etc", lock))
    else:
        holds = os.open(place, os.O_RDONLY)
    try:
        if holds >= 0:
            fcntl.flock(holds, fcntl.LOCK_EX)  # as whoever may open it can
        started = time.monotonic()
        made = Listener(path)
        assert time.monotonic() - started < bind._START_WAIT, "it waited for what another user holds"
        connect(path, 1.0).close()
        made.unlink()
        made.sock.close()
        assert [name for name in os.listdir(place) if name != ".k.0"] == []
    finally:
        if holds >= 0:
            os.close(holds)


def test_of_four_that_start_at_once_over_a_dead_socket_one_serves_at_the_path(place: str) -> None:
    path = f"{place}/k"

    def start(gate: threading.Barrier) -> Listener | VramError:
        gate.wait(30)
        try:
            return Listener(path)
        except VramError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        for _ in range(30):
            dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            dead.bind(path)
            dead.close()
            came = list(pool.map(start, [threading.Barrier(4)] * 4))
            (made,) = [one for one in came if isinstance(one, Listener)]
            assert sum(type(one) is BusyError for one in came) == 3, came
            connect(path, 1.0).close()
            made.unlink()
            made.sock.close()
            assert os.listdir(place) == []


def test_what_a_killed_process_left_is_used_again_and_removed(place: str) -> None:
    lock = f"{place}/.k.{os.geteuid()}"
    os.mkdir(lock, 0o700)
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(f"{lock}/k")
    left.close()
    made = Listener(f"{place}/k")
    connect(f"{place}/k", 1.0).close()
    assert os.listdir(place) == ["k"]
    made.unlink()
    made.sock.close()


def test_a_name_as_long_as_a_path_may_be(place: str) -> None:
    path = f"{place}/" + "n" * (107 - len(place) - 1)
    with vram.lend(vram.copy(np.arange(3)), at=path), vram.borrow(path) as lease:
        assert lease["array"].numpy().tolist() == [0, 1, 2]
    close_client(path)
    assert os.listdir(place) == []


# -- taking over ----------------------------------------------------------------------------------------------------


def taken_over(path: str, *options: str) -> KeeperProcess:
    return KeeperProcess(path, ["--takeover", *options])


def test_a_takeover_sets_the_mode_that_it_is_given_and_else_keeps_the_one_there_is(place: str) -> None:
    path = f"{place}/k"
    first = KeeperProcess(path, ["--mode", "0666"])
    try:
        second = taken_over(path)
        try:
            assert mode_of(path) == 0o666
            third = taken_over(path, "--mode", "0600", "--group", str(os.getegid()))
            try:
                assert mode_of(path) == 0o600
                connect(path, 1.0).close()
            finally:
                third.kill()
        finally:
            second.kill()
    finally:
        first.kill()


@root_only
def test_a_takeover_sets_the_group(place: str) -> None:
    path = f"{place}/k"
    first = KeeperProcess(path)
    try:
        second = taken_over(path, "--group", str(OTHER))
        try:
            assert (mode_of(path), os.lstat(path).st_gid) == (0o600, OTHER)
        finally:
            second.kill()
    finally:
        first.kill()


def test_a_takeover_into_a_group_that_does_not_exist_is_refused_and_the_old_keeper_serves(place: str) -> None:
    path = f"{place}/k"
    first = KeeperProcess(path)
    try:
        with pytest.raises(VramError, match="there is no group 'nosuchgroup'"):
            taken_over(path, "--group", "nosuchgroup").kill()
        assert serves(path)
        assert first.process.poll() is None
    finally:
        first.kill()


@root_only
def test_a_takeover_that_may_not_give_the_group_fails_and_the_mode_is_as_it_was(place: str) -> None:
    path = f"{place}/k"
    os.chmod(place, 0o777)
    with keeper_of(OTHER, path, mode=0o640):
        said = as_user(OTHER, lambda: take_over(KeeperServer(path, mode=0o666, group="0")))
        assert said[0] is UsageError
        assert "cannot change mode or group" in said[1]
        assert (mode_of(path), os.lstat(path).st_gid) == (0o640, OTHER)
        assert as_user(OTHER, lambda: serves(path))


@root_only
def test_a_takeover_changes_no_other_socket_of_the_same_user_that_was_put_there(place: str) -> None:
    """Whose socket it is is known from connecting to it, not to what its path leads to later."""
    mine = KeeperProcess(f"{place}/k", ["--mode", "0600"])
    other = KeeperProcess(f"{place}/other", ["--mode", "0600"])
    try:
        permissions = Permissions(f"{place}/k")
        try:
            os.rename(f"{place}/other", f"{place}/k")
            with open_channel(f"{place}/k", True, 5.0, through=permissions.through) as channel:
                assert channel.peer().pid == mine.pid
            permissions.change(0o666, None)
            assert mode_of(f"{place}/k") == 0o600
        finally:
            permissions.close()
    finally:
        mine.kill()
        other.kill()


def test_a_group_that_does_not_exist_is_refused_before_anything_else(place: str) -> None:
    with pytest.raises(UsageError, match="there is no group"):
        vram.lend(vram.copy(np.arange(3)), at=f"{place}/k", group="nosuchgroup")
    assert os.listdir(place) == []
