"""The ``vmm_fd`` transport of SGLang's weight cache: descriptors of memory, handed over by the keeper.

SGLang ships a placeholder under this name. The daemon publishes its model's tensors, and answers an engine with the
entry's name, which has a digest of the bytes (S11). The memory outlives the daemon, so engines need not watch it.
Tensors outside of a :class:`vram.TorchPool` are copied once; without room for that the daemon uses ``torch_ipc``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.weight_cache.protocol import send_msg
from sglang.srt.weight_cache.transport import VMM_FD_BACKEND, WeightCacheTransportBackend

import vram

from ..entries.lease import Lease
from ..errors import ProtocolError, VramError
from ..spec import format_size, round_up
from .checksums import digest as checksum
from .strides import flat

_log = logging.getLogger(__name__)
_ALIGNMENT = 256  # of tensors in what is published, in bytes
_PIECE = 2 << 20  # bytes that memory of a GPU comes in


class VramTransportBackend(WeightCacheTransportBackend):  # type: ignore[misc]
    """Both sides of it: the daemon's makes entries, the engine's gets tensors. Both ask the user's default keeper."""

    name = VMM_FD_BACKEND

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._tensors: dict[str, Any] = {}

    @classmethod
    def can_export_state(cls, state_tensors: Mapping[str, tuple[Any, bool]]) -> bool:
        """Whether there is a keeper, and room for a copy; otherwise the daemon goes on with ``torch_ipc``."""
        try:
            vram.statistics()
        except VramError:
            return False
        needed: Counter[Any] = Counter()
        for tensor in _arrays(state_tensors)[0].values():
            needed[tensor.device] += round_up(tensor.nbytes, _ALIGNMENT)
        return bool(state_tensors) and all(_has_room(device, nbytes) for device, nbytes in needed.items())

    # -- the daemon -----------------------------------------------------------------------------------------------
    def prepare_export(self, state_tensors: Mapping[str, tuple[Any, bool]]) -> dict[str, dict[str, Any]]:
        """Publish the tensors, each once, and return what an engine has to know of each name."""
        arrays, entries = _arrays(state_tensors)
        # A daemon that is started again on the same weights replaces what the one before it published.
        where = sorted({_place(tensor.device) for tensor, _ in state_tensors.values()})
        digest = hashlib.sha256(json.dumps([where, entries, checksum(arrays)], sort_keys=True).encode()).hexdigest()
        published = vram.publish(f"sglang/{digest[:32]}", arrays, meta=_notes())
        self._hold(vram.attach(published.name, version=published.version))
        return entries

    def send_fetch_state_response(
        self,
        conn: Any,
        *,
        config: dict[str, Any],
        entries: dict[str, dict[str, Any]],
        pid: int,
        preloaded_weights_bytes: int = 0,
    ) -> None:
        """Tell an engine what to attach."""
        lease = self._lease
        if lease is None:
            raise ProtocolError("nothing was exported yet")
        send_msg(
            conn,
            {
                "status": "ok",
                "config": config,
                "entries": entries,
                "pid": pid,
                "transport_backend": self.name,
                "preloaded_weights_bytes": preloaded_weights_bytes,
                "vram": {"name": lease.name, "version": lease.version},
            },
        )

    # -- the engine -----------------------------------------------------------------------------------------------
    def recv_fetch_state_response(self, sock: Any, result: dict[str, Any]) -> dict[str, Any]:
        """Attach what the daemon has published; only what this user has."""
        said = result.get("vram")
        if not isinstance(said, dict):
            raise ProtocolError("the daemon's answer does not say what to attach: does it run another release of vram?")
        self._hold(vram.attach(said["name"], version=said["version"], owner=os.getuid()))
        return {**result, "pid": None}  # nothing dangles when the daemon ends: nobody needs to watch it

    def import_tensor(self, entry: dict[str, Any]) -> Any:
        """Return one tensor: shared, and a copy of its own of what is no parameter."""
        if not self._tensors and self._lease is not None:
            self._tensors = self._lease.torch()
        tensor = self._tensors[entry["array"]]
        if entry["strides"] is not None:
            tensor = tensor.as_strided(*entry["strides"])
        return tensor if entry["is_param"] else tensor.clone()

    def _hold(self, lease: Lease) -> None:
        """Keep the lease as long as this; SGLang keeps this with the model."""
        self._lease = lease
        weakref.finalize(self, lease.close).atexit = False


def _notes() -> dict[str, str]:
    """Return the model of this daemon, for people: its own options, as SGLang has published them in this process."""
    try:
        from sglang.srt.runtime_context import get_model

        return {"model": str(get_model().model_path)[-200:]}
    except (ImportError, AttributeError, LookupError, RuntimeError, ValueError) as error:  # a label, nothing more
        _log.debug("the weight cache's model is not known: %s", error)
        return {}


def _arrays(state_tensors: Mapping[str, tuple[Any, bool]]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what is published, each tensor once, and what an engine has to know of each name."""
    arrays: dict[str, Any] = {}
    entries: dict[str, dict[str, Any]] = {}
    known: dict[tuple[object, ...], str] = {}
    for name, (tensor, is_param) in state_tensors.items():
        same = tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        array = known.setdefault(same, name) if tensor.numel() else name
        shown = flat(tensor.data)
        if array == name:
            arrays[name] = shown[0]
        entries[name] = {
            "array": array,
            "strides": shown[1],
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "is_param": is_param,
        }
    return arrays, entries


def _has_room(device: Any, nbytes: int) -> bool:
    """Whether so much can be published from a device. torch is asked to release its cache there."""
    if device.type != "cuda":
        return True
    needed = round_up(nbytes, _PIECE)
    if torch.cuda.mem_get_info(device)[0] < needed:
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < needed:
        _log.warning(
            "the weight cache goes on with torch_ipc: publishing takes a copy of %s on %s, where %s are free",
            format_size(needed), device, format_size(free),
        )  # fmt: skip
    return bool(free >= needed)


def _place(device: Any) -> str:
    """Say where memory is. The number of a GPU depends on which of them a process sees."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)
