"""What a pickled array of a published version turns into: its memory is attached once, whatever is unpickled of it."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from dataclasses import dataclass, field

from ..arrays import Array
from ..errors import ClosedError, NotFoundError, ProtocolError
from ..keeper.client import KeeperClient
from ..memory import Region
from ..sharing.descriptor import Manifest
from .keepers import connect
from .lease import Lease, array_on, wire_access
from .mapping import ACCESS
from .provenance import Provenance

__all__ = ["attach_array"]


@dataclass(slots=True)
class _Known:
    """A version that arrays of this process hold: what is in it, and which of its memories are mapped, weakly."""

    manifest: Manifest
    regions: dict[int, weakref.ref[Region]] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        return any(ref() is not None for ref in self.regions.values())


# By connection: the numbers of versions mean the same for as long as it lasts.
_known: weakref.WeakKeyDictionary[KeeperClient, dict[tuple[str, int, str], _Known]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # never taken by a finalizer, nor over a call that waits


def attach_array(
    path: str, name: str, version: int, array: str, access: str, start: int, shape: tuple[int, ...]
) -> Array:
    """Attach one array of one version, or a slice of it.

    Parameters
    ----------
    path : str
        The keeper's socket.
    array : str
        Its name in the entry.
    start : int
        Where in the array the slice begins, in bytes.

    Raises
    ------
    NotFoundError
        If the version is gone.
    PeerGoneError
        If the keeper is.
    ProtocolError
        If that is nothing that an array is pickled as.
    """
    _check(name, version, array, access, start, shape)
    client = connect(path)
    where = Provenance(client.path, name, version, array, access, 0, 0)
    # A private copy is each array's own; everything else is the same memory for all.
    whole = None if access == "cow" else _again(client, where)
    if whole is None:  # an array may be empty, and then is false
        whole = _attach(client, where)
    if (start, shape) == (0, whole.shape):
        return whole
    try:
        return Array(whole.region, whole.dtype, shape, offset=whole.offset + start, provenance=whole.provenance)
    finally:
        whole.close()  # now, and not once the traceback of an error is gone: it has the lease


def _check(name: object, version: object, array: object, access: object, start: object, shape: object) -> None:
    """Raise for what no array was pickled as: bytes from elsewhere, or of another release."""
    fine = (
        all(isinstance(one, str) for one in (name, array, access))
        and access in ACCESS
        and all(type(one) is int and abs(one) < 2**63 for one in (version, start))
        and isinstance(shape, tuple)
        and all(type(one) is int and one >= 0 for one in shape)
    )
    if not fine:
        raise ProtocolError(
            f"no array is pickled as name {name!r:.40}, version {version!r:.40}, array {array!r:.40}, access "
            f"{access!r:.40}, start {start!r:.40} and shape {shape!r:.40}"
        )


def _again(client: KeeperClient, where: Provenance) -> Array | None:
    """The array on memory that others hold already: no further lease, no further mapping (S6)."""
    with _lock:
        known = _known.get(client, {}).get((where.name, where.version, where.access))
    if known is None or where.entry not in known.manifest.arrays:
        return None
    ref = known.regions.get(known.manifest.arrays[where.entry].memory)
    region = None if ref is None else ref()
    if region is not None:
        with contextlib.suppress(ClosedError):  # its last array was closed in this moment
            return array_on(region, known.manifest, where)
    return None


def _attach(client: KeeperClient, where: Provenance) -> Array:
    attachment = client.lease(where.name, version=where.version, access=wire_access(where.access))
    lease = Lease(client, attachment, where.access)
    try:
        if where.entry not in lease:
            raise NotFoundError(f"{where.name!r} version {where.version} has no array {where.entry!r:.80}")
        array = lease.keep_only(where.entry)
    except BaseException:
        lease.close()
        raise
    with _lock:
        versions = _known.setdefault(client, {})
        for key in [key for key, known in versions.items() if not known.is_alive]:
            del versions[key]
        known = versions.setdefault((where.name, where.version, where.access), _Known(lease.manifest))
        known.regions[lease.manifest.arrays[where.entry].memory] = weakref.ref(array.region)
    return array


def _after_fork_in_child() -> None:
    """Another thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
