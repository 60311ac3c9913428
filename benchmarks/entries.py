"""Entries that are only there to be many, and the memory of the process that keeps them."""

from __future__ import annotations

from vram import driver as drivers
from vram.bench.children import status
from vram.keeper.client import KeeperClient, Segment
from vram.memory import PhysicalAllocation
from vram.spec import HOST, HandleKind

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


def rss(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    return status(pid, "VmRSS") / 2**20
