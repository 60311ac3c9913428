"""Save an entry as safetensors files, from which ``publish_file`` brings back the same."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from ..arrays.weights import path_of
from ..arrays.weights_out import Tensor, check, write
from ..errors import UsageError
from ..lifetime import shielded
from ..memory.long_work import long_work
from ..spec import check_timeout, parse_size
from .attach import attach
from .keepers import TIMEOUT
from .publish_file import FILE_META, OURS, Saved

if TYPE_CHECKING:
    from ..keeper.private import Keeper
    from .lease import Lease

_SHARD = "5GiB"


@shielded
def save(
    name: str,
    path: str | os.PathLike[str],
    *,
    version: int | None = None,
    shard: int | str = _SHARD,
    timeout: float | None = TIMEOUT,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> tuple[str, ...]:
    """Write an entry to disk as safetensors: :func:`vram.publish_file` publishes it again, with its meta and ties.

    Files are written under other names, flushed, and put in place in one step: whoever is killed, what was there before
    is there, whole, or what is saved; one process saves into a folder at a time. A model that was in the folder, whole
    or in shards, is replaced; other files stay. An entry that is updated in place is saved inside one section, which
    keeps its publisher waiting (not with ``swap=True``).

    Parameters
    ----------
    name : str
        The entry.
    path : path-like
        A file that ends with ``.safetensors``, or a folder, which is made if it is not there. In a folder, readers
        go by ``model.safetensors``, or by ``model.safetensors.index.json`` where there are several files.
    version : int, optional
        Its version, by default the current one.
    shard : int or str
        Bytes of a file in a folder, at most, but for a tensor that is larger.
    timeout : float or None
        Seconds to wait for a keeper, for the name, and for an update that is under way; None waits for ever.
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`vram.attach`.

    Returns
    -------
    tuple of str
        The files, the index last.

    Raises
    ------
    UsageError
        If an array is of a type that safetensors does not have, or is called ``__metadata__``; it is named. If the
        folder has other safetensors files, which its readers would take for parts.
    BusyError
        If somebody is saving into the folder.
    BackupError
        If a file cannot be written, or the disk is full. The files of before are unchanged.

    The others are those of :func:`vram.attach`.
    """
    where, encoded = path_of(path), b""
    with contextlib.suppress(UnicodeEncodeError):
        encoded = os.fsencode(where)
    if not encoded or b"\0" in encoded:
        raise UsageError(f"path {where!r:.80} is no path of a file or folder")
    most = parse_size(shard, what="shard")
    check_timeout(timeout)
    with attach(name, version=version, timeout=timeout, keeper=keeper) as lease:
        with lease.reading(timeout=timeout) if lease.updatable else contextlib.nullcontext():
            tensors, ties = _tensors(lease)
            check(tensors)
            nbytes = sum(one.nbytes for one in tensors.values())
            with long_work(f"saving {name}", nbytes):
                return write(where, tensors, _meta(lease, ties), max(most, 1))


def _tensors(lease: Lease) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the arrays of a lease, each memory once, and the names that are tied to others."""
    manifest, found, ties = lease._manifest, dict[str, Tensor](), dict[str, str]()
    first = manifest.memories_of_a_slot * lease.slot if manifest.slots > 1 else 0
    known: dict[Tensor, str] = {}
    for name, entry in manifest.arrays.items():
        number = first + entry.memory
        offset = manifest.memories[number].offset + entry.offset
        tensor = Tensor(entry.dtype, tuple(entry.shape), lease._regions[number], offset, entry.nbytes)
        other = known.setdefault(tensor, name)
        if other != name and tensor.nbytes:
            ties[name] = other
        else:
            found[name] = tensor
    return found, ties


def _meta(lease: Lease, ties: dict[str, str]) -> dict[str, str]:
    """Return the metadata of a file: what that of the file before had, and in one item what only vram reads."""
    own: dict[str, str] = {}
    with contextlib.suppress(msgspec.MsgspecError):
        own = msgspec.json.decode(lease.meta.get(FILE_META, "{}"), type=dict[str, str])
    device = next((memory.device for memory in lease._manifest.memories if memory.device != "host"), "host")
    place = device if device == "host" else f"cuda:{device}"  # by its UUID
    return {"format": "pt", **own, OURS: msgspec.json.encode(Saved(1, lease.meta, ties, place)).decode()}
