"""vLLM on vram: a model loader, a sleep backend with the worker that allocates for it, and a weight transfer engine.

vLLM finds this by its entry point ``vllm.general_plugins`` and calls :func:`register` in each of its processes. That
says names; the classes are in modules beside this one, which vLLM imports when it is told to use one of them:

- ``--load-format vram``: :mod:`.vllm_loader`
- ``--enable-sleep-mode --sleep-mode-backend vram --worker-cls vram.engines.vllm_sleep.VramWorker``: :mod:`.vllm_sleep`
- ``WeightTransferConfig(backend="vram")``: :mod:`.vllm_transfer`

Written against vLLM 0.33.0.
"""

from __future__ import annotations

from typing import Any

from ..arrays.torch_pool import TorchPool
from ..errors import UsageError

__all__ = ["is_pooled", "pool", "register"]

_pools: dict[int, TorchPool] = {}  # by GPU; as long as the process


def register() -> None:
    """Tell vLLM the names. May be called again."""
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.model_executor import model_loader

    if "vram" not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend("vram", "vram.engines.vllm_sleep", "VramSleepModeBackend")
    for factory, name in (
        (WeightTransferEngineFactory, "VramWeightTransferEngine"),
        (WeightTransferTrainerFactory, "VramTrainerWeightTransferEngine"),
    ):
        if "vram" not in factory._registry:
            factory.register_engine("vram", "vram.engines.vllm_transfer", name)
    if "vram" not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        from .vllm_loader import VramModelLoader  # vLLM has no way to name a loader by a string

        model_loader.register_model_loader("vram")(VramModelLoader)


def pool(device: Any) -> TorchPool:
    """Return the pool of this process on a GPU, a ``torch.device``; make it if there is none yet.

    Raises
    ------
    UnsupportedError
        If this torch cannot have one; see :class:`vram.TorchPool`.
    """
    import torch

    ordinal = torch.cuda.current_device() if device is None or device.index is None else device.index
    found = _pools.get(ordinal)
    if found is None:
        found = _pools[ordinal] = TorchPool(f"cuda:{ordinal}")
    return found


def is_pooled(tensor: Any) -> bool:
    """Return whether a tensor is on memory of one of these pools."""
    for one in list(_pools.values()):
        try:
            one.tag_of(tensor)
        except UsageError:
            continue
        return True
    return False
