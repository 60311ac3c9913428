"""Sleep and wake for arrays and regions: see :mod:`vram.memory.sleep`, which does it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from ..errors import UsageError
from ..memory import Region
from ..memory.backups import FileBackup
from ..memory.long_work import long_work
from ..memory.sleep import Asleep, Place, SleepReport, WakeReport, sleep_regions, wake_regions
from . import streams
from .array import Array


def sleep(
    things: Array | Region | Iterable[Array | Region],
    to: Literal["host"] | str | os.PathLike[str] | None = "host",
    *,
    after: object = None,
    shared: Literal["refuse", "unmap"] = "refuse",
) -> SleepReport:
    """Put memory to sleep: its addresses stay, its bytes move to where they are told, and the memory is given back.

    All of `things` or, if anything fails, none. Memory that is asleep can be viewed, resized and shared again after
    :func:`wake`; until then that raises AsleepError. Views, tensors and pointers from before stay good: they must not
    be touched meanwhile. On the host that kills the process (SIGSEGV), on a GPU it ends the context (illegal address).

    Parameters
    ----------
    things : Array, Region, or an iterable of them
        Of an array, all of the region it lies on, and every array there.
    to : "host", a directory, or None
        Pinned memory of the host, which is kept for the next time (:func:`vram.memory.trim`) and bounded by
        ``VRAM_PINNED_LIMIT``; a file without a name in a directory; or nowhere: the bytes are let go.
    after : optional
        An event of the GPU, as a number or an object of torch or CuPy: the work that uses the memory is done when it
        is. By default all work on the devices that may use it is waited for.
    shared : "refuse" or "unmap"
        The way with memory that somebody else holds as well (a keeper, a lease, a loan, an exported descriptor; on
        the host a child that was forked since and has not ended), who would keep the old bytes. "unmap" takes away only
        this process's mapping, which frees nothing; waking maps the same memory again, with what it holds by then.

    Returns
    -------
    SleepReport
        `nbytes` put aside, bytes `freed`, `seconds`, and the `rate`.

    Raises
    ------
    BusyError
        If somebody else holds the memory, or a process that may be a forked child cannot be looked at; names who, and
        why. Nothing has changed then.
    AsleepError
        If some of it is asleep already. Nothing has changed then.
    OutOfMemoryError, CapacityError, BackupError
        If there is not enough room for the bytes. Nothing has changed then.

    Examples
    --------
    >>> weights = vram.zeros((1024, 1024), device="host")
    >>> vram.sleep(weights, to="/tmp").freed
    4194304
    >>> vram.wake(weights).nbytes
    4194304
    """
    if shared not in ("refuse", "unmap"):
        raise UsageError(f'shared is "refuse" or "unmap", not {shared!r:.40}')
    try:
        where: Place = "host" if to == "host" else None if to is None else Path(os.fspath(to))
    except TypeError:
        raise UsageError(f'to is "host", a directory, or None, not {to!r:.40}') from None
    if to == "":  # pathlib takes it for the current directory
        raise UsageError('to="" is no directory; say "." for the current one, "host", or None')
    event = None if after is None else streams.as_event(after)
    places = dict.fromkeys(_regions(things), where)
    total = sum(region.nbytes for region in places if isinstance(where, Path) and region.asleep is None)
    with long_work(f"putting memory to sleep in {where}", total):
        return sleep_regions(places, after=event, unmap_shared=shared == "unmap")


def wake(things: Array | Region | Iterable[Array | Region], *, discard: bool = False) -> WakeReport:
    """Give memory that is asleep its bytes back, at the same addresses. Memory that is awake stays as it is.

    All of `things` or, if anything fails, none: on OutOfMemoryError everything is still asleep, and whole.

    Parameters
    ----------
    things : Array, Region, or an iterable of them
        As for :func:`sleep`.
    discard : bool
        Without the bytes: they are zero afterwards, and the backup is released. Memory that was only unmapped
        (``shared="unmap"``) has no backup: it wakes with its contents, which others hold, and counts neither in
        `nbytes` nor in `discarded`.

    Returns
    -------
    WakeReport
        `nbytes` brought back, bytes `discarded`, `seconds`, and the `rate`.

    Raises
    ------
    OutOfMemoryError
        If there is not enough memory.
    BackupError
        If the bytes are not as they were put aside.
    """
    regions = _regions(things)
    marks = [region.asleep for region in regions]
    filed = [mark.nbytes for mark in marks if isinstance(mark, Asleep) and isinstance(mark.backup, FileBackup)]
    with long_work("waking memory from a file", 0 if discard else sum(filed)):
        return wake_regions(regions, discard=bool(discard))


def _regions(things: Array | Region | Iterable[Array | Region]) -> list[Region]:
    """Return the regions that some things lie on, each once, in the order given."""
    given = [things] if isinstance(things, (Array, Region)) else things
    try:
        found = list(given)
    except TypeError:
        raise UsageError(f"arrays and regions sleep, not {things!r:.80}") from None
    for thing in found:
        if not isinstance(thing, (Array, Region)):
            raise UsageError(f"arrays and regions sleep, not {thing!r:.80}")
    return list(dict.fromkeys(thing.region if isinstance(thing, Array) else thing for thing in found))
