"""SIGKILL of whoever talks to a keeper, before every single message: its books are as the state machine says (S5).

The victims use the real client and stop themselves right before their n-th message; see ``stopped.py``.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import Running
from tests.support.deadlines import SOON, until
from tests.support.memfds import memfds
from tests.support.places import short_directory

from vram.keeper.client import _PART, Attachment, KeeperClient, Segment
from vram.keeper.messages import Claimed
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds

STOPPED = Path(__file__).parents[1].joinpath("support", "stopped.py")


@contextlib.contextmanager
def victim(stop_at: int, what: str, path: str) -> Iterator[str]:
    """Run a client up to its `stop_at`-th message; yield where it is; then kill it."""
    with Running(STOPPED, stop_at, what, path) as process:
        yield process.line()


@pytest.fixture
def keeper() -> Iterator[KeeperProcess]:
    with short_directory() as place:
        process = KeeperProcess(f"{place}/k")
        yield process
        assert process.stop() == 0
        assert process.said() == ""


@pytest.fixture
def watcher(keeper: KeeperProcess) -> Iterator[KeeperClient]:
    with KeeperClient.connect(keeper.path, label="watcher") as connection:
        yield connection


def descriptors(keeper: KeeperProcess) -> int:
    return len(os.listdir(f"/proc/{keeper.pid}/fd"))


def books(watcher: KeeperClient) -> tuple[int, ...]:
    found = watcher.statistics()
    return found.entries, found.versions, found.leases, found.connections, found.nbytes, found.descriptors


def publish(connection: KeeperClient, count: int = 1) -> int:
    with memfds(count) as fds:
        return connection.publish("w", [Segment(4096)] * count, fds)


def test_a_publisher_killed_before_any_message_leaves_all_of_a_version_or_none(
    keeper: KeeperProcess, watcher: KeeperClient
) -> None:
    clean, idle = books(watcher), descriptors(keeper)
    outcomes = []
    for step in range(100):
        with victim(step, "publish", keeper.path) as where:
            pass
        until(lambda: watcher.statistics().connections == 1)
        entries = watcher.list()
        outcomes.append(bool(entries))
        if entries:
            assert entries[0].segments == 600
            got = watcher.attach("w")
            assert len(got.fds) == 600
            close_fds(got.fds)
            watcher.release([got.lease_id])
            watcher.remove("w")
        assert books(watcher) == clean
        until(lambda: descriptors(keeper) == idle, what="the end of all descriptors")
        if where == "end":
            break
    # The hello, all parts but the last, and their answers are for nothing; the last part is the commit.
    parts = math.ceil(600 / _PART)
    assert parts > 2
    assert outcomes == [False] * (2 * parts + 1) + [True] * 2


@pytest.mark.parametrize("what", ["attach", "release"])
def test_a_reader_killed_before_any_message_holds_nothing(
    keeper: KeeperProcess, watcher: KeeperClient, what: str
) -> None:
    publish(watcher, 600)
    clean, idle = books(watcher), descriptors(keeper)
    for step in range(100):
        with victim(step, what, keeper.path) as where:
            leases = watcher.statistics().leases
            assert leases in (0, 1)
            if where == "end":
                assert leases == (what == "attach")
        until(lambda: books(watcher) == clean, what="the end of the victim's lease")
        until(lambda: descriptors(keeper) == idle)
        if where == "end":
            break
    assert step > 6


def test_a_retired_version_goes_with_its_last_reader_however_that_ends(
    keeper: KeeperProcess, watcher: KeeperClient
) -> None:
    publish(watcher)
    idle = descriptors(keeper)
    with victim(1_000, "attach", keeper.path) as where:
        assert where == "end"
        publish(watcher)
        assert watcher.statistics().versions == 2
        # The victim's connection, and the second version.
        until(lambda: descriptors(keeper) == idle + 2, what="no other descriptors than those")
    until(lambda: watcher.statistics().versions == 1)
    until(lambda: descriptors(keeper) == idle, what="the end of the old version's memory")


def test_a_claim_outlives_none_of_its_holders(keeper: KeeperProcess, watcher: KeeperClient) -> None:
    """Whoever has the claim is killed before its n-th message; the next in line gets it, or the version."""
    published = 0
    for step in range(3, 100):
        with victim(step, "claim", keeper.path) as where:
            got = watcher.attach_or_claim("w", timeout=0) if where == "end" else None
        got = got or watcher.attach_or_claim("w", timeout=SOON)
        if isinstance(got, Claimed):
            assert watcher.list() == []
            watcher.abandon(got)
        else:
            assert isinstance(got, Attachment)
            close_fds(got.fds)
            watcher.release([got.lease_id])
            watcher.remove("w")
            published += 1
        until(lambda: watcher.statistics().connections == 1)
        assert watcher.statistics().versions == 0
        if where in ("end", ""):
            break
    assert published > 0
