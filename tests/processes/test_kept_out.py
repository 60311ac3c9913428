"""What a user is told who does not reach the keeper at a path: kept out, unanswered, or no socket there."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.deadlines import until
from tests.support.keeper_here import is_stopped
from tests.support.other_users import OTHER, as_user

import vram
from vram.doctor import keepers
from vram.errors import AccessDeniedError, UsageError, WaitTimeoutError
from vram.keeper.client import KeeperClient, close_client


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_who_is_kept_out_is_told_who_may_change_it() -> None:
    with vram.private_keeper() as keeper:
        directory = os.path.dirname(keeper.path)
        (inside,) = as_user(OTHER, lambda: keepers.examine(keeper.path))
        os.chmod(directory, 0o755)
        (refused,) = as_user(OTHER, lambda: keepers.examine(keeper.path))
        kind, said = as_user(OTHER, lambda: KeeperClient.connect(keeper.path))
    assert (inside.verdict, inside.code) == ("broken", "EACCES")
    assert f"may not enter {directory}" in inside.remedy
    assert f"its permissions keep uid {OTHER} out" in refused.remedy
    assert kind is AccessDeniedError
    assert f"its permissions keep uid {OTHER} out; whoever runs a keeper there starts it with `vram keep --mode" in said
    for found in (inside, refused):
        assert found.verdict == "broken"
        assert "--mode 0660 --group" in found.remedy
        assert "start one with" not in found.remedy


@pytest.mark.slow
def test_a_keeper_that_stands_still_is_named_with_what_to_do() -> None:
    with vram.private_keeper() as keeper:
        pid = vram.statistics(keeper=keeper).pid
        close_client(keeper.path)
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: is_stopped(pid), what="the keeper to stand still")
            with pytest.raises(WaitTimeoutError, match=f"pid {pid} of uid {os.geteuid()}.*kill -CONT {pid}"):
                KeeperClient.connect(keeper.path, timeout=0.1)
            (found,) = keepers.examine(keeper.path)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert (found.verdict, f"pid {pid}" in found.said, bool(found.remedy)) == ("broken", True, True)


def test_what_listens_and_says_nothing_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "k.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(path)
        silent.listen()
        with pytest.raises(WaitTimeoutError, match=f"pid {os.getpid()} of uid {os.geteuid()}.*`kill {os.getpid()}`"):
            KeeperClient.connect(path, timeout=0.1)


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_what_is_no_socket_is_said_to_be_none(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "k"
    make(path)
    with pytest.raises(UsageError, match="is no socket"):
        KeeperClient.connect(str(path))
    (found,) = keepers.examine(path)
    assert (found.verdict, "is no socket" in found.said, "start" in found.remedy) == ("broken", True, False)
