"""Collectives on memory of GPUs: every call is put on a stream, and returns.

The first call of a group on a GPU sets up what its kernels share, by a vote as all set-up; from then on the host waits
for nobody. So what goes wrong in a kernel is raised by a later call, or by :meth:`~vram.Group.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .. import driver as drivers
from ..arrays.dtypes import dtype_name
from ..arrays.gpu import CudaSource
from ..arrays.sources import as_source
from ..arrays.streams import as_stream
from ..driver.protocol import DeviceMemory
from ..errors import UsageError
from ..spec import HOST, Location
from . import host
from .captured import Captured, Met
from .device import ANY, LEGACY_STREAM, Workspace
from .kernels import BLOCKS, Layout
from .routes import LIBRARY, SHARES, Routes
from .symmetric import SymmetricBuffer

if TYPE_CHECKING:
    from ..arrays.hints import ArrayLike

# Blocks that are on a GPU at once, whichever it is: those of ranks that share one wait for each other, and a rank's do
# not begin while those of others have the whole GPU.
_AT_ONCE = 32


class Library(Protocol):
    """Another library that sums up over the same ranks, such as NCCL: a group hands over to it what is large."""

    @property
    def name(self) -> str:
        """The name of the library, with its version."""

    def all_reduce(self, source: CudaSource, target: CudaSource, op: str, stream: int) -> None:
        """Put an all-reduce on a stream. Source and target may be the same memory."""


def is_on_gpu(given: SymmetricBuffer | ArrayLike) -> bool:
    """Whether an array is memory of a GPU. Raises UsageError if it is no array."""
    if isinstance(given, SymmetricBuffer):
        return given.array.region.location != HOST
    return not isinstance(given, np.ndarray) and isinstance(as_source(given), CudaSource)


class OnGpu:
    """The calls of a group on one GPU; a kernel waits `patience` seconds for a rank, and all have the same `routes`.
    Set for each call: `make` makes a symmetric buffer; `agree` waits until all ranks said the same words."""

    make: Callable[[int, str], SymmetricBuffer]
    agree: Callable[[str], object]

    def __init__(self, rank: int, size: int, patience: float, name: str, routes: Routes, share_gpus: bool) -> None:
        self._rank, self._size, self._patience, self._name = rank, size, patience, name
        self._routes = routes
        self._blocks = max(1, _AT_ONCE // size) if share_gpus else BLOCKS
        self.library: Library | None = None
        self._handed_over = 0
        self._ready: set[tuple[str, str]] = set()
        self._shared: SymmetricBuffer | None = None
        self._space: Workspace | None = None
        self._is_stopped = False
        self.captured: Captured | None = None

    # -- set-up, and the end ------------------------------------------------------------------------------------------
    def _workspace(self, gpu: Location) -> Workspace:
        space = self._space
        if space is None:
            self.agree(f"the table of routes {self._routes.digest}")
            shared = self.make(Layout(self._size).nbytes, str(gpu))
            try:
                region = shared.array.region
                space = Workspace(
                    self._rank, shared.addresses, region.driver, region.location, self._patience, self._name,
                    self._routes, self._blocks,
                )  # fmt: skip
            except BaseException:
                shared.close()
                raise
            self._shared, self._space = shared, space
            if self._is_stopped:
                space.stop()
        elif space.location != gpu:
            raise UsageError(
                f"rank {self._rank} of the group {self._name!r} computes on {space.location}, and the array is on "
                f"{gpu}: a rank has one GPU, make another group for another"
            )
        return space

    def _prepared(self, gpu: Location, dtype: str, op: str, stream: object) -> tuple[Workspace, int]:
        """Return the workspace with the kernels for a type and an operation loaded on all ranks, and the stream. All
        load them before any launch: loading code may wait for what runs on the GPU, and that for the other ranks."""
        number = LEGACY_STREAM if stream is None else as_stream(stream)
        if (dtype, op) not in self._ready:
            driver = drivers.get(gpu)
            if isinstance(driver, DeviceMemory) and driver.stream_is_capturing(number, gpu):
                raise UsageError(
                    f"the first {op} of {dtype} of the group {self._name!r} cannot be captured into a graph, since its "
                    f"kernels are loaded then: call it once before"
                )
            space = self._workspace(gpu)
            space.prepare(dtype, op)
            self.agree(f"{op} of {dtype} on GPUs")
            self._ready.add((dtype, op))
        return self._workspace(gpu), number

    def wake(self) -> None:
        """Have kernels wait no longer: a rank is gone. From any thread."""
        self._is_stopped = True
        if self._space is not None:
            self._space.stop()

    def check(self) -> None:
        """Raise what a kernel ran into."""
        if self._space is not None:
            self._space.check()

    def close(self) -> None:
        """Wait for what is under way, and give everything back."""
        if self._space is not None:
            self._space.close()
        if self.captured is not None:
            self.captured.close()
        if self._shared is not None:
            self._shared.close()

    # -- calls --------------------------------------------------------------------------------------------------------
    def all_reduce(
        self, given: SymmetricBuffer | ArrayLike, op: str, out: SymmetricBuffer | ArrayLike | None, stream: object
    ) -> None:
        """See :meth:`~vram.Group.all_reduce`."""
        source = self._source(given)
        into = given if out is None else out
        target = source if out is None else self._source(out)
        self._check_out(target, source, source.nbytes)
        dtype = dtype_name(source.dtype)
        rows, outs = _rows(given), _rows(into)
        if self.library is not None:
            symmetric = rows is not None and outs is not None
            choice = self._routes.choose(self._size, dtype, op, source.nbytes, symmetric=symmetric, library=True)
            if choice.route == LIBRARY:
                self._handed_over += 1
                self.library.all_reduce(source, target, op, LEGACY_STREAM if stream is None else as_stream(stream))
                return
        space, number = self._prepared(_gpu(source), dtype, op, stream)
        if (rows is None or outs is None) and self._meet(space, dtype, op, source, target, number):
            return
        space.all_reduce(dtype, op, source.address, target.address, source.nbytes, number, rows, outs)

    def _meet(self, space: Workspace, dtype: str, op: str, source: CudaSource, target: CudaSource, stream: int) -> bool:
        """Capture a call that is best done where all arrays are, which the other ranks are told after it; False for a
        call that goes as any array does: nothing is captured, or there is no need to know the arrays."""
        driver = space.driver
        if space.choose(dtype, op, source.nbytes, symmetric=True).route != SHARES or not source.nbytes:
            return False
        if not isinstance(driver, DeviceMemory) or not driver.stream_is_capturing(stream, space.location):
            return False
        entry = space.new_entry()
        if entry is None:
            return False
        space.all_reduce_entry(dtype, op, entry, source.address, target.address, source.nbytes, stream)
        if self.captured is None:
            self.captured = Captured(self._rank, self._size)
        # The owner is not kept: a graph has its memory, and a tensor kept here would keep that of a graph that is gone.
        bare = [replace(one, owner=None) for one in (source, target)]
        self.captured.met.append(Met(entry, *bare))
        return True

    def settle(self) -> None:
        """Wait until nothing of this rank runs, so that entries may change."""
        if self._space is not None:
            self._space.driver.synchronize(self._space.location)
            self._space.check()

    @property
    def gpu(self) -> Location | None:
        """Where this rank computes, once it has."""
        return None if self._space is None else self._space.location

    def write(self, entries: Sequence[tuple[int, Sequence[int] | None]]) -> None:
        """Write entries of the table of calls of graphs: see :meth:`Workspace.write_entry`."""
        for entry, row in entries:
            if self._space is not None:
                self._space.write_entry(entry, row)

    def all_reduce_norm(
        self,
        given: SymmetricBuffer | ArrayLike,
        residual: SymmetricBuffer | ArrayLike,
        weight: SymmetricBuffer | ArrayLike,
        out: SymmetricBuffer | ArrayLike | None,
        total: SymmetricBuffer | ArrayLike | None,
        epsilon: float,
        stream: object,
    ) -> None:
        """See :meth:`~vram.Group.all_reduce_norm`."""
        source, before, scale = self._source(given), self._source(residual), self._source(weight)
        target = source if out is None else self._source(out)
        into = before if total is None else self._source(total)
        dtype, size = dtype_name(source.dtype), source.dtype.itemsize
        epsilon = host.check_norm(dtype, source.nbytes // size, scale.nbytes // scale.dtype.itemsize, epsilon)
        if before.nbytes != source.nbytes or len({(one.dtype, one.gpu) for one in (source, before, scale)}) > 1:
            raise UsageError(
                f"the residual is {before.nbytes} bytes of {before.dtype} on cuda:{before.gpu}, and the weight of "
                f"{scale.dtype} on cuda:{scale.gpu}: the array is {source.nbytes} bytes of {source.dtype} on "
                f"cuda:{source.gpu}"
            )
        for one in (target, into):
            self._check_out(one, source, source.nbytes)
        _check_apart(target, [before, scale, into], [source])
        _check_apart(into, [source, scale], [before])
        space, number = self._prepared(_gpu(source), dtype, "sum", stream)
        rows, width = source.nbytes // scale.nbytes, scale.nbytes
        space.all_reduce_norm(
            dtype, source.address, before.address, scale.address, target.address, into.address, rows, width, epsilon,
            number,
        )  # fmt: skip

    def explain(self, dtype: str, op: str, nbytes: int, symmetric: bool) -> str:
        """Say which way an all-reduce takes, and by which table."""
        library = self.library
        choice = self._routes.choose(self._size, dtype, op, nbytes, symmetric=symmetric, library=library is not None)
        pieces = max(1, -(-nbytes // choice.piece))
        how = f"{choice.route}, " + (f"{pieces} pieces of at most {choice.piece} bytes" if pieces > 1 else "one kernel")
        if choice.route == LIBRARY and library is not None:
            how = f"handed over to {library.name}"
        return (
            f"{op} of {nbytes} bytes of {dtype} over {self._size} ranks: {how} "
            f"(table {self._routes.digest}, {self._routes.origin})"
        )

    def counts(self) -> dict[str, int]:
        """Return how often each kernel was put on a stream, and how often a library was handed over to."""
        found = {} if self._space is None else dict(self._space.counts)
        if self.captured is not None and self.captured.registered:
            found["registered"] = self.captured.registered
        return found | ({LIBRARY: self._handed_over} if self._handed_over else {})

    def reduce_scatter(self, given: SymmetricBuffer | ArrayLike, out: ArrayLike, op: str, stream: object) -> None:
        """See :meth:`~vram.Group.reduce_scatter`."""
        source, target, rows = self._source(given), self._source(out), self._rows_of(given, "reduce_scatter")
        self._check_out(target, source, source.nbytes // self._size, parts=self._size)
        dtype = dtype_name(source.dtype)
        space, number = self._prepared(_gpu(source), dtype, op, stream)
        space.reduce_scatter(dtype, op, rows, target.address, target.nbytes, number)

    def all_gather(self, given: SymmetricBuffer | ArrayLike, out: ArrayLike, stream: object) -> None:
        """See :meth:`~vram.Group.all_gather`."""
        source, target, rows = self._source(given), self._source(out), self._rows_of(given, "all_gather")
        self._check_out(target, source, source.nbytes * self._size)
        space, number = self._prepared(_gpu(source), *ANY, stream)
        space.fetch(rows, target.address, source.nbytes, number)

    def all_to_all(self, given: SymmetricBuffer | ArrayLike, out: ArrayLike, stream: object) -> None:
        """See :meth:`~vram.Group.all_to_all`."""
        source, target, rows = self._source(given), self._source(out), self._rows_of(given, "all_to_all")
        self._check_out(target, source, source.nbytes, parts=self._size)
        part = source.nbytes // self._size
        space, number = self._prepared(_gpu(source), *ANY, stream)
        space.fetch(rows, target.address, part, number, offset=self._rank * part)

    def broadcast(self, given: SymmetricBuffer | ArrayLike, root: int, stream: object) -> None:
        """See :meth:`~vram.Group.broadcast`."""
        source, rows = self._source(given), self._rows_of(given, "broadcast")
        space, number = self._prepared(_gpu(source), *ANY, stream)
        space.fetch(rows, source.address, source.nbytes, number, root=root)

    def barrier(self, device: str, stream: object) -> None:
        """See :meth:`~vram.Group.barrier`."""
        gpu = Location.parse(device)
        if gpu.kind != "cuda":
            raise UsageError(f"{device} has no streams: leave device= out, and the processes wait for one another")
        space, number = self._prepared(drivers.get(gpu).canonical(gpu), *ANY, stream)
        space.barrier(number)

    # -- what is given ------------------------------------------------------------------------------------------------
    def _source(self, given: SymmetricBuffer | ArrayLike) -> CudaSource:
        found = as_source(given.array if isinstance(given, SymmetricBuffer) else given)
        if not isinstance(found, CudaSource):
            raise UsageError("one array of the call is on a GPU and another one is not: put both on the same device")
        if not found.contiguous:
            raise UsageError("the array is not contiguous: give a copy, or a part of it that is")
        return found

    def _check_out(self, target: CudaSource, source: CudaSource, nbytes: int, *, parts: int = 1) -> None:
        if target.readonly:
            raise UsageError("the array is read-only, and the result goes there: give another one")
        if source.nbytes % (parts * source.dtype.itemsize):
            raise UsageError(f"{source.nbytes // source.dtype.itemsize} elements have no {parts} equal parts")
        if (target.dtype, target.nbytes, target.gpu) != (source.dtype, nbytes, source.gpu):
            raise UsageError(
                f"the result is {nbytes} bytes of {source.dtype} on cuda:{source.gpu}, and out is {target.nbytes} of "
                f"{target.dtype} on cuda:{target.gpu}"
            )

    def _rows_of(self, given: SymmetricBuffer | ArrayLike, what: str) -> Sequence[int]:
        rows = _rows(given)
        if rows is None:
            raise UsageError(
                f"{what} on a GPU reads the arrays of all ranks where they are: give a symmetric buffer, made with "
                f'group.symmetric(..., device="cuda:...")'
            )
        return rows


def _check_apart(target: CudaSource, others: Sequence[CudaSource], same: Sequence[CudaSource]) -> None:
    """Refuse a result that overlaps one of the others, or one of those that it may be, in part."""
    for other in (*others, *same):
        overlaps = target.address < other.address + other.nbytes and other.address < target.address + target.nbytes
        if overlaps and not (other in same and other.address == target.address):
            raise UsageError("a result overlaps another array of the call: out= may be the array, total= the residual")


def _gpu(source: CudaSource) -> Location:
    return Location("cuda", source.gpu)


def _rows(given: SymmetricBuffer | ArrayLike) -> Sequence[int] | None:
    return given.addresses if isinstance(given, SymmetricBuffer) else None
