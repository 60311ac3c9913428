"""Shape and type of an array, and the protocols by which other libraries see its memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..errors import ReadOnlyError, UsageError, VramError
from ..memory import Pin
from ..spec import Access, Location
from . import streams
from .dtypes import DLPACK_CPU, DLPACK_CUDA, carrier, is_plain
from .gpu import copy_host_rows
from .numpy_on_use import np
from .shapes import part_of
from .streams import stream_synchronize
from .views import NDArray, RegionViews, buffer, bytes_of

if TYPE_CHECKING:
    import torch


Buffer: TypeAlias = memoryview  # which in the class is a method


class Viewable:
    """Properties and views of an array; the base of :class:`Array`. Each view has a pin of its own (invariant I6)."""

    __slots__ = ("_shown", "_stream")

    _dtype: np.dtype[Any]
    _offset: int
    _row_nbytes: int
    _shape: tuple[int, ...]

    _shown: NDArray | None
    _stream: int | None

    def _view(
        self,
        holder: str,
        dtype: np.dtype[Any],
        full: bool = False,
        *,
        show: Callable[[RegionViews, Pin, int, tuple[int, ...], np.dtype[Any]], NDArray] = RegionViews.view,
    ) -> NDArray:
        raise NotImplementedError

    def _open_views(self) -> RegionViews:
        raise NotImplementedError

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of the dimensions."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements: numpy's, or `ml_dtypes`' for bfloat16 and the 8-bit floats."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.nbytes // self._dtype.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        shape = self._shape
        return shape[0] * self._row_nbytes if shape else self._row_nbytes

    @property
    def device(self) -> Location:
        """Where the memory is."""
        return self._open_views().region.location

    @property
    def readonly(self) -> bool:
        """Whether it cannot be written to here."""
        return self._open_views().region.access is not Access.READ_WRITE

    # -- views --------------------------------------------------------------------------------------------------
    def numpy(self, *, full: bool = False) -> NDArray:
        """Return a numpy array over the same memory.

        It keeps the memory alive, as does everything derived from it. A view of read-only memory is read-only.

        Parameters
        ----------
        full : bool
            Show the whole capacity instead of the rows there are, so that growth needs no new view. Rows that have
            no memory behind them kill the process when touched (SIGSEGV). As long as it lives the array can grow but
            not shrink.

        Raises
        ------
        UnsupportedError
            If the CPU cannot address the memory.
        ClosedError
            If the array was closed.
        """
        return self._view("numpy view", self._dtype, full)

    def torch(self, *, full: bool = False, writable: Literal["copy"] | None = None) -> torch.Tensor:
        """Return a torch tensor over the same memory, which it keeps alive.

        torch has no read-only tensors. On the host a tensor over read-only memory is copy-on-write: its pages are the
        shared ones until this process writes to them, and private to this process from then on: later writes of
        others to such a page are not seen. All tensors over one memory see the same private pages, as long as one of
        them or an array over it lives; :meth:`numpy` shows the shared memory. An update (:func:`vram.update`) takes
        private pages away at the next section of :meth:`vram.Lease.reading`. On a GPU a write to read-only memory is
        an illegal memory access, which ends the context of the process: take ``writable="copy"`` for work in place.

        Parameters
        ----------
        full : bool
            Show the whole capacity, so that growth needs no new tensor. Such a tensor is not copy-on-write. Rows that
            have no memory behind them must not be touched, and read-only memory not be written to: on the host that
            kills the process (SIGSEGV), on a GPU it ends the context (illegal address).
        writable : "copy", optional
            Return a tensor with memory of its own, from torch, with the same elements.

        Raises
        ------
        UnsupportedError
            If torch is not installed, or has no such element type.
        UsageError
            For another value of `writable`.
        """
        from .torch import check_writable, tensor

        views, copied = self._open_views(), check_writable(writable)
        if views.gpu is None:
            show = RegionViews.view if full else RegionViews.writable_view
            made = tensor(partial(self._view, show=show), self._dtype, full=full)
        else:
            view = partial(self._view, show=RegionViews.device_view)
            made = tensor(view, self._dtype, full=full, gpu=views.gpu, ready=self._wait_on)
        return made.clone() if copied else made

    def memoryview(self) -> Buffer:
        """Return a memoryview of the same shape over the same memory, which it keeps alive.

        Element types that the buffer protocol has no letter for (bfloat16, dates) show as unsigned integers of the
        same size.
        """
        try:
            return buffer(self._view("memoryview", self._dtype))
        except ValueError:
            return buffer(self._view("memoryview", carrier(self._dtype)))

    def __buffer__(self, flags: int, /) -> Buffer:
        """The buffer protocol, from Python 3.12 on."""
        try:
            return buffer(self._view("buffer", self._dtype))
        except ValueError as error:  # numpy, asked for its own array, then goes on to __array__
            raise BufferError(f"the buffer protocol has no letter for {self._dtype}; use .memoryview()") from error

    @property
    def __array_interface__(self) -> dict[str, object]:
        """numpy's array interface.

        The memory is given as a buffer that keeps it, not as an address: a consumer holds on to what it was given,
        and this array may be closed before it is done.
        """
        if not is_plain(self._dtype):
            raise AttributeError(f"the array interface has no word for {self._dtype}")  # numpy goes on to __array__
        data = buffer(self._view("array interface", carrier(self._dtype)))
        return {"version": 3, "data": data, "shape": self._shape, "typestr": self._dtype.str}

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NDArray:
        view = self.numpy()
        if dtype is not None and np.dtype(dtype) != view.dtype:  # type: ignore[call-overload]
            if copy is False:
                raise UsageError(f"converting {view.dtype} to {dtype} takes a copy, and copy=False forbids it")
            return view.astype(dtype)  # type: ignore[call-overload, no-any-return]
        return view.copy() if copy else view

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return an owning DLPack capsule, versioned if `max_version` says that the consumer knows it.

        Parameters
        ----------
        stream : int, optional
            On a GPU, the stream that the consumer will work on, as the array API standard numbers them (1: the legacy
            default stream, 2: the per-thread one, -1: no waiting, please). It waits for what :attr:`stream` holds.

        Raises
        ------
        BufferError
            For another device, for element types without a word in DLPack, and for read-only memory to a consumer of
            the old form, which cannot be told.
        """
        from . import dlpack  # loads ctypes

        here = self.__dlpack_device__()
        if dl_device is not None and dl_device != here:
            raise BufferError(f"cannot export to device {dl_device!r:.80}; this memory is on {here}: see .to_host()")
        gpu = self._open_views().gpu
        if gpu is None:
            if stream is not None:
                raise BufferError("memory of the host has no streams: stream must be None")
            view = self._view("DLPack capsule", dlpack.shown_as(self._dtype), show=RegionViews.tolerant_view)
            return dlpack.capsule(view, self._dtype, max_version=max_version, copy=copy)
        if copy:
            raise BufferError("no copies are made on the GPU here; take .to_host(), or copy what you get")
        if stream != -1:
            self._wait_on(streams.as_stream(1 if stream is None else stream))
        view = self._view("DLPack capsule", dlpack.shown_as(self._dtype), show=RegionViews.device_view)
        return dlpack.capsule(view, self._dtype, max_version=max_version, gpu=gpu)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's (device type, device id)."""
        views = self._open_views()
        if views.gpu is not None:
            return (DLPACK_CUDA, views.gpu)
        if not views.addressable:
            raise BufferError(f"memory on {views.region.location} is not exported by DLPack")
        return (DLPACK_CPU, 0)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The CUDA array interface, version 3; only of arrays on a GPU.

        A consumer of it keeps this object, not the memory. So once it was asked for, the memory stays until this
        object is gone: :meth:`Array.close` before that defers.

        References
        ----------
        Numba documentation, "CUDA Array Interface (Version 3)".
        """
        views = self._open_views()
        if views.gpu is None or not is_plain(self._dtype):  # it has no word for bfloat16 and the 8-bit floats
            raise AttributeError(f"no CUDA array interface for {self._dtype} on {views.region.location}; use DLPack")
        shown = self._shown
        if views.region.asleep is not None:
            raise views.region.sleeps()
        if shown is None or shown.shape != self._shape:
            shown = self._shown = self._view("CUDA array interface", self._dtype, show=RegionViews.device_view)
        address = shown.__array_interface__["data"][0] if shown.size else 0
        return {
            "version": 3,
            "shape": self._shape,
            "typestr": self._dtype.str,
            "data": (address, self.readonly),
            "strides": None,
            "stream": self._stream,
        }

    @property
    def stream(self) -> int | None:
        """The stream on which work is under way that fills this array; None if it is done.

        Set it, to a handle or to any object with ``cuda_stream``, ``ptr`` or ``__cuda_stream__``, and whoever takes the
        memory by DLPack, ``__cuda_array_interface__`` or :meth:`torch` waits for that stream first, on the GPU.
        """
        return self._stream

    @stream.setter
    def stream(self, stream: object) -> None:
        views = self._open_views()
        if stream is not None and views.gpu is None:
            raise UsageError(f"memory on {views.region.location} has no streams")
        self._stream = None if stream is None else streams.as_stream(stream)

    def _wait_on(self, stream: int) -> None:
        """Have a consumer's stream wait for the work that fills this array."""
        if self._stream is not None and self._stream != stream:
            streams.stream_wait(self._open_views().region, self._stream, stream)

    # -- values -------------------------------------------------------------------------------------------------
    def __setitem__(self, key: int | slice | tuple[Any, ...] | EllipsisType, value: object) -> None:
        """Write through numpy, with all its indexing. On a GPU: whole rows, by a row's number or a slice of them."""
        self._check_writable()
        views = self._open_views()
        try:
            if views.addressable:
                self.numpy()[key] = value
            else:
                assign(self, key, value)
        except OverflowError as error:
            raise _unfit(value, self, error) from None

    def fill(self, value: object) -> None:
        """Set every element to `value`, as numpy would convert it."""
        self._check_writable()
        views = self._open_views()
        try:
            if views.addressable:
                self.numpy().fill(value)
            else:
                assign(self, slice(None) if self._shape else ..., value)
        except (OverflowError, ValueError) as error:
            raise _unfit(value, self, error) from None

    def copy(self) -> NDArray:
        """Return a copy as a numpy array of the host."""
        views = self._open_views()
        if views.addressable:
            return self.numpy().copy()
        shape = self._shape
        made = np.empty(shape, self._dtype)
        if made.nbytes:
            if self._stream is not None:
                streams.stream_synchronize(views.region, self._stream)
            kept = views.region.pin(self._offset, self._offset + made.nbytes, "copy")
            try:
                views.region.driver.copy_out(bytes_of(made), views.region.address + self._offset)
            finally:
                kept.release()
        return made

    to_host = copy

    def _check_writable(self) -> None:
        if self.readonly and not self._open_views().addressable:
            raise ReadOnlyError(
                'the array is read-only here; attach with access="rw" if it was published writable, or copy it with '
                "vram.asarray(array.to_host(), device=...)"
            )
        if self.readonly:
            raise ReadOnlyError(
                'the array is read-only here; attach with access="cow" for changes of your own, with access="rw" if '
                "it was published writable, or take a .copy()"
            )


