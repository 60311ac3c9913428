"""Deltas: pieces as what changed since the version before, where the reader still has that one.

A delta is the XOR of both in words of 16 bits: a bitmap of the words that changed, and these words, compressed by zstd.
The piece that it gives has the digest of any piece, so another base costs a second transfer, and never a byte.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any, cast

from ..arrays.numpy_on_use import np
from ..errors import ProtocolError, UnsupportedError

_WORD = np.dtype("<u2")
_BLOCK = 1 << 18  # words that are looked at at a time: they stay in a core's cache
_LEVEL = 1  # of zstd: the next ones save nothing, since the words that changed are noise
_WINDOW = 22  # log2 of the bytes that a peer may have zstd look back


@functools.cache
def zstd() -> ModuleType:
    """Return what compresses. Raises UnsupportedError where it is not installed."""
    try:
        # The same module twice: a part of Python, and an extra that deltas alone need.
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError:
        raise UnsupportedError(
            "deltas between versions", "zstd: the package backports.zstd, or that of Python 3.14", "neither",
            "pip install '.[nodes]' in a clone of vram",
        ) from None  # fmt: skip


def pack(old: memoryview, new: memoryview) -> bytes | None:
    """Return the delta from one piece to another of the same length; None if it is more than half as long."""
    before, after = (np.frombuffer(view, _WORD, len(view) // 2) for view in (old, new))
    maps: list[Any] = []
    words: list[Any] = []
    left = len(after) // 2
    for at in range(0, len(after), _BLOCK):
        changes = before[at : at + _BLOCK] ^ after[at : at + _BLOCK]
        is_changed = changes != 0
        words.append(changes[np.flatnonzero(is_changed)])  # several times as fast as by the mask itself
        left -= len(words[-1])
        if left < 0:
            return None
        maps.append(np.packbits(is_changed))
    odd = bytes((old[-1] ^ new[-1],)) if len(new) % 2 else b""
    delta = cast("bytes", zstd().compress(b"".join((*maps, *words, odd)), _LEVEL))
    return delta if len(delta) <= len(new) // 2 else None


def unpack(delta: bytes | bytearray, old: memoryview, into: memoryview) -> None:
    """Make a piece of the one before and a delta; an empty one says that they are the same.
    Raises ProtocolError if it is no delta of such a piece; some of the piece may be written, then."""
    if len(old) != len(into):
        raise ProtocolError(f"a base of {len(old)} bytes for a piece of {len(into)}")
    into[:] = old
    if not delta:
        return
    count = len(into) // 2
    start, odd = -(-count // 8), len(into) % 2
    data = _decompressed(delta, start + 2 * count + odd)
    if len(data) < start + odd or (len(data) - start - odd) % 2:
        raise ProtocolError(f"a delta of {len(data)} bytes for a piece of {len(into)}")
    maps, words = np.frombuffer(data, np.uint8, start), np.frombuffer(data, _WORD, (len(data) - start) // 2, start)
    after, taken = np.frombuffer(into, _WORD, count), 0
    for at in range(0, count, _BLOCK):
        block = after[at : at + _BLOCK]
        places = np.flatnonzero(np.unpackbits(maps[at // 8 : (at + _BLOCK) // 8], count=len(block)).view(np.bool_))
        some = words[taken : taken + len(places)]
        block[places[: len(some)]] ^= some
        taken += len(places)
    if taken != len(words):
        raise ProtocolError(f"a delta names {taken} words, and has {len(words)}")
    if odd:
        into[-1] ^= data[-1]


def _decompressed(delta: bytes | bytearray, most: int) -> bytes:
    """Decompress what a peer sent, which may be at most so many bytes."""
    module = zstd()
    try:
        frame = module.ZstdDecompressor(options={module.DecompressionParameter.window_log_max: _WINDOW})
        data = cast("bytes", frame.decompress(delta, max_length=most + 1))
        if frame.eof and not frame.unused_data and len(data) <= most:
            return data
    except module.ZstdError as error:
        raise ProtocolError(f"a delta that zstd cannot read: {error!s:.200}") from None
    raise ProtocolError(f"a delta that is cut off, or of more than {most} bytes")
