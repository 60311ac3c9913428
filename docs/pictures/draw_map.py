"""Draws map.svg and map-process.svg: ``python docs/pictures/draw_map.py``, in a second.

A model that two processes have attached, and the process that has published it. The memory is made up, and as real as
any: a few MiB on the host, behind a keeper of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

import vram

MIB = 1 << 20
READER = """
import sys, vram
lease = vram.attach("qwen", keeper=vram.Keeper(sys.argv[1], label=sys.argv[2]))
print(flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Publish a model, have two processes attach it, and draw it."""
    out = Path(__file__).with_name("map.svg")
    sizes = {"embed": 9, "attention.0": 4, "mlp.0": 8, "attention.1": 4, "mlp.1": 8, "lm_head": 5}
    weights = {name: np.ones((size, MIB), "uint8") for name, size in sizes.items()}
    weights |= {f"norm.{number}": np.ones(256, "uint8") for number in range(40)}
    with vram.private_keeper() as keeper:
        vram.publish("qwen", weights, meta={"step": "12000"}, keeper=keeper)
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, keeper.path, f"worker {number}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for number in range(2)
        ]
        for reader in readers:
            reader.stdout.readline()
        vram.memory_map("qwen", keeper=keeper).save(out)
        with vram.attach("qwen", keeper=keeper) as lease, made() as (cache, buffer, asleep):
            view = lease["mlp.0"].numpy()
            vram.memory_map(keeper=keeper).save(out.with_name("map-process.svg"))
            vram.wake(asleep)
            print(out, view.shape, cache, buffer)
        for reader in readers:
            reader.communicate()


class made:
    """A cache that may grow, a buffer that has left the process, and what is asleep."""

    def __enter__(self) -> tuple[vram.Array, vram.Array, vram.Array]:
        self.arrays = (
            vram.zeros((9, MIB), "uint8", device="host", capacity=24, chunk="4MiB"),
            vram.zeros((6, MIB), "uint8", device="host"),
            vram.zeros((12, MIB), "uint8", device="host"),
        )
        vram.sleep(self.arrays[2], to=None)
        return self.arrays

    def __exit__(self, *_: object) -> None:
        for array in self.arrays:
            array.close()


if __name__ == "__main__":
    main()
