"""The table on a GPU in which kernels of captured graphs look their arrays up when they run.

While a graph is captured nobody can be asked, so a kernel is put into it that looks its arrays up when it runs, in an
entry of this rank's table on the GPU. An entry of zeros says that a piece at a time goes through the workspace, which
any array can. Registering makes it an entry of addresses, on all ranks or on none: the memory travels by the ways that
anything is shared by (:mod:`vram.arrays.share`), as descriptors where there are some, else as the 64 bytes of
cudaMalloc memory. Memory that cannot be shared stays as it is, and the reason is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct

from ..arrays.gpu import CudaSource
from ..arrays.share import share
from ..errors import ProtocolError, VramError
from ..handover.by_handle import describe_by_handle, goes_by_handle, handle_bytes
from ..lifetime import own
from ..memory.kinds import BY_NUMBER
from ..sharing.channel import MAX_FDS
from ..sharing.descriptor import HANDLE_BYTES, MemoryDescriptor
from ..sharing.legacy_ipc import open_whole
from ..sharing.mapping import describe, location_of, map_memory
from ..spec import Location

AT_ONCE = 32  # calls of graphs of which one vote speaks: each has two arrays
_ALIGNED = 16  # bytes


class SharedArray(Struct, frozen=True, array_like=True):
    """A rank's word on one array: how its memory is opened and where in it the array begins, or why it is not.
    Its descriptors, if any, come with the vote, behind those of the arrays before it."""

    memory: MemoryDescriptor | None
    handle: Annotated[bytes, Meta(max_length=HANDLE_BYTES)] = b""
    why: Annotated[str, Meta(max_length=300)] = ""

    def count(self) -> int:
        """Return how many descriptors belong to it."""
        return 0 if self.memory is None or self.handle else len(self.memory.segments)


@dataclass(frozen=True, slots=True)
class Met:
    """A call that was captured: its entry in the table, and its two arrays."""

    entry: int
    source: CudaSource
    target: CudaSource


class Captured:
    """The calls of graphs of one rank whose arrays the others do not know yet, and the others' arrays that are open
    here. `met` is in the order of capture on all ranks; `registered` counts calls that reach arrays where they are."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.met: list[Met] = []
        self.registered = 0
        self._open: list[Any] = []  # regions, the newest last
        self._claim = own(f"arrays of graphs of other ranks, open on rank {rank}", partial(_close_all, self._open))

    # -- this rank's ---------------------------------------------------------------------------------------------------
    def describe(self, some: Sequence[Met]) -> tuple[list[SharedArray], list[int], list[Any]]:
        """Return where the arrays of some calls are, two for each call (source, target); their descriptors; and the
        owners of those, which the caller keeps until the descriptors were sent."""
        said: list[SharedArray] = []
        fds: list[int] = []
        keeps: list[Any] = []
        for source in [one for met in some for one in (met.source, met.target)]:
            try:
                found, more, keep = _described(source)
            except VramError as error:
                found, more, keep = SharedArray(None, why=str(error)[:300]), [], None
            if len(fds) + len(more) > MAX_FDS:
                found, more = SharedArray(None, why=f"in too many pieces to be sent at once, {len(more)}"), []
            said.append(found)
            fds += more
            keeps.append(keep)
        return said, fds, keeps

    # -- those of others -----------------------------------------------------------------------------------------------
    def open(
        self, some: Sequence[Met], said: Sequence[Sequence[SharedArray]], fds: Sequence[Sequence[int]], gpu: Location
    ) -> tuple[list[list[int]], list[str]]:
        """Open what the ranks, by rank, have said of some calls; descriptors are lent, and none of this rank's own.
        Return for each call the addresses here of all sources, then targets, and the reason (or "") why it has none."""
        rows: list[list[int]] = [[0] * (2 * self._size) for _ in some]
        whys = [""] * len(some)
        for rank in range(self._size):
            wanted = 0 if rank == self._rank else sum(one.count() for one in said[rank])
            if len(said[rank]) != 2 * len(some) or len(fds[rank]) != wanted:
                raise ProtocolError(
                    f"rank {rank} spoke of {len(said[rank])} arrays with {len(fds[rank])} descriptors; {2 * len(some)} "
                    f"and {wanted} are asked for"
                )
            first = 0
            for number, one in enumerate(said[rank]):
                met, which = some[number // 2], number % 2
                last = first + one.count()
                try:
                    address, why = self._opened(rank, met, which, one, fds[rank][first:last], gpu)
                except VramError as error:
                    address, why = 0, f"rank {self._rank} cannot open that of rank {rank}: {error}"
                rows[number // 2][which * self._size + rank] = address
                whys[number // 2] = whys[number // 2] or why
                first = last
        return rows, whys

    def _opened(
        self, rank: int, met: Met, which: int, one: SharedArray, fds: Sequence[int], gpu: Location
    ) -> tuple[int, str]:
        mine = met.target if which else met.source
        if one.memory is None or one.why:
            return 0, f"that of rank {rank} is not shared: {one.why}"
        if rank == self._rank:
            return mine.address, ""
        one.memory.check()
        if one.memory.nbytes != mine.nbytes:
            raise ProtocolError(f"{one.memory.nbytes} bytes were said to be an array of {mine.nbytes}")
        if one.handle:
            return self._open_handle(one, gpu) + one.memory.offset, ""
        region = map_memory(one.memory, fds, access="rw", user=gpu)
        self._open.append(region)
        return region.address + one.memory.offset, ""

    def _open_handle(self, one: SharedArray, gpu: Location) -> int:
        if one.memory is None or len(one.handle) != HANDLE_BYTES or len(one.memory.segments) != 1:
            raise ProtocolError("memory that another rank described by a handle is not one allocation")
        location_of(one.memory.device)  # a GPU that this process sees
        region = open_whole(one.handle, gpu)
        self._open.append(region)
        if region.nbytes < (said := one.memory.segments[0].nbytes):
            raise ProtocolError(f"{said} bytes were said to be in an allocation of {region.nbytes}")
        return region.address

    def close(self) -> None:
        """Let go of what is open of others. Idempotent; nothing may run that reaches there."""
        self._claim.release()


def _described(source: CudaSource) -> tuple[SharedArray, list[int], Any]:
    if source.address % _ALIGNED:
        return SharedArray(None, why=f"it does not begin at a multiple of {_ALIGNED} bytes"), [], None
    array = share((source.address, source.nbytes, f"cuda:{source.gpu}"))
    region, start, stop = array.region, array.offset, array.offset + source.nbytes
    if not goes_by_handle(region):
        memory, fds = describe(region, start, stop)
        return SharedArray(memory), fds, array
    memory = describe_by_handle(region, start, stop)
    kind = BY_NUMBER[memory.segments[0].kind]
    if kind.at_home:
        return SharedArray(None, why=f"it is of {kind.makes}, whose memory other GPUs do not open"), [], array
    return SharedArray(memory, handle_bytes(region)), [], array


def _close_all(parts: list[Any]) -> None:
    while parts:
        parts[-1].close()
        parts.pop()
