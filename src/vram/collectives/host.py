"""Sums, minima and maxima of arrays of the host: element by element in the order of the ranks.

Every rank that reduces the same elements gets the same bits. Floats of 16 bits are summed in 32. A sum begins with
``x + 0.0``, so that no result is -0.0, on whatever way it was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DTYPES", "OPS", "check", "reduce", "share"]

OPS = ("sum", "min", "max")
DTYPES = ("float32", "float16", "bfloat16", "int32", "float64", "int64")
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
    """Reduce arrays of one dimension, one of each rank in their order, and write what comes of it to all targets.

    Sources and targets have one length and type, and may be the same memory.
    """
    import numpy as np

    first = sources[0]
    kind = first.dtype
    wide = np.dtype(np.float32) if kind.itemsize == 2 else kind
    combine: Callable[..., Any] = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op]
    begins_with_zero = op == "sum" and wide.kind == "f"
    result = np.empty(min(_BLOCK, first.shape[0]), wide)
    narrow = result if wide == kind else np.empty(result.shape[0], kind)
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
