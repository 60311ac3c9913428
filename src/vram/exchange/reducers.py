"""How multiprocessing pickles arrays: as a reference to shared memory, or by name what was attached."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ..arrays import Array
from .endpoint import endpoint

__all__ = ["register"]


def register() -> None:
    """Teach :mod:`multiprocessing` (Queue, Pipe, Pool, Process arguments) to pass arrays without copying them."""
    ForkingPickler.register(Array, _reduce)


def _reduce(array: Array) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    # What was attached is attached again by whoever gets it: then the keeper knows who holds what.
    if array.provenance is not None and array.region.is_imported:
        by_name = array.provenance.reduce(array)
        if by_name is not None:
            return by_name
    return _rebuild, endpoint().write_down(array)


def _rebuild(*reference: Any) -> Array:
    return endpoint().read(*reference)
