"""A keeper in a thread of this process: its limits, and its clock, are the test's to choose."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import pytest
from tests.support.deadlines import until
from tests.support.keeper_here import serving
from tests.support.servers import connect, make

from vram.errors import QuotaError, UnsupportedError
from vram.keeper.client import KeeperClient
from vram.keeper.private import short_directory
from vram.keeper.restart import take_over
from vram.keeper.server import KeeperServer


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as place:
        yield f"{place}/k"


def test_one_user_has_at_most_half_of_the_connections(path: str) -> None:
    with serving(make(path)) as server, contextlib.ExitStack() as stack:
        one, *_ = [connect(stack, path) for _ in range(3)]
        with pytest.raises(
            QuotaError, match=rf"uid {os.geteuid()} may hold 3 connections .*holds 3 and would hold 4; .*half of all"
        ):
            connect(stack, path)
        one.close()
        until(lambda: server.by_user == {os.geteuid(): 2}, what="the end of the connection")
        assert connect(stack, path).statistics().connections == 3


def test_a_connection_that_ended_makes_room_for_one_of_the_same_user(path: str) -> None:
    with serving(make(path)) as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            one = connect(stack, path)
            one.close()
            until(lambda: not server.by_user, what="the end of the connection")
        for _ in range(3):
            connect(stack, path)


def test_the_keepers_own_user_has_all_connections(path: str) -> None:
    with serving(make(path, uid=os.geteuid())), contextlib.ExitStack() as stack:
        for _ in range(6):
            connect(stack, path)
        with pytest.raises(QuotaError, match="the keeper may hold 6 connections"):
            connect(stack, path)


def test_one_user_has_at_most_half_of_the_descriptors(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 512))
    server = make(path)
    most = server.catalogue.accounts.quotas.max_descriptors
    assert most is not None
    assert 200 < most < 300, "what is left of 512"
    with serving(server), contextlib.ExitStack() as stack:
        one = connect(stack, path)
        one.offer("w", 4096, handles=most // 2)
        with pytest.raises(QuotaError, match=rf"descriptors more: uid {os.geteuid()} may hold {most // 2}"):
            one.offer("w", 4096, handles=most // 2 + 1)
    with serving(make(path, uid=os.geteuid())), contextlib.ExitStack() as stack:
        one = connect(stack, path)
        one.offer("w", 4096, handles=most // 2 + 1)
        with pytest.raises(QuotaError, match="descriptors more: the keeper may hold"):
            one.offer("w", 4096, handles=most + 1)


# -- over a takeover ------------------------------------------------------------------------------------------------
def test_a_keeper_that_cannot_hand_over_says_so_and_serves_on(path: str) -> None:
    with serving(KeeperServer(path, raises_limit=False)), KeeperClient.connect(path) as client:
        with pytest.raises(UnsupportedError, match=f"started by `vram keep`; have one inside of pid {os.getpid()}"):
            take_over(KeeperServer(path, raises_limit=False))
        assert client.list() == []
