"""Updates of memory on GPUs: where, and what fills and copies it."""

from __future__ import annotations

from typing import Any

import vram
from vram import driver as drivers
from vram.spec import Location

GPU, OTHER = "cuda:0", "cuda:1"


HERE = Location("cuda", 0)


def fill(array: vram.Array, value: int, stream: int) -> None:
    """Fill an array with a byte, on a stream."""
    driver: Any = drivers.get(HERE)
    driver.fill_async(array.address, value, array.nbytes, stream)


def copied(source: vram.Array, target: vram.Array, stream: int) -> None:
    """Copy one array into another, on a stream."""
    driver: Any = drivers.get(HERE)
    driver.copy_async(target.address, source.address, source.nbytes, stream)
