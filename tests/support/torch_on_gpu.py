"""What tests of memory that torch allocates on a real GPU have in common. What wants torch imports it: this is also
imported where there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import vram
from vram import driver as drivers
from vram.spec import Location

GPU = Location("cuda", 0)
MIB = 1 << 20


def free_bytes() -> int:
    """Return how many bytes are free on the GPU once its work is done."""
    import torch

    torch.cuda.synchronize()
    free, _ = drivers.get(GPU).mem_info(GPU)
    return free


def end(pools: Iterable[vram.TorchPool]) -> None:
    """Have torch give everything back that no tensor is on, and give the GPU what was kept for later."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    for pool in pools:
        pool.close()
    torch.cuda.empty_cache()
    for pool in pools:
        pool.trim()
    vram.memory.trim()
