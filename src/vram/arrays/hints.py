"""Type hints for arguments that the functions of this library take as an array, or as a stream.

``vram.typing.ArrayLike`` is a vram array, a numpy array, a torch tensor, or anything else that has DLPack,
``__cuda_array_interface__``, ``__array_interface__`` or the buffer protocol. ``vram.typing.StreamLike`` is a stream of
a GPU: its handle as an integer (1 is the legacy default stream, 2 the per-thread one), or an object of torch, CuPy,
Numba or cuda.core. Such an object is inspected when it is passed; an object that is no array raises
:class:`~vram.errors.UsageError` then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union

from .array import Array

if TYPE_CHECKING:
    import torch


class SupportsDLPack(Protocol):
    """An array that is passed on as a DLPack capsule, such as one of torch, CuPy, JAX or numpy."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __dlpack_device__(self) -> tuple[Any, Any]: ...


class SupportsCudaArrayInterface(Protocol):
    """An array on a GPU that says where it lies, such as one of CuPy, Numba or torch."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


class SupportsArrayInterface(Protocol):
    """An array of the host that says where it lies, such as numpy's."""

    @property
    def __array_interface__(self) -> Mapping[str, Any]: ...


class SupportsBuffer(Protocol):
    """An object with the buffer protocol, such as bytes, an :class:`array.array` or an :class:`mmap.mmap`."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class TableLike(Protocol):
    """A table of named columns: a DataFrame of pandas or polars, a Table or RecordBatch of pyarrow."""

    @property
    def columns(self) -> Any:
        """The columns, or their names."""

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and columns."""


class CudaStream(Protocol):
    """A stream that follows cuda.core's protocol: its version, and the handle."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStream(Protocol):
    """A stream of torch."""

    @property
    def cuda_stream(self) -> int:
        """The handle."""


class CupyStream(Protocol):
    """A stream of CuPy."""

    @property
    def ptr(self) -> int:
        """The handle."""


class NumbaStream(Protocol):
    """A stream of Numba."""

    @property
    def handle(self) -> Any:
        """The handle, as something that an integer can be made of."""


# A Union, not a row of bars: it is looked at while the program runs, too.
ArrayLike: TypeAlias = Union[  # noqa: UP007
    Array, SupportsDLPack, SupportsCudaArrayInterface, SupportsArrayInterface, SupportsBuffer
]
StreamLike: TypeAlias = Union[int, CudaStream, TorchStream, CupyStream, NumbaStream]  # noqa: UP007
ModuleLike: TypeAlias = "torch.nn.Module"
