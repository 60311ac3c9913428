"""One of many loads, the others wait for it, whatever happens to the one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import later
from tests.support.places import short_directory
from tests.support.threads import race

import vram
from vram.errors import MismatchError, NotFoundError, PeerGoneError, UsageError, WaitTimeoutError
from vram.keeper.private import KeeperProcess

pytestmark = pytest.mark.usefixtures("kept")

# Loads slowly and says so; ``die`` in its environment makes it wait for ever in the middle of that.
LOADER = """
import os, sys, time
import numpy, vram
log = open(sys.argv[1], "a", buffering=1)
def load():
    log.write(f"loading {os.getpid()}\\n")
    if "DIE" in os.environ:
        time.sleep(600)
    time.sleep(0.1)
    return {"w": numpy.arange(1000), "who": numpy.array([os.getpid()])}
sys.stdin.readline()
with vram.attach_or_publish("model", load, expect={"config": "1"}, timeout=300) as lease:
    assert (lease["w"].numpy() == numpy.arange(1000)).all()
    log.write(f"has {os.getpid()} {lease.version} {lease['who'].numpy()[0]}\\n")
"""


@contextmanager
def loaders(log: Path, count: int, **environment: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that begin when they are told."""
    log.touch()
    made: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            command = [sys.executable, "-W", "error", "-c", LOADER, str(log)]
            made.append(subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **environment}))
        yield made
    finally:
        for process in made:
            process.kill()
            process.wait(SOON)
            assert process.stdin is not None
            process.stdin.close()


def go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def said(log: Path, word: str) -> list[list[str]]:
    return [line.split()[1:] for line in log.read_text().splitlines() if line.startswith(word)]


