"""What the ranks of a group do in processes of their own: each is told the path, its rank and the size."""

from __future__ import annotations

import os
import threading
import time
import warnings
from multiprocessing.connection import Connection

import numpy as np

import vram

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
        saying = threading.Thread(target=_say_when_it_waits, args=(group, pipe), daemon=True)
        saying.start()
        try:
            group.barrier()
            came: object = "passed"
        except KeyboardInterrupt:
            came = "interrupted"
        except vram.errors.VramError as error:
            came = (type(error).__name__, str(error))
        saying.join(TIMEOUT)
        pipe.send(came)
        pipe.recv()


def call_briefly(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Make the call that it is told, with little patience, and say how it ended; leave when the pipe ends."""
    with vram.Group(rank=rank, size=size, at=at, timeout=TIMEOUT) as group:
        pipe.send("formed")
        call = pipe.recv()
        try:
            if call == "barrier":
                group.barrier(timeout=0.3)
            else:
                group.symmetric(4, device="host", timeout=0.3).close()
            pipe.send(("passed", "", ()))
        except vram.errors.VramError as error:
            pipe.send((type(error).__name__, str(error), getattr(error, "ranks", ())))
        pipe.recv()


def fork_and_wait(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Fork a child that finds itself no rank, and lives on; the others wait for this rank, and say what came of it."""
    group = vram.Group(rank=rank, size=size, at=at, timeout=TIMEOUT)
    if rank != 1:
        try:
            group.barrier()
        except vram.errors.VramError as error:
            pipe.send((type(error).__name__, str(error)))
        pipe.recv()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        group.barrier()
    except vram.errors.VramError as error:
        kind = type(error).__name__
    group.close()
    pipe.send((kind, group._signals.has_given_up))
    try:
        pipe.recv()
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)
