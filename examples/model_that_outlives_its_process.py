"""A torch model sleeps and wakes, its process is killed, and another process computes the same from the same memory.

On a GPU its parameters come from a pool that PyTorch allocates from; on the host they are arrays that PyTorch sees.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"
WIDTH, LAYERS = 1024, "01234567"


def run(weights: dict[str, Any]) -> float:
    """Compute with the weights where they are."""
    x = torch.ones(WIDTH, device=weights["0"].device)
    for _, layer in sorted(weights.items()):
        x = torch.tanh(layer @ x)
    return float(x.sum())


def make(pipe: Connection) -> None:
    """Make a model, put it to sleep, wake it and publish it; then wait for the end."""
    if DEVICE == "host":
        arrays = {name: vram.empty((WIDTH, WIDTH), "float32", device="host") for name in LAYERS}
        weights = {name: array.torch() for name, array in arrays.items()}
    else:
        pool = vram.TorchPool(DEVICE)
        with pool.use("weights"):
            arrays = weights = {name: torch.empty(WIDTH, WIDTH, device=DEVICE) for name in LAYERS}
    for weight in weights.values():
        weight.normal_(std=WIDTH**-0.5)
    before = run(weights)
    slept = vram.sleep(arrays.values(), to="/var/tmp") if DEVICE == "host" else pool.sleep(offload=["weights"])
    woke = vram.wake(arrays.values()) if DEVICE == "host" else pool.wake()  # at the same addresses
    assert run(weights) == before
    assert not vram.publish("model", arrays, whole=True).copied
    pipe.send((before, f"{slept.freed >> 20} MiB asleep in {slept.seconds:.3f} s, back in {woke.seconds:.3f} s"))
    pipe.recv()


if __name__ == "__main__":
    with vram.private_keeper():
        ours, theirs = multiprocessing.Pipe()
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(theirs,))
        maker.start()
        theirs.close()
        answer, told = ours.recv()
        maker.kill()  # SIGKILL
        maker.join()
        with vram.attach("model") as lease:
            assert run(lease.torch()) == answer
        print(f"{told}; process {maker.pid} was killed, and its model still says {answer:.4f}")
