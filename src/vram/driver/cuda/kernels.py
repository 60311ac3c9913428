"""Kernels: machine code that is loaded, and launched on a stream of whoever made it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

from ...errors import DriverError, UnsupportedError, UsageError
from ...spec import Location
from ..protocol import LiveObjects
from .bindings import Bindings
from .devices import Devices
from .failures import INVALID_HANDLE
from .multicast import MulticastCalls
from .objects import Taken

_COMPUTE_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: which one, and 64 bytes for its value, of which this one takes the first number."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_DEPENDENT = (_Attribute * 1)(_Attribute(_PROGRAMMATIC, 0, (ctypes.c_uint * 16)(1)))


class KernelCalls(MulticastCalls):
    """A part of :class:`~vram.driver.cuda.CudaDriver`: :class:`~vram.driver.protocol.DeviceMemory`."""

    def __init__(self, bindings: Bindings, devices: Devices) -> None:
        super().__init__(bindings, devices)
        self._libraries = Taken()

    def live(self) -> LiveObjects:
        known = super().live()
        return LiveObjects(known.reservations, known.handles + len(self._libraries), known.mappings, known.nbytes)

    def capability(self, location: Location) -> tuple[int, int]:
        device = self._devices.device(location)
        major, minor = (device.attribute(number) for number in _COMPUTE_CAPABILITY)
        return major, minor

    def kernels_load(self, code: bytes, location: Location) -> int:
        device = self._devices.device(location)
        room = ctypes.create_string_buffer(code, len(code))
        at = ctypes.addressof(room)  # the driver keeps a copy
        nothing = 0
        return self._made(
            self._libraries, device, "cuLibraryUnload", "cuLibraryLoadData",
            at, nothing, nothing, nothing, nothing, nothing, nothing,
        )  # fmt: skip

    def kernels_unload(self, library: int) -> None:
        if not self._take_back(self._libraries, "cuLibraryUnload", library):
            raise UsageError(f"kernels_unload({library:#x}): no kernels of this driver")

    def kernel(self, library: int, name: str) -> int:
        ordinal = self._libraries.get(library)
        if ordinal is None:
            raise UsageError(f"kernel({library:#x}, {name!r}): no kernels of this driver")
        found = ctypes.c_uint64()
        room = ctypes.create_string_buffer(name.encode())
        at, text = ctypes.addressof(found), ctypes.addressof(room)

        def load() -> None:
            self._call.past("cuLibraryGetKernel", at, library, text)
            self._call.past("cuKernelGetFunction", at, found.value)
            # Where code is loaded when it is first launched (the default), that waits for what runs on the GPU.
            with contextlib.suppress(UnsupportedError):
                self._call.past("cuFuncLoad", found.value)

        self._contexts[ordinal].run(load)
        return found.value

    def launch(
        self,
        kernel: int,
        blocks: int,
        threads: int,
        arguments: Sequence[int],
        stream: int,
        location: Location,
        *,
        dependent: bool = False,
    ) -> None:
        count = len(arguments)
        values = (ctypes.c_uint64 * count)(*arguments)
        first = ctypes.addressof(values)
        places = (ctypes.c_uint64 * count)(*range(first, first + 8 * count, 8))
        config = _Config(
            (blocks, 1, 1), (threads, 1, 1), 0, stream, _DEPENDENT if dependent else None, 1 if dependent else 0
        )
        at = ctypes.addressof(config)

        def launch() -> None:
            try:
                self._call.past("cuLaunchKernelEx", at, kernel, ctypes.addressof(places), 0)
            except DriverError as error:
                if error.code != INVALID_HANDLE:
                    raise
                raise UsageError(f"launch: {stream:#x} is no stream (any more) of the GPU {location}") from None

        self._on(self._devices.device(location)).run(launch)

    def launch_copy(self, destination: int, source: int, nbytes: int, stream: int, location: Location) -> None:
        def copy() -> None:
            try:
                self._call("cuMemcpyAsync", destination, source, nbytes, stream)
            except DriverError as error:
                if error.code != INVALID_HANDLE:
                    raise
                raise UsageError(f"launch_copy: {stream:#x} is no stream (any more) of the GPU {location}") from None

        self._on(self._devices.device(location)).run(copy)
