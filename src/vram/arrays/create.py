"""Make arrays: on memory that can be grown in place and shared from the start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .. import driver as drivers
from ..driver import visible
from ..errors import UsageError, VramError
from ..memory import Region, checks
from ..sharing.descriptor import check_array_name
from ..spec import HOST, Location, round_up
from . import Array
from .dtypes import as_dtype
from .gpu import CudaSource, copy_rows, to_host
from .numpy_on_use import np
from .shapes import nbytes_of
from .sources import as_source
from .views import close_when_unused

if TYPE_CHECKING:
    from .hints import ArrayLike

ALIGNMENT = 256  # of arrays in one memory, in bytes: what GPU libraries ask for


def empty(
    shape: int | Sequence[int],
    dtype: object = "float32",
    *,
    device: str | Location,
    capacity: int | Sequence[int] | None = None,
    chunk: int | str | None = None,
    populate: bool = False,
    backing: Literal["zero"] | None = None,
) -> Array:
    """Make an array whose first dimension can be resized in place, up to its capacity.

    Parameters
    ----------
    shape : int or sequence of int
        The shape to begin with; the first dimension may be 0.
    dtype : str, numpy.dtype, type or torch.dtype
        The element type, such as ``"float32"`` or ``"bfloat16"``.
    device : str
        ``"host"`` or, with the CUDA driver, ``"cuda:0"``. There is no default: memory never lands somewhere silently.
    capacity : int or sequence of int, optional
        The largest number of rows (first dimension), or the largest shape. It costs addresses, not memory. By
        default the array cannot grow.
    chunk : int or str, optional
        Bytes by which memory is added and given back; see :meth:`vram.memory.Region.create`.
    populate : bool
        Touch the pages now rather than at first use.
    backing : "zero", optional
        Rows up to the capacity that have no memory read as zeros, so that a kernel that reads a row too far gets zeros
        and does not end the context; writing there faults all the same. For kernels and C code, which go by
        :attr:`~vram.Array.address`: views show the rows that there are, or with ``full=True`` all. On the host it costs
        nothing; on a GPU growing waits for its work, as shrinking does. See :meth:`vram.memory.Region.create`.

    Returns
    -------
    Array
        New memory is zeroed by the operating system; rows given back by a shrink inside a chunk keep their contents.

    Raises
    ------
    UsageError
        For a shape, dtype, device or capacity that cannot be.
    OutOfMemoryError, AddressSpaceError
        If there is not enough.

    Examples
    --------
    >>> vectors = vram.empty((0, 384), "float32", device="host", capacity=1_000_000)
    >>> vectors.resize(4096)
    >>> vectors.shape
    (4096, 384)
    """
    location = Location.parse(device)
    if location != HOST:
        location = visible(location)
    return Array.create(
        drivers.get(location), location, shape, dtype, capacity=capacity, chunk=chunk, populate=populate,
        backing=backing,
    )  # fmt: skip


def zeros(
    shape: int | Sequence[int],
    dtype: object = "float32",
    *,
    device: str | Location,
    capacity: int | Sequence[int] | None = None,
    chunk: int | str | None = None,
    populate: bool = False,
    backing: Literal["zero"] | None = None,
) -> Array:
    """Make an array of zeros. New memory is zero anyway: this says in the code that it is relied on.

    Parameters and errors are those of :func:`empty`.
    """
    return empty(shape, dtype, device=device, capacity=capacity, chunk=chunk, populate=populate, backing=backing)


def asarray(
    source: ArrayLike | complex | Sequence[Any],
    dtype: object = None,
    *,
    device: str | Location,
    capacity: int | Sequence[int] | None = None,
    chunk: int | str | None = None,
    populate: bool = False,
    backing: Literal["zero"] | None = None,
) -> Array:
    """Return an array with the contents of `source`: the same object if it is a vram array that fits, else a copy.

    Parameters
    ----------
    source : Array, numpy.ndarray, torch.Tensor, buffer, or nested sequence of numbers
        The source of the contents.
    dtype : optional
        Convert to this element type; by default that of `source`.
    device, capacity, chunk, populate, backing
        As of :func:`empty`. Copying touches the pages of the rows anyway; `populate` is about the rest of the last
        chunk, and about an array that is returned as it is.

    Raises
    ------
    UsageError
        If it is no array, or its numbers do not make one.
    """
    location = visible(Location.parse(device))
    kind = None if dtype is None else as_dtype(dtype)
    if (
        isinstance(source, Array)
        and source.device == location
        and (kind is None or kind == source.dtype)
        and capacity is None
        and chunk is None
        and backing is None
    ):
        if checks.flag(populate, "populate"):
            source.region.populate()
        return source
    given = _given(source, kind)
    wanted = given.dtype if kind is None else kind
    array = empty(
        given.shape, wanted, device=location, capacity=capacity, chunk=chunk, populate=populate, backing=backing
    )
    try:
        _copy(given, array)
    except BaseException as error:
        array.close()
        if isinstance(error, (TypeError, ValueError)) and not isinstance(error, VramError):
            raise UsageError(f"{given.dtype} does not convert to {array.dtype}: {error}") from None
        raise
    return array


def pack(arrays: Mapping[str, ArrayLike | complex | Sequence[Any]], *, device: str | Location) -> dict[str, Array]:
    """Copy many arrays into one memory, one behind the other, and return an array for each.

    Memory comes in units of 2 MiB: a thousand arrays of :func:`zeros` take 2 GiB, and packed what they have in them.
    All of them together are published, lent or sent without a copy, as one segment. (:func:`vram.publish` packs what
    it copies by itself, so numpy arrays that are published once need no call of this.)

    Parameters
    ----------
    arrays : mapping of str to array
        Arrays as :func:`asarray` takes them, by names that :func:`vram.publish` takes.
    device : str
        As of :func:`empty`.

    Returns
    -------
    dict of str to Array
        In the order given, each aligned to 256 bytes. They cannot be resized. The memory is freed with the last of them
        and of their views.

    Raises
    ------
    UsageError
        If `arrays` is no mapping or is empty, or for what is no array; the error names it.
    OutOfMemoryError, AddressSpaceError
        If there is not enough.

    Examples
    --------
    >>> packed = vram.pack({"scale": np.ones(8), "shift": np.zeros(8)}, device="host")
    >>> packed["shift"].address - packed["scale"].address
    256
    """
    location = visible(Location.parse(device))
    if not isinstance(arrays, Mapping) or not arrays:
        raise UsageError(f"pack takes a mapping of names to arrays with one at least, not {arrays!r:.60}")
    given: dict[str, np.ndarray[Any, Any] | CudaSource] = {}
    places: dict[str, int] = {}
    end = 0
    for name, source in arrays.items():
        with _about(check_array_name(name)):
            given[name] = found = _given(source, None)
            as_dtype(found.dtype)
        places[name] = round_up(end, ALIGNMENT)
        end = places[name] + nbytes_of(found.shape, found.dtype)
    region = Region.create(location, capacity=max(end, 1), nbytes=end, managed=True)
    packed: dict[str, Array] = {}
    try:
        for name, found in given.items():
            packed[name] = Array(region, found.dtype, found.shape, offset=places[name])
            with _about(name):
                _copy(found, packed[name])
        close_when_unused(region)
    except BaseException:
        for array in packed.values():
            array.close()
        region.close()
        raise
    return packed


@contextlib.contextmanager
def _about(name: str) -> Iterator[None]:
    """Have errors in a block say which array they are about."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"array {name!r:.80}: {error}") from None


def _copy(given: np.ndarray[Any, Any] | CudaSource, array: Array) -> None:
    """Copy contents: within the host or a GPU directly, between the two over the host."""
    if not isinstance(given, CudaSource):
        array[...] = given
    elif not array._open_views().addressable and given.dtype == array.dtype:
        copy_rows(array.region, array.offset, given)
    elif given.is_ours:
        array[...] = to_host(given)
    else:
        raise UsageError("copy it to the host with its own library first, or take it as it is: same device, same dtype")


def _given(source: object, kind: np.dtype[Any] | None) -> np.ndarray[Any, Any] | CudaSource:
    """Look at the contents of anything as numpy does, or as they lie on a GPU."""
    if not isinstance(source, (list, tuple, int, float, complex, bool, np.generic)):
        found = as_source(source)
        return found if isinstance(found, CudaSource) else found.view
    try:
        return np.asarray(source, kind)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"numpy makes no array of that: {error}; give rows of one length, of numbers that fit"
        ) from None
