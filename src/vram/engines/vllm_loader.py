"""``--load-format vram``: a model whose parameters are shared with every other engine that serves the same weights.

The first engine loads as vLLM would and publishes the result, for which the others wait; vLLM's own loader for shared
weights registers what is attached. Parameters are read-only; buffers are copied, since vLLM writes to some later. An
entry's name has a digest of files, ``WeightCacheKey``, configuration, variables and GPU, before the model is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_cache.ipc_loader import IpcModelLoader
from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheState, check_ipc_quant_support
from vllm.model_executor.model_loader.weight_cache.utils import export_model_attrs

import vram

from ..entries.lease import Lease
from ..errors import (
    PeerGoneError,
    UsageError,
    VramError,
)
from .strides import flat
from .vllm_checkpoint import Checkpoint, RecordingLoader, find, plain
from .vllm_pools import pool

logger = init_logger(f"vllm.{__name__}")  # vLLM configures the logger "vllm", and no other

_LAYOUT = "vram.layout"  # the array that says what the others are
# vLLM's variables that choose kernels: its key has the options that do, and not these.
_LAYING_OUT = re.compile(
    r"VLLM_\w*(MOE|GEMM|FP4|FP8|INT4|W4A8|AWQ|QUANT|MARLIN|PREPACK|PADDING|AITER|MLA|KERNEL|EMULATION|HUMMING|MATMUL"
    r"|PARTITION|REPLICATE_EMBED|FUSION|CONTIG)"
)
# Parameters that a kernel (Marlin's) leaves empty because it needs no such numbers, and no weights.
_EMPTY = ("g_idx", "g_idx_sort_indices", "zp", "zeros", "zero_point")
_PACKED = {"_cpu_unpacked_conv_weight"}  # attributes of a layer whose parameter was packed, and would be once more
_OTHERS = ("socket_path", "socket_dir")  # what the class below takes, and there is no use for here


class _Entry:
    """One tensor, as vLLM's loader takes it."""

    def __init__(self, tensor: Any, kind: str) -> None:
        self.kind = kind
        self._tensor = tensor

    def rebuild(self, device_index: int) -> Any:
        """Return it; what is written to later, in memory of this process."""
        return self._tensor if self.kind == "param" else self._tensor.clone()


