"""Checks of places and buffers for all transports, in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import driver as drivers
from ..arrays import Array
from ..arrays.share import over, share
from ..arrays.streams import as_stream, stream_synchronize
from ..driver import visible
from ..errors import DriverError, RangeError, UnsupportedError, UsageError
from ..spec import HOST, Location
from .contract import No, Yes

if TYPE_CHECKING:
    import numpy as np


# The advice of a refusal: the transport that goes over the host, within one process and between two.
STAGED = "use staged, which goes over the host"
SHM = "use shm, which goes over memory of the host that both processes map"


def name_place(place: Location | str) -> Location:
    """Return the one name of a place in this process. Raises UsageError for text that names none, UnsupportedError if
    this process does not see it, or has no driver for it."""
    return visible(Location.parse(place))


def seen(*places: Location | str) -> Yes | No:
    """Say whether this process can work on all of these places."""
    for place in map(Location.parse, places):
        try:
            found = visible(place)
        except (UnsupportedError, DriverError) as error:
            return No(f"{place}: {error}")
        if found != HOST and not isinstance(found.id, int):
            return No(f'{place}: memory of the host that NVIDIA\'s driver made is no end of a transport; use "host"')
    return Yes()


def on_gpus(what: str, src: Location | str, dst: Location | str, instead: str) -> Yes | No:
    """Say whether two places are two GPUs, or one, that reach each other; `instead` is the way over the host."""
    places = Location.parse(src), Location.parse(dst)
    for place in places:
        if place.kind != "cuda":
            return No(f"{what}, and {place} is not: {instead}")
    answer = seen(*places)
    if isinstance(answer, No):
        return answer
    here, there = map(visible, places)
    driver: Any = drivers.get(here)
    reason: str = driver.peer_refusal(there.id, here.id)
    return No(f"{reason}; {instead}") if reason else Yes()


def as_array(buffer: Any, *, copies: bool = False) -> Array:
    """Return a buffer as an array: a vram array, or whatever :func:`vram.share` takes. If the transport only `copies`,
    GPU memory that cannot leave this process will do."""
    try:
        return over(buffer) if copies else share(buffer)
    except UnsupportedError as error:
        hint = "" if copies or isinstance(buffer, Array) else ". The shm transport copies whatever is on a GPU"
        raise UsageError(f"a transport moves vram arrays, and what vram.share() makes one of: {error}{hint}") from None


def check_place(what: str, array: Array, place: Location) -> None:
    """Raise unless an array is at a place, where the place's GPU can work on it."""
    region = array.region
    if region.location != place and place not in region.users:
        raise UsageError(f"{what} is on {region.location}, not on {place}, which this transport is for")
    if place not in region.users:
        users = ", ".join(map(str, region.users))
        raise UsageError(f"{what} is on {place} but mapped for {users} only; map it for {place}, too")


def check_fits(array: Array, nbytes: int, place: Location) -> None:
    """Raise unless what comes can be written to an array."""
    check_place("the buffer to receive into", array, place)
    if array.readonly:
        raise UsageError(f"{array!r} is read-only: nothing can be received into it")
    if array.nbytes < nbytes:
        raise RangeError(f"the message has {nbytes} bytes and the buffer {array.nbytes}; it waits for a larger one")


def fresh(place: Location, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a new array at a place, for what came without a buffer."""
    return Array.create(drivers.get(place), place, shape, dtype)


def ready(array: Array, stream: object) -> None:
    """Return when the work is done that was begun on an array: that of a stream, or all of its GPUs."""
    region = array.region
    if stream is None:
        region.synchronize()
    elif region.users[0].kind == "host":
        raise UsageError(f"{array!r} is on the host, where no stream works on it: leave `stream` out")
    else:
        stream_synchronize(region, as_stream(stream))


def shown_on(buffer: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return what came as an array on the buffer that it was received into: the buffer itself if it looks like it."""
    if buffer.dtype == dtype and buffer.shape == shape:
        return buffer
    return Array(buffer.region, dtype, shape, offset=buffer.offset)
