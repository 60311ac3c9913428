"""What of Ray its adapter derives from and calls, in a few lines: for tests where Ray is not installed.

Doubles, and no more: they say what the adapter does with such classes, not that Ray has them. That is for
tests/engines/check_ray.py, which runs where Ray is.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class TensorTransportMetadata:
    """What is told of tensors."""

    tensor_meta: list[Any]
    tensor_device: str | None = None


class CloudPickler(pickle.Pickler):
    """The pickler, with reducers by exact type."""

    dispatch: dict[type, Callable[[Any], Any]] = {}

    def reducer_override(self, value: Any) -> Any:
        reducer = self.dispatch.get(type(value))
        return NotImplemented if reducer is None else reducer(value)


class Cluster:
    """What a process knows of its cluster, and how it pickles what a method returns."""

    def __init__(self) -> None:
        self.node = "node a"
        self.is_initialized = True
        self.context = SimpleNamespace(_thread_local=threading.local())
        self.worker = SimpleNamespace(get_serialization_context=lambda: self.context, mode=0)

    def taken_out(self, value: Any) -> tuple[bytes, list[Any]]:
        """Pickle the result of a method with a tensor transport; return it, and what was taken out."""
        local = self.context._thread_local
        local.use_external_transport, local.rdt_tensors = True, []
        try:
            return self.pickled(value)[0], local.rdt_tensors
        finally:
            local.use_external_transport, local.rdt_tensors = False, []

    def pickled(self, value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
        """Pickle a value, with what goes out of band."""
        file, buffers = io.BytesIO(), []
        CloudPickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        return file.getvalue(), buffers

    def put_back(self, data: bytes, tensors: list[Any]) -> Any:
        """Unpickle what had tensors taken out."""
        self.context._thread_local.rdt_tensors = tensors
        return pickle.loads(data)


def modules(cluster: Cluster) -> dict[str, ModuleType]:
    """Return the modules, by name."""
    known: dict[str, tuple[Any, ...]] = {}

    def register(name: str, devices: list[str], manager: type, data_type: type) -> None:
        if name in known:
            raise ValueError(name)
        known[name] = devices, manager, data_type

    content: dict[str, dict[str, Any]] = {
        "ray": {
            "__version__": "2.60.0",
            "SCRIPT_MODE": 0,
            "is_initialized": lambda: cluster.is_initialized,
            "get_runtime_context": lambda: SimpleNamespace(get_node_id=lambda: cluster.node),
        },
        "ray.cloudpickle": {"CloudPickler": CloudPickler},
        "ray._private": {},
        "ray._private.worker": {"global_worker": cluster.worker},
        "ray._private.serialization": {"SerializationContext": type("Context", (), {"serialize_rdt_objects": None})},
        "ray.experimental": {"register_tensor_transport": register},
        "ray.experimental.rdt": {},
        "ray.experimental.rdt.util": {"transport_manager_info": known},
        "ray.experimental.rdt.tensor_transport_manager": {
            "CommunicatorMetadata": type("CommunicatorMetadata", (), {}),
            "TensorTransportManager": type("TensorTransportManager", (), {}),
            "TensorTransportMetadata": TensorTransportMetadata,
        },
    }
    made: dict[str, ModuleType] = {}
    for name, names in content.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(names)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, made[name])
    return made
