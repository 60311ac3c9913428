"""Entries that are only there to be many."""

from __future__ import annotations

import resource
from multiprocessing.connection import Connection

from .. import driver as drivers
from ..keeper.client import KeeperClient, Segment
from ..memory import PhysicalAllocation
from ..sharing.channel import close_fds
from ..spec import HOST, HandleKind

__all__ = ["connect_readers", "fill"]

_NBYTES = 2 << 20


def fill(path: str, count: int) -> None:
    """Publish so many entries, each of untouched memory of its own."""
    driver = drivers.get(HOST)
    with KeeperClient.connect(path, label="benchmark") as client:
        for number in range(count):
            with PhysicalAllocation.create(driver, _NBYTES, HOST) as memory:
                memory.seal()
                piece = Segment(memory.nbytes, HandleKind.POSIX_FD, "host")
                meta = {"config": f"sha256:{number:064x}"}
                client.publish(f"filler/{number}", [piece], [memory.export()], manifest=bytes(200), meta=meta)


def connect_readers(pipe: Connection, path: str, name: str, count: int) -> None:
    """A process of its own: connect so often, hold a lease on each connection, and stay until the parent hangs up."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    readers = []
    for number in range(count):
        reader = KeeperClient.connect(path, label=f"reader {number}")
        readers.append(reader)
        close_fds(reader.attach(name).fds)  # what is counted is the lease
    pipe.send(len(readers))
    try:
        pipe.recv()
    finally:
        for reader in readers:
            reader.close()
