"""Reinforcement learning: a trainer writes new weights under those who use them, and no step sees half of them.

The rollout process attaches once. Each of its steps is a section in which all weights are of one version.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"
UPDATES = 50


def show(array: vram.Array) -> Any:
    """Return an array to compute with, over the same memory."""
    return array.numpy() if DEVICE == "host" else array.torch()


def roll_out(results: Connection) -> None:
    """Take steps until the last version, and say which versions were seen whole."""
    steps, seen = 0, set()
    with vram.attach("policy", timeout=60.0) as lease:
        results.send("attached")
        version = 0
        while version <= UPDATES:
            with lease.reading() as version:
                first, last = (show(lease[name]) for name in ("first", "last"))  # the shared memory, not a copy
                assert (first == first[0, 0]).all() and (last == first[0, 0]).all(), "half an update was seen"
            seen.add(version)
            steps += 1
    results.send((steps, len(seen)))


def main() -> None:
    """Train: here, write the number of the update into every weight."""
    with vram.private_keeper():
        weights = {name: vram.zeros((1024, 1024), "float32", device=DEVICE) for name in ("first", "last")}
        vram.publish("policy", weights, updatable=True)

        ours, theirs = multiprocessing.Pipe()
        worker = multiprocessing.get_context("spawn").Process(target=roll_out, args=(theirs,))
        worker.start()
        theirs.close()
        print("the rollout process has", ours.recv())
        for number in range(1, UPDATES + 1):
            with vram.update("policy", timeout=60.0) as arrays:  # waits for steps that are under way
                for array in arrays.values():
                    array.fill(number)
        steps, versions = ours.recv()
        worker.join()
        print(f"{UPDATES} updates of 8 MiB in place; {steps} steps, each of one version, {versions} of which were used")


if __name__ == "__main__":
    main()
