"""What it takes to hand an array to another actor of Ray's and to read it there, by VRAM and by Ray's object store.

By VRAM a vram array, which is not copied, and a numpy array, which is; by the store a numpy array.

    python benchmarks/engines/ray_rates.py [--sizes 64MiB 1GiB] [--rounds 5]

All in one run, in turn, on one node: an actor has an array that it filled before, and the time is from the call that
returns it until another actor has read it and said so. Each round hands over an array that was not handed over before.
It is read in three ways: its first element, one element of each page, and all of it (the sum); for comparison once more
by the same actor, which has nothing handed over. It needs Ray, and memory: three times the largest size in the object
store, as much for vram.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # no token in the home directory; the cluster ends with this

import numpy as np
import ray

import vram
from vram.engines.ray import register
from vram.spec import parse_size

SECONDS = 120.0


def actors() -> tuple[Any, Any]:
    """Make one that fills and hands over, and one that reads."""
    register()

    @ray.remote(num_cpus=1)
    class Source:
        def fill(self, nbytes: int, ours: bool, value: int) -> None:
            self.array = vram.empty((nbytes // 8,), "u8", device="host") if ours else np.empty(nbytes // 8, "u8")
            (self.array.numpy() if ours else self.array).fill(value)

        @ray.method(tensor_transport="VRAM")
        def by_vram(self) -> Any:
            array, self.array = self.array, None
            return array

        def by_store(self) -> Any:
            array, self.array = self.array, None
            return array

    @ray.remote(num_cpus=1, enable_tensor_transport=True)
    class Sink:
        def read(self, array: Any, step: int) -> tuple[int, float]:
            seen = array.numpy() if isinstance(array, vram.Array) else array
            total = int(seen[::step].sum())
            began = time.perf_counter()
            assert int(seen[::step].sum()) == total
            return total, time.perf_counter() - began

    return Source.remote(), Sink.remote()


WAYS = {"vram array": (True, "by_vram"), "numpy by VRAM": (False, "by_vram"), "object store": (False, "by_store")}


def hand_over(source: Any, sink: Any, nbytes: int, way: str, step: int, value: int) -> tuple[float, float]:
    """Return the seconds of one array handed over and read, and those of reading it once more."""
    ours, method = WAYS[way]
    ray.get(source.fill.remote(nbytes, ours, value), timeout=SECONDS)
    began = time.perf_counter()
    total, again = ray.get(sink.read.remote(getattr(source, method).remote(), step), timeout=SECONDS)
    took = time.perf_counter() - began
    assert total == value * (nbytes // 8 // step), "it is another array"
    return took - again, again


def main() -> int:
    """Print a line for each size and way to read, with the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1MiB", "64MiB", "1GiB"])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    sizes = {size: parse_size(size) for size in given.sizes}
    with vram.private_keeper() as keeper:
        os.environ["VRAM_KEEPER"] = keeper.path
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, configure_logging=False,
            object_store_memory=max(3 * max(sizes.values()), 100 << 20),
        )  # fmt: skip
        try:
            source, sink = actors()
            print(
                f"ray {ray.__version__}, numpy {np.__version__}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
            )
            for size, nbytes in sizes.items():
                for what, step in (("its first element", nbytes // 8), ("each page", 512), ("all of it", 1)):
                    rounds = [
                        [hand_over(source, sink, nbytes, way, step, number) for way in WAYS]
                        for number in range(given.rounds + 1)
                    ][1:]  # the first has connections and memory to make
                    each = list(zip(*rounds, strict=True))
                    seconds = {way: sorted(took for took, _ in those) for way, those in zip(WAYS, each, strict=True)}
                    again = statistics.median(least for _, least in each[0])
                    print(
                        f"{size}, {what} read: "
                        + ", ".join(
                            f"{way} {statistics.median(all_of) * 1e3:.1f} ms ({all_of[0] * 1e3:.1f} to "
                            f"{all_of[-1] * 1e3:.1f})"
                            for way, all_of in seconds.items()
                        )
                        + f"; read once more {again * 1e3:.1f} ms (load {os.getloadavg()[0]:.1f})",
                        flush=True,
                    )
        finally:
            ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
