"""The pools of this process, one for each GPU, which vLLM's worker allocates in and its sleep backend puts to sleep."""

from __future__ import annotations

from typing import Any

from ..arrays.torch_pool import TorchPool

_pools: dict[int, TorchPool] = {}  # by GPU; as long as the process


def pool(device: Any) -> TorchPool:
    """Return the pool of this process on a GPU, a ``torch.device``; make it if there is none yet.
    Raises UnsupportedError if this torch cannot have one; see :class:`vram.TorchPool`."""
    import torch

    ordinal = torch.cuda.current_device() if device is None or device.index is None else device.index
    found = _pools.get(ordinal)
    if found is None:
        found = _pools[ordinal] = TorchPool(f"cuda:{ordinal}")
    return found
