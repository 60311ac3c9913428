"""A pool of multiprocessing: arrays go to the workers by reference, whatever their size.

Each worker reads its part of one array and writes its part of another; nothing is pickled but who owns the memory.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time

import numpy as np

import vram

ROWS, PARTS = 200_000, 8


def normalise(part: slice, rows: vram.Array, out: vram.Array) -> int:
    """Scale some rows to length one."""
    some = rows.numpy()[part]
    out.numpy()[part] = some / np.linalg.norm(some, axis=1, keepdims=True)
    return len(some)


def main() -> None:
    """Normalise 100 MB of rows in as many parts as there are tasks."""
    rows = vram.asarray(np.random.default_rng(3).standard_normal((ROWS, 128), dtype="float32"), device="host")
    out = vram.zeros((ROWS, 128), "float32", device="host")
    bounds = np.linspace(0, ROWS, PARTS + 1, dtype=int).tolist()
    tasks = [(slice(start, end), rows, out) for start, end in itertools.pairwise(bounds)]

    context = multiprocessing.get_context("spawn")  # never fork where there are threads or GPUs
    with context.Pool(2) as pool:
        start = time.perf_counter()
        done = sum(pool.starmap(normalise, tasks, chunksize=1))
        took = time.perf_counter() - start
    print(f"{done} rows of {rows.nbytes >> 20} MiB in {PARTS} tasks, {took:.2f} s, the workers' start included")
    assert done == ROWS and np.allclose(np.linalg.norm(out.numpy(), axis=1), 1.0, atol=1e-5)


if __name__ == "__main__":
    sys.exit(main())