if sys.version_info < (3, 12):
    del Viewable.__buffer__  # the interpreter would not look at it


def _unfit(value: object, array: Viewable, error: Exception) -> Exception:
    if isinstance(error, VramError):
        return error
    return UsageError(f"{value!r:.40} cannot be put into an array of {array._dtype}: {error}")


def assign(array: Viewable, key: object, value: object) -> None:
    """Copy a value of the host, converted and broadcast as numpy does, over whole rows of an array on a GPU.
    Raises UsageError for other indices than a row or a run of rows, and for a value that does not fit."""
    if isinstance(key, EllipsisType):
        row, shape = 0, array.shape
    elif isinstance(key, (int, slice)):
        row, shape = part_of(key, array.shape)
    else:
        raise UsageError(f"on a GPU whole rows are written: index with a row or a slice of rows, not {key!r:.80}")
    try:
        given: NDArray = np.asarray(value, array.dtype)
        given = np.broadcast_to(given, shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"the value does not fit {array.dtype} {shape}: {error}") from None
    if not given.size:
        return
    start = row * array._row_nbytes
    views = array._open_views()
    if array._stream is not None:
        stream_synchronize(views.region, array._stream)  # what it still writes comes first
    kept = views.region.pin(array._offset + start, array._offset + start + given.nbytes, "copy")
    try:
        copy_host_rows(views.region, array._offset + start, given)
    finally:
        kept.release()
