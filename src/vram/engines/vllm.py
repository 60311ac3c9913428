"""vLLM on vram: a model loader, a sleep backend with the worker that allocates for it, and a weight transfer engine.

vLLM finds this by its entry point ``vllm.general_plugins`` and calls :func:`register` in each of its processes. That
says names; the classes are in modules beside this one, which vLLM imports when it is told to use one of them:

- ``--load-format vram``: :mod:`.vllm_loader`
- ``--enable-sleep-mode --sleep-mode-backend vram --worker-cls vram.engines.vllm_sleep.VramWorker``: :mod:`.vllm_sleep`
- ``WeightTransferConfig(backend="vram")``: :mod:`.vllm_transfer`

Written against vLLM 0.33. Any other version is told so in its log, and loads the format ``vram`` plainly.
"""

from __future__ import annotations

import logging

__all__ = ["register"]

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM configures the logger "vllm", and no other
_WORKS_WITH = "0.33"


def register() -> None:
    """Tell vLLM the names. May be called again.

    vLLM calls this wherever vram is installed, wanted or not: a vLLM that lacks what this needs runs on without it.
    """
    try:
        _check_version()
        _register()
    except (ImportError, AttributeError) as error:
        _log.warning(
            "vram's adapter works with vLLM %s, and not with this one: %s. Nothing is shared: the load format 'vram' "
            "loads plainly, and there is no sleep backend and no weight transfer of that name",
            _WORKS_WITH, error,
        )  # fmt: skip
        _register_plain_loader()


def _check_version() -> None:
    """Raise :class:`ImportError` if this is no vLLM that the adapter was written for."""
    from vllm.version import __version__

    # Its classes have other signatures in each minor version, and an error comes only when a model is loaded.
    if __version__.split(".")[:2] != _WORKS_WITH.split("."):
        raise ImportError(f"its version is {__version__}")


def _register_plain_loader() -> None:
    """Have ``--load-format vram`` load as ever, if this vLLM has loaders that can be registered at all."""
    try:
        from vllm.model_executor import model_loader

        from .vllm_plain import PlainLoader

        if "vram" not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
            model_loader.register_model_loader("vram")(PlainLoader)
    except (ImportError, AttributeError) as error:
        _log.warning("the load format 'vram' is not there: %s", error)


def _register() -> None:
    # All that may be missing is looked for before the first name is said: a vLLM gets all of them or none.
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.model_executor import model_loader

    from .vllm_loader import VramModelLoader  # vLLM has no way to name a loader by a string

    load_formats, register_model_loader = model_loader._LOAD_FORMAT_TO_MODEL_LOADER, model_loader.register_model_loader
    places = (
        (SleepModeBackendFactory._registry, SleepModeBackendFactory.register_backend, "sleep", "VramSleepModeBackend"),
        (
            WeightTransferEngineFactory._registry,
            WeightTransferEngineFactory.register_engine,
            "transfer",
            "VramWeightTransferEngine",
        ),
        (
            WeightTransferTrainerFactory._registry,
            WeightTransferTrainerFactory.register_engine,
            "transfer",
            "VramTrainerWeightTransferEngine",
        ),
    )
    for known, say, module, name in places:
        if "vram" not in known:
            say("vram", f"vram.engines.vllm_{module}", name)
    if "vram" not in load_formats:
        register_model_loader("vram")(VramModelLoader)
