"""The GPUs of this process: what they are called, where memory can be, and the contexts to work under.

A GPU is known by its ordinal, which ``CUDA_VISIBLE_DEVICES`` decides, and by its UUID, which nothing changes. Places of
the driver are written behind ``cuda:``:

==================  ================================================================================================
``0``, ``GPU-...``  a GPU
``host``            page-locked memory of the host (CUDA 12.2 on); cannot leave the process
``numa:1``          the same on one NUMA node of the host; can be shared
``numa``            the same on the node of the calling thread, which is looked up once, when memory is made
==================  ================================================================================================
"""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ...errors import DriverError, UnsupportedError, UsageError
from ...lifetime import noted
from ...spec import Location
from ..protocol import DeviceInfo
from .bindings import UINT32, Bindings, version_text, write
from .failures import INVALID_HANDLE, INVALID_VALUE

_T = TypeVar("_T")
_ANYWHERE = ctypes.byref(ctypes.c_void_p())  # where the driver writes which context it was, which nobody reads

# CUmemLocationType
DEVICE, HOST, HOST_NUMA = 1, 2, 3
_NUMA = re.compile(r"numa(?::(\d{1,4}))?")
_VERSION = {HOST: 12020, HOST_NUMA: 12020}  # of the driver that knows the location first


class Device:
    """One GPU. No call here makes a context."""

    __slots__ = ("_bindings", "_context", "_used", "handle", "name", "ordinal", "total_bytes", "uuid")

    def __init__(self, bindings: Bindings, ordinal: int) -> None:
        self._bindings = bindings
        self.ordinal = ordinal
        self.handle = int(bindings("cuDeviceGet", ordinal))
        raw = bindings("cuDeviceGetUuid", self.handle)
        self.uuid = f"GPU-{uuid.UUID(bytes=bytes(raw.bytes)[:16])}"
        self.name = bindings("cuDeviceGetName", 256, self.handle).split(b"\0")[0].decode(errors="replace")
        self.total_bytes = int(bindings("cuDeviceTotalMem", self.handle))
        self._context = 0
        self._used = False

    def attribute(self, number: int) -> int:
        """Return a device attribute by its number in cuda.h; 0 for one that the driver does not know."""
        api = self._bindings.api
        try:
            return int(self._bindings("cuDeviceGetAttribute", api.CUdevice_attribute(number), self.handle))
        except (UsageError, ValueError, KeyError):
            return 0
        except Exception as error:
            if getattr(error, "code", None) == INVALID_VALUE:  # an attribute of a later release
                return 0
            raise

    @property
    def context(self) -> int:
        """The primary context, which every library in this process shares. Made at the first use, and then kept."""
        if not self._context:
            # Kept until the process ends: frameworks hold on to it as well. Two threads retain it twice at worst.
            self._context = int(self._bindings("cuDevicePrimaryCtxRetain", self.handle))
        return self._context

    @property
    def is_used(self) -> bool:
        """Whether its primary context exists already, made by anybody in this process; asked until it does."""
        if not self._used:
            self._used = bool(self._bindings("cuDevicePrimaryCtxGetState", self.handle)[1])
        return self._used

    def run(self, body: Callable[[], _T]) -> _T:
        """Return what a function does under the primary context, as the current one of this thread; then the one before
        is that again."""
        push, pop = self._bindings.function("cuCtxPushCurrent"), self._bindings.function("cuCtxPopCurrent")
        status = push(self.context)
        if status:
            raise self._bindings.failure("cuCtxPushCurrent", status)
        try:
            found = body()
        except BaseException as error:
            with noted(error):
                self._leave(pop)
            raise
        self._leave(pop)
        return found

    def on_stream(self, words: str, call: str, *arguments: Any) -> Any:
        """Make a call under the primary context. Raises UsageError with `words` for a handle that it does not know."""
        try:
            return self.run(lambda: self._bindings(call, *arguments))
        except DriverError as error:
            if error.code != INVALID_HANDLE or error.call != call:
                raise
            raise UsageError(words) from None

    def _leave(self, pop: Callable[..., int]) -> None:
        status = pop(_ANYWHERE)
        # Contexts that others made current come back with a lost device, too; that says nothing new.
        if status and self._bindings.lost is None:
            raise self._bindings.failure("cuCtxPopCurrent", status)


