"""A keeper that comes later than those who want something of it: waited for as the name is, by the same deadline;
and what a user is told who does not reach one."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.keeper_here import is_stopped
from tests.support.other_users import OTHER, as_user

import vram
from vram.doctor import keepers as looked_at
from vram.entries import keepers
from vram.errors import AccessDeniedError, PeerGoneError, UsageError, WaitTimeoutError
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import KeeperProcess

X = {"w": np.arange(4)}


class Looks:
    """Counts the looks for a keeper, and says when there was a first one."""

    def __init__(self, look: Callable[..., KeeperClient]) -> None:
        self.look, self.count, self.first = look, 0, threading.Event()

    def __call__(self, path: str | None, **options: Any) -> KeeperClient:
        self.count += 1
        try:
            return self.look(path, **options)
        finally:
            self.first.set()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    wrapped = Looks(keepers.client)
    monkeypatch.setattr(keepers, "client", wrapped)
    return wrapped


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def total(lease: vram.Lease) -> int:
    with lease:
        return int(lease["w"].numpy().sum())


def waiting(path: str) -> dict[str, Callable[[], int]]:
    return {
        "attach": lambda: total(vram.attach("x", timeout=SOON, keeper=path)),
        "attach for ever": lambda: total(vram.attach("x", timeout=None, keeper=path)),
        "attach_or_publish": lambda: total(vram.attach_or_publish("x", lambda: dict(X), timeout=SOON, keeper=path)),
        "attach_or_publish for ever": lambda: total(vram.attach_or_publish("x", lambda: dict(X), keeper=path)),
    }


@pytest.mark.parametrize("how", waiting(""))
def test_a_keeper_that_starts_later_is_waited_for(how: str, place: str, looks: Looks) -> None:
    early = in_thread(waiting(place)[how])
    assert looks.first.wait(SOON)
    assert not early.done()
    keeper = KeeperProcess(place)
    try:
        if not how.startswith("attach_or_publish"):
            vram.publish("x", X, keeper=place)
        assert early.result(SOON) == 6
        assert looks.count > 1
    finally:
        close_client(place)
        keeper.stop()


def test_an_upgrade_waits_for_the_next_keeper(place: str, looks: Looks) -> None:
    first = KeeperProcess(place)
    vram.publish("x", X, keeper=place)
    lease = vram.attach("x", keeper=place)
    first.stop()
    looks.first.clear()
    newer = in_thread(lambda: total(lease.upgrade(timeout=SOON)))
    assert looks.first.wait(SOON)
    second = KeeperProcess(place)
    try:
        vram.publish("x", X, keeper=place)
        assert newer.result(SOON) == 6
    finally:
        lease.close()
        close_client(place)
        second.stop()


@pytest.mark.parametrize("how", ["attach", "attach_or_publish"])
def test_a_keeper_that_dies_while_it_is_asked_is_gone_at_once(how: str, place: str) -> None:
    keeper = KeeperProcess(place)
    try:
        with vram.attach_or_publish("x", lambda: dict(X), keeper=place), KeeperClient.connect(place) as other:
            if how == "attach":
                waits = in_thread(lambda: total(vram.attach("y", timeout=100 * SOON, keeper=place)))
            else:
                other.attach_or_claim("y")  # somebody loads it
                waits = in_thread(
                    lambda: total(vram.attach_or_publish("y", lambda: dict(X), timeout=100 * SOON, keeper=place))
                )
            until(lambda: other.statistics().waiting == 1, seconds=SOON, what="the wait for the name")
            keeper.kill()
            with pytest.raises(PeerGoneError, match=r"the keeper at .* is gone"):
                waits.result(AT_ONCE)
    finally:
        keeper.kill()


def test_without_a_timeout_one_look_is_all(place: str, looks: Looks) -> None:
    for act in (
        lambda: vram.attach("x", keeper=place),
        lambda: vram.attach("x", timeout=0, keeper=place),
        lambda: vram.attach_or_publish("x", lambda: dict(X), timeout=0, keeper=place),
    ):
        looks.count = 0
        with pytest.raises(PeerGoneError, match="start one with `vram keep --socket") as caught:
            act()
        assert "none was there" not in str(caught.value)
        assert looks.count == 1


def test_who_waits_for_ever_for_a_keeper_says_so(place: str, looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "_QUIETLY", 0.0)
    said = threading.Event()
    texts: list[str] = []

    def note(message: Warning | str, *_: object, **__: object) -> None:
        texts.append(str(message))
        said.set()

    monkeypatch.setattr(keepers.warnings, "warn", note)
    early = in_thread(lambda: total(vram.attach_or_publish("x", lambda: dict(X), keeper=place)))
    assert said.wait(SOON)
    keeper = KeeperProcess(place)
    try:
        assert early.result(SOON) == 6
    finally:
        close_client(place)
        keeper.stop()
    (text,) = texts
    assert f"start one with `vram keep --socket {place}`" in text
    assert "for ever" in text


# -- who is kept out --------------------------------------------------------------------------------------------------
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_who_is_kept_out_is_told_who_may_change_it() -> None:
    with vram.private_keeper() as keeper:
        directory = os.path.dirname(keeper.path)
        (inside,) = as_user(OTHER, lambda: looked_at.examine(keeper.path))
        os.chmod(directory, 0o755)
        (refused,) = as_user(OTHER, lambda: looked_at.examine(keeper.path))
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
            (found,) = looked_at.examine(keeper.path)
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
    (found,) = looked_at.examine(path)
    assert (found.verdict, "is no socket" in found.said, "start" in found.remedy) == ("broken", True, False)
