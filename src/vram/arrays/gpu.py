"""Arrays in memory that the CPU cannot touch: other libraries' as sources, and copies between them and ours."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from .. import driver as drivers
from ..driver.protocol import DeviceMemory
from ..errors import UsageError
from ..memory import Region
from ..spec import Location
from .dtypes import DLPACK_CUDA, as_dtype, from_torch_dtype
from .numpy_on_use import np
from .streams import stream_ordered
from .views import NDArray, bytes_of

_AT_ONCE = 16 << 20  # bytes of the host's memory, at most, for a value that is repeated


@dataclass(frozen=True, slots=True, eq=False)
class CudaSource:
    """Memory of a GPU that holds an array; `nbytes` counts all elements, `gpu` is the ordinal. Hold on to `owner` as
    long as the address is used. `readonly` is the owner's word; `is_ours` says that it is memory of this library."""

    address: int
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    contiguous: bool
    gpu: int
    owner: object
    is_ours: bool = False
    readonly: bool = False


def of_tensor(tensor: Any) -> CudaSource:
    """Return a torch tensor on a GPU as a source."""
    dtype = from_torch_dtype(tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError("the tensor is conjugated or negated in name only; give tensor.resolve_conj().resolve_neg()")
    shape, contiguous = tuple(tensor.shape), bool(tensor.is_contiguous())
    nbytes = math.prod(shape) * dtype.itemsize
    return CudaSource(tensor.data_ptr(), nbytes, dtype, shape, contiguous, tensor.device.index, tensor.detach())


def of_dlpack(value: Any, name: str) -> CudaSource:
    """Return an object that speaks only DLPack as a source; its memory is ready for the legacy default stream.
    Raises UsageError if it gives no capsule, or a capsule that makes no array here."""
    try:
        try:
            capsule = value.__dlpack__(stream=1, max_version=(1, 0))
        except TypeError:  # from before versions
            capsule = value.__dlpack__(stream=1)
    except Exception as error:
        raise UsageError(f"the memory of a {name} cannot be seen: {error}") from error
    from . import dlpack  # loads ctypes

    device, number, address, shape, strides, dtype = dlpack.look(capsule)
    if device != DLPACK_CUDA:
        raise UsageError(f"the {name} says that it is on a GPU and gave memory of DLPack device type {device}")
    nbytes = math.prod(shape) * dtype.itemsize
    readonly = dlpack.is_readonly(capsule)
    return CudaSource(address, nbytes, dtype, shape, _is_dense(shape, strides, 1), number, capsule, readonly=readonly)


def of_interface(value: object, name: str) -> CudaSource:
    """Return an object with ``__cuda_array_interface__`` (CuPy, Numba, JAX) as a source.
    Raises UsageError if the interface makes no array."""
    said: Any = getattr(value, "__cuda_array_interface__", None)
    try:
        shape = tuple(operator.index(length) for length in said["shape"])
        if min(shape, default=0) < 0:
            raise ValueError(f"a shape of {shape}")
        dtype = as_dtype(np.dtype(said["typestr"]))
        address, readonly, strides = operator.index(said["data"][0]), bool(said["data"][1]), said.get("strides")
        if said.get("mask") is not None:
            raise ValueError("it has a mask")
        strides = None if strides is None else tuple(operator.index(step) for step in strides)
    except (TypeError, KeyError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise UsageError(f"the {name} has no CUDA array interface that makes an array: {error}") from None
    nbytes = math.prod(shape) * dtype.itemsize
    gpu = _ordered_driver().ordinal_of(address) if nbytes else 0
    dense = _is_dense(shape, strides, dtype.itemsize)
    return CudaSource(address, nbytes, dtype, shape, dense, gpu, value, readonly=readonly)


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...] | None, step: int) -> bool:
    """Whether elements lie one behind the other, last dimension fastest; `step` is from one to the next."""
    if strides is None or not math.prod(shape):
        return True
    if len(strides) != len(shape):
        return False
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != step:
            return False
        step *= length
    return True


def copy_rows(region: Region, offset: int, source: CudaSource) -> None:
    """Copy GPU memory of any library to an offset of a region on a GPU, and return when it is done.
    Raises UsageError if its elements are not contiguous, or it is another library's on another GPU."""
    if not source.contiguous:
        raise UsageError("elements on a GPU are copied only where they lie one behind the other; make it contiguous")
    if not source.nbytes:
        return
    driver, place = stream_ordered(region), region.users[0]
    region.driver.synchronize(Location("cuda", source.gpu))  # whoever fills it may do so on any stream
    if source.is_ours:
        region.driver.copy(region.address + offset, source.address, source.nbytes)
        return
    if Location("cuda", source.gpu) != place:
        raise UsageError(f"it is on cuda:{source.gpu}, not on {place}; move it there with its own library first")
    stream = driver.stream_create(place)
    try:
        driver.copy_async(region.address + offset, source.address, source.nbytes, stream)
        driver.stream_synchronize(stream, place)
    finally:
        driver.stream_destroy(stream)


def to_host(source: CudaSource) -> NDArray:
    """Return a copy of memory of ours on the host."""
    made = np.empty(source.shape, source.dtype)
    if made.nbytes:
        drivers.get(Location("cuda")).copy_out(bytes_of(made), source.address)
    return made


def copy_host_rows(region: Region, offset: int, given: NDArray) -> None:
    """Copy an array of the host to an offset; what has no memory of its own is written out piece by piece."""
    address = region.address + offset
    if given.flags.c_contiguous or given.nbytes <= _AT_ONCE or not given.ndim:
        region.driver.copy_in(address, bytes_of(np.ascontiguousarray(given)))
        return
    rows = max(_AT_ONCE // (given.nbytes // len(given)), 1)
    for first in range(0, len(given), rows):
        part = np.ascontiguousarray(given[first : first + rows])
        region.driver.copy_in(address, bytes_of(part))
        address += part.nbytes


def _ordered_driver() -> DeviceMemory:
    driver: Any = drivers.get(Location("cuda"))
    return driver  # type: ignore[no-any-return]
