"""Deltas: pieces as what changed since the version before, where the reader still has that one.

A delta is the XOR of both: where words of 64 bits changed, by blocks and as gaps; which of their parts of 16 bits did;
and these parts, all of it compressed by zstd. The piece that it gives has the digest of any piece, so that another base
costs a second transfer, and never a byte.
"""

from __future__ import annotations

import functools
import importlib
import sys
from operator import xor
from types import ModuleType
from typing import Any, cast

from ..arrays.numpy_on_use import np
from ..errors import ProtocolError, UnsupportedError

_WORD, _PART, _COUNT = np.dtype("<u8"), np.dtype("<u2"), np.dtype("<u4")  # few words to look at, little to send of each
_BLOCK = 1 << 16  # words that are looked at at a time: they stay in a core's cache
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
    before, after = (np.frombuffer(view, _WORD, len(view) // 8) for view in (old, new))
    counts: list[int] = []
    gaps: list[Any] = [np.zeros(0, _PART)]
    words: list[Any] = [before[:0]]
    for at in range(0, len(after), _BLOCK):
        changes = before[at : at + _BLOCK] ^ after[at : at + _BLOCK]
        places = np.flatnonzero(changes != 0)
        counts.append(len(places))
        gaps.append(np.diff(places, prepend=0).astype(_PART))
        words.append(changes[places])
    parts = np.concatenate(words).view(_PART)
    is_changed = parts != 0
    parts = parts[np.flatnonzero(is_changed)]  # several times as fast as by the mask itself
    if 2 * len(parts) > len(new) // 2:
        return None
    tail = bytes(map(xor, old[8 * len(after) :], new[8 * len(after) :]))
    found = np.array(counts, _COUNT), _planes(np.concatenate(gaps)), np.packbits(is_changed), parts
    delta = cast("bytes", zstd().compress(b"".join((*map(bytes, found), tail)), _LEVEL))
    return delta if len(delta) <= len(new) // 2 else None


def _planes(gaps: Any) -> Any:
    """Return the lower bytes, and then the higher ones, nearly all of which are 0."""
    return np.ascontiguousarray(gaps.view(np.uint8).reshape(-1, 2).T)


def unpack(delta: bytes | bytearray, old: memoryview, into: memoryview) -> None:
    """Make a piece of the one before and a delta; an empty one says that they are the same.
    Raises ProtocolError if it is no delta of such a piece; some of the piece may be written, then."""
    if len(old) != len(into):
        raise ProtocolError(f"a base of {len(old)} bytes for a piece of {len(into)}")
    into[:] = old
    if not delta:
        return
    after = np.frombuffer(into, _WORD, len(into) // 8)
    blocks, tail = -(-len(after) // _BLOCK), len(into) % 8
    data = _Data(_decompressed(delta, 4 * blocks + 11 * len(after) + tail))
    counts = data.take(_COUNT, blocks)
    changed = int(counts.sum(dtype=np.uint64)) if blocks else 0
    gaps = np.ascontiguousarray(data.take(np.dtype(np.uint8), 2 * changed).reshape(2, -1).T).view(_PART).reshape(-1)
    chosen = np.flatnonzero(np.unpackbits(data.take(np.dtype(np.uint8), -(-changed // 2)), count=4 * changed))
    parts = np.zeros(4 * changed, _PART)
    parts[chosen] = data.take(_PART, len(chosen))
    words, taken = parts.view(_WORD), 0
    for number, count in enumerate(counts.tolist()):
        block = after[number * _BLOCK : (number + 1) * _BLOCK]
        places = np.cumsum(gaps[taken : taken + count], dtype=np.int64)
        if count and places[-1] >= len(block):
            raise ProtocolError(f"a delta of word {places[-1]} of a block of {len(block)}")
        block[places] ^= words[taken : taken + count]
        taken += count
    into[8 * len(after) :] = bytes(map(xor, into[8 * len(after) :], data.take(np.dtype(np.uint8), tail)))
    data.end()


class _Data:
    """What a delta is of, taken from the front."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, dtype: np.dtype[Any], count: int) -> Any:
        """Return the next numbers. Raises ProtocolError if there are not so many."""
        start = self._at
        self._at += count * dtype.itemsize
        if self._at > len(self._data):
            raise ProtocolError(f"a delta of {len(self._data)} bytes, which is too short")
        return np.frombuffer(self._data, dtype, count, start)

    def end(self) -> None:
        """Raise ProtocolError if anything is left."""
        if self._at < len(self._data):
            raise ProtocolError(f"a delta of {len(self._data)} bytes, of which {self._at} mean something")


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
