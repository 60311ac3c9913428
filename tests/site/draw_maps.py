"""Draws the maps that test_map.py looks at: ``python draw_maps.py DIRECTORY``.

An entry of two versions whose array and metadata are called what nobody should call them; one of 10,000 arrays; a
process with memory that is asleep, that may grow, and that is shared.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import vram

MIB = 1 << 20
EVIL = "<script>document.title='run'</script><img src=/x onerror=\"document.title='run'\">'\"><h1>no</h1>\x1b[31m\u202e"
LONG = "layer." * 150


def main(directory: Path) -> None:
    """Draw them as SVG and as pages."""
    with vram.private_keeper() as keeper:
        vram.publish("model", {"w": np.ones(3 * MIB, "uint8")}, keeper=keeper)
        arrays = {"w": np.ones(3 * MIB, "uint8"), EVIL: np.ones(2 * MIB, "uint8"), LONG: np.ones(MIB, "uint8")}
        with vram.attach("model", keeper=keeper):
            vram.publish("model", arrays, meta={EVIL: EVIL, "long": LONG * 2}, keeper=keeper)
            save(vram.memory_map("model", keeper=keeper), directory / "model")
        with vram.zeros(80 * MIB, "uint8", device="host") as big:
            many = {f"layer.{number}": big[number * 4096 : number * 4096 + 4000] for number in range(10_000)}
            vram.publish("many", many, keeper=keeper)
        save(vram.memory_map("many", keeper=keeper), directory / "many")
        with (
            vram.attach("model", keeper=keeper),
            vram.zeros((9, MIB), "uint8", device="host", capacity=24, chunk="4MiB"),
            vram.zeros(4 * MIB, "uint8", device="host") as asleep,
        ):
            vram.sleep(asleep, to=None)
            save(vram.memory_map(), directory / "process")


def save(drawn: object, where: Path) -> None:
    """Write a map in both forms."""
    for end in (".svg", ".html"):
        drawn.save(where.with_suffix(end))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
