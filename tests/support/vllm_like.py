"""What of vLLM its adapter derives from and calls, in a few lines: for tests where vLLM is not installed.

Doubles, and no more: they say what the adapter does with such classes, not that vLLM has them. That is for
tests/engines/check_vllm.py, which serves with vLLM itself.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

HUB = Path("/nonexistent")  # a test's own


class SleepModeBackend:
    """A backend's base."""

    def __init__(self) -> None:
        self._state = "RUNNING"

    def state(self) -> str:
        """As it says."""
        return self._state


class Worker:
    """A worker: where it allocates by itself, it says so."""

    def __init__(self, config: Any, load_format: str = "auto") -> None:
        self.vllm_config = SimpleNamespace(model_config=config, load_config=SimpleNamespace(load_format=load_format))
        self.device = None

    def _maybe_get_memory_pool_context(self, tag: str) -> str:
        return f"vLLM's {tag}"


class Factory:
    """A registry by name."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, kind: str) -> None:
        """Note it; once only."""
        if name in self._registry:
            raise ValueError(name)
        self._registry[name] = module, kind

    register_backend = register_engine


@dataclasses.dataclass(frozen=True)
class Key:
    """What the weights depend on: of files their headers, which are the same for all models of one shape."""

    checkpoint: str
    model_arch: str = "Tiny"


@dataclasses.dataclass
class LoadConfig:
    """How to load."""

    model_loader_extra_config: dict[str, Any]
    device: str | None = None
    load_format: str = "vram"


class IpcModelLoader:
    """The loader for weights of another process: a key, then a state, then a model of it."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config
        extra = dict(load_config.model_loader_extra_config)
        self.mode = extra.pop("mode", "zero_copy")
        self.fallback = extra.pop("fallback", True)
        self.is_draft = False
        if extra:
            raise ValueError(f"Unexpected extra config keys: {sorted(extra)}")

    def _fetch_entries(self, model_config: Any, *_: Any) -> Any:
        return self._state_for_key(Key("headers"))  # type: ignore[attr-defined]

    def _build_model(self, vllm_config: Any, model_config: Any, prefix: str, state: Any) -> Any:
        import torch

        if torch.device(self.load_config.device or vllm_config.device_config.device).index is None:
            raise RuntimeError("Cannot access accelerator device when none is available.")
        model = model_config.construct()
        modules = dict(model.named_modules(remove_duplicate=False))
        made: dict[str, Any] = {}
        for name, entry in state.entries.items():
            path, _, leaf = name.rpartition(".")
            tensor = entry.rebuild(0)
            if self.mode == "copy":
                tensor = tensor.clone()
            made[name] = torch.nn.Parameter(tensor, requires_grad=False) if entry.kind == "param" else tensor
            modules[path]._parameters.pop(leaf, None)
            modules[path]._buffers.pop(leaf, None)
            if entry.kind == "param":
                modules[path].register_parameter(leaf, made[name])
            else:
                modules[path].register_buffer(leaf, made[name])
        for name, canonical in state.aliases.items():
            path, _, leaf = name.rpartition(".")
            modules[path].register_parameter(leaf, made[canonical])
        if self.mode == "copy":
            self._send_release()  # type: ignore[attr-defined]
        return model

    def _fallback_load_config(self) -> LoadConfig:
        return dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={})

    def _fallback_load(self, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        return DefaultModelLoader(self._fallback_load_config()).load_model(vllm_config, model_config, prefix)


class DefaultModelLoader:
    """The one from disk, and from a hub whose cache is :data:`HUB`."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    def _prepare_weights(
        self, model: str, subfolder: str | None, revision: str | None, pt: bool, patterns: list[str] | None
    ) -> tuple[str, list[str], bool, str]:
        folder = Path(model)
        if not folder.is_dir():
            cached = HUB / f"models--{model.replace('/', '--')}"
            folder = cached / "snapshots" / (cached / "refs" / (revision or "main")).read_text()
        found = [str(path) for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))]
        if not found:
            raise RuntimeError(f"Cannot find any model weights with `{model}`")
        return str(folder), found, True, "model.safetensors.index.json"

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """What the configuration loads."""
        self._prepare_weights(model_config.model, None, model_config.revision, True, None)
        model_config.loads.append(model_config.model)
        return model_config.load()

    def load_weights(self, model: Any, model_config: Any) -> None:
        """From disk, in place."""
        model_config.loads.append("in place")

    def get_all_weights(self, model_config: Any, model: Any) -> Any:
        """What is in the checkpoint."""
        yield "checkpoint", model_config.model


def modules() -> dict[str, ModuleType]:
    """Return the modules, by name."""
    loaders: dict[str, type] = {}
    content: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.version": {"__version__": "0.33.2.dev3+cpu"},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.device_allocator": {"DEFERRABLE_TAGS": ("weights", "kv_cache")},
        "vllm.device_allocator.sleep_mode_backend": {
            "SleepModeBackend": SleepModeBackend,
            "SleepModeBackendFactory": Factory(),
        },
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": Factory(),
            "WeightTransferTrainerFactory": Factory(),
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {
            "_LOAD_FORMAT_TO_MODEL_LOADER": loaders,
            "register_model_loader": lambda name: lambda kind: loaders.__setitem__(name, kind),
        },
        "vllm.model_executor.model_loader.default_loader": {"DefaultModelLoader": DefaultModelLoader},
        "vllm.model_executor.model_loader.reload": {},
        "vllm.model_executor.model_loader.reload.layerwise": {
            "get_layerwise_info": lambda layer: layer.__dict__.setdefault(
                "info", SimpleNamespace(restore_device="meta")
            )
        },
        "vllm.model_executor.model_loader.weight_cache": {},
        "vllm.model_executor.model_loader.weight_cache.ipc_loader": {"IpcModelLoader": IpcModelLoader},
        "vllm.model_executor.model_loader.weight_cache.protocol": {
            "WeightCacheState": lambda **fields: SimpleNamespace(**fields),
            "check_ipc_quant_support": lambda model: None,
        },
        "vllm.model_executor.model_loader.weight_cache.utils": {"export_model_attrs": lambda model: {}},
    }
    made: dict[str, ModuleType] = {}
    for name, names in content.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(names)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, made[name])
    return made
