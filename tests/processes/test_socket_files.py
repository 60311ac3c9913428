"""The socket's file, in a directory where another user may change everything at any moment.

Nothing that a keeper or a lender does there may reach a file that it did not make: no chmod, no chown, no unlink.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import pytest
from tests.support.other_users import OTHER
from tests.support.places import short_directory

from vram.errors import UsageError, VramError
from vram.keeper.bind import Listener
from vram.keeper.client import KeeperClient
from vram.keeper.private import KeeperProcess
from vram.sharing.channel import connect

pytestmark = pytest.mark.slow  # goes with sockets in shared directories

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


@pytest.fixture
def place() -> Iterator[str]:
    with short_directory() as directory:
        yield directory


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def serves(path: str) -> bool:
    with KeeperClient.connect(path, label="test") as client:
        return client.list() == []


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


# -- taking over ----------------------------------------------------------------------------------------------------
def taken_over(path: str, *options: str) -> KeeperProcess:
    return KeeperProcess(path, ["--takeover", *options])


def test_a_takeover_sets_the_mode_that_it_is_given_and_else_keeps_the_one_there_is(place: str) -> None:
    path = f"{place}/k"
    first = KeeperProcess(path, ["--survive", "--mode", "0666"])
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


def test_a_takeover_into_a_group_that_does_not_exist_is_refused_and_the_old_keeper_serves(place: str) -> None:
    path = f"{place}/k"
    first = KeeperProcess(path, ["--survive"])
    try:
        with pytest.raises(VramError, match="there is no group 'nosuchgroup'"):
            taken_over(path, "--group", "nosuchgroup").kill()
        assert serves(path)
        assert first.process.poll() is None
    finally:
        first.kill()
