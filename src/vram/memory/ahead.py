"""Memory that a thread makes before it is needed, and what shrinking gives back: kept, so that growing finds it.

Making memory of a GPU takes many times as long as mapping it. All that is kept is zero, as new memory is, and nobody
else has it or ever had it: what has left the process is never kept.
"""

from __future__ import annotations

import os
import resource
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ..driver.protocol import DeviceMemory, Driver, HostMemory
from ..errors import CapacityError, DriverError, UsageError
from ..lifetime import noted, shielded, wait_for
from ..spec import AllocationFlags, HandleKind, Location, check_timeout, format_size, round_up
from . import checks
from .allocation import PhysicalAllocation, acquire, create_memory
from .children import is_inherited, may_be_inherited
from .chunks import Chunk, Chunks, Kind, Ready, is_lack, make_room, supplies
from .kinds import OWN
from .long_work import long_work

_changing = threading.RLock()  # for who changes what is in force
_PATIENCE = 60.0  # seconds to wait for a thread that makes one chunk


@shielded
def make_ahead(region: Any, nbytes: int) -> tuple[PhysicalAllocation, ...]:
    """Make the memory by which a region grows to so many bytes, and return it; the region's next growth maps it."""
    rows = region._chunks
    kind = Kind(rows.where.driver, region.location, region._kinds, region._flags, 0)
    with region._alone():
        rows.ahead = [_take_or_make(kind._replace(nbytes=size)) for size in region._growth(nbytes)]
        return tuple([PhysicalAllocation.of(memory) for memory, _ in rows.ahead])


def _take_or_make(kind: Kind) -> Ready:
    supply = supplies.get(kind)
    ready: Ready | None = None if supply is None else supply._take()
    make = partial(create_memory, kind.driver, kind.nbytes, kind.location, kind.kinds, kind.flags)
    try:
        return make() if ready is None else ready
    except DriverError as error:
        if is_lack(error) and make_room(kind.driver, kind.location):
            return make()
        raise


