"""What the keeper itself keeps of what a publisher says: for readers, and how much of it counts."""

from __future__ import annotations

from typing import Any

import msgspec

from . import messages as m
from .fields import record_from
from .records import Version, exact

# Bytes that the keeper may need for an entry's words before they count against anybody's ceiling: what any entry
# needs, and so the number of entries bounds it.
_FREE = 4096


def settle(version: Version, request: m.Publish) -> None:
    """Have a version keep what its readers get, as its publisher said it."""
    notes: Any = msgspec.Raw(version.notes)
    entry = record_from(m.Entry, request, version=version.number, owner=version.owner, meta=notes)
    version.settle(exact(m.encode(entry)))


def own_bytes(request: m.Publish) -> int:
    """How many bytes of the keeper's own a publication takes, as far as they count."""
    words = len(request.manifest) + 16 * len(request.segments) + sum(map(len, request.devices))
    words += sum(len(key) + len(value) for key, value in request.meta.items())
    return max(0, words - _FREE)
