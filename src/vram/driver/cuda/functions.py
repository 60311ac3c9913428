"""The driver's functions that are called past the bindings, with the types of cuda.h.

Two kinds are. Pointer attributes, which several releases of the bindings tell wrong. And what makes something or takes
something back: it takes and gives the numbers that the books keep, where the bindings have objects of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ...errors import UnsupportedError
from ..protocol import HANDLE_BYTES


class Handle(ctypes.Structure):
    """The bytes of a handle from another process: a struct that some functions take by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_INT, _UINT, _SIZE, _U64, _PTR = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
# The release of CUDA that brought each, in the form whose types are written here: the driver gives out that one, which
# has a suffix among its symbols for some. Objects of the driver (contexts, streams, events, pools) are pointers.
_FUNCTIONS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "cuPointerGetAttribute": (4000, (_PTR, _INT, _U64)),
    "cuPointerGetAttributes": (7000, (_UINT, _PTR, _PTR, _U64)),
    "cuCtxPushCurrent": (4000, (_PTR,)),
    "cuCtxPopCurrent": (4000, (_PTR,)),
    "cuMemAddressReserve": (10020, (_PTR, _SIZE, _SIZE, _U64, _U64)),
    "cuMemAddressFree": (10020, (_U64, _SIZE)),
    "cuMemCreate": (10020, (_PTR, _SIZE, _PTR, _U64)),
    "cuMemRelease": (10020, (_U64,)),
    "cuMemRetainAllocationHandle": (11000, (_PTR, _PTR)),
    "cuMemMap": (10020, (_U64, _SIZE, _SIZE, _U64, _U64)),
    "cuMemUnmap": (10020, (_U64, _SIZE)),
    "cuMemExportToShareableHandle": (10020, (_PTR, _U64, _INT, _U64)),
    "cuMemImportFromShareableHandle": (10020, (_PTR, _PTR, _INT)),
    "cuStreamCreate": (2000, (_PTR, _UINT)),
    "cuStreamDestroy": (4000, (_PTR,)),
    "cuEventCreate": (2000, (_PTR, _UINT)),
    "cuEventDestroy": (4000, (_PTR,)),
    "cuMemHostRegister": (6050, (_PTR, _SIZE, _UINT)),
    "cuMemHostUnregister": (4000, (_PTR,)),
    "cuMemAlloc": (3020, (_PTR, _SIZE)),
    "cuMemFree": (3020, (_U64,)),
    "cuIpcOpenMemHandle": (11000, (_PTR, Handle, _UINT)),
    "cuIpcCloseMemHandle": (4010, (_U64,)),
    "cuIpcOpenEventHandle": (4010, (_PTR, Handle)),
    "cuMemPoolDestroy": (11020, (_PTR,)),
    "cuMemPoolExportToShareableHandle": (11020, (_PTR, _PTR, _INT, _U64)),
    "cuMemPoolImportFromShareableHandle": (11020, (_PTR, _PTR, _INT, _U64)),
    "cuMemFreeAsync": (11020, (_U64, _PTR)),
    "cuMemPoolImportPointer": (11020, (_PTR, _PTR, _PTR)),
    "cuLibraryLoadData": (12000, (_PTR, _PTR, _PTR, _PTR, _UINT, _PTR, _PTR, _UINT)),
    "cuLibraryUnload": (12000, (_PTR,)),
    "cuLibraryGetKernel": (12000, (_PTR, _PTR, _PTR)),
    "cuKernelGetFunction": (12000, (_PTR, _PTR)),
    "cuFuncLoad": (12040, (_PTR,)),
    "cuLaunchKernelEx": (11060, (_PTR, _PTR, _PTR, _PTR)),
    "cuMulticastCreate": (12010, (_PTR, _PTR)),
    "cuMulticastAddDevice": (12010, (_U64, _INT)),
    "cuMulticastUnbind": (12010, (_U64, _INT, _SIZE, _SIZE)),
}


def exported(name: str, have: str) -> Callable[..., int]:
    """Return a function of the libcuda that the bindings have loaded: the loader finds it by its name (SONAME).
    `have` is the driver's version as text, for the error."""
    since, types = _FUNCTIONS[name]
    found, status = ctypes.c_void_p(), -1
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuGetProcAddress  # since CUDA 11.3
        ask.argtypes, ask.restype = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64), ctypes.c_int
        status = ask(name.encode(), ctypes.byref(found), since, 0)
    except (OSError, AttributeError):
        pass
    if status or not found.value:
        raise UnsupportedError(
            name, "a driver that has this function", f"driver {have}, which has not", "Upgrade the NVIDIA driver"
        )
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(found.value)