class Prepared:
    """Memory that is kept ready, in chunks of one size. Made by :func:`vram.prepare`.
    It stays in force until :meth:`close` or :func:`vram.memory.trim`, also if nobody holds this object."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._most = 0  # chunks
        self._ready: list[Ready] = []
        self._lock = threading.RLock()  # guards the three, and is not reached from a finalizer
        self._filling: threading.Event | None = None
        self._error: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are to be ready; 0 once it was closed."""
        return self._most * self._kind.nbytes if self._is_current else 0

    @property
    def ready(self) -> int:
        """Bytes that are ready."""
        return len(self._ready) * self._kind.nbytes if self._is_current else 0

    @property
    def error(self) -> Exception | None:
        """The error that stopped the thread, such as OutOfMemoryError. It tries again when some was used."""
        return self._error

    @shielded
    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is ready, for at most `timeout` seconds, and return whether it is. Raises the filling thread's
        error: OutOfMemoryError, or CapacityError if under a quarter of the process's descriptors would stay free."""
        seconds = check_timeout(timeout)
        filling = self._filling
        if self._is_current and filling is not None:
            with long_work(f"making memory on {self._kind.location} ahead", self.nbytes, lambda: self.ready):
                wait_for(filling, seconds)
        error = self._error
        if error is not None and self._is_current:
            raise error
        return self._is_current and len(self._ready) >= self._most

    @shielded
    def close(self) -> None:
        """Give all that is kept back, and make no more. Idempotent."""
        self._end()

    def __repr__(self) -> str:
        kind = self._kind
        return (
            f"<Prepared {kind.location} {format_size(self.ready)} of {format_size(self.nbytes)} "
            f"in chunks of {format_size(kind.nbytes)}>"
        )

    # -- for who grows and shrinks ------------------------------------------------------------------------------
    @property
    def _is_current(self) -> bool:
        """Whether it is in force: not in a forked child, whose memory is the parent's (I7)."""
        return supplies.get(self._kind) is self

    def _take(self) -> Ready | None:
        with self._lock:
            return self._ready.pop() if self._ready else None

    def _put(self, ready: Ready) -> None:
        """Keep memory that is zero and nobody else's, or give it back where there is enough.
        It is unmapped: a child forked before may have it, a child forked from now on has not."""
        memory, claim = ready
        is_free = not may_be_inherited(memory)
        if is_free:
            memory.first_mapped = 0
        with self._lock:
            fits = is_free and len(self._ready) < self._most
            if fits:
                self._ready.append(ready)
        if not fits:
            claim.release()

    def _give_way(self) -> int:
        """Give back what is kept, for others to have it; return its bytes."""
        with self._lock:
            given, self._ready = self._ready, []
        for _, claim in given:
            claim.release()
        return len(given) * self._kind.nbytes

    def _refill(self) -> None:
        """Have a thread make what is missing."""
        with self._lock:
            if self._filling is not None or len(self._ready) >= self._most:
                return
            self._error = None
            done = self._filling = threading.Event()
            try:
                threading.Thread(target=self._fill, args=(done,), name="vram: memory ahead").start()
            except RuntimeError as error:  # no thread is to be had, says wait; who grows makes memory as always
                self._error = error.with_traceback(None)
                self._filling = None
                done.set()

    def _fill(self, done: threading.Event) -> None:
        """Make chunks until there are enough. The thread ends then, or when the interpreter does."""
        kind = self._kind
        try:
            while self._lacks_some():
                if not _spares_descriptors(kind.driver):
                    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                    raise CapacityError(
                        f"with more made ahead, less than a quarter of the {limit} descriptors that this process may "
                        f"have would be free: prepare fewer and larger chunks, or allow more (ulimit -n)"
                    )
                self._put(create_memory(kind.driver, kind.nbytes, kind.location, kind.kinds, kind.flags))
        except Exception as error:  # noqa: BLE001  (raised by wait)
            with self._lock:
                self._error = error.with_traceback(None)
                self._filling = None
        finally:
            with self._lock:
                done.set()

    def _lacks_some(self) -> bool:
        """Whether the thread is to make more; if not, whoever takes some from now on begins another one."""
        with self._lock:
            lacks = len(self._ready) < self._most and threading.main_thread().is_alive()
            if not lacks:
                self._filling = None
            return lacks

    def _set(self, most: int) -> None:
        with self._lock:
            self._most = most
            surplus, self._ready = self._ready[most:], self._ready[:most]
        for _, claim in surplus:
            claim.release()
        self._refill()

    def _end(self) -> int:
        """Give all that is kept back, and make no more; return its bytes."""
        with _changing:
            if not self._is_current:
                return 0
            with self._lock:
                self._most = 0  # what the thread is just making goes at once
                filling = self._filling
            supplies.pop(self._kind, None)
        if filling is not None:
            wait_for(filling, _PATIENCE)
        return self._give_way()


