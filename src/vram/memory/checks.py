"""Arguments of this room in the form that drivers take. Values that drivers refuse are not checked here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from .. import driver as drivers
from ..driver.protocol import Driver
from ..errors import AlignmentError, UsageError
from ..spec import Access, AllocationFlags, HandleKind, Location, parse_size

_T = TypeVar("_T")


def size(value: int | str, what: str) -> int:
    """Return a number of bytes; strings such as ``"64MiB"`` are read."""
    if type(value) is int and 0 <= value < 1 << 63:  # the common case, without the cost of parsing
        return value
    return parse_size(value, what=what)


def positive(value: int | str, what: str, granularity: int) -> int:
    """Return a number of bytes that is not 0 and a multiple of `granularity`."""
    nbytes = size(value, what)
    if nbytes == 0:
        raise UsageError(f"{what} is 0; the least is one granule of {granularity} bytes")
    return aligned(nbytes, what, granularity)


def aligned(value: int, what: str, granularity: int) -> int:
    """Return a size, offset or address that is a multiple of `granularity`."""
    if value % granularity:
        below = value - value % granularity
        nearest = f"{below} or {below + granularity}" if below else f"{granularity}"
        raise AlignmentError(f"{what} {value} is not a multiple of the granularity, {granularity}; nearest: {nearest}")
    return value


def place(driver: Driver, location: Location | str) -> Location:
    """Return a location that `driver` serves."""
    # One name for one place: a GPU's UUID becomes its ordinal here, and "this thread's NUMA node" a certain one.
    found = location if type(location) is Location else Location.parse(location)
    if type(found.id) is int and found.kind == getattr(driver, "name", None):  # as nearly always
        return found
    return driver_of(driver).canonical(found)


def served(location: Location | str) -> tuple[Location, Driver]:
    """Return a location as this process calls it, and the driver that serves it, loaded at its first use."""
    if hasattr(location, "mem_create"):
        raise UsageError(
            f'a region is made at a place, such as "host" or "cuda:0", not with <{type(location).__name__}>: write '
            f'Region.create("host", ...), and driver= besides for one that is not registered'
        )
    found = drivers.visible(location if type(location) is Location else Location.parse(location))
    return found, drivers.get(found)


def handle_bytes(value: bytes) -> bytes:
    """Return what another process sent as the bytes of a handle; how many there must be is for the driver to say."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise UsageError(f"a handle of another process is bytes, not {value!r:.40}")
    return bytes(value)


def kinds(value: HandleKind) -> HandleKind:
    """Return a mask of handle kinds."""
    if type(value) is not HandleKind:
        raise UsageError(f"handle kinds must be a HandleKind such as HandleKind.POSIX_FD, not {value!r}")
    return value


def flags(value: AllocationFlags) -> AllocationFlags:
    """Return a mask of what memory is meant for."""
    if type(value) is not AllocationFlags:
        raise UsageError(f"flags must be AllocationFlags such as AllocationFlags.GPU_DIRECT_RDMA, not {value!r}")
    return value


def access(value: Access) -> Access:
    """Return an access right."""
    if type(value) is not Access:
        raise UsageError(f"access must be Access.NONE, READ or READ_WRITE, not {value!r}")
    return value


def flag(value: object, what: str) -> bool:
    """Return a choice between two, for whatever Python takes for one: an array of several is none."""
    try:
        return bool(value)
    except (TypeError, ValueError):
        raise UsageError(f"{what} must be True or False, not {value!r:.40}") from None


def each(values: Iterable[_T], kinds: tuple[type, ...], what: str) -> tuple[_T, ...]:
    """Return what was given one behind the other, all of the kinds that are meant."""
    try:
        found = tuple(values)
    except TypeError:
        raise UsageError(f"{what} must be a list of {_either(kinds)}, not {values!r:.40}") from None
    for one in found:
        if not isinstance(one, kinds):
            raise UsageError(f"{what} must be a list of {_either(kinds)}; {one!r:.40} is none")
    return found


def _either(kinds: tuple[type, ...]) -> str:
    return " or ".join(kind.__name__ for kind in kinds)


def driver_of(value: Driver) -> Driver:
    """Return a driver, if that is what it looks like."""
    if not hasattr(value, "mem_granularity"):
        raise UsageError(f"a driver is what vram.driver.get(location) returns, not {value!r:.40}")
    return value
