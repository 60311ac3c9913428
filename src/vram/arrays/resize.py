"""Growth of many arrays in one call: see :mod:`vram.memory.resize`, which does it."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UsageError
from .array import Array, resize_rows


def resize(rows: Mapping[Array, int], *, after: object = None) -> None:
    """Set the lengths of arrays' first dimensions in place: of all of them, or of none.

    As :meth:`Array.resize <vram.Array.resize>` for each, and it may be larger for some and smaller for others. If
    anything fails, every array is as it was. The work of the GPUs is waited for once.

    Growing arrays get their memory before shrinking ones give any back. Where there is not enough for both, shrink in
    one call and grow in the next.

    Parameters
    ----------
    rows : dict of Array to int
        The new length of each.
    after : optional
        Only for arrays on a GPU that shrink, or grow and have ``backing="zero"``: an event, as a number or an object of
        torch or CuPy. The work that used what goes, zeros included, is done when it is. By default all work on the
        devices that may use it is waited for.

    Raises
    ------
    CapacityError
        Past the capacity of one of them.
    BusyError
        While views or slices show what would go; names all of them.
    AsleepError
        If one of them is asleep.
    UsageError
        If one of them has memory of others, as slices and what was attached; or if two lie on the same memory.
    OutOfMemoryError
        If there is not enough for all.

    Examples
    --------
    >>> keys, values = (vram.zeros((0, 64), device="host", capacity=1 << 20) for _ in range(2))
    >>> vram.resize({keys: 4096, values: 4096})
    >>> keys.shape, values.shape
    ((4096, 64), (4096, 64))
    """
    if not isinstance(rows, Mapping):
        raise UsageError(f"rows is a dict of arrays and their new lengths, not {rows!r:.80}")
    for array in rows:
        if not isinstance(array, Array):
            raise UsageError(f"arrays are resized, not {array!r:.80}")
    resize_rows(rows, after)
