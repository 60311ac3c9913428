"""Streams and events of a GPU: as numbers, or as objects of any framework; and the order between them.

Nothing here imports a framework: a stream is a number, or an object that has one.
"""

from __future__ import annotations

import contextlib

from ..driver.protocol import DeviceMemory
from ..errors import UnsupportedError, UsageError
from ..memory import Region


def as_stream(stream: object) -> int:
    """Return the handle of a stream: a number, or an object of torch, CuPy, Numba or cuda.core.
    Raises UsageError if it is none, or 0, which could mean either default stream."""
    found: object = stream
    if not isinstance(stream, int):
        said = getattr(stream, "__cuda_stream__", None)  # cuda.core's protocol: (version, handle)
        words = [word for word in ("cuda_stream", "ptr", "handle") if hasattr(stream, word)]
        with contextlib.suppress(TypeError, ValueError, IndexError):
            if said is not None:
                found = int((said() if callable(said) else said)[1]) or 1
            elif words:
                found = int(getattr(stream, words[0])) or 1  # the default stream says 0 of itself
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 1 << 64:
        raise UsageError(f"{stream!r:.80} is no CUDA stream; 1 is the legacy default stream, 2 the per-thread one")
    return found


def as_event(event: object) -> int:
    """Return the handle of an event: a number, or an object of torch, CuPy or cuda.core.
    Raises UsageError if it is none, or was not recorded yet."""
    words = [word for word in ("cuda_event", "ptr", "handle") if hasattr(event, word)]
    found: object = event
    with contextlib.suppress(TypeError, ValueError):
        found = int(getattr(event, words[0])) if words else event
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 1 << 64:
        raise UsageError(f"{event!r:.80} is no CUDA event, or was not recorded yet")
    return found


def stream_wait(region: Region, before: int, after: int) -> None:
    """Have stream `after` wait, on the GPU, for what stream `before` holds now.
    Raises UsageError if `before` is no stream of a GPU that may access the memory."""
    driver = stream_ordered(region)
    for place in region.users:  # an event is recorded on streams of its own GPU only
        event = driver.event_create(place)
        try:
            driver.event_record(event, before)
        except UsageError:
            continue
        else:
            driver.stream_wait(after, event, place)
            return
        finally:
            driver.event_destroy(event)  # the driver keeps it until the wait is over
    raise UsageError(
        f"a stream to wait for, {before:#x}, is none (any more) of a GPU that may access the memory: see array.stream"
    )


def stream_synchronize(region: Region, stream: int) -> None:
    """Return when a stream is done with what it holds now."""
    stream_ordered(region).stream_synchronize(stream, region.users[0])


def stream_ordered(region: Region) -> DeviceMemory:
    """Return the driver of a region, if streams order its work. Raises UnsupportedError for memory of the host."""
    driver = region.driver
    if not isinstance(driver, DeviceMemory):
        raise UnsupportedError("streams", "memory of a GPU", f"memory on {region.location}")
    return driver
