"""Two jobs share the memory of one machine: each sleeps while the other works, and finds its bytes where they were.

What sleeps keeps its addresses, so whatever remembers them (views, tensors, captured graphs) is good again afterwards.
"""

from __future__ import annotations

import sys
import tempfile
import time

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"
ROWS = 64 << 10  # of 1 KiB: 64 MiB each


def main() -> None:
    """Let a model and a cache take turns; the model's bytes are needed again, the cache's are not."""
    model = vram.zeros((ROWS, 256), "float32", device=DEVICE)
    cache = vram.zeros((ROWS, 256), "float32", device=DEVICE)
    model.fill(3)
    cache.fill(5)
    where = model.address

    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        start = time.perf_counter()
        kept = vram.sleep(model, to="host" if DEVICE != "host" else directory)
        dropped = vram.sleep(cache, to=None)
        print(f"asleep in {time.perf_counter() - start:.3f} s: {(kept.freed + dropped.freed) >> 20} MiB are free")
        try:
            model.to_host()
        except vram.errors.AsleepError as error:
            print("meanwhile:", error)

        start = time.perf_counter()
        woken = vram.wake([model, cache])
        print(f"awake in {time.perf_counter() - start:.3f} s, {woken.discarded >> 20} MiB without their bytes")
    assert model.address == where and (model.to_host() == 3).all() and (cache.to_host() == 0).all()


if __name__ == "__main__":
    main()
