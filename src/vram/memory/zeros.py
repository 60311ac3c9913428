"""Zeros behind the addresses of a region that have no memory, on devices: so that reading a row too far reads zeros.

One chunk of zeros is mapped again and again, for reading only, over all that has no memory; every region of a device
shares it. Mapping costs a call for each piece, so large capacities take pieces of up to 64 MiB, and pieces of one
granule where such a one does not fit. A driver of which reservations themselves read as zeros
(:class:`~vram.driver.protocol.HostMemory`) needs none of this. Internal to this room.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..driver.protocol import Driver, HostMemory
from ..errors import ClosedError, DeviceLostError, ForkedError, UsageError, VramError
from ..lifetime import Claim, Handle, report, unwinding
from ..spec import Access, AllocationFlags, HandleKind, Location
from .allocation import Memory, create_memory
from .chunks import Chunks
from .reservation import Unmap, put_memory

_LARGEST = 64 << 20  # bytes of the zeros that large regions share
_PIECES = 256  # of a region, about, before they become larger

# Memory that is mapped again and again, by driver, place and size. Without claims: it goes with its last piece.
_shared: dict[tuple[Driver, Location, int], Memory] = {}


class Zeros:
    """The zeros of one region, whose changes wait for one another.
    The address range of `mapped` says what is free; `granule` is the least piece, in bytes."""

    def __init__(self, mapped: Chunks, granule: int) -> None:
        self._chunks = mapped
        self._granule = granule
        self._large = granule
        while self._large < _LARGEST and self._large * _PIECES < mapped.where.nbytes:
            self._large *= 2
        self._pieces: dict[int, tuple[Handle, Unmap]] = {}  # by offset: what keeps the mapping, and how it is undone

    def uncover(self, start: int, stop: int) -> None:
        """Unmap zeros so that there is room from `start` up to `stop` (bytes), on which no device works any more.
        Pieces go whole; :meth:`cover` maps the rest again, also after a failure here."""
        for offset, (mapping, undo) in sorted(self._pieces.copy().items()):
            if start < offset + undo.nbytes and offset < stop:
                undo.is_idle = True
                undo()  # here, so that a driver that refuses is heard: it is mapped still, then
                self._pieces.pop(offset, None)
                self._chunks.handle.drop_dependency(mapping)

    def cover(self) -> None:
        """Map zeros wherever nothing is mapped: all of it, or nothing (I4). Not while the region is asleep."""
        made: list[int] = []
        held: list[Claim] = []
        try:
            for start, stop in list(self._holes()):
                at = start
                while at < stop:
                    size = self._large if at % self._large == 0 and at + self._large <= stop else self._granule
                    self._map(at, size, made, held)
                    at += size
                where, users = self._chunks.where, self._chunks.users
                where.driver.mem_set_access(where.address + start, stop - start, Access.READ, users)
        except BaseException as error:
            with unwinding(error):
                for offset in reversed(made):
                    if (piece := self._pieces.pop(offset, None)) is not None:
                        piece[1].is_idle = True  # nobody has heard of it
                        self._chunks.handle.drop_dependency(piece[0])
            raise
        finally:
            for claim in held:
                claim.release()

    def mend(self) -> None:
        """Do as :meth:`cover` after something that cannot be taken back. A failure is reported, and not raised."""
        try:
            self.cover()
        except VramError as error:
            if not isinstance(error, DeviceLostError):
                report(
                    f"no zeros could be mapped behind {self._chunks.handle.label}, where a kernel that reads too far "
                    f"faults until its size changes again: {error}"
                )

    def _map(self, offset: int, nbytes: int, made: list[int], held: list[Claim]) -> None:
        where, handle = self._chunks.where, self._chunks.handle
        memory = self._memory(nbytes, held)
        undo = Unmap(where, offset, nbytes)
        made.append(offset)
        mapping = handle.keep(undo.describe, undo, depends=(where.handle, memory.handle))
        self._pieces[offset] = mapping, undo
        undo.map(put_memory(memory, False))

    def _memory(self, nbytes: int, held: list[Claim]) -> Memory:
        """Return zeros of a size, which a claim keeps from now on."""
        where, place = self._chunks.where, self._chunks.location
        key = (where.driver, place, nbytes)
        memory = _shared.get(key)
        if memory is not None:
            if [claim for claim in held if claim.handle is memory.handle]:
                return memory
            try:
                held.append(memory.handle.claim("zeros"))
                return memory
            except (ClosedError, ForkedError):  # the last piece of it went
                pass
        memory, claim = create_memory(where.driver, nbytes, place, HandleKind.NONE, AllocationFlags.NONE)
        held.append(claim)
        _shared[key] = memory
        return memory

    def _holes(self) -> Iterator[tuple[int, int]]:
        """Yield from where to where nothing is mapped."""
        at = 0
        for start, size in sorted(self._chunks.where.spans.copy().items()):
            if at < start:
                yield at, start
            at = max(at, start + size)
        if at < self._chunks.where.nbytes:
            yield at, self._chunks.where.nbytes


def back_with_zeros(mapped: Chunks, backing: object) -> None:
    """Have all that has no memory behind it read as zeros, now and from now on; called before there is any memory.
    Raises UsageError if `backing` is anything but ``"zero"``."""
    if not isinstance(backing, str) or backing != "zero":
        raise UsageError(f'backing must be "zero" or left out, not {backing!r:.40}')
    where = mapped.where
    if isinstance(where.driver, HostMemory):
        where.driver.address_zero(where.address, where.nbytes)
    else:
        granule = where.driver.mem_granularity(mapped.location, HandleKind.NONE).recommended
        mapped.zeros = Zeros(mapped, granule)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shared.clear)  # the memory is the parent's (I7)
