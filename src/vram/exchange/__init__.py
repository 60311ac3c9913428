"""The verbs people type. Importing this teaches multiprocessing to pass arrays without copying them."""

from __future__ import annotations

from .array_channel import ArrayChannel
from .attach import attach, attach_or_publish
from .create import asarray, empty, zeros
from .keepers import holders, list_entries, remove, revoke, show, statistics
from .lease import Lease
from .publish import Published, publish
from .reducers import register
from .weights import put

__all__ = [
    "ArrayChannel",
    "Lease",
    "Published",
    "asarray",
    "attach",
    "attach_or_publish",
    "empty",
    "holders",
    "list_entries",
    "publish",
    "put",
    "remove",
    "revoke",
    "show",
    "statistics",
    "zeros",
]

register()
