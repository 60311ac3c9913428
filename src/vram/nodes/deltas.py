"""Deltas: pieces as what changed since the version before, where the reader still has that one.

A delta is the XOR of both, compressed by zstd: all of that is done without Python's lock, by as many threads as there
are connections. The piece that it gives has the digest of any piece, so that another base costs a second transfer, and
never a byte.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType

from ..arrays.numpy_on_use import np
from ..errors import ProtocolError, UnsupportedError

_BLOCK = 1 << 18  # bytes that are looked at at a time: they stay in a core's cache
_LEVEL = -1  # of zstd: the next ones take longer than they save, since what changed is noise
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
    before, after = (np.frombuffer(view, np.uint8) for view in (old, new))
    compressor = zstd().ZstdCompressor(_LEVEL)
    parts: list[bytes] = []
    left = len(new) // 2
    for at in range(0, len(new), _BLOCK):
        parts.append(compressor.compress(before[at : at + _BLOCK] ^ after[at : at + _BLOCK]))
        left -= len(parts[-1])
        if left < 0:
            return None
    parts.append(compressor.flush())
    return b"".join(parts) if len(parts[-1]) <= left else None


def unpack(delta: bytes | bytearray, old: memoryview, into: memoryview) -> None:
    """Make a piece of the one before and a delta; an empty one says that they are the same.
    Raises ProtocolError if it is no delta of such a piece; some of the piece may be written, then."""
    if len(old) != len(into):
        raise ProtocolError(f"a base of {len(old)} bytes for a piece of {len(into)}")
    if not delta:
        into[:] = old
        return
    before, after = (np.frombuffer(view, np.uint8) for view in (old, into))
    module = zstd()
    frame = module.ZstdDecompressor(options={module.DecompressionParameter.window_log_max: _WINDOW})
    given, at = delta, 0
    try:
        while not frame.eof:
            changes = np.frombuffer(frame.decompress(given, max_length=min(_BLOCK, len(old) - at + 1)), np.uint8)
            given, end = b"", at + len(changes)
            if (at == end and not frame.eof) or end > len(old):
                break
            np.bitwise_xor(before[at:end], changes, out=after[at:end])
            at = end
    except module.ZstdError as error:
        raise ProtocolError(f"a delta that zstd cannot read: {error!s:.200}") from None
    if not frame.eof or frame.unused_data or at != len(old):
        raise ProtocolError(f"a delta that is cut off, or not of {len(old)} bytes")
