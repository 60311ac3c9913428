"""Arrays of other libraries: an address, a type and a shape, and the object that keeps the memory meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from . import gpu
from . import torch as torch_views
from .array import Array
from .dtypes import DLPACK_CUDA, as_dtype
from .gpu import CudaSource
from .numpy_on_use import np
from .tables import columns_of, each_column, is_table
from .views import NDArray, RegionViews

_CPU = (1, 3, 11, 13)  # DLPack device types whose memory the CPU reads: CPU, CUDA host, ROCm host, CUDA managed


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # a traceback must not read memory that may be gone
class Source:
    """Memory of the host that holds an array; `view` keeps it alive. With `write` the elements do not lie anywhere yet,
    such as the parts of a column: `write` puts them into an array, and `view` has only type and shape."""

    view: NDArray
    write: Callable[[NDArray], None] | None = None

    @property
    def address(self) -> int:
        """Where the first element is."""
        address: int = self.view.__array_interface__["data"][0]
        return address

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.view.nbytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""
        return self.view.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the dimensions."""
        shape: tuple[int, ...] = self.view.shape
        return shape

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one behind the other, last dimension fastest."""
        return self.write is None and self.view.flags.c_contiguous


def as_source(value: object) -> Source | CudaSource:
    """Find the memory behind an array of any library, on the host or a GPU, without a copy.
    Raises UsageError if it is no array, is on a device of another kind, or is of a type that cannot be shared."""
    if isinstance(value, Source):  # a column of a table, which says how it is written
        return value
    if isinstance(value, Array):
        return Source(value.numpy()) if value._open_views().addressable else of_array(value)
    if isinstance(value, np.ndarray):
        view = _of_numpy(value)
    elif torch_views.is_tensor(value):
        if getattr(value, "is_cuda", False):
            return gpu.of_tensor(value)
        view = torch_views.array_of(value)
    elif (place := _place_of(value)) not in _CPU and hasattr(value, "__cuda_array_interface__"):
        return gpu.of_interface(value, _name_of(value))
    elif place == DLPACK_CUDA:
        return gpu.of_dlpack(value, _name_of(value))
    else:
        view = _of_any(value, place)
    if view.dtype.hasobject and is_table(value):
        raise UsageError(f"{columns_of(value)}: **{{{each_column(value, prefix='table/')}}}")
    as_dtype(view.dtype)
    return Source(view)


def _of_numpy(value: NDArray) -> NDArray:
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError("a masked array is two arrays: publish .data and .mask, or .filled(...)")
    return value.view(np.ndarray)  # a matrix or memmap is an array like any other here


def _name_of(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _place_of(value: object) -> int | None:
    """Return DLPack's device type of an array; None for what does not speak it."""
    kind = type(value)
    device = getattr(kind, "__dlpack_device__", None)
    if device is None:
        return None
    try:
        return int(device(value)[0])
    except Exception as error:
        raise UsageError(f"{_name_of(value)} does not tell where its memory is: {error}") from error


def _of_any(value: object, place: int | None) -> NDArray:
    kind, name = type(value), _name_of(value)
    if place is not None and place not in _CPU:
        raise UsageError(f"the {name} is on a device (DLPack type {place}), not on the host; copy it there first")
    try:
        if place is not None:
            try:
                return np.from_dlpack(value)  # type: ignore[arg-type]
            except (BufferError, RuntimeError, TypeError):
                pass  # bfloat16, for one: the library may say it in numpy's own words
        if any(hasattr(kind, word) for word in ("__array_interface__", "__array_struct__", "__array__")):
            return np.asarray(value)
        with contextlib.suppress(TypeError):  # no buffer either
            return np.asarray(memoryview(value))  # type: ignore[arg-type]
    except Exception as error:
        raise UsageError(f"the memory of a {name} cannot be seen: {error}") from error
    raise UsageError(
        f"a {name} is no array: give vram arrays, numpy arrays, torch tensors, or objects with DLPack, "
        f"__array_interface__ or the buffer protocol (numpy.asarray makes one of lists and numbers)"
    )


def of_array(array: Array) -> CudaSource:
    """Return one of our own arrays as a source. A pin of its own keeps the memory, whatever becomes of the array."""
    views = array._open_views()
    kept = array._view("source", array.dtype, show=RegionViews.device_view)
    address: int = kept.__array_interface__["data"][0]
    return CudaSource(address, kept.nbytes, array.dtype, array.shape, True, views.gpu or 0, kept, True)
