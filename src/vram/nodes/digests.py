"""Digests of pieces: xxh3-128, which finds damage. It does not stop a peer that has the key and lies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

from ..errors import UnsupportedError


@functools.cache
def check_installed() -> tuple[ModuleType, ModuleType]:
    """Return what makes digests and deltas. Raises :class:`UnsupportedError` where the extra is not installed."""
    try:
        import xxhash  # an extra: who stays on one machine needs none of it
        import zstandard
    except ImportError as error:
        raise UnsupportedError(
            "replicas on other nodes", f"the package {error.name}", "no such package",
            "pip install '.[nodes]' in a clone of vram",
        ) from None  # fmt: skip
    return xxhash, zstandard


def digest(data: bytes | memoryview) -> bytes:
    """Return the 16 bytes of a digest."""
    found: bytes = check_installed()[0].xxh3_128_digest(data)
    return found


def content(layout: bytes, digests: Sequence[bytes]) -> str:
    """Return one digest of a layout and of all pieces."""
    return digest(b"".join((layout, *digests))).hex()
