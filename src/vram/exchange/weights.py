"""Publish a file of weights: read once into shared memory, attached by any number of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .. import driver as drivers
from ..arrays import weights
from ..keeper.session import Keeper
from ..spec import Location
from .keepers import as_notes, check_flag, connect
from .publish import Published, publish_to

__all__ = ["put"]


def put(
    name: str,
    path: str | os.PathLike[str],
    *,
    device: str | Location,
    meta: Mapping[str, str] | None = None,
    writable: bool = False,
    ttl: float | None = None,
    keeper: Keeper | str | None = None,
) -> Published:
    """Publish the tensors of a safetensors file.

    Parameters
    ----------
    name : str
        What readers will attach.
    path : path-like
        The file. It is read once; it may be replaced or deleted afterwards.
    device : str
        Where to keep it: ``"host"``.
    meta : mapping of str to str, optional
        As of :func:`vram.publish`. The file's name is added as ``source`` unless given.
    writable, ttl, keeper
        As of :func:`vram.publish`.

    Raises
    ------
    UsageError
        If the file is not a safetensors file, is truncated, or its header contradicts its contents.
    NotFoundError
        If there is no such file.
    """
    location = Location.parse(device)
    plan = weights.plan(path)
    source = os.path.basename(plan.path).encode(errors="replace").decode()[:200]
    notes = {"source": source, **as_notes(meta)}
    client = connect(keeper)
    # Before the file is read, which may take minutes: would it be taken at all?
    writable = check_flag(writable, "writable")
    client.offer(name, plan.nbytes, writable=writable, meta=notes, ttl=ttl)
    arrays = weights.load(plan, drivers.get(location), location)
    try:
        return publish_to(client, name, arrays, meta=notes, writable=writable, ttl=ttl, consume=False)
    finally:
        for array in arrays.values():
            array.close()
