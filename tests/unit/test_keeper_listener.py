"""The keeper's path: taken by one at a time, and given up by who has it and nobody else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from tests.support.places import short_directory

from vram.errors import BusyError, UsageError
from vram.keeper import bind as module
from vram.keeper.bind import Listener


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as place:
        yield f"{place}/k"


def leave_stale(path: str) -> None:
    """Leave a socket that nobody listens on, as a keeper does that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(path)


def answers(path: str) -> bool:
    """Whether somebody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True


def inode(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


@pytest.mark.parametrize("adopted", [False, True], ids=["bound", "adopted"])
def test_i8_who_stops_takes_its_own_path_away_and_nobody_elses(path: str, adopted: bool) -> None:
    """Somebody removed the socket of a keeper and started another: the first one stops, the second one serves on."""
    first = Listener(path)
    if adopted:
        first = Listener.adopt(path, first.sock)
    os.rename(path, f"{path}.away")  # not removed: its inode could be given to the next
    second = Listener(path)
    try:
        first.unlink()
        assert answers(path), "a keeper that stopped took the socket of another one away"
        os.rename(f"{path}.away", f"{path}.back")
        second.unlink()
        assert not os.path.exists(path)
    finally:
        first.sock.close()
        second.sock.close()
    os.unlink(f"{path}.back")


@pytest.mark.parametrize("adopted", [False, True], ids=["bound", "adopted"])
def test_i8_who_stops_takes_its_path_away(path: str, adopted: bool) -> None:
    first = Listener(path)
    if adopted:
        first = Listener.adopt(path, first.sock)
    first.unlink()
    first.unlink()
    first.sock.close()
    assert not os.path.exists(path)


def test_of_two_that_start_at_once_one_waits_for_the_other(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find what a dead keeper left. The second comes right after the first has removed that: it must neither
    bind where the first is about to, nor remove what the first has bound."""
    leave_stale(path)
    clear = module._clear_path
    refused: list[BaseException] = []

    def meanwhile(where: str) -> None:
        clear(where)
        monkeypatch.setattr(module, "_clear_path", clear)
        try:
            Listener(path).sock.close()
        except (BusyError, UsageError) as error:
            refused.append(error)

    monkeypatch.setattr(module, "_clear_path", meanwhile)
    monkeypatch.setattr(module, "HANDSHAKE", 0.05)
    first = Listener(path)
    try:
        assert [type(error) for error in refused] == [BusyError], "two started at the same time"
        assert "is a keeper starting?" in str(refused[0])
        assert (first.inode, answers(path)) == (inode(path), True)
        with pytest.raises(BusyError, match=r"serves .* already"):
            Listener(path)
        assert first.inode == inode(path)
    finally:
        first.unlink()
        first.sock.close()


def test_who_comes_while_another_starts_has_its_turn_then(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(path, "w"), pytest.raises(UsageError, match="no socket"):
        Listener(path)
    os.unlink(path)
    leave_stale(path)
    monkeypatch.setattr(module, "HANDSHAKE", 0.05)
    for name in (path, f"{path}2"):
        made = Listener(name)
        made.unlink()
        made.sock.close()


def test_a_server_that_is_busy_or_of_another_kind_is_left_alone(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(path)
        other.listen(1)
        with pytest.raises(BusyError, match="another kind"):
            Listener(path)
        assert os.path.exists(path)
    os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy:
        busy.bind(path)
        busy.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
            waiting.connect(path)
            with pytest.raises(BusyError, match="too busy"):
                Listener(path)
        assert os.path.exists(path)
    os.unlink(path)


def test_the_permissions_are_there_before_anybody_can_connect(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    there: list[list[str]] = []
    place = os.path.dirname(path)

    class Watched(socket.socket):
        def bind(self, address: object) -> None:
            super().bind(address)  # type: ignore[arg-type]
            there.append(os.listdir(place))

        def listen(self, backlog: int) -> None:  # type: ignore[override]
            modes.append(os.lstat(self.getsockname()).st_mode & 0o777)
            super().listen(backlog)

    monkeypatch.setattr(module.socket, "socket", Watched)
    before = os.umask(0)
    try:
        made = Listener(path, mode=0o640)
        assert os.umask(0) == 0, "the umask of the process is as it was"
    finally:
        os.umask(before)
    assert modes == [0o640]
    assert there == [["k"]]
    assert os.listdir(place) == ["k"]
    made.unlink()
    made.sock.close()
