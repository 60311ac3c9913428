"""What ranks on GPUs of their own do in processes of their own: each is told the path, its rank and the size."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import vram
from vram import driver as drivers
from vram.errors import UnsupportedError, VramError
from vram.testing.keeper import SOON

__all__ = ["ask_for_multicast", "meet", "read", "write", "write_to_all"]


def read(array: vram.Array) -> np.ndarray[Any, Any]:
    """Return what is in memory of a GPU."""
    found = np.empty(array.shape, np.float32)
    drivers.get(array.region.location).copy_out(memoryview(found).cast("B"), array.address)
    return found


def write(array: vram.Array, data: np.ndarray[Any, Any]) -> None:
    """Put something into memory of a GPU."""
    drivers.get(array.region.location).copy_in(array.address, memoryview(data).cast("B"))


def meet(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Make a symmetric buffer of GPUs, and say how that ended, and whether this rank and the group work on."""
    with vram.Group(rank=rank, size=size, at=at, timeout=SOON) as group:
        said = ("", "")
        try:
            group.symmetric(8, "float32", device=f"cuda:{rank}")
        except VramError as error:
            said = type(error).__name__, str(error)
        with (
            group.symmetric(4, "float32", device="host") as host,
            vram.zeros(4, "float32", device=f"cuda:{rank}") as on,
        ):
            group.all_reduce(host)
            pipe.send((*said, read(on).tolist()))
        group.barrier()


def write_to_all(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Have the last rank write to the memory of all, and say what is in this rank's."""
    with vram.Group(rank=rank, size=size, at=at, timeout=SOON) as group:
        with group.symmetric(5, "float32", device=f"cuda:{rank}") as buffer:
            where = buffer.multicast_address
            if rank == size - 1:
                driver = drivers.get(buffer.array.region.location)
                driver.copy_in(where, memoryview(np.full(4, 3, np.float32)).cast("B"))
            group.barrier()
            pipe.send(read(buffer.array).tolist())
            group.barrier()


def ask_for_multicast(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Say why there is no address."""
    with vram.Group(rank=rank, size=size, at=at, timeout=SOON) as group:
        with group.symmetric(5, "float32", device=f"cuda:{rank}") as buffer:
            try:
                pipe.send(buffer.multicast_address)
            except UnsupportedError as error:
                pipe.send(str(error))
        group.barrier()