class Devices:
    """All GPUs that this process may see, and what locations mean to the driver."""

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self.all = tuple(Device(bindings, number) for number in range(int(bindings("cuDeviceGetCount"))))
        self._by_uuid = {device.uuid: device for device in self.all}
        self._places: dict[Location, tuple[int, int]] = {}
        self._names: dict[tuple[int, int], Location] = {}
        self._wheres: dict[tuple[int, int], Any] = {}

    def place(self, location: Location) -> tuple[int, int]:
        """Return a location as the driver says it: ``CUmemLocationType`` and id. Raises UsageError for a place that
        this process does not see, UnsupportedError if the driver is too old for the kind of place."""
        found = self._places.get(location)
        if found is None:
            found = self._look_up(location)
            if location.id != "numa":  # that one depends on who asks
                self._places[location] = found
        return found

    def device(self, location: Location) -> Device:
        """Return the GPU at a location. Raises UsageError if it is none, or none that this process sees."""
        kind, number = self.place(location)
        if kind != DEVICE:
            raise UsageError(f"{location} is memory of the host; name a GPU, such as cuda:0")
        return self.all[number]

    def location(self, kind: int, number: int) -> Location:
        """Return what the driver's location is called here: for one place always the same object, found by identity."""
        found = self._names.get((kind, number))
        if found is None:
            name = number if kind == DEVICE else "host" if kind == HOST else f"numa:{number}"
            found = self._names.setdefault((kind, number), Location("cuda", name))
        return found

    def where(self, place: tuple[int, int]) -> Any:
        """Return a place as a struct of the driver, which nobody changes."""
        found = self._wheres.get(place)
        if found is None:
            found = self._bindings.api.CUmemLocation()
            for offset, value in ((0, place[0]), (4, place[1])):
                write(found, offset, UINT32, value)
            self._wheres[place] = found
        return found

    def used(self, ordinal: int | None) -> Device:
        """Return a GPU to work under; where it does not matter which, one that has a context already if any has."""
        if ordinal is None:
            return next((device for device in self.all if device.is_used), self.all[0])
        return self.all[ordinal]

    def device_count(self) -> int:
        return len(self.all)

    def device_info(self, location: Location) -> DeviceInfo:
        device = self.device(location)
        return DeviceInfo(device.uuid, device.name, device.total_bytes)

    def canonical(self, location: Location) -> Location:
        return self.location(*self.place(location))

    def mem_info(self, location: Location) -> tuple[int, int]:
        free, total = self.device(location).run(lambda: self._bindings("cuMemGetInfo"))
        return int(free), int(total)

    def peer_refusal(self, device: int, memory_of: int) -> str:
        """Return why a GPU cannot access another's memory; empty if it can."""
        if device == memory_of:
            return ""
        one, other = self.all[device], self.all[memory_of]
        if int(self._bindings("cuDeviceCanAccessPeer", one.handle, other.handle)):
            return ""
        return f"no peers, says the driver: {one.name} (cuda:{device}) and {other.name} (cuda:{memory_of})"

    def _look_up(self, location: Location) -> tuple[int, int]:
        where = location.id
        if location.kind != "cuda":
            raise UsageError(f'the cuda driver serves "cuda:..." only, not "{location}"')
        if isinstance(where, int):
            if not 0 <= where < len(self.all):
                raise UsageError(f"no {location} among {self._seen()}")
            return DEVICE, where
        if where.startswith("GPU-"):
            device = self._by_uuid.get(where.lower().replace("gpu-", "GPU-", 1))
            if device is None:
                raise UsageError(f"no {location} among {self._seen()}")
            return DEVICE, device.ordinal
        numa = _NUMA.fullmatch(where)
        if where != "host" and numa is None:
            raise UsageError(
                f'"{location}" is no place of the cuda driver; write e.g. cuda:0, cuda:numa:0 or cuda:host'
            )
        kind = HOST if numa is None else HOST_NUMA
        if self._bindings.driver_version < _VERSION[kind]:
            raise UnsupportedError(
                f"memory on {location}", f"a driver of CUDA {version_text(_VERSION[kind])}",
                version_text(self._bindings.driver_version), 'Upgrade the NVIDIA driver, or use device="host"',
            )  # fmt: skip
        if numa is None:
            return HOST, 0
        return HOST_NUMA, _current_node() if numa[1] is None else int(numa[1])

    def _seen(self) -> str:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = len(self.all)
        uuids = ", ".join(device.uuid for device in self.all)
        seen = f"the {count} GPU{'s' * (count != 1)} visible to this process ({uuids})"
        return seen + (f" with CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else "")


def _current_node() -> int:
    """Return the NUMA node of the calling thread: cuMemCreate refuses "the current one", so it is looked up here."""
    cpu, node = ctypes.c_uint(), ctypes.c_uint()
    try:
        if ctypes.CDLL(None).getcpu(ctypes.byref(cpu), ctypes.byref(node), None) == 0:
            return node.value
    except (OSError, AttributeError):
        pass
    nodes = sorted(int(folder.name[4:]) for folder in Path("/sys/devices/system/node").glob("node[0-9]*"))
    return nodes[0] if nodes else 0
