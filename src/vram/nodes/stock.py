"""Offers of a carrier: one version of an entry as a row of pieces, with their digests.

A version that is sealed is offered as it lies in memory. Memory that can still be written to, by its publisher or by
everybody, is copied first, inside of a section of the lease where there are sections: all pieces are of one state.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from typing import NamedTuple

from .. import driver as drivers
from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..entries.lease import Lease
from ..memory import Region
from ..spec import HOST, round_up
from . import messages as m
from .connection import Connection
from .deltas import pack
from .digests import content, digest
from .engine import Span

_PAGE = 4096  # bytes: where an extent begins, and is put in a replica
_GAP = 2 << 20  # bytes between two arrays that are sent along, rather than begin another extent


class _Extent(NamedTuple):
    """Bytes of a region that are sent, and where they lie in a replica."""

    region: Region
    start: int
    nbytes: int
    offset: int


class Stock:
    """One attached version for many readers; it owns the lease. All methods but :meth:`close` are thread-safe."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._copy: Region | None = None
        self._wholes: dict[Region, tuple[Array, memoryview]] = {}
        self._digests: dict[int, bytes] = {}  # by piece
        self.spans: tuple[Span, ...] = ()
        try:
            with lease.reading() if lease.updatable else contextlib.nullcontext(0) as self.updates:
                extents = self._lay_out({name: lease[name] for name in lease})
                if lease.updatable or lease._attachment.writable:
                    extents = self._copied(extents)
            self.spans = tuple(map(self._span, extents))
        except BaseException:
            self.close()
            raise
        self.pieces = m.cut(tuple((span.offset, span.nbytes) for span in self.spans))
        self._at = [span for span in self.spans for _ in range(0, span.nbytes, m.PIECE)]

    def _lay_out(self, arrays: dict[str, Array]) -> list[_Extent]:
        """Find out which parts of which memory hold the arrays, and where they come to lie in a replica."""
        regions: dict[Region, list[tuple[int, int]]] = {}
        for array in arrays.values():
            if array.nbytes:
                regions.setdefault(array.region, []).append((array.offset, array.offset + array.nbytes))
        extents: list[_Extent] = []
        end = 0
        for region, ranges in regions.items():
            for start, stop in _merged(ranges):
                end = round_up(end, _PAGE)
                extents.append(_Extent(region, start, stop - start, end))
                end += stop - start
        self.nbytes = end
        places: dict[Region, list[_Extent]] = {}
        for extent in extents:
            places.setdefault(extent.region, []).append(extent)
        self.arrays: dict[str, m.ArrayPlace] = {}
        for name, array in arrays.items():
            at = 0
            if array.nbytes:
                there = places[array.region]
                extent = there[bisect_right(there, array.offset, key=lambda one: one.start) - 1]
                at = extent.offset + array.offset - extent.start
            self.arrays[name] = m.ArrayPlace(at, array.nbytes, dtype_name(array.dtype), array.shape)
        return extents

    def _copied(self, extents: list[_Extent]) -> list[_Extent]:
        """Copy what is offered into memory of the host, which nobody writes to any more."""
        nbytes = max(self.nbytes, 1)
        copy = self._copy = Region.create(HOST, capacity=nbytes, nbytes=nbytes)
        _, view = self._wholes[copy] = host_view(copy)
        for region, start, nbytes, offset in extents:
            region.driver.copy_out(view[offset : offset + nbytes], region.address + start)
        return [_Extent(copy, one.offset, one.nbytes, one.offset) for one in extents]

    def _span(self, extent: _Extent) -> Span:
        region, start, nbytes, offset = extent
        view = None
        if region.location == HOST:
            if region not in self._wholes:
                self._wholes[region] = host_view(region)
            view = self._wholes[region][1][start : start + nbytes]
        return Span(offset, region.address + start, nbytes, region.location, view)

    def digest(self, number: int) -> bytes:
        """Return the digest of a piece. Two threads may find out the same at the same time."""
        found = self._digests.get(number)
        if found is None:
            with self._bytes(number) as view:
                found = self._digests[number] = digest(view)
        return found

    @property
    def is_copy(self) -> bool:
        """Whether it is of memory that could be written to."""
        return self._copy is not None

    def content(self, layout: bytes) -> str:
        """Return the digest of all of it, which has this layout; empty if that of a piece was never asked for."""
        digests = [self._digests.get(number, b"") for number in range(len(self.pieces))]
        return content(layout, digests) if all(digests) else ""

    def delta(self, number: int, base: Stock) -> bytes | None:
        """Return the delta of a piece from that of a stock of the same layout; None if it saves too little."""
        if self.digest(number) == base.digest(number):
            return b""
        with base._bytes(number) as old, self._bytes(number) as new:
            return pack(old, new)

    def has_layout_of(self, other: Stock) -> bool:
        """Whether the pieces of both lie at the same places of the same arrays."""
        return (self.pieces, self.arrays) == (other.pieces, other.arrays)

    def send(self, number: int, connection: Connection, timeout: float) -> None:
        """Send the bytes of a piece."""
        with self._bytes(number) as view:
            connection.send_bytes(view, timeout)

    def _bytes(self, number: int) -> memoryview:
        """Return the bytes of a piece; those of a GPU are copied to memory of the host."""
        span, piece = self._at[number], self.pieces[number]
        start = piece.offset - span.offset
        if span.view is not None:
            return span.view[start : start + piece.nbytes]
        buffer = memoryview(bytearray(piece.nbytes))
        drivers.get(span.location).copy_out(buffer, span.address + start)
        return buffer

    def close(self) -> None:
        """Give the version back."""
        for span in self.spans:
            if span.view is not None:
                span.view.release()
        self.spans = ()
        for array, view in self._wholes.values():
            view.release()
            array.close()
        self._wholes.clear()
        if self._copy is not None:
            self._copy.close()
        self._lease.close()


def host_view(region: Region) -> tuple[Array, memoryview]:
    """Return all bytes of a region of the host; the array is to be closed, after the view was released."""
    array = Array(region, "uint8", region.nbytes)
    return array, array.numpy().data


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges that begin at pages and hold these, joined where little is between them."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        start -= start % _PAGE
        if merged and start - merged[-1][1] <= _GAP:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged
