"""Two users besides root, and keepers that they may connect to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tests.support.peers import Peer, running
from tests.support.places import short_directory

from vram.info import StatisticsInfo
from vram.keeper import messages as m
from vram.keeper.client import Segment
from vram.keeper.private import KeeperProcess

GREEDY, MODEST = 5001, 5002


KIB4 = Segment(4096)


@contextlib.contextmanager
def being(uid: int) -> Iterator[None]:
    """Who connects in this block is this user to the kernel, and so to the keeper, for as long as it is connected."""
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextlib.contextmanager
def open_to_all(*options: str, descriptors: int = 0) -> Iterator[KeeperProcess]:
    launcher = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"] if descriptors else ()
    with short_directory() as place:
        os.chmod(place, 0o711)
        with running(f"{place}/k", "--mode", "0666", *options, launcher=launcher) as keeper:
            yield keeper


@contextlib.contextmanager
def peers(keeper: KeeperProcess, uid: int, count: int) -> Iterator[list[Peer]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            with being(uid):
                made.append(Peer(keeper.path))
            stack.callback(made[-1].close)
        yield made


def moment(reply: m.Reply | None) -> float:
    assert isinstance(reply, m.Rows)
    return m.decode_rows(reply.rows, StatisticsInfo)[0].uptime
