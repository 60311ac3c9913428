"""Deltas: pieces as what changed since the version before, where the reader still has that one.

A delta is the XOR of both, compressed by zstd: all of that is done without Python's lock, by as many threads as there
are connections. The piece that it gives has the digest of any piece, so that another base costs a second transfer, and
never a byte.
"""

from __future__ import annotations

from ..arrays.numpy_on_use import np
from ..errors import ProtocolError
from .digests import check_installed

_BLOCK = 1 << 20  # bytes that are looked at at a time: they stay in a core's cache, and threads seldom meet in Python
_LEVEL = -1  # of zstd: the next ones take longer than they save, since what changed is noise
_WINDOW = 1 << 22  # bytes that a peer may have zstd look back


def pack(old: memoryview, new: memoryview) -> bytes | None:
    """Return the delta from one piece to another of the same length; None if it is more than half as long."""
    before, after = (np.frombuffer(view, np.uint8) for view in (old, new))
    frame = check_installed()[1].ZstdCompressor(level=_LEVEL).compressobj(size=len(new))
    parts: list[bytes] = []
    left = len(new) // 2
    for at in range(0, len(new), _BLOCK):
        parts.append(frame.compress(before[at : at + _BLOCK] ^ after[at : at + _BLOCK]))
        left -= len(parts[-1])
        if left < 0:
            return None
    parts.append(frame.flush())
    return b"".join(parts) if len(parts[-1]) <= left else None


def unpack(delta: bytes | bytearray, old: memoryview, into: memoryview) -> None:
    """Make a piece of the one before and a delta; an empty one says that they are the same.
    Raises ProtocolError if it is no delta of such a piece; some of the piece may be written, then. Bytes behind its
    end are not looked at: the piece has a digest."""
    if len(old) != len(into):
        raise ProtocolError(f"a base of {len(old)} bytes for a piece of {len(into)}")
    if not delta:
        into[:] = old
        return
    before, after = (np.frombuffer(view, np.uint8) for view in (old, into))
    zstd = check_installed()[1]
    try:
        with zstd.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(delta) as changes:
            for at in range(0, len(old), _BLOCK):
                part = after[at : at + _BLOCK]
                if changes.readinto(part) != len(part):
                    raise ProtocolError(f"a delta of less than {len(old)} bytes")
                np.bitwise_xor(before[at : at + _BLOCK], part, out=part)
    except zstd.ZstdError as error:
        raise ProtocolError(f"a delta that zstd cannot read: {error!s:.200}") from None
