"""Drivers: each speaks to one kind of memory; integers in, integers out, no policy.

:func:`get` finds the driver that serves a location. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError, UsageError
from ..spec import HOST, Location
from .protocol import Driver

__all__ = ["get", "register", "reserved", "visible"]

_drivers: dict[str, Driver] = {}
_makers: dict[str, Callable[[], Driver]] = {}
_OURS = ("host", "cuda")
_making = threading.RLock()  # a driver keeps books: there is one of each, whoever asks first


def register(kind: str, make: Callable[[], Driver]) -> None:
    """Serve locations of a new kind, such as ``Location("mine", 0)``, by the driver that `make` returns at the first
    use. The driver passes ``vram.testing.DriverContract``. Raises UsageError for a kind in use, or no identifier."""
    if not isinstance(kind, str) or not kind.isidentifier() or not callable(make):
        raise UsageError(f"a driver is registered by a kind that is an identifier, and what makes it, not {kind!r:.60}")
    if kind in _OURS or _makers.get(kind, make) is not make:
        raise UsageError(f"locations of kind {kind!r} are served already, by {_makers.get(kind, 'vram itself')!r}")
    _makers[kind] = make


def get(location: Location) -> Driver:
    """Return this process's driver for a location, always the same object; never a fallback to another kind of memory.
    Raises UsageError for anything but a Location, UnsupportedError if the system has no such driver."""
    try:
        driver = _drivers.get(location.kind)
    except AttributeError:
        raise UsageError(
            f"location must be a Location, such as Location.parse('cuda:0'), not {location!r:.60}"
        ) from None
    if driver is None:
        with _making:
            driver = _drivers.get(location.kind)
            if driver is None:
                driver = _drivers.setdefault(location.kind, _load(location))
    return driver


def _load(location: Location) -> Driver:
    if location.kind == "host":
        if sys.platform != "linux":
            raise UnsupportedError("host memory", "Linux (memfd and sealing)", sys.platform)
        from .host import HostDriver

        return HostDriver()
    if location.kind == "cuda":
        from .cuda import CudaDriver

        return CudaDriver()
    if location.kind in _makers:
        made = _makers[location.kind]()
        if getattr(made, "name", None) != location.kind:
            raise UnsupportedError(
                f"memory on {location}", f"a driver with the name {location.kind!r}", f"{made!r:.80}, which is none",
                "It is what vram.driver.register() was given that made it",
            )  # fmt: skip
        return made
    have = ", ".join((*_OURS, *_makers))
    raise UnsupportedError(
        f"memory on {location}", "a driver for it", f"drivers for {have}", "Register one: vram.driver.register()"
    )


def reserved() -> list[tuple[str, int, int, list[tuple[int, int]]]]:
    """Return each reservation of the loaded drivers, by address: driver name, address, bytes, and mapped spans.
    A span is the offset in bytes at which a mapping begins, and that at which it ends."""
    found = []
    for name, made in _drivers.copy().items():
        books = getattr(made, "books", None)  # drivers of others need have none
        if books is None:
            continue
        for place in list(books.reservations.at.copy().values()):
            inside = list(place.mappings.at.copy().values())
            spans = sorted((one.address - place.address, one.end - place.address) for one in inside)
            found.append((name, place.address, place.nbytes, spans))
    return sorted(found, key=lambda one: one[1])


def _after_fork_in_child() -> None:
    global _making
    _making = threading.RLock()  # the parent's thread that had it is not here
    host: Any = _drivers.get(HOST.kind)
    if host is not None:
        host.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def visible(location: Location) -> Location:
    """Return the name of a place in this process: a GPU's UUID becomes its ordinal.
    Raises UnsupportedError for a GPU that this process does not see, or a place without a driver."""
    if location == HOST:
        return HOST
    try:
        return get(location).canonical(location)
    except UsageError as error:
        raise UnsupportedError(
            f"memory on {location}", "that GPU", str(error), "Make it visible: see CUDA_VISIBLE_DEVICES"
        ) from None
