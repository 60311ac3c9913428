"""What a process published outlives it, however it ends: the restart attaches instead of loading again.

The maker is killed with SIGKILL in the middle of its work. Another process finds the same bytes at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"


def make(ready: Connection) -> None:
    """Publish a cache, and never get to its own end."""
    rows = np.arange(6_400_000, dtype="float32").reshape(100_000, 64)
    vram.publish("cache", {"rows": vram.asarray(rows, device=DEVICE)}, meta={"made-by": str(os.getpid())})
    ready.send("published")
    signal.pause()


def main() -> None:
    """Kill the maker, and go on with what it made."""
    with vram.private_keeper():
        ours, theirs = multiprocessing.Pipe()
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(theirs,))
        maker.start()
        theirs.close()  # the child has it: if it fails, recv() says so
        print("the maker says:", ours.recv())
        maker.kill()
        maker.join()
        print(f"the maker ended with status {maker.exitcode}")

        start = time.perf_counter()
        with vram.attach("cache") as lease:
            took = time.perf_counter() - start
            rows = lease["rows"].numpy() if DEVICE == "host" else lease["rows"].to_host()  # the CPU sees no GPU memory
            print(f"{lease.nbytes >> 20} MiB of process {lease.meta['made-by']}: {1e3 * took:.0f} ms, imports included")
            assert np.array_equal(rows.ravel(), np.arange(6_400_000, dtype="float32"))
        vram.remove("cache")


if __name__ == "__main__":
    main()
