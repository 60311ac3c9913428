"""Kernels: machine code that is loaded for a GPU, and launched on anybody's stream."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Sequence

from ...errors import DriverError, UnsupportedError, UsageError
from ...spec import Location
from .bindings import Bindings
from .devices import Devices
from .failures import INVALID_HANDLE
from .objects import Table

_COMPUTE_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
# CUlaunchConfig: three sizes of the grid and of a block, bytes of shared memory, the stream, attributes, their number.
_CONFIG = struct.Struct("7IPPI0P")
_ROOM = ctypes.c_char * _CONFIG.size
# One CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, a gap, and 64 bytes for its value.
_DEPENDENT = (ctypes.c_uint * 18)(6, 0, 1)


class Kernels:
    """Libraries of kernels, and launches of them."""

    def __init__(self, bindings: Bindings, devices: Devices) -> None:
        self._call = bindings
        self._devices = devices
        self.libraries = Table(bindings, devices, "cuLibraryUnload", "no kernels of this driver")

    def capability(self, location: Location) -> tuple[int, int]:
        device = self._devices.device(location)
        major, minor = (device.attribute(number) for number in _COMPUTE_CAPABILITY)
        return major, minor

    def kernels_load(self, code: bytes, location: Location) -> int:
        device = self._devices.device(location)
        room = ctypes.create_string_buffer(code, len(code))
        at = ctypes.addressof(room)  # the driver keeps a copy
        return self.libraries.make(device, "cuLibraryLoadData", at, *[0] * 6)  # no options

    def kernels_unload(self, library: int) -> None:
        self.libraries.take_back("kernels_unload", library)

    def kernel(self, library: int, name: str) -> int:
        ordinal = self.libraries.out.get(library)
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

        self._devices.all[ordinal].run(load)
        return found.value

    def launch(
        self, kernel: int, blocks: int, threads: int, arguments: Sequence[int], stream: int, location: Location, *,
        dependent: bool = False,
    ) -> None:  # fmt: skip
        count = len(arguments)
        values = (ctypes.c_uint64 * count)(*arguments)
        first = ctypes.addressof(values)
        places = (ctypes.c_uint64 * count)(*range(first, first + 8 * count, 8))
        attributes = ctypes.addressof(_DEPENDENT) if dependent else 0
        packed = _CONFIG.pack(blocks, 1, 1, threads, 1, 1, 0, stream, attributes, dependent)
        config = _ROOM.from_buffer_copy(packed)

        def launch() -> None:
            try:
                self._call.past("cuLaunchKernelEx", ctypes.addressof(config), kernel, ctypes.addressof(places), 0)
            except DriverError as error:
                if error.code != INVALID_HANDLE:
                    raise
                raise UsageError(f"launch: {stream:#x} is no stream (any more) of the GPU {location}") from None

        self._devices.device(location).run(launch)

    def launch_copy(self, destination: int, source: int, nbytes: int, stream: int, location: Location) -> None:
        words = f"launch_copy: {stream:#x} is no stream (any more) of the GPU {location}"
        self._devices.device(location).on_stream(words, "cuMemcpyAsync", destination, source, nbytes, stream)
