"""A safetensors file once into shared memory, and what a reader finds out about it before it attaches.

`vram publish-file`, `vram ls` and `vram show` are the same from a command line.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"


def main() -> None:
    """Write a small checkpoint, publish it, and look at it."""
    with vram.private_keeper(), tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.safetensors")
        layers = {f"layer.{n}.weight": np.full((512, 512), n, "float32") for n in range(32)}
        save_file(layers, path, metadata={"format": "pt", "trained-by": "an example"})

        start = time.perf_counter()
        vram.publish_file("model", str(path), device=DEVICE, meta={"revision": "abc123"})
        print(f"published {path.stat().st_size >> 20} MiB in {1e3 * (time.perf_counter() - start):.0f} ms")

        entry = vram.entry("model")
        print(f"{entry.name} version {entry.version}: {dict(entry.meta)}")
        try:
            vram.attach("model", expect={"revision": "def456"})
        except vram.errors.MismatchError as error:
            print("refused, and nothing was mapped:", error)
        with vram.attach("model", expect={"revision": "abc123"}) as lease:
            print(f"{len(lease)} arrays, {lease.nbytes >> 20} MiB, on {lease['layer.0.weight'].device}")
            weights = lease.numpy() if DEVICE == "host" else {name: lease[name].to_host() for name in lease}
            assert all((weights[f"layer.{n}.weight"] == n).all() for n in range(32))


if __name__ == "__main__":
    main()