class VramModelLoader(IpcModelLoader):  # type: ignore[misc]
    """Attach the weights of a model (its lease is ``vram_lease``), or load and publish them. Its extra configuration
    has ``keeper``, ``name`` (prefix of entries), ``owner`` (uid whose weights are taken), ``timeout`` (seconds, for
    another engine's load), ``digest`` (names by bytes), and vLLM's ``mode`` and ``fallback``."""

    load_config: Any

    def __init__(self, load_config: Any) -> None:
        extra = dict(load_config.model_loader_extra_config or {})
        self._keeper = extra.pop("keeper", None)
        self._prefix = str(extra.pop("name", "vllm"))
        self._owner = int(extra.pop("owner", os.getuid()))
        self._timeout: float | None = extra.pop("timeout", None)
        self._by_bytes = bool(extra.pop("digest", False))
        if unused := sorted(set(extra).intersection(_OTHERS)):
            raise ValueError(f"load format 'vram' takes no {unused}: a keeper serves all GPUs, at one path (keeper)")
        super().__init__(dataclasses.replace(load_config, model_loader_extra_config=extra))
        self._device = "cpu"
        self._lease: Lease | None = None
        self._checkpoint: Checkpoint | None = None
        self._configuration: object = None
        self._read: set[str] = set()  # files that the model was loaded from
        # The use of the key, once the class above has computed it.
        self._then: Callable[[dict[str, str], str], Any] = self._published_bytes

    # -- what vLLM calls ------------------------------------------------------------------------------------------
    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Return the bytes that are on the GPU already, published, and that this engine will not need.
        Parked weights count as what this engine loads, since it wakes them."""
        if self.mode != "zero_copy":
            return 0
        self._then = self._published_bytes
        try:
            return int(self._with_key(vllm_config, vllm_config.model_config))
        except UsageError:
            return 0  # load_model says why

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Return the model, with its parameters shared."""
        if vllm_config.parallel_config.enable_eplb:
            raise ValueError("load format 'vram' shares parameters, and EPLB moves them between ranks: leave one out")
        if self.mode == "zero_copy" and getattr(vllm_config, "weight_transfer_config", None) is not None:
            raise ValueError(
                "a weight transfer writes to parameters, and load format 'vram' shares them read-only: start with "
                '--model-loader-extra-config \'{"mode": "copy"}\', or without --weight-transfer-config'
            )
        speculative = vllm_config.speculative_config
        self.is_draft = speculative is not None and model_config is speculative.draft_model_config
        loaded: list[Any] = []
        failed: list[BaseException] = []

        def load() -> dict[str, Any]:
            try:
                loaded.append(self._fallback_load(vllm_config, model_config, prefix))
            except BaseException as error:
                failed.append(error)
                raise
            check_ipc_quant_support(loaded[0])
            _check_whole(loaded[0])
            self._check_files()
            return _contents(loaded[0])

        self._then = partial(self._attach_or_publish, load)
        try:
            return self._shared(vllm_config, model_config, prefix, loaded)
        except BaseException as error:
            self._send_release()
            if not self.fallback or error in failed or not isinstance(error, Exception):
                raise
            # As text: a record with the error in it would keep what its frames refer to.
            said = str(error) if isinstance(error, VramError) else "".join(traceback.format_exception(error))
            logger.warning("The weights are not shared: %s", said)
        # The error is gone here, and with it what its frames refer to.
        if loaded:
            return loaded[0]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self._fallback_load(vllm_config, model_config, prefix)

    def _shared(self, vllm_config: Any, model_config: Any, prefix: str, loaded: list[Any]) -> Any:
        """Return the model with shared parameters. In `loaded` is one that is whole, and this engine's own, or none."""
        state = self._with_key(vllm_config, model_config)
        lease = self._lease
        with self._memory(vllm_config.model_config) as sleeps:
            if loaded:
                model = self._rebind(loaded.pop(), state, sleeps)
            else:
                model = self._build_model(vllm_config, model_config, prefix, state)
                self._reload_on(model, vllm_config)
        if lease is not None and not lease.is_closed:
            model.vram_lease = lease
            weakref.finalize(model, lease.close).atexit = False
            model.vram_checkpoint = self._checkpoint
        self._lease = None
        return model

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load again, in place. Shared parameters stay: of such a model, only buffers are set."""
        lease = getattr(model, "vram_lease", None)
        if lease is None:
            DefaultModelLoader(self._fallback_load_config()).load_weights(model, model_config)
            return
        buffers = dict(model.named_buffers())
        for name, entry in _state(lease).entries.items():
            if entry.kind == "buffer" and name in buffers:
                buffers[name].copy_(entry.rebuild(0))

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        """Return the checkpoint's weights, for vLLM's ``reload_weights``; none for a model that shares its own, which
        nobody can write to: vLLM gives each layer its own back. Raises UsageError if other weights are asked for."""
        shared: Checkpoint | None = getattr(model, "vram_checkpoint", None)
        if shared is None:
            weights: Iterator[tuple[str, Any]] = DefaultModelLoader(self._fallback_load_config()).get_all_weights(
                model_config, model
            )
            return weights
        if shared.identity() != self._find(model_config).identity():
            raise UsageError(
                f"this model's parameters are those of {shared.model!r} as it was when they were loaded, shared with "
                f"other engines and read-only: to load {model_config.model!r} as it is now into it, start it with "
                '--model-loader-extra-config \'{"mode": "copy"}\''
            )
        logger.info("The weights of %r are shared, and are what they were: nothing is read again", shared.model)
        return iter(())

    # -- what the class above calls -------------------------------------------------------------------------------
    def _state_for_key(self, cache_key: Any, *, is_reload: bool = False) -> Any:
        if self._checkpoint is None:
            raise UsageError("which files the weights are loaded from was not looked up: use load_model()")
        fields = {
            **dataclasses.asdict(cache_key),
            "checkpoint": self._checkpoint.identity(),
            "configuration": self._configuration,
            "gpu": self._device,
        }
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()
        notes = self._checkpoint.notes(str(getattr(cache_key, "model_arch", "")))
        return self._then({**notes, "weights": digest}, f"{self._prefix}/{digest[:32]}")

    def _fallback_load(self, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        loader = RecordingLoader(self._fallback_load_config())
        model = loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        self._read = loader.read
        return model

    def _build_model(self, vllm_config: Any, model_config: Any, prefix: str, state: Any) -> Any:
        """Build it on a device with a number: without one, vLLM asks the accelerator for it, also on the host."""
        config = self.load_config
        device = torch.device(config.device or vllm_config.device_config.device)
        if device.type == "cpu" and device.index is None:
            self.load_config = dataclasses.replace(config, device="cpu:0")
        try:
            return super()._build_model(vllm_config, model_config, prefix, state)
        finally:
            self.load_config = config

    def _watch_daemon(self) -> None:
        """Nothing is to be watched: the memory stays mapped whatever becomes of the keeper."""

    def _send_release(self) -> None:
        """Let go of what was copied."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    # -- what is done with a key ----------------------------------------------------------------------------------
    def _with_key(self, vllm_config: Any, model_config: Any) -> Any:
        named = torch.device(self.load_config.device or vllm_config.device_config.device)
        if named.type == "cuda":
            index = torch.cuda.current_device() if named.index is None else named.index
            self._device = str(torch.cuda.get_device_properties(index).uuid)
        self._checkpoint = self._find(model_config)
        self._configuration = plain([getattr(model_config, "hf_config", None), _variables()])
        return self._fetch_entries(
            model_config, vllm_config.cache_config, vllm_config.parallel_config, vllm_config.kernel_config
        )

    def _find(self, model_config: Any) -> Checkpoint:
        return find(model_config.model, model_config.revision, self._fallback_load_config(), by_bytes=self._by_bytes)

    def _check_files(self) -> None:
        """Raise :class:`UsageError` if what was loaded is not what the name of the entry stands for."""
        if self._checkpoint is not None and (change := self._checkpoint.change(self._read)) is not None:
            raise UsageError(f"{change}: it is served by this engine alone")

    def _published_bytes(self, expect: dict[str, str], name: str) -> int:
        try:
            entries = vram.list_entries(name, keeper=self._keeper)
        except PeerGoneError:
            return 0
        return sum(
            one.nbytes
            for one in entries
            if (one.name, one.owner) == (name, self._owner)
            and not one.parked
            and expect.items() <= dict(one.meta).items()
        )

    def _attach_or_publish(self, load: Callable[[], dict[str, Any]], expect: dict[str, str], name: str) -> Any:
        vram.statistics(keeper=self._keeper)  # or there is no keeper: this does not wait for one
        self._lease = vram.attach_or_publish(
            name, load, expect=expect, owner=self._owner, timeout=self._timeout, wake=True, keeper=self._keeper
        )
        logger.info("The weights are %r version %d", name, self._lease.version)
        return _state(self._lease)

    def _reload_on(self, model: Any, vllm_config: Any) -> None:
        """Have vLLM make the tensors of a reload on the model's device: it notes the one of the construction."""
        device = torch.device(self.load_config.device or vllm_config.device_config.device)
        for layer in model.modules():
            get_layerwise_info(layer).restore_device = device

    @contextlib.contextmanager
    def _memory(self, config: Any) -> Iterator[bool]:
        """Have a block's copies in the pool that sleeps, if there is one; tell whether there is. Published memory comes
        from elsewhere: it is read-only, and torch would give out what is free around it."""
        if self.mode != "copy" or not config.enable_sleep_mode or config.sleep_mode_backend != "vram":
            yield False
            return
        with pool(None).use("weights"):
            yield True

    def _rebind(self, model: Any, state: Any, sleeps: bool) -> Any:
        """Put the parameters of the model that was published where the others have theirs; its own memory goes."""
        if self.mode != "copy" or sleeps:
            for name, parameter in model.named_parameters():
                found = state.entries[name].rebuild(0)
                parameter.data = found.clone() if sleeps else found
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if self.mode == "copy":
            self._send_release()
        return model