def test_of_six_that_race_exactly_one_loads(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with loaders(log, 6) as six:
        for process in six:
            go(process)
        for process in six:
            assert process.wait(SOON) == 0
    ((who,),) = said(log, "loading")
    has = said(log, "has")
    assert len(has) == 6
    assert {loader for _, _, loader in has} == {who}
    assert len({version for _, version, _ in has}) == 1
    assert vram.statistics().versions == 1


def test_when_the_loader_is_killed_the_next_one_loads(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with loaders(log, 1, DIE="yes") as (victim,), loaders(log, 2) as two:
        go(victim)
        until(lambda: said(log, "loading"), seconds=SOON)
        for process in two:
            go(process)
        until(lambda: vram.statistics().waiting == 2, seconds=SOON)
        assert len(said(log, "loading")) == 1
        victim.send_signal(signal.SIGKILL)
        for process in two:
            assert process.wait(SOON) == 0
    assert len(said(log, "loading")) == 2
    assert len(said(log, "has")) == 2


def total(lease: vram.Lease) -> int:
    with lease:
        return int(lease["w"].numpy().sum())


def test_what_is_there_is_attached_without_loading() -> None:
    vram.publish("model", {"w": np.arange(3)}, meta={"config": "1", "more": "2"})

    def load() -> dict[str, Any]:
        raise AssertionError("nothing is to be loaded")

    assert total(vram.attach_or_publish("model", load, expect={"config": "1"})) == 3
    assert total(vram.attach_or_publish("model", load)) == 3


def test_what_is_there_but_different_is_replaced() -> None:
    vram.publish("model", {"w": np.arange(3)}, meta={"config": "1"})
    with vram.attach("model") as old:
        lease = vram.attach_or_publish("model", lambda: {"w": np.arange(5)}, expect={"config": "2"})
        assert lease.meta == {"config": "2"}
        assert lease.version == old.version + 1
        assert total(lease) == 10
        assert old.is_stale()
        assert old["w"].numpy().sum() == 3


def test_when_the_loader_fails_the_next_one_loads() -> None:
    waiting: list[Any] = []

    def fails() -> dict[str, Any]:
        waiting.append(later(lambda: total(vram.attach_or_publish("model", lambda: {"w": np.arange(4)}))))
        until(lambda: vram.statistics().waiting == 1)
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        vram.attach_or_publish("model", fails)
    ((thread, found),) = waiting
    thread.join(SOON)
    assert found == [6]


@pytest.mark.parametrize(
    ("load", "match"),
    [
        (lambda: None, "returned None"),
        (lambda: [np.arange(3)], r"returned \[array"),
        (dict, "nothing to publish"),
        (lambda: {"w": "text"}, "str is no array"),
        (5, "load must be a function"),
    ],
)
def test_what_load_returns_is_checked_and_the_claim_given_up(load: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        vram.attach_or_publish("model", load)
    assert total(vram.attach_or_publish("model", lambda: {"w": np.arange(3)}, timeout=1)) == 3


def test_waiting_for_a_loader_ends_in_time() -> None:
    def load() -> dict[str, Any]:
        # In a thread of its own: in this one it would be for itself, which is another error.
        with pytest.raises(WaitTimeoutError, match="model"):
            race(lambda: vram.attach_or_publish("model", dict, timeout=0.05))
        return {"w": np.arange(3)}

    assert total(vram.attach_or_publish("model", load)) == 3


def test_writing_together_needs_writable() -> None:
    with pytest.raises(UsageError, match="writable=True"):
        vram.attach_or_publish("model", dict, access="rw")
    with vram.attach_or_publish("model", lambda: {"w": np.arange(3)}, access="rw", writable=True) as lease:
        lease["w"][0] = 7
        assert total(vram.attach("model")) == 10


def test_a_name_of_another_user_is_not_replaced(kept: vram.Keeper) -> None:
    """The claim is refused, not granted and then of no use."""
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    from tests.support.other_users import OTHER, as_user

    with short_directory() as directory:
        os.chmod(directory, 0o755)
        keeper = KeeperProcess(os.path.join(directory, "keeper.sock"), ["--mode", "0666"])
        try:
            vram.publish("ours", {"w": np.arange(3)}, keeper=keeper.path)

            def act() -> int:
                return total(vram.attach_or_publish("ours", dict, expect={"config": "2"}, keeper=keeper.path))

            kind, text = as_user(OTHER, act)
            assert kind is MismatchError
            assert f"uid {OTHER} may not replace it" in text
        finally:
            vram.keeper.client.close_client(keeper.path)
            keeper.stop()


def test_losing_the_keeper_while_loading_is_said() -> None:
    with short_directory() as directory:
        path = os.path.join(directory, "keeper.sock")
        keepers = [KeeperProcess(path)]

        def load() -> dict[str, Any]:
            keepers[0].kill()
            os.unlink(path)
            keepers.append(KeeperProcess(path))
            return {"w": np.arange(3)}

        try:
            with pytest.raises(PeerGoneError, match="keeper"):
                vram.attach_or_publish("model", load, keeper=path)
            with pytest.raises(NotFoundError):
                vram.attach("model", keeper=path)
            assert total(vram.attach_or_publish("model", lambda: {"w": np.arange(3)}, keeper=path)) == 3
        finally:
            vram.keeper.client.close_client(path)
            for keeper in keepers:
                keeper.stop()


def test_the_same_name_inside_its_own_load_is_an_error_and_not_a_wait_for_itself(kept: vram.Keeper) -> None:
    caught: list[BaseException] = []

    def load() -> dict[str, object]:
        try:
            vram.attach_or_publish("recursive", load, timeout=5.0)
        except vram.errors.VramError as error:
            caught.append(error)
        with vram.attach_or_publish("another", lambda: {"x": np.arange(3)}) as other:  # which waits for nobody
            return {"x": other["x"].numpy().copy()}

    with vram.attach_or_publish("recursive", load) as lease:
        assert lease["x"].numpy().tolist() == [0, 1, 2]
    assert [type(error) for error in caught] == [vram.errors.BusyError]
    assert "would wait for itself" in str(caught[0])
    with (
        pytest.raises(vram.errors.BusyError),
        vram.attach_or_publish("second", lambda: vram.attach_or_publish("second", dict)),
    ):
        pass
    with vram.attach_or_publish("second", lambda: {"x": np.arange(2)}) as lease:  # the claim was given up
        assert len(lease) == 1
