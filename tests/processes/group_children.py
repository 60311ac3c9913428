"""What the ranks of a group do in processes of their own: each is told the path, its rank and the size."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection

import numpy as np

import vram

__all__ = ["TIMEOUT", "compute", "outlive", "wait_at_barrier"]

TIMEOUT = 60.0  # seconds: for what is to be heard at once


def compute(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Sum up in place, and say what came of it."""
    with vram.Group(rank=rank, size=size, at=at, timeout=TIMEOUT) as group:
        buffer = group.symmetric(100_003, "float32", device="host")
        buffer.array.numpy()[:] = np.random.default_rng(rank).standard_normal(100_003, np.float32)
        group.all_reduce(buffer)
        pipe.send(buffer.array.numpy().tobytes())
        buffer.close()
        group.barrier()


def outlive(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Say how far this rank is at each step, and go on when told: with what another rank is gone in the middle of."""
    try:
        group = vram.Group(rank=rank, size=size, at=at, timeout=TIMEOUT)
        pipe.send("formed")
        pipe.recv()
        buffer = group.symmetric(1000, "float32", device="host")
        buffer.array.numpy()[:] = 1
        pipe.send("made")
        pipe.recv()
        for _ in range(3):
            group.all_reduce(buffer)
        pipe.send("reduced")
        pipe.recv()
        group.barrier()
        pipe.send("done")
    except vram.errors.PeerGoneError as error:
        pipe.send(("gone", error.ranks))
        pipe.recv()  # who ends now is gone, too, and the others are to name the first


def _say_when_it_waits(group: vram.Group, pipe: Connection) -> None:
    while not group._signals.arrived:
        time.sleep(0.001)
    pipe.send("here")


def wait_at_barrier(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Say when this rank has come to a barrier, and how it ended; afterwards leave."""
    with vram.Group(rank=rank, size=size, at=at, timeout=TIMEOUT) as group:
        threading.Thread(target=_say_when_it_waits, args=(group, pipe), daemon=True).start()
        try:
            group.barrier()
            pipe.send("passed")
        except KeyboardInterrupt:
            pipe.send("interrupted")
        except vram.errors.VramError as error:
            pipe.send((type(error).__name__, str(error)))
        pipe.recv()
