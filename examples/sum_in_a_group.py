"""Processes that sum up what each of them has, in place, without a copy and without a server.

Each writes to an array of its own, which all of them have mapped. A rank that dies, or never comes, is an error that
names it on all the others: nobody waits for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time

import numpy as np

import vram

RANKS, ELEMENTS, STEPS = 4, 1 << 18, 20


def work(rank: int, at: str) -> None:
    """Be one of the ranks."""
    with (
        vram.Group(rank=rank, size=RANKS, at=at, timeout=60.0) as group,
        group.symmetric(ELEMENTS, "float32", device="host") as gradients,
    ):
        mine = gradients.array.numpy()
        group.barrier()  # all have met: the clock starts
        start = time.perf_counter()
        for step in range(STEPS):
            mine[:] = rank + step
            group.all_reduce(gradients)
            assert mine[0] == mine[-1] == sum(range(RANKS)) + RANKS * step
        took = time.perf_counter() - start
        best = np.array([took])
        group.all_reduce(best, "max")  # any array of the host: this one goes through memory of the group
        if rank == 0:
            each = best[0] / STEPS
            print(f"{RANKS} processes, {STEPS} sums of {mine.nbytes / 2**20:g} MiB: {each * 1e3:.2f} ms each")


def main() -> None:
    """Start the ranks, which meet at a path."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        at = os.path.join(directory, "sums.sock")
        ranks = [spawn.Process(target=work, args=(rank, at)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert all(rank.exitcode == 0 for rank in ranks)


if __name__ == "__main__":
    main()
