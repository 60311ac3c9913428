"""Collectives on arrays of the host: sums, minima and maxima in the order of the ranks, and moving elements.

Every rank that reduces the same elements gets the same bits. Floats of 16 bits are summed in 32. A sum begins with
``x + 0.0``, so that no result is -0.0, on whatever way it was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..arrays.sources import Source, as_source
from ..errors import UsageError
from .symmetric import SymmetricBuffer

if TYPE_CHECKING:
    import numpy as np

    from ..arrays.hints import ArrayLike

_Staged = Sequence["np.ndarray[Any, Any]"]  # what each rank has staged, by part and element

OPS = ("sum", "min", "max")
DTYPES = ("float32", "float16", "bfloat16", "int32", "float64", "int64")
NORMED = ("float32", "float16", "bfloat16")
_BLOCK = 32 * 1024  # elements at a time: what is summed up stays in the second-level cache
_LINE = 64  # elements that a share is a multiple of: no two ranks write to one line of the cache


def check(op: str, dtype: str) -> None:
    """Raise :class:`UsageError` for an operation or element type that is not reduced."""
    if op not in OPS:
        raise UsageError(f"op {op!r:.40} is not one of {', '.join(OPS)}")
    if dtype not in DTYPES:
        raise UsageError(f"elements of type {dtype} are not reduced; {', '.join(DTYPES)} are")


def share(count: int, rank: int, size: int) -> slice:
    """Return which of `count` elements are for a rank to reduce; the last ranks may have fewer, or none."""
    each = -(-count // (size * _LINE)) * _LINE
    return slice(min(rank * each, count), min((rank + 1) * each, count))


def reduce(op: str, sources: Sequence[np.ndarray[Any, Any]], targets: Sequence[np.ndarray[Any, Any]]) -> None:
    """Reduce arrays of one dimension, one of each rank in their order, and write the result to all targets.
    Sources and targets have one length and type, and may be the same memory."""
    import numpy as np

    first = sources[0]
    kind = first.dtype
    wide = np.dtype(np.float32) if kind.itemsize == 2 else kind
    combine: Callable[..., Any] = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op]
    begins_with_zero = op == "sum" and wide.kind == "f"
    result = np.empty(min(_BLOCK, first.shape[0]), wide)
    narrow = result if wide == kind else np.empty(result.shape[0], kind)
    with np.errstate(all="ignore"):  # what is no number is a result, and no rank may stop in the middle because of it
        for start in range(0, first.shape[0], _BLOCK):
            stop = min(start + _BLOCK, first.shape[0])
            total, rounded = result[: stop - start], narrow[: stop - start]
            if begins_with_zero:
                np.add(first[start:stop], wide.type(0), out=total)
            else:
                total[...] = first[start:stop]
            for source in sources[1:]:
                combine(total, source[start:stop], out=total)
            if rounded is not total:
                rounded[...] = total
            for target in targets:
                target[start:stop] = rounded


def check_norm(dtype: str, count: int, width: int, epsilon: object) -> float:
    """Return epsilon if rows of `width` elements of a type can be normalized; raise :class:`UsageError` if not."""
    if dtype not in NORMED:
        raise UsageError(f"rows of {dtype} are not normalized; those of {', '.join(NORMED)} are")
    if not width or count % width:
        raise UsageError(f"{count} elements are no rows of {width}, which is how many the weight has")
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 <= epsilon < float("inf"):
        raise UsageError(f"epsilon {epsilon!r:.40} is no number from 0 on")
    return float(epsilon)


def normalize(
    reduced: np.ndarray[Any, Any], residual: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], epsilon: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Add a residual, and normalize each row by its root mean square; return that and the sum, of one dimension each.
    The sum is rounded before its squares are taken, as by a kernel of its own; the weighted result is rounded once."""
    import numpy as np

    wide = np.dtype(np.float32)
    with np.errstate(all="ignore"):
        total = (reduced.astype(wide) + residual.astype(wide)).astype(reduced.dtype)
        rows = total.astype(wide).reshape(-1, weight.size)
        mean = np.mean(rows * rows, axis=1, dtype=wide, keepdims=True)
        scale = wide.type(1) / np.sqrt(mean + wide.type(epsilon))
        return (rows * scale * weight.astype(wide)).astype(reduced.dtype).reshape(-1), total


# -- what is given ------------------------------------------------------------------------------------------------
def flat(given: SymmetricBuffer | ArrayLike, rank: int, *, writable: bool = False) -> np.ndarray[Any, Any]:
    """Return the elements of an array of the host, in one dimension, in its own memory. Raises UsageError if that
    cannot be, it is on a GPU, or it is read-only and has to be `writable`."""
    if isinstance(given, SymmetricBuffer):
        return given.flat(rank)
    source = as_source(given)
    if not isinstance(source, Source):
        raise UsageError("one array of the call is on a GPU and another one is not: put both on the same device")
    if not source.contiguous:
        raise UsageError("the elements of the array do not lie one behind the other: give a contiguous one")
    if writable and not source.view.flags.writeable:
        raise UsageError("the array is read-only, and the result goes there: give another as out=")
    return source.view.reshape(-1)


def check_out(whole: np.ndarray[Any, Any], of: np.ndarray[Any, Any], count: int) -> None:
    """Raise :class:`UsageError` unless an array has so many elements, of the type of another one."""
    if whole.dtype != of.dtype or whole.size != count:
        raise UsageError(f"{whole.size} elements of {whole.dtype} where it takes {count} of {of.dtype}")


def check_apart(source: np.ndarray[Any, Any], out: np.ndarray[Any, Any], offset: int = 0) -> None:
    """Raise :class:`UsageError` if contiguous source and result overlap, unless the source begins `offset` bytes into
    the result: a call in place is staged before it is overwritten, piece by piece."""
    begin, at = source.ctypes.data, out.ctypes.data
    if begin < at + out.nbytes and at < begin + source.nbytes and begin != at + offset:
        raise UsageError("source and out overlap, and are not in place: give memory of its own as out=")


# -- taking what all have staged ----------------------------------------------------------------------------------
def take_root(into: np.ndarray[Any, Any], root: int, rank: int, staged: _Staged, start: int, stop: int) -> None:
    """Take elements of one rank, on all others."""
    if rank != root:
        into[start:stop] = staged[root][0]


def take_all(rows: np.ndarray[Any, Any], staged: _Staged, start: int, stop: int) -> None:
    """Take elements of all ranks, each to a row of its own."""
    for row, one in zip(rows, staged, strict=True):
        row[start:stop] = one[0]


def take_parts(rows: np.ndarray[Any, Any], rank: int, staged: _Staged, start: int, stop: int) -> None:
    """Take elements of the part that each rank has for this one, each to a row of its own."""
    for row, one in zip(rows, staged, strict=True):
        row[start:stop] = one[rank]


def take_reduced(into: np.ndarray[Any, Any], op: str, rank: int, staged: _Staged, start: int, stop: int) -> None:
    """Reduce elements of the parts that all ranks have for this one."""
    reduce(op, [one[rank] for one in staged], [into[start:stop]])
