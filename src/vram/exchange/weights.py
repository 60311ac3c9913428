"""Publish a file of weights: read once into shared memory, attached by any number of processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .. import driver as drivers
from ..arrays import weights
from ..keeper.session import Keeper
from ..spec import Location
from .publish import Published, publish

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
    arrays = weights.load(path, drivers.get(location), location)
    try:
        notes = {"source": Path(path).name[:200], **(meta or {})}
        return publish(name, arrays, meta=notes, writable=writable, ttl=ttl, keeper=keeper)
    finally:
        for array in arrays.values():
            array.close()
