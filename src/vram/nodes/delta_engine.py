"""The reader's half of deltas: the replica that is here, as their base, and an engine that reads pieces by them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from .. import driver as drivers
from ..arrays import Array
from ..entries.attach import attach
from ..errors import NotFoundError, ProtocolError, UnsupportedError
from ..spec import HOST, Location
from .connection import Connection
from .deltas import unpack
from .engine import Offering, Reading, Span
from .messages import Piece
from .stock import host_view

if TYPE_CHECKING:
    from ..memory import Region


Base = tuple[int, int, bytes]  # a version, its updates in place, and the digest of all of it
NO_BASE: Base = (0, 0, b"")


def base_of(meta: Mapping[str, str]) -> Base:
    """Return what of its origin a replica has."""
    version, updates, content = (meta.get(f"origin_{what}", "0") for what in ("version", "updates", "content"))
    with contextlib.suppress(ValueError):
        if len(found := bytes.fromhex(content)) == 16 and 0 < int(version) < 2**62 and 0 <= int(updates) < 2**62:
            return int(version), int(updates), found
    return NO_BASE


class Deltas:
    """The replica that is here as the base of deltas, and an engine that reads them: the current one, of which it owns
    a lease until it is closed, or a `region` that nobody writes to meanwhile.
    Raises NotFoundError if another one is current by now."""

    name = "delta"

    def __init__(self, name: str, content: bytes, keeper: str, region: Region | None = None) -> None:
        self.content = content
        self._whole: tuple[Array, memoryview] | None = None
        self._lease = attach(name, keeper=keeper) if region is None else None
        try:
            if self._lease is not None:
                regions = [array.region for array in self._lease.values() if array.nbytes]
                if base_of(self._lease.meta)[2] != content or not regions:
                    raise NotFoundError("the version before has been replaced meanwhile, or has no bytes")
                region = regions[0]  # a replica is one
            self._region = cast("Region", region)
            if self._region.location == HOST:
                self._whole = host_view(self._region)
        except BaseException:
            self.close()
            raise

    def before(self, piece: Piece) -> memoryview:
        """Return what the base has at the place of a piece; memory of a GPU is copied to the host."""
        if self._whole is not None:
            return self._whole[1][piece.offset : piece.offset + piece.nbytes]
        buffer = memoryview(bytearray(max(0, min(piece.nbytes, self._region.nbytes - piece.offset))))
        drivers.get(self._region.location).copy_out(buffer, self._region.address + piece.offset)
        return buffer

    def close(self) -> None:
        """Give the lease back. Idempotent."""
        if self._whole is not None:
            (array, view), self._whole = self._whole, None
            view.release()
            array.close()
        if self._lease is not None:
            self._lease.close()

    def reaches(self, location: Location) -> bool:
        """Whether it writes to such a place."""
        return location == HOST

    def offer(self, spans: Sequence[Span]) -> Offering:
        """A carrier sends deltas by itself."""
        raise UnsupportedError("an offer of deltas", "a carrier with deltas", "an engine")

    def open(self, data: bytes, link: Connection) -> Reading:
        """Read over one connection."""
        return DeltaReading(self, link)


class DeltaReading:
    """Reads pieces over one connection: `packed` is the delta that the last one came as, None if it came whole."""

    def __init__(self, base: Deltas, link: Connection) -> None:
        self._base, self._link = base, link
        self.packed: bytearray | None = None

    def read(self, piece: Piece, into: Span, timeout: float) -> None:
        """Fill memory with a piece. The result of a torn delta has another digest than the piece."""
        view = cast("memoryview", into.view)
        self.packed = self._link.fetch(piece, view, timeout, self._base.content)
        if self.packed is None:
            return
        with self._base.before(piece) as old, contextlib.suppress(ProtocolError):
            unpack(self.packed, old, view)

    def close(self) -> None:
        """End it."""
