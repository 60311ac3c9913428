"""Three engines share one model, sleep together until the GPU is empty, and come back at the same addresses.

On the host nothing is parked: there an engine that sleeps gives back its mappings only.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"
ENGINES = 3


def serve(jobs: Connection) -> None:
    """Compute with the weights as they are told to; sleep and wake in between."""
    with vram.attach("model", timeout=60.0) as lease:
        addresses = {name: array.address for name, array in lease.items()}
        while (job := jobs.recv()) is not None:
            if job == "sleep":
                jobs.send(lease.sleep())
                continue
            version = lease.wake()  # whoever is first brings parked weights back; awake, it does nothing
            assert addresses == {name: array.address for name, array in lease.items()}
            jobs.send((version, float(sum(array.to_host().sum() for array in lease.values()))))


def main() -> None:
    """Publish a model, and have all engines compute, sleep, and compute again."""
    context = multiprocessing.get_context("spawn")
    with vram.private_keeper():
        weights = {f"layer{n}": np.full((512, 1024), n, np.float32) for n in range(8)}
        vram.publish("model", vram.pack(weights, device=DEVICE))  # nobody else keeps what was packed
        expected = float(sum(layer.sum() for layer in weights.values()))
        engines = []
        for _ in range(ENGINES):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,))
            process.start()
            engines.append((process, ours))
        for job in ("compute", "sleep", "compute"):
            began = time.perf_counter()
            for _, pipe in engines:
                pipe.send(job)
            answers = [pipe.recv() for _, pipe in engines]
            if job == "sleep" and DEVICE != "host":
                report = vram.park("model")
                print(f"parked: the GPU has {report.freed >> 20} MiB back")
            assert job == "sleep" or {total for _, total in answers} == {expected}
            asleep = sum(holder.is_asleep for holder in vram.holders("model"))
            print(f"{job}: {asleep} of {ENGINES} asleep, {time.perf_counter() - began:.3f} s")
        for process, pipe in engines:
            pipe.send(None)
            process.join()


if __name__ == "__main__":
    main()
