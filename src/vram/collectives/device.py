"""Collectives on memory of GPUs: one rank's workspace, its kernels, and what went wrong in them.

A call puts one kernel on a stream and returns. Nothing of it waits on the host, and nothing of it is decided by what
the host knows of the calls before: their number lies in memory of the GPU, so that a call may be captured into a graph
and launched again. All ranks choose the same kernel and the same grid, since both follow from what they have agreed on:
how many they are, the element type, the operation, the bytes, whether the arrays are symmetric buffers, and a table.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from ..arrays import Array
from ..arrays.create import zeros
from ..driver.protocol import DeviceMemory, Driver
from ..errors import PeerGoneError, UnsupportedError, UsageError, WaitTimeoutError
from ..lifetime import Owned, own, unwinding
from ..memory.pinned import pin
from ..spec import HOST, Location
from .kernels import BLOCKS, GRID, KINDS, OPS, THREADS, WIDEST_ROW, Layout, Variant, compiled
from .routes import PACKETS, PUSH, SHARES, TWO_SHOTS, Choice, Routes

ANY: Final = ("int32", "sum")  # the kernels that are taken for what does not look at elements
LEGACY_STREAM: Final = 1  # CU_STREAM_LEGACY
_UNITS: Final = {PACKETS: 8, PUSH: 16, TWO_SHOTS: 16, SHARES: 16}  # bytes that a thread takes at a time
_COPIED = 4 << 20  # bytes of a rank: from there on the GPU's copy engines gather, which are faster than kernels
_STATE = 32  # words of the GPU: the number of the newest call, blocks that have begun it, whether it is poisoned
_ENTRIES = 4096  # calls of graphs whose arrays other ranks may come to know
_PAGE = 4096  # bytes of the host that the GPU reads and writes
_FAULT = struct.Struct("=4I")  # whether there is one; the rank that was waited for; why not any longer; the call
_FAULT_AT = 128  # bytes: not in the line of the word that says stop
_STOPPED = 1

Rows = Sequence[int]  # the addresses of the arrays of all ranks, by rank, as this process has them mapped


class Workspace(Owned):
    """A rank's means to compute on one GPU; streams that it is used on wait for one another. `addresses` are the ranks'
    :attr:`Layout.nbytes` bytes of zeros, at multiples of 16, which the caller keeps until this is closed. Ranks that
    share a GPU need all their `blocks` on it at once: they wait for each other."""

    __slots__ = (
        "_addresses", "_blocks", "_entries", "_kernels", "_libraries", "_lock", "_name", "_page", "_patience", "_state",
        "_stream", "_words",
        "capability", "counts", "driver", "layout", "location", "rank", "routes",
    )  # fmt: skip

    def __init__(
        self,
        rank: int,
        addresses: Rows,
        driver: Driver,
        location: Location,
        patience: float,
        name: str = "group",
        routes: Routes | None = None,
        blocks: int = BLOCKS,
    ) -> None:
        if not isinstance(driver, DeviceMemory):
            raise UnsupportedError(
                "collectives on GPUs", "a driver that runs kernels", f"the driver {driver.name}", "Use host memory"
            )
        self.rank, self.location, self.driver = rank, location, driver
        self.routes = Routes() if routes is None else routes
        self._blocks = blocks
        self.counts: Counter[str] = Counter()
        self.layout = Layout(len(addresses))
        self.capability = driver.capability(location)
        self._name, self._addresses = name, tuple(addresses)
        self._patience = round(patience * 1e9)
        self._kernels: dict[tuple[str, str], dict[str, int]] = {}
        self._libraries: list[int] = []
        self._lock = threading.Lock()
        self._stream = 0
        self._entries = 0  # that are in use
        self._state: Array = zeros(_STATE + _ENTRIES * self._words_of_entry, "uint32", device=str(location))
        self._page: Array = zeros(_PAGE, "uint8", device=HOST)
        # The thread that hears of a death writes here, even while this is closed: the view keeps it mapped.
        self._words = memoryview(cast("Any", self._page.numpy()))
        pinned = pin(driver, self._page.address, _PAGE, location)
        try:
            self._claim = own(
                f"the workspace of rank {rank} of the group {name}",
                partial(_close, driver, location, self._libraries, pinned, (self._state, self._page)),
            )
        except BaseException as error:
            with unwinding(error):
                pinned.release()
                self._state.close()
                self._page.close()
                self._words = memoryview(bytearray(_PAGE))
            raise

    def close(self, *, strict: bool = False) -> None:
        """Wait for what is under way, and give everything back. Idempotent."""
        super().close(strict=strict)
        if self.is_closed:
            self._words = memoryview(bytearray(_PAGE))  # whoever still has the view keeps the page for as long

    # -- what went wrong --------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Have kernels wait no longer, for whatever rank. From any thread; they return within milliseconds."""
        self._words[0] = 1

    def check(self) -> None:
        """Raise what a kernel ran into, if any: PeerGoneError if a rank was waited for that is gone, WaitTimeoutError
        if a rank did not come in time. All kernels that were put on a stream since did nothing."""
        is_set, rank, why, call = _FAULT.unpack_from(self._words, _FAULT_AT)
        if not is_set:
            return
        where = f"in call {call} of the group {self._name!r} on {self.location}"
        advice = "what came of it is not known, and the group computes no more: make a new one"
        if why == _STOPPED:
            error = PeerGoneError(f"rank {rank} was waited for {where} when a rank was gone; {advice}")
            error.ranks = (rank,)
            raise error
        raise WaitTimeoutError(
            f"rank {rank} did not come within {self._patience / 1e9:g} s {where}: every rank makes the same calls in "
            f"the same order; {advice}"
        )

    # -- calls, of what all ranks have prepared ------------------------------------------------------------------------
    def prepare(self, dtype: str, op: str) -> None:
        """Compile and load the kernels for an element type and an operation: some 0.3 s when they are not on disk.
        Raises UsageError for a type or an operation without kernels."""
        if dtype not in KINDS or op not in OPS:
            raise UsageError(f"there is no {op} of {dtype} on GPUs: choose {', '.join(OPS)} of {', '.join(KINDS)}")
        with self._lock:
            if (dtype, op) in self._kernels:
                return
            variant = Variant(self.layout.size, self.rank, dtype, op, self.capability)
            library = self.driver.kernels_load(compiled(variant), self.location)
            self._libraries.append(library)
            self._kernels[dtype, op] = {name: self.driver.kernel(library, name) for name in variant.names()}

    def choose(self, dtype: str, op: str, nbytes: int, *, symmetric: bool, library: bool = False) -> Choice:
        """Return which way an all-reduce of so many bytes takes; see :meth:`Routes.choose`."""
        choice = self.routes.choose(self.layout.size, dtype, op, nbytes, symmetric=symmetric, library=library)
        return replace(choice, blocks=self._blocks) if choice.blocks > self._blocks else choice

    def all_reduce(
        self,
        dtype: str,
        op: str,
        source: int,
        target: int,
        nbytes: int,
        stream: int,
        rows: Rows | None = None,
        outs: Rows | None = None,
    ) -> None:
        """Put an all-reduce on a stream; source and target may be the same. `rows` and `outs` are where all ranks have
        theirs, if those are symmetric buffers: at multiples of 16."""
        symmetric = rows is not None and outs is not None
        choice = self.choose(dtype, op, nbytes, symmetric=symmetric)
        if choice.route == SHARES and rows is not None and outs is not None:
            if nbytes:
                blocks = _blocks(-(-nbytes // self.layout.size), 16, choice.blocks)
                self._launch(dtype, op, "all_reduce_shares", blocks, (*rows, *outs, nbytes), stream)
            return
        for start in range(0, nbytes, choice.piece):
            part = min(choice.piece, nbytes - start)
            each = -(-part // self.layout.size) if choice.route == TWO_SHOTS else part
            blocks = _blocks(each, _UNITS[choice.route], choice.blocks)
            arguments = (source + start, target + start, part)
            self._launch(dtype, op, f"all_reduce_{choice.route}", blocks, arguments, stream)

    @property
    def _words_of_entry(self) -> int:
        """Of 4 bytes: whether it is known, and the addresses of all sources and targets."""
        return 2 * (1 + 2 * self.layout.size)

    def new_entry(self) -> int | None:
        """Return the number of an entry for a call of a graph; None if all are in use."""
        if self._entries == _ENTRIES:
            return None
        self._entries += 1
        return self._entries - 1

    def write_entry(self, entry: int, row: Rows | None) -> None:
        """Have a call of a graph reach its arrays at these addresses: all ranks' sources, then all targets. None:
        through the workspace again. No graph may run that looks there."""
        self.handle  # noqa: B018  (the check)
        words = struct.pack(f"={1 + 2 * self.layout.size}Q", *((1, *row) if row else (0,) * (1 + 2 * self.layout.size)))
        self.driver.copy_in(self._address_of(entry), memoryview(words))

    def _address_of(self, entry: int) -> int:
        return self._state.address + 4 * (_STATE + entry * self._words_of_entry)

    def all_reduce_entry(
        self, dtype: str, op: str, entry: int, source: int, target: int, nbytes: int, stream: int
    ) -> None:
        """Put an all-reduce into a graph that goes by what an entry of :meth:`new_entry` says when it runs."""
        blocks = self.choose(dtype, op, nbytes, symmetric=True).blocks
        blocks = _blocks(-(-nbytes // self.layout.size), 16, blocks)
        where = self._address_of(entry)
        for start in range(0, nbytes, self.layout.staged):
            arguments = (where, source, target, start, min(self.layout.staged, nbytes - start), nbytes)
            self._launch(dtype, op, "all_reduce_entry", blocks, arguments, stream)

    def all_reduce_norm(
        self,
        dtype: str,
        source: int,
        residual: int,
        weight: int,
        target: int,
        total: int,
        rows: int,
        width: int,
        epsilon: float,
        stream: int,
    ) -> None:
        """Put a sum over the ranks, with a residual added and each row normalized, on a stream. Addresses are multiples
        of 16; `target` may be `source`, and `total` may be `residual`. `width` is a row's bytes: a multiple of 16."""
        if width % 16 or not 0 < width <= WIDEST_ROW:
            raise UsageError(f"rows of {width} bytes: a row has a multiple of 16 bytes, and at most {WIDEST_ROW}")
        if any(address % 16 for address in (source, residual, weight, target, total)):
            raise UsageError(
                "an array does not begin at a multiple of 16 bytes, as those of an all_reduce_norm have to"
            )
        words = struct.unpack("<I", struct.pack("<f", epsilon))[0]
        whole = self.choose(dtype, "sum", rows * width, symmetric=False)
        in_packets = whole.route == PACKETS
        at_once = max(1, (self.layout.packets if in_packets else self.layout.pushed) // width)
        name = "all_reduce_norm_packets" if in_packets else "all_reduce_norm_push"
        for first in range(0, rows, at_once):
            count, at = min(at_once, rows - first), first * width
            self._launch(
                dtype, "sum", name, min(count, whole.blocks),
                (source + at, residual + at, weight, target + at, total + at, count, width, words), stream,
            )  # fmt: skip

    def reduce_scatter(self, dtype: str, op: str, rows: Rows, target: int, part: int, stream: int) -> None:
        """Put a reduce-scatter of symmetric buffers on a stream: this rank gets `part` bytes, its own of the result."""
        self._launch(dtype, op, "reduce_scatter", self._grid(part), (*rows, target, part), stream)

    def fetch(
        self, rows: Rows, target: int, part: int, stream: int, *, offset: int = 0, root: int | None = None
    ) -> None:
        """Put a gather of symmetric buffers on a stream: `part` bytes of each rank, or of `root` alone, from `offset`
        on."""
        if part >= _COPIED and self.layout.size > 1:
            self._copy(rows, target, part, stream, offset, root)
            return
        only = self.layout.size if root is None else root
        self._launch(*ANY, "fetch", self._grid(part), (*rows, target, part, offset, only), stream)

    def _copy(self, rows: Rows, target: int, part: int, stream: int, offset: int, root: int | None) -> None:
        """Fetch by the GPU's copy engines, after all ranks have come, and before any goes on."""
        self.barrier(stream)
        size = self.layout.size
        for step in range(size):
            rank = (self.rank + step) % size  # not all from one at a time
            source, to = rows[rank] + offset, target + (rank * part if root is None else 0)
            if (root is None or rank == root) and source != to:
                self.driver.launch_copy(to, source, part, stream, self.location)
        self.counts["copies"] += 1
        self._launch(*ANY, "barrier", 1, (), stream, after_kernel=False)

    def _grid(self, nbytes: int) -> int:
        return _blocks(nbytes, 16, min(GRID, self._blocks))

    def barrier(self, stream: int) -> None:
        """Put a barrier on a stream: what comes after it there comes after what all ranks put before theirs."""
        self._launch(*ANY, "barrier", 1, (), stream)

    def _launch(
        self,
        dtype: str,
        op: str,
        name: str,
        blocks: int,
        arguments: Sequence[int],
        stream: int,
        *,
        after_kernel: bool = True,
    ) -> None:
        self.handle  # noqa: B018  (the check)
        self.check()
        if stream != self._stream:
            self._move_to(stream)
        kernels = self._kernels[dtype, op]
        self.counts[name] += 1
        page = self._page.address
        common = (*self._addresses, self._state.address, page, page + _FAULT_AT, self._patience)
        threads = 64 if name == "barrier" else THREADS
        self.driver.launch(
            kernels[name], blocks, threads, (*common, *arguments), stream, self.location,
            dependent=after_kernel and self.capability >= (9, 0),
        )  # fmt: skip

    def _move_to(self, stream: int) -> None:
        """Have another stream be used, after what is on the one before: two kernels at once would share a number."""
        driver, before = self.driver, self._stream
        if driver.stream_is_capturing(stream, self.location):
            return  # whoever launches the graph says when
        if before:
            event = driver.event_create(self.location)
            try:
                driver.event_record(event, before)
                driver.stream_wait(stream, event, self.location)
            except UsageError:  # the stream is no more, or is captured; what it had may still run
                driver.synchronize(self.location)
            finally:
                driver.event_destroy(event)
        self._stream = stream

    def __repr__(self) -> str:
        return f"<Workspace of rank {self.rank} of {self._name} on {self.location}>"


def _blocks(nbytes: int, unit: int, most: int) -> int:
    """Return the grid in which a thread has one unit of so many bytes, as long as it is not too large."""
    return max(1, min(most, -(-nbytes // (unit * THREADS))))


def _close(driver: Driver, location: Location, libraries: list[int], pinned: object, arrays: Sequence[Array]) -> None:
    driver.synchronize(location)  # kernels may be running, for as long as their patience
    while libraries:
        driver.kernels_unload(libraries[-1])  # type: ignore[attr-defined]
        libraries.pop()
    pinned.release()  # type: ignore[attr-defined]
    for array in arrays:
        array.close()
