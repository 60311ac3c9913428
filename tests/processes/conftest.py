"""A keeper for all tests of a module, and the proof after each of them that it was left as it was found."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.carried import Nodes, nodes
from tests.support.deadlines import until
from tests.support.places import private_socket, short_directory
from tests.support.updates import HERE

import vram
from vram import driver as drivers
from vram.handover import pickling
from vram.keeper.client import KeeperClient, close_client
from vram.sharing.channel import Channel


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
def path() -> Iterator[str]:
    """Where two ends meet."""
    with short_directory() as directory:
        yield os.path.join(directory, "x")


@pytest.fixture
def place() -> Iterator[str]:
    """Where a keeper will be."""
    with short_directory() as directory:
        path = os.path.join(directory, "keeper.sock")
        yield path
        close_client(path)


@pytest.fixture
def pair() -> Iterator[tuple[vram.ArrayChannel, vram.ArrayChannel]]:
    one, other = vram.ArrayChannel.pair()
    with one, other:
        yield one, other


@pytest.fixture
def hostile() -> Iterator[tuple[socket.socket, vram.ArrayChannel]]:
    """A socket of somebody who says what he likes, and our end."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, vram.ArrayChannel(Channel(other)) as channel:
        yield one, channel


@pytest.fixture
def stream() -> Iterator[int]:
    driver: Any = drivers.get(HERE)
    made = driver.stream_create(HERE)
    yield made
    driver.stream_destroy(made)


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


@pytest.fixture
def two() -> Iterator[Nodes]:
    """Where entries come from, and where they go."""
    with nodes() as found:
        yield found
