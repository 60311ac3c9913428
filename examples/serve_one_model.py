"""One copy of a model's weights for many worker processes.

The first worker loads and publishes; the others attach. All compute on the same physical memory, which stays when the
worker that loaded it has gone. The keeper is a private one here; or run `vram keep`, without `private_keeper`.
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
    """Stand for reading a checkpoint, which takes long."""
    print(f"process {os.getpid()} loads")
    layers = np.random.default_rng(7).standard_normal((8, WIDTH, WIDTH), dtype="float32")
    return {f"layer.{n}": vram.asarray(layer, device=DEVICE) for n, layer in enumerate(layers)}


def run(weights: vram.Lease, number: int) -> float:
    """Run the model on the shared memory itself: nothing is copied."""
    if DEVICE == "host":
        x = np.full(WIDTH, 1.0 + number, "float32")
        for _, layer in sorted(weights.numpy().items()):
            x = np.tanh(layer @ x)
        return float(x.sum())
    import torch

    y = torch.full((WIDTH,), 1.0 + number, device=DEVICE)
    for _, layer in sorted(weights.torch().items()):
        y = torch.tanh(layer @ y)
    return float(y.sum())


def work(number: int) -> tuple[int, int, float]:
    """Attach the model and run it once."""
    with vram.attach_or_publish("model", load, expect={"revision": "7"}, timeout=60.0) as lease:
        return number, lease.version, run(lease, number)


def main() -> None:
    """Run four workers at once, and count what is in memory."""
    with vram.private_keeper():
        with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
            for number, version, answer in pool.imap(work, range(WORKERS)):
                print(f"worker {number}: version {version}, answer {answer:.4f}")
        held = vram.entry("model")  # the workers have ended, and the model is still there
        print(f"{held.nbytes >> 20} MiB, loaded once: version {held.version}")


if __name__ == "__main__":
    main()
