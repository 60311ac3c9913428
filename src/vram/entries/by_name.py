"""Arrays that are pickled by the name that they were published under, and attached by it where they are unpickled."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from ..arrays import Array
from ..arrays.dtypes import dtype_of
from ..arrays.views import close_when_unused, is_written
from ..errors import ClosedError, NotFoundError, ProtocolError, UsageError, VramError
from ..keeper.client import KeeperClient
from ..lifetime import shielded
from ..memory import Region
from ..sharing.descriptor import Manifest
from .keepers import connect
from .mapped import map_version, wire_access


class Provenance(NamedTuple):  # made for every array that is attached: a dataclass takes five times as long
    """The published version that an array is of; `entry` is its name there, `access` how unpickling attaches it.
    `offset`, `nbytes` (bytes) and `layout` (the region's chunks) are the published ones: later rows are not in it, and
    a lease that slept may be on another version, in other chunks."""

    keeper: str
    name: str
    version: int
    entry: str
    access: str
    offset: int
    nbytes: int
    layout: tuple[object, ...] = ()

    def reduce(self, array: Array) -> tuple[Callable[..., Array], tuple[Any, ...]] | None:
        """Return what pickle should store of the array, or of a slice of it; None if it is not what was published."""
        then, now = self.layout, array.region.layout
        if array.region.is_private and is_written(array.region, array.offset, array.nbytes):
            return None
        if then and (len(now) < len(then) or now[len(then) - 1] is not then[-1]):
            return None
        start = array.offset - self.offset
        if start < 0 or start + array.nbytes > self.nbytes:
            return None
        where = self.keeper, self.name, self.version, self.entry, self.access
        return attach_array, (*where, start, array.shape, str(array.dtype))


def array_on(
    region: Region, manifest: Manifest, keeper: str, name: str, version: int, array: str, access: str, slot: int = 0
) -> Array:
    """Make an array of a version on its mapped region; see :class:`Provenance` for the parameters.
    An array of an entry with two slots has no provenance: its name does not say which bytes it has."""
    entry = manifest.arrays[array]
    memory = entry.memory + manifest.memories_of_a_slot if slot else entry.memory
    offset = manifest.memories[memory].offset + entry.offset
    try:
        dtype = dtype_of(entry.dtype)
        if entry.nbytes != dtype.itemsize * math.prod(entry.shape):
            raise UsageError(f"{entry.shape} of {entry.dtype} are not its {entry.nbytes} bytes")
        provenance = None
        if manifest.slots == 1:
            layout = region._chunks.row if region.asleep is None else (None,)  # as no version that wakes
            provenance = Provenance(keeper, name, version, array, access, offset, entry.nbytes, layout)
        return Array(region, dtype, entry.shape, offset=offset, provenance=provenance)
    except UsageError as error:  # not this caller's mistake, but the publisher's
        raise ProtocolError(f"{name!r} version {version} describes {array!r:.80} wrongly: {error}") from None


# The versions that arrays of this process hold: the manifest of each, and its mapped memories, weakly. By connection:
# the numbers of versions mean the same for as long as it lasts.
_Known = tuple[Manifest, dict[int, weakref.ref[Region]]]
_known: weakref.WeakKeyDictionary[KeeperClient, dict[tuple[str, int, str], _Known]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # never taken by a finalizer, nor over a call that waits


@shielded
def attach_array(
    path: str, name: str, version: int, array: str, access: str, start: int, shape: tuple[int, ...], dtype: str
) -> Array:
    """Attach one array of one version, or a slice that begins `start` bytes in, as it is unpickled.
    A failure is raised at the array's first use: here it would end a worker, and its results never come."""
    try:
        client = connect(path)
        where = Provenance(client.path, name, version, array, access, 0, 0)
        # A private copy is each array's own; everything else is the same memory for all.
        whole = None if access == "cow" else _reuse(client, where)
        if whole is None:  # an array may be empty, and then is false
            whole = _attach(client, where)
        if (start, shape) == (0, whole.shape):
            return whole
        try:
            return Array(whole.region, whole.dtype, shape, offset=whole.offset + start, provenance=whole.provenance)
        finally:
            whole.close()  # now, and not once the traceback of an error is gone: it has the lease
    except (VramError, OSError) as error:
        return Array.lost(dtype, shape, error)


def _reuse(client: KeeperClient, where: Provenance) -> Array | None:
    """The array on memory that others hold already: no further lease, no further mapping (S6)."""
    with _lock:
        known = _known.get(client, {}).get((where.name, where.version, where.access))
    if known is None or where.entry not in known[0].arrays:
        return None
    manifest, regions = known
    ref = regions.get(manifest.arrays[where.entry].memory)
    region = None if ref is None else ref()
    if region is not None:
        with contextlib.suppress(ClosedError):  # its last array was closed in this moment
            return array_on(region, manifest, *where[:5])
    return None


def _attach(client: KeeperClient, where: Provenance) -> Array:
    leased = client.attach(where.name, version=where.version, access=wire_access(where.access))
    manifest, regions, _, claim, _ = map_version(client, leased, where.access)
    try:
        if where.entry not in manifest.arrays:
            raise NotFoundError(f"{where.name!r} version {where.version} has no array {where.entry!r:.80}")
        region = regions[manifest.arrays[where.entry].memory]
        array = array_on(region, manifest, *where[:5])
    finally:
        for one in reversed(regions):
            close_when_unused(one)
        claim.release()  # the mapping keeps the lease
    with _lock:
        versions = _known.setdefault(client, {})
        for key, (_, known) in versions.copy().items():
            if all(ref() is None for ref in known.values()):
                del versions[key]
        _, known = versions.setdefault((where.name, where.version, where.access), (manifest, {}))
        known[manifest.arrays[where.entry].memory] = weakref.ref(region)
    return array


def _after_fork_in_child() -> None:
    """Another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
