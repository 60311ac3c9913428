"""Digests of pieces: xxh3-128, which finds damage. It does not stop a peer that has the key and lies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import UnsupportedError

if TYPE_CHECKING:
    from types import ModuleType


@functools.cache
def check_installed() -> ModuleType:
    """Return what makes digests. Raises :class:`UnsupportedError` where the extra is not installed."""
    try:
        import xxhash  # an extra: who stays on one machine needs none of it
    except ImportError:
        raise UnsupportedError(
            "replicas on other nodes",
            "the package xxhash",
            "no such package",
            "pip install '.[nodes]' in a clone of vram",
        ) from None
    return xxhash


def digest(data: bytes | memoryview) -> bytes:
    """Return the 16 bytes of a digest."""
    found: bytes = check_installed().xxh3_128_digest(data)
    return found


def content(layout: bytes, digests: Sequence[bytes]) -> str:
    """Return one digest of a layout and of all pieces."""
    return digest(b"".join((layout, *digests))).hex()
