"""One copy of a model's weights for many worker processes.

The first worker that comes loads and publishes; the others attach what it published. Every worker computes on the same
physical memory, and it stays when the worker that loaded it has gone. Needs a keeper: here a private one, else run
`vram keep` and leave out the line that says `private_keeper`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

import numpy as np

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"
WORKERS, WIDTH = 4, 512


def load() -> dict[str, vram.Array]:
    """Stand for reading a checkpoint, which takes long and needs the memory once."""
    print(f"process {os.getpid()} loads")
    generator = np.random.default_rng(7)
    layers = [generator.standard_normal((WIDTH, WIDTH), dtype="float32") for _ in range(8)]
    return {f"layer.{n}": vram.asarray(layer, device=DEVICE) for n, layer in enumerate(layers)}


def work(number: int) -> tuple[int, int, float]:
    """Attach the model and run it once."""
    with vram.attach_or_publish("model", load, expect={"revision": "7"}, timeout=60.0) as lease:
        x = np.full(WIDTH, 1.0 + number, "float32")
        for name in sorted(lease):
            x = np.tanh(lease[name].to_host() @ x)  # with torch on a GPU: lease.torch()[name]
        return number, lease.version, float(x.sum())


def main() -> None:
    """Run four workers at once, and count what is in memory."""
    with vram.private_keeper():
        with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
            for number, version, answer in pool.imap(work, range(WORKERS)):
                print(f"worker {number}: version {version}, answer {answer:.4f}")
        held = vram.statistics()  # the workers have ended, and the model is still there
        print(f"{held.entries} entry, {held.nbytes >> 20} MiB, loaded once")
        assert held.entries == 1 and vram.entry("model").version == 1


if __name__ == "__main__":
    main()
