"""Shapes and keys as users write them, and the bytes they come to."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Sequence
from typing import Any

from ..errors import CapacityError, RangeError, UsageError
from .numpy_on_use import np

_MAX_NDIM = 32  # numpy 1's; version 2 allows 64
_MAX_BYTES = 2**63 - 1


def as_shape(shape: int | Sequence[int], what: str = "shape") -> tuple[int, ...]:
    """Return a shape as a tuple of lengths. Raises UsageError if it is no int, or sequence of ints, from 0 on."""
    if type(shape) is tuple and len(shape) <= _MAX_NDIM:
        for length in shape:
            if type(length) is not int or length < 0:
                break
        else:
            return shape  # as nearly always
    if isinstance(shape, (str, bytes)):  # a sequence as well
        raise UsageError(f"{what} must be an int or a sequence of ints, not {shape!r:.80}")
    try:
        lengths: tuple[Any, ...] = tuple(shape)  # type: ignore[arg-type]
    except TypeError:
        lengths = (shape,)
    if len(lengths) > _MAX_NDIM:
        raise UsageError(f"{what} has {len(lengths)} dimensions; at most {_MAX_NDIM} are possible")
    return tuple(as_length(length, what) for length in lengths)


def as_length(value: object, what: str) -> int:
    """Return the length of one dimension."""
    if type(value) is int and value >= 0:
        return value
    try:
        length = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{what} must be made of ints, not {value!r}") from None
    if length < 0 or isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{what} must be made of ints that are not negative, not {value!r}")
    return length


def capacity_rows(capacity: int | Sequence[int], shape: tuple[int, ...]) -> int:
    """Return the capacity in rows."""
    if not shape:
        raise UsageError("an array without dimensions cannot grow: leave capacity out")
    rows = shape[0]
    if isinstance(capacity, (str, bytes)):
        raise UsageError(
            f"capacity is a number of rows, or the largest shape, such as {(max(2 * rows, 1), *shape[1:])}, not "
            f"{capacity!r:.80}: bytes are for chunk=, and for vram.memory.Region"
        )
    asked = as_shape(capacity, "capacity")
    if hasattr(capacity, "__len__") and (len(asked) != len(shape) or asked[1:] != shape[1:]):
        raise UsageError(
            f"capacity {asked} differs from shape {shape} in more than the first dimension; only that one grows: "
            f"write {(max(asked[0] if asked else 0, rows), *shape[1:])}"
        )
    if asked[0] < rows:
        raise CapacityError(f"capacity of {asked[0]} rows is less than the {rows} of the shape")
    return asked[0]


def nbytes_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the bytes of all elements. Raises RangeError where no address space could hold them."""
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    # Beside a 0 the other lengths count as well: numpy has no empty array either whose strides are no numbers.
    spanned = nbytes or dtype.itemsize * math.prod(filter(None, shape))
    if spanned > _MAX_BYTES:
        raise RangeError(f"shape {shape} of {dtype} spans {spanned} bytes; addresses end at {_MAX_BYTES}")
    return nbytes


def part_of(key: object, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return the first row and the shape of what ``array[key]`` means: a row, or a run of rows.
    Raises RangeError for a row that is not there, UsageError for any other key."""
    if isinstance(key, slice) and shape:
        try:
            start, stop, step = key.indices(shape[0])
        except (TypeError, ValueError):
            step = 0
        if step == 1:
            return start, (max(stop - start, 0), *shape[1:])
    elif hasattr(key, "__index__") and shape:
        with contextlib.suppress(TypeError):  # an array of several
            row = operator.index(key)
            if not -shape[0] <= row < shape[0]:
                raise RangeError(f"row {row} is out of range: there are {shape[0]}")
            return row % shape[0], shape[1:]
    raise UsageError(
        f"[{repr(key)[:80]}] is not a row or a run of rows without steps; for anything else use .numpy()[...], which "
        f"copies nothing either (on a GPU .torch() or another library's view)"
    )