@shielded
def prepare(device: Location | str, nbytes: int | str, *, chunk: int | str) -> Prepared:
    """Have memory made before it is needed: growing finds it ready, and what shrinking gives back is kept with it.

    A thread makes `nbytes` now, and again what was used. Arrays that were made with the same ``chunk=`` take from it
    when they grow, wake or are made. Kept memory is zero, and was in no other process, nor, on the host, there at a
    fork; it is given back when a growth would else find too little memory, by :meth:`Prepared.close`, and by
    :func:`vram.memory.trim`. A chunk on the host takes a descriptor: a quarter of those of the process stays free.

    Parameters
    ----------
    device : Location or str
        Where: ``"cuda:0"``, ``"host"``.
    nbytes : int or str
        How much at most, such as ``"2GiB"``. Said again for the same chunks, the latest holds; 0 ends it.
    chunk : int or str
        The size of a chunk, as for :func:`vram.empty`.

    Returns
    -------
    Prepared
        How much is `ready`, the thread's `error` if there was one, and :meth:`Prepared.wait`.

    Examples
    --------
    >>> with_room = vram.zeros((0, 1024), device="host", capacity=1 << 20, chunk="2MiB")
    >>> vram.prepare("host", "8MiB", chunk="2MiB").wait()
    True
    >>> with_room.resize(1024)
    >>> vram.memory.trim() > 0
    True
    """
    place, driver = checks.served(device)
    kinds, flags = OWN.kind, AllocationFlags.NONE  # as arrays are made
    granularity = driver.mem_granularity(place, kinds, flags).recommended
    size = round_up(checks.size(chunk, "chunk"), granularity)
    if not size:
        raise UsageError(f"chunk is 0; the least is one granule of {granularity} bytes")
    asked = checks.size(nbytes, "nbytes")
    if 0 < asked < size:
        raise UsageError(f"{format_size(asked)} is less than one chunk of {format_size(size)}: prepare more, or 0")
    return keep_ready(Kind(driver, place, kinds, flags, size), asked // size)


def keep_ready(kind: Kind, most: int) -> Prepared:
    """Have so many chunks of a kind ready from now on; none ends it. See :func:`prepare`."""
    with _changing:
        made = supplies.get(kind)
        if not isinstance(made, Prepared):
            made = Prepared(kind)
        if most:
            supplies[kind] = made
            made._set(most)
    if not most:
        made._end()
    return made


def set_aside(
    given: Iterable[tuple[Chunks, HandleKind, AllocationFlags, Sequence[Chunk]]],
) -> list[tuple[Prepared, Ready]]:
    """Choose chunks to keep among those that go and that no device works on, zero them, and take claims on their
    memory. Memory that cannot be kept is left out; :attr:`Prepared.error` says why, if the driver refused something."""
    count: Counter[Prepared] = Counter()
    places: dict[tuple[Any, Location], tuple[list[tuple[int, int]], list[tuple[Prepared, Ready]]]] = {}
    for mapped, kinds, flags, going in given:
        driver, chosen = mapped.where.driver, list[Chunk]()
        spans, kept = places.setdefault((driver, mapped.users[0]), ([], []))
        if not _spares_descriptors(driver):
            continue
        for chunk in going:
            supply = supplies.get(Kind(driver, mapped.location, kinds, flags, chunk.stop - chunk.start))
            if not isinstance(supply, Prepared) or len(supply._ready) + count[supply] >= supply._most:
                continue
            try:
                ready = _claimed(chunk)
            except Exception as error:  # noqa: BLE001  (it goes as it would without)
                supply._error = error.with_traceback(None)
                continue
            if ready is None:
                continue
            kept.append((supply, ready))
            count[supply] += 1
            chosen.append(chunk)
        spans += _spans(mapped.where.address, chosen)
    found: list[tuple[Prepared, Ready]] = []
    for (driver, place), (spans, kept) in places.items():
        try:
            _zero(driver, place, spans)
        except Exception as error:  # noqa: BLE001  (as above)
            for supply, _ in kept:
                supply._error = error.with_traceback(None)
            continue
        found += kept
    return found


def _spares_descriptors(driver: Driver) -> bool:
    """Whether a quarter of the descriptors that this process may have are free; memory of the host takes one each."""
    if not isinstance(driver, HostMemory):
        return True
    try:
        lowest = os.open("/", os.O_PATH | os.O_CLOEXEC)  # the kernel gives the lowest number: all below are in use
        os.close(lowest)
    except OSError:
        return False
    return lowest < resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4


def _zero(driver: Any, place: Location, spans: Sequence[tuple[int, int]]) -> None:
    """Zero spans of addresses; on a device in a stream of its own, which waits for nobody's work."""
    if not isinstance(driver, DeviceMemory) or not spans:
        for start, stop in spans:
            driver.fill(start, 0, stop - start)
        return
    claim, stream = acquire("stream for zeros", partial(driver.stream_create, place), driver.stream_destroy)
    with claim:
        try:
            for start, stop in spans:
                driver.fill_async(start, 0, stop - start, stream)
            driver.stream_synchronize(stream, place)
        except BaseException as error:
            with noted(error):  # what was begun ends before anything is unmapped
                driver.stream_synchronize(stream, place)
            raise


def _claimed(chunk: Chunk) -> Ready | None:
    """Return the memory of a chunk with a claim on it, if nobody but its mapping has it or ever had it."""
    if is_inherited(chunk):  # a view there shows what the next to have it puts in
        return None
    memory = chunk.memory
    if memory.has_left or memory.sealed or memory.handle.holders(besides=[chunk.mapping]):
        return None
    return memory, memory.handle.claim("kept for growth")


def _spans(address: int, given: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Return from where to where chunks reach that lie behind one another: addresses, of one region."""
    found: list[tuple[int, int]] = []
    for chunk in given:
        start, stop = address + chunk.start, address + chunk.stop
        found.append((found.pop()[0] if found and found[-1][1] == start else start, stop))
    return found


def _after_fork_in_child() -> None:
    """The memory is the parent's, and a lock may be held by a thread that does not exist here (I7)."""
    global _changing
    supplies.clear()
    _changing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
