"""Owning DLPack capsules of numpy views.

numpy's own exporter makes them, versioned and not, consumed or dropped: its deleter is C code that gives up a reference
to the view, in any thread and at interpreter exit too, where a callback of ours could not run any more. Element types
that numpy lacks travel as integers, and the two bytes of the type are corrected before the capsule leaves.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, cast

from ..errors import UsageError
from .dtypes import DLPACK_CUDA, carrier, dlpack_code, is_plain, of_dlpack_code
from .numpy_on_use import np
from .views import NDArray


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_python = ctypes.PyDLL(None)
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_python.PyCapsule_IsValid.restype = ctypes.c_int
_python.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)


@functools.cache
def _has_new_keywords() -> bool:
    return np.lib.NumpyVersion(np.__version__) >= "2.1.0"


def shown_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type under which numpy is asked to export `dtype`. Raises BufferError if DLPack has no word for it."""
    if is_plain(dtype):
        return dtype  # numpy knows what it can export, and says so
    if dlpack_code(dtype) is None:
        raise BufferError(f"DLPack has no word for dtype {dtype}; export .numpy().view(...) of a type it knows")
    return carrier(dtype)


def capsule(
    view: NDArray,
    dtype: np.dtype[Any],
    *,
    max_version: tuple[int, int] | None = None,
    copy: bool | None = None,
    gpu: int | None = None,
) -> object:
    """Return an owning DLPack capsule of a view that shows `dtype` as :func:`shown_as` says; `gpu` marks a device view.
    Raises BufferError for read-only memory to a consumer that cannot be told so, and for what DLPack cannot say."""
    if _has_new_keywords():
        made = view.__dlpack__(max_version=max_version, copy=copy)
    else:
        if copy:
            view = view.copy()
        made = view.__dlpack__()
    code = None if view.dtype == dtype else dlpack_code(dtype)
    if code is not None:
        _tensor_in(made).code, _tensor_in(made).bits = code
    if gpu is not None:
        _tensor_in(made).device_type, _tensor_in(made).device_id = DLPACK_CUDA, gpu
    return made


def look(capsule: object) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...] | None, np.dtype[Any]]:
    """Return device type and id, address, shape, strides in elements (None: dense) and element type of a capsule, which
    keeps its memory. Raises UsageError if it was consumed, or is none that is known here."""
    if not any(_python.PyCapsule_IsValid(capsule, name) for name in (b"dltensor_versioned", b"dltensor")):
        raise UsageError(f"{capsule!r:.80} is no DLPack capsule, or was consumed already")
    tensor = _tensor_in(capsule)
    shape = tuple((ctypes.c_int64 * tensor.ndim).from_address(tensor.shape)) if tensor.ndim else ()
    strides = tuple((ctypes.c_int64 * tensor.ndim).from_address(tensor.strides)) if tensor.strides else None
    dtype = of_dlpack_code(tensor.code, tensor.bits, tensor.lanes)
    return tensor.device_type, tensor.device_id, (tensor.data or 0) + tensor.byte_offset, shape, strides, dtype


def is_readonly(capsule: object) -> bool:
    """Whether a capsule says that its memory must not be written; those from before versions cannot."""
    if not _python.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        return False
    found = _Versioned.from_address(_python.PyCapsule_GetPointer(capsule, b"dltensor_versioned"))
    return bool(found.flags & 1)  # DLPACK_FLAG_BITMASK_READ_ONLY


def _tensor_in(made: object) -> _Tensor:
    if _python.PyCapsule_IsValid(made, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_python.PyCapsule_GetPointer(made, b"dltensor_versioned"))
        return cast("_Tensor", versioned.tensor)
    return _Tensor.from_address(_python.PyCapsule_GetPointer(made, b"dltensor"))
