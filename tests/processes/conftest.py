"""A keeper for all tests of a module, and the proof after each of them that it was left as it was found."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.deadlines import until
from tests.support.updates import HERE

import vram
from vram import driver as drivers
from vram.handover import pickling
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import private_socket, short_directory


@pytest.fixture(scope="module")
def running_keeper() -> Iterator[str]:
    """The socket of a keeper; use ``kept``, which watches over it."""
    with private_socket() as path:
        yield path


@pytest.fixture
def kept(running_keeper: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[vram.Keeper]:
    """A keeper that is this process's default. A test that leaves a lease, or memory that nobody can reach, fails."""
    monkeypatch.setenv("VRAM_KEEPER", running_keeper)
    yield vram.Keeper(running_keeper)
    gc.collect()
    with KeeperClient.connect(running_keeper, label="cleaner") as cleaner:
        until(lambda: not cleaner.statistics().leases, what="the return of every lease")
        close_client(running_keeper)
        for entry in cleaner.list():
            cleaner.remove(entry.name)
        until(lambda: cleaner.statistics().connections == 1, what="the end of every connection")
        left = cleaner.statistics()
    assert (left.entries, left.versions, left.nbytes, left.descriptors, left.waiting) == (0, 0, 0, 0, 0), left


@pytest.fixture
def hand_over() -> Iterator[None]:
    """Arrays may travel in pickles of multiprocessing; afterwards nobody knows of it."""
    yield
    pickling.shut_down()


@pytest.fixture
def at() -> Iterator[str]:
    with short_directory() as directory:
        yield os.path.join(directory, "group.sock")


@pytest.fixture
def streams() -> Iterator[list[int]]:
    """Three streams that wait for no other."""
    driver: Any = drivers.get(HERE)
    made: list[int] = []
    try:
        made += [driver.stream_create(HERE) for _ in range(3)]
        yield made
    finally:
        for stream in made:
            driver.stream_destroy(stream)
