"""Who asks to take over while the keeper is killed, and ceilings that are filled by packed arrays and by tables."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.support.other_users import OTHER, as_user, needs_root
from tests.support.peers import Peer
from tests.support.quotas import keeper as limited

import vram
from vram.entries.administration import usage
from vram.errors import QuotaError
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import KeeperProcess, short_directory
from vram.keeper.server import KeeperServer
from vram.testing.keeper import SOON, until

pytestmark = [
    pytest.mark.slow,
    needs_root,
]  # goes with takeover by a successor

UNIT = 2 << 20


# -- a takeover by another user ---------------------------------------------------------------------------------------
@pytest.fixture
def path() -> Iterator[str]:
    """A keeper that is followed, open to all."""
    with short_directory() as place:
        os.chmod(place, 0o711)
        made = KeeperProcess(f"{place}/k", ["--mode", "0666", "--survive"])
        try:
            yield made.path
            close_client(made.path)
            assert made.stop() == 0
        finally:
            made.kill()


def _ask_without_end(path: str, tells: int) -> NoReturn:
    """Ask a keeper to be taken over, as another user, and say what it answers. In a process of its own."""
    try:
        os.setgroups([])
        os.setresgid(OTHER, OTHER, OTHER)
        os.setresuid(OTHER, OTHER, OTHER)
        while True:
            for word in (m.Takeover(1), m.Takeover(1, True, True, True, os.getpid())):
                with contextlib.suppress(OSError, AssertionError):  # killed meanwhile, before or after the greeting
                    peer = Peer(path)
                    reply = peer.ask(m.encode(word))
                    got = reply.kind if isinstance(reply, m.Error) else type(reply).__name__
                    os.write(tells, f"{got}\n".encode())
                    peer.sock.close()
    finally:
        os._exit(1)


def test_who_asks_to_take_over_while_the_keeper_is_killed_gets_nothing(path: str) -> None:
    """Another user asks without end, in both forms; the keeper dies again and again, in the middle of its answers."""
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


# -- ceilings ---------------------------------------------------------------------------------------------------------
def packed() -> dict[str, Any]:
    return vram.pack({"a": np.ones(100), "b": np.zeros(100)}, device="host")


def pandas_table() -> Any:
    return pytest.importorskip("pandas", reason="pandas is not installed").DataFrame({"x": [1, 2], "y": ["one", "two"]})


def polars_table() -> Any:
    return pytest.importorskip("polars", reason="polars is not installed").DataFrame({"x": [1, 2], "y": ["one", "two"]})


def held(server: KeeperServer) -> tuple[int, int]:
    """Return how many bytes and entries of the other user's count."""
    rows = [row for row in usage(server.path)[0] if row.uid == OTHER]
    return (rows[0].nbytes, rows[0].entries) if rows else (0, 0)


@pytest.mark.parametrize("make", [packed, pandas_table, polars_table])
def test_what_is_packed_and_tables_count_as_arrays_do(make: Callable[[], Any]) -> None:
    """Each takes a unit of 2 MiB, counts for its user, is refused beyond the ceiling, and leaves nothing then."""
    with limited(user_bytes=2 * UNIT) as server:
        value = make()  # before the fork: a child of this process loads no more

        def publish() -> list[str]:
            come = []
            for name in ("one", "two", "three"):
                try:
                    vram.publish(name, make() if make is packed else value, keeper=server.path)
                    come.append(name)
                except QuotaError:
                    come.append("QuotaError")
            return come

        assert as_user(OTHER, publish) == ["one", "two", "QuotaError"]
        until(lambda: held(server) == (2 * UNIT, 2), what="two units and nothing of the third")
        vram.remove("one", keeper=server.path)
        until(lambda: held(server) == (UNIT, 1), what="the end of what was removed")
        assert as_user(OTHER, publish)[:1] == ["one"]  # and those of its own names are replaced
        close_client(server.path)
