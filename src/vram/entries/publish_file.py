"""Publish a file of weights: read once into shared memory, attached by any number of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from ..arrays import weights
from ..arrays.dtypes import dtype_name
from ..arrays.views import close_when_unused
from ..keeper.rules import MAX_KEYS, MAX_META, check_meta
from ..lifetime import shielded
from ..memory import Region
from ..memory.long_work import long_work
from ..sharing.descriptor import ArrayEntry
from ..spec import Location
from .keepers import as_notes, check_flags, connect
from .publish import Published, check_writers, publish_loaded

if TYPE_CHECKING:
    from ..keeper.client import KeeperClient
    from ..keeper.messages import Claimed
    from ..keeper.private import Keeper

FILE_META = "__metadata__"  # what the format itself calls it
MAX_FILE_META = 1024  # bytes
OURS = "vram"  # the item of that in which an entry that was saved has the rest of it


class Saved(msgspec.Struct):
    """The meta of an entry that was saved, its arrays that are others by another name, and where it was."""

    form: Literal[1]
    meta: dict[str, str]
    ties: dict[str, str]
    device: str = "host"


@shielded
def publish_file(
    name: str,
    path: weights.Paths,
    *,
    device: str | Location,
    meta: Mapping[str, str] | None = None,
    writable: bool = False,
    ttl: float | None = None,
    updatable: bool = False,
    swap: bool = False,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Published:
    """Publish the tensors of a safetensors file, or of all files of a checkpoint, as one entry.

    Parameters
    ----------
    name : str
        The name that readers will attach.
    path : path-like, or sequence of path-like
        The file; the index of a checkpoint (``model.safetensors.index.json``); a folder that has one index, or files
        and no index; or the files themselves. Each is read once, several at a time. They may be replaced meanwhile, and
        deleted afterwards. Where there is an index, it says which tensors count: others of its files are left out, with
        a warning.
    device : str
        Where to keep it: ``"host"``, or a GPU, such as ``"cuda:0"``, which it reaches through pinned memory that is
        kept for the next file.
    meta : mapping of str to str, optional
        As of :func:`vram.publish`. As far as there is room, and unless given, the file's name is added as ``source``,
        and its own metadata, as one JSON object, as ``__metadata__``: at most 1 KiB of it, whole items.
    writable, ttl, updatable, swap, keeper
        As of :func:`vram.publish`.

    Returns
    -------
    Published
        Its version, the number of its arrays, and their bytes.

    Raises
    ------
    UsageError
        If a file is not a safetensors file, is truncated, or its header contradicts its contents; if a tensor is in two
        files and there is no index, or not in the file in which the index says that it is.
    MissingFileError, UnreadableFileError
        If there is no such file, or it cannot be read: by this user, or because its device fails.
    UnsupportedError
        If this process sees no such GPU, or has nothing to speak to it with.
    OutOfMemoryError
        If the device has not that much.

    The others are those of :func:`vram.publish`.
    """
    location = Location.parse(device)
    plan = weights.plan(path)
    saved = saved_in(plan)
    notes = _notes(plan, check_meta(as_notes(meta))) if saved is None else check_meta({**saved.meta, **as_notes(meta)})
    client = connect(keeper)
    writable, updatable, swap = check_flags(writable=writable, updatable=updatable, swap=swap)
    check_writers(writable=writable, updatable=updatable, swap=swap)
    return publish_plan(
        client, name, plan, location, saved, meta=notes, writable=writable, ttl=ttl, updatable=updatable, swap=swap
    )


def publish_plan(
    client: KeeperClient, name: str, plan: weights.WeightsPlan, location: Location, saved: Saved | None, *,
    meta: dict[str, str], writable: bool, ttl: float | None = None, updatable: bool = False, swap: bool = False,
    claim: Claimed | None = None,
) -> Published:  # fmt: skip
    """Publish the files of a plan over a connection; `claim` is the claim on the name that this fulfils."""
    # Before the file is read, which may take minutes: would it be taken at all?
    client.offer(name, plan.nbytes * (1 + swap), meta=meta, ttl=ttl, claim=claim)
    # No array is made of it: what lies where is known, and there may be thousands.
    arrays = {
        key: ArrayEntry(0, tensor.offset, tensor.nbytes, dtype_name(tensor.dtype), tensor.shape)
        for key, tensor in plan.tensors.items()
    }
    ties = {} if saved is None else saved.ties
    arrays |= {key: arrays[other] for key, other in ties.items() if other in arrays and key not in arrays}
    nbytes = max(plan.nbytes, 1)  # an entry of empty tensors has memory, too
    inherited = writable or updatable  # else it is sealed: what is forked while it is read is not to have it mapped
    region = Region.create(location, capacity=nbytes, nbytes=nbytes, inherited=inherited, managed=True)
    spare: Region | None = None
    try:
        if swap:
            spare = Region.create(location, capacity=nbytes, nbytes=nbytes, managed=True)
        with long_work(f"publishing {name}", plan.nbytes):
            weights.fill(plan, region)
        return publish_loaded(
            client, name, region, arrays, meta=meta, writable=writable, ttl=ttl, updatable=updatable, spare=spare,
            claim=claim,
        )  # fmt: skip
    finally:
        close_when_unused(region)  # what is updated in place stays mapped here
        if spare is not None:
            close_when_unused(spare)


def saved_in(plan: weights.WeightsPlan) -> Saved | None:
    """Return what :func:`vram.save` wrote of an entry besides its arrays, if it wrote the file."""
    try:
        return msgspec.json.decode(plan.meta[OURS], type=Saved)
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _notes(plan: weights.WeightsPlan, meta: dict[str, str]) -> dict[str, str]:
    """Add what is known of the file to what its publisher says of it, as far as there is room."""
    source = os.path.basename(os.path.normpath(plan.path)).encode(errors="replace").decode()[:200]
    added = {"source": source, **({FILE_META: _as_json(plan.meta)} if plan.meta else {})}
    room = MAX_META - sum(len(key.encode()) + len(value.encode()) for key, value in meta.items())
    for key, value in added.items():
        nbytes = len(key.encode()) + len(value.encode())
        if key not in meta and nbytes <= room and len(meta) < MAX_KEYS:
            meta[key] = value
            room -= nbytes
    return meta


def _as_json(meta: dict[str, str]) -> str:
    """Write a file's metadata down in at most :data:`MAX_FILE_META` bytes: whole items, the short ones first."""
    kept: dict[str, str] = {}
    for key, value in sorted(meta.items(), key=lambda item: len(item[0]) + len(item[1])):
        longer = {**kept, key: value}
        left_out = len(meta) - len(longer)
        text = msgspec.json.encode({**longer, "...": f"{left_out} more"} if left_out else longer)
        if len(text) > MAX_FILE_META:
            break
        kept = longer
    ordered = {key: value for key, value in meta.items() if key in kept}
    if len(kept) < len(meta):
        ordered["..."] = f"{len(meta) - len(kept)} more"
    return msgspec.json.encode(ordered).decode()
