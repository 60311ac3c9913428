"""How multiprocessing pickles arrays: as a reference to shared memory, or by name what was attached.

An end of an :class:`ArrayChannel` can be the argument of a process, too."""

from __future__ import annotations

import socket
from collections.abc import Callable
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

from ..arrays import Array
from ..memory.foreign import ForeignRegion
from .array_channel import ArrayChannel
from .endpoint import endpoint

__all__ = ["register"]


def register() -> None:
    """Teach :mod:`multiprocessing` (queues, pipes, pools, process arguments) to pass arrays without copying them."""
    ForkingPickler.register(Array, _reduce)
    ForkingPickler.register(ArrayChannel, _reduce_channel)


def _reduce(array: Array) -> tuple[Callable[..., Array], tuple[Any, ...]]:
    # What was attached is attached again by whoever gets it: then the keeper knows who holds what.
    # Not what was borrowed by handle: that cannot be attached by whoever comes, and says so below.
    region = array.region
    if array.provenance is not None and region.is_imported and not isinstance(region, ForeignRegion):
        by_name = array.provenance.reduce(array)
        if by_name is not None:
            return by_name
    return _rebuild, endpoint().write_down(array)


def _reduce_channel(channel: ArrayChannel) -> tuple[Callable[..., ArrayChannel], tuple[Any, ...]]:
    return _rebuild_channel, (DupFd(channel.give_away()),)


def _rebuild_channel(descriptor: Any) -> ArrayChannel:
    return ArrayChannel(socket.socket(fileno=descriptor.detach()))


def _rebuild(*reference: Any) -> Array:
    return endpoint().read(*reference)
