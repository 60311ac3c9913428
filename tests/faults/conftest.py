"""Another process, and what it made for the tests here to open."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.other_process import OtherProcess
from tests.support.raw_cuda import Maker

from vram.spec import HandleKind, Location

G = 2 << 20
HERE = Location("cuda", 0)
FD = HandleKind.POSIX_FD


@pytest.fixture(scope="module")
def neighbour() -> Iterator[OtherProcess]:
    with OtherProcess(Maker) as other:
        yield other


@pytest.fixture
def theirs(neighbour: OtherProcess) -> Iterator[dict[str, Any]]:
    """What the other process made for us to open."""
    base = neighbour.call("legacy", G)
    pool = neighbour.call("pool")
    pointers = [neighbour.call("allocate", pool, G) for _ in range(2)]
    event = neighbour.call("event_create", HERE, interprocess=True)
    number = neighbour.call("pool_export", pool)
    fd = neighbour.take_fd(number)
    neighbour.close_fd(number)
    yield {
        "legacy": neighbour.call("ipc_export", base),
        "fd": fd,
        "tokens": [neighbour.call("pool_export_pointer", pointer) for pointer in pointers],
        "event": neighbour.call("event_export", event),
    }
    os.close(fd)
    for made in (*pointers, pool):
        neighbour.call("free", made)
    neighbour.call("event_destroy", event)
    neighbour.call("free", base)
