"""The socket's file, in a directory where another user may change everything at any moment.

Nothing that a keeper or a lender does there may reach a file that it did not make: no chmod, no chown, no unlink.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tests.support.other_users import OTHER, as_user, keeper_of

import vram
from vram.errors import BusyError, PeerGoneError, UsageError, VramError
from vram.keeper import bind
from vram.keeper.bind import Listener
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import KeeperProcess, short_directory
from vram.keeper.restart import take_over
from vram.keeper.server import KeeperServer
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


def test_a_socket_that_can_be_connected_to_has_its_mode(place: str) -> None:
    path = f"{place}/k"
    modes: list[int] = []

    def act(_: int) -> None:
        with contextlib.suppress(PeerGoneError):
            connect(path, 0.1).close()
            modes.append(mode_of(path))

    with at_every_line(act):
        made = Listener(path, mode=0o660)
    assert set(modes) == {0o660}
    made.unlink()
    made.sock.close()


@root_only
@pytest.mark.parametrize("mode", [0o1777, 0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_refused(place: str, mode: int) -> None:
    os.chmod(place, mode)
    with pytest.raises(UsageError, match=rf"mode {mode:04o}, and whoever may write there .* install -d -m 700 "):
        Listener(f"{place}/k")
    os.chmod(place, 0o755)
    os.chown(place, OTHER, -1)
    with pytest.raises(UsageError, match=f"it belongs to uid {OTHER}"):
        Listener(f"{place}/k")
    assert os.listdir(place) == []


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
    os.chmod(place, 0o755)
    os.chown(place, OTHER, -1)
    with keeper_of(OTHER, path, mode=0o640):
        said = as_user(OTHER, lambda: take_over(KeeperServer(path, mode=0o666, group="0")))
        assert said[0] is UsageError
        assert "cannot change mode or group" in said[1]
        assert (mode_of(path), os.lstat(path).st_gid) == (0o640, OTHER)
        assert as_user(OTHER, lambda: serves(path))


def test_a_group_that_does_not_exist_is_refused_before_anything_else(place: str) -> None:
    with pytest.raises(UsageError, match="there is no group"):
        vram.lend(vram.copy(np.arange(3)), at=f"{place}/k", group="nosuchgroup")
    assert os.listdir(place) == []