def _check_whole(model: Any) -> None:
    """Raise :class:`UsageError` if kernels took weights to where they are not published. Kernels of the host and of
    some quantizations pack a weight into memory of their own, and leave an empty parameter."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.device.type == "meta":
            raise UsageError(f"parameter {name!r} has no memory: it was not loaded")
        if not parameter.numel() and not name.endswith(_EMPTY):
            raise UsageError(f"parameter {name!r} is empty: its layer keeps the weights where other engines cannot")
    for name, layer in model.named_modules():
        for attribute in _PACKED.intersection(vars(layer)):
            raise UsageError(f"layer {name!r} was packed by a kernel, which keeps a part of it in {attribute!r}")


def _variables() -> dict[str, str]:
    """Return the variables of the environment that choose kernels, and so the layout of processed weights."""
    return {name: value for name, value in sorted(os.environ.items()) if _LAYING_OUT.match(name)}


def _contents(model: Any) -> dict[str, Any]:
    """Return what is published of a model: each tensor once, and what they are."""
    arrays: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    aliases: dict[str, str] = {}
    strides: dict[str, tuple[list[int], list[int]]] = {}
    known: dict[int, str] = {}
    for kind, named in (
        ("param", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            if name in kinds or name in aliases:
                continue
            if id(tensor) in known:
                aliases[name] = known[id(tensor)]
                continue
            known[id(tensor)], kinds[name] = name, kind
            arrays[name], shown = flat(tensor.data)
            if shown is not None:
                strides[name] = shown
    layout = {"kinds": kinds, "aliases": aliases, "strides": strides, "attrs": export_model_attrs(model)}
    arrays[_LAYOUT] = np.frombuffer(json.dumps(layout).encode(), np.uint8)
    return arrays


def _state(lease: Lease) -> Any:
    """Return what was published as vLLM's loader takes it."""
    layout = json.loads(bytes(lease[_LAYOUT].numpy()))
    tensors = lease.torch()
    for name, (shape, steps) in layout["strides"].items():
        tensors[name] = tensors[name].as_strided(shape, steps)
    entries = {name: _Entry(tensors[name], kind) for name, kind in layout["kinds"].items()}
    return WeightCacheState(entries=entries, aliases=layout["aliases"], attrs=layout["attrs"])
