"""Maps of memory: an entry, an array or an address space, drawn to scale as SVG or as a page."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..arrays import Array
from ..entries.lease import Lease
from ..errors import UsageError
from ..memory import Region
from ..spec import format_count, format_size
from .drawing import Lane, MemoryMap, Span
from .entry import map_of_entry
from .process import lane_of_region, map_of_process, map_of_this_process

if TYPE_CHECKING:
    from ..keeper.private import Keeper

__all__ = ["MemoryMap", "memory_map"]


def memory_map(
    what: str | int | Array | Region | Lease | None = None, *, keeper: Keeper | str | os.PathLike[str] | None = None
) -> MemoryMap:
    """Look at memory and return a drawing of it: reserved, mapped, asleep, shared, and with whom.

    Parameters
    ----------
    what : str, int, Array, Region, Lease or None
        By default this process, on the host and on GPUs. A str is the name of an entry. An int is the PID of another
        process, of which its host memory is shown, as ``/proc/PID/maps`` has it, and what the keeper knows: leases, and
        what it has published. An array, a region or a lease of this process: the memory that it lies on.
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`vram.attach`. This process, and what is in it, is drawn without one.

    Returns
    -------
    MemoryMap
        A notebook shows it. ``.svg()`` and ``.html()`` return it as text: a drawing, and a page with every number
        in tables. ``.save("map.html")`` (or ``.svg``) writes it to a file, whole or not at all.

    Raises
    ------
    NotFoundError
        If there is no such entry or process, or nothing of this library is in that process.
    AccessDeniedError
        If the process is another user's, and the keeper knows nothing of it.
    ClosedError
        If what is to be drawn was closed.
    UsageError
        For anything else.
    PeerGoneError
        If there is no keeper. For a process, a keeper that is not named may be missing.
    """
    if what is None:
        return map_of_this_process()
    if isinstance(what, str):
        return map_of_entry(what, keeper)
    if isinstance(what, int) and not isinstance(what, bool):
        return map_of_process(what, keeper)
    if isinstance(what, Lease):
        fact = f"{format_count(len(what), 'array')}, {format_size(what.nbytes)}, access {what.access}"
        arrays = {name: what[name] for name in what}
        return MemoryMap(f"lease on {what.name} version {what.version}", [fact], _lanes_of(arrays))
    if isinstance(what, Array):
        name = f"{what.dtype} {what.shape}"
        return MemoryMap(f"array {name}", [], _lanes_of({name: what}))
    if isinstance(what, Region):
        what.handle  # noqa: B018  (closed regions say so)
        return MemoryMap(f"region on {what.location}", [], [lane_of_region(what)])
    raise UsageError(
        f"a map is of an entry (its name), a process (its PID), an array, a region or a lease, not of {what!r:.80}"
    )


def _lanes_of(arrays: Mapping[str, Array]) -> list[Lane]:
    """Return the regions that arrays lie on, with the names of the arrays."""
    spans: dict[Region, list[Span]] = defaultdict(list)
    for name, array in arrays.items():
        spans[array.region].append(Span(array.offset, array.offset + array.nbytes, "array", name))
    return [lane_of_region(region, named) for region, named in spans.items()]
