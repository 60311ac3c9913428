"""Where an array can be had again: what a published or attached array turns into when it is pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..arrays import Array

__all__ = ["Provenance"]


class Provenance(NamedTuple):  # made for every array that is attached: a dataclass takes five times as long
    """An array of a published version.

    Attributes
    ----------
    keeper : str
        The keeper's socket path.
    name, version, entry : str, int, str
        The entry, its version, and the array's name in it.
    access : {"r", "rw", "cow"}
        How whoever unpickles it attaches it.
    offset, nbytes : int
        Where in its region the array lay when it was published, in bytes. What lies outside of that was not
        published with it: rows that it grew by since.
    layout : tuple
        The region's chunks when it was published. What was given back and grown again since is other memory.
    """

    keeper: str
    name: str
    version: int
    entry: str
    access: str
    offset: int
    nbytes: int
    layout: tuple[object, ...] = ()

    def reduce(self, array: Array) -> tuple[Callable[..., Array], tuple[Any, ...]] | None:
        """Return what pickle should store of the array, or of a slice of it; None if not all of it was published."""
        then, now = self.layout, array.region.layout
        if then and (len(now) < len(then) or now[len(then) - 1] is not then[-1]):
            return None
        start = array.offset - self.offset
        if start < 0 or start + array.nbytes > self.nbytes:
            return None
        from .by_name import attach_array

        return attach_array, (self.keeper, self.name, self.version, self.entry, self.access, start, array.shape)
