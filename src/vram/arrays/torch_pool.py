"""A memory pool for PyTorch whose memory is ours: it sleeps, wakes, and can be published without a copy.

torch calls both functions of a pool with its allocator's lock held, so neither may wait for Python's lock: free is
native code that does nothing (:func:`_find_freed` asks later what went), and allocate runs with torch's lock released
(:mod:`.torch_allocator`). torch frees segments long after their pool is gone, so both stay as long as the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .. import driver as drivers
from ..errors import (
    AsleepError,
    CapacityError,
    ForkedError,
    OutOfMemoryError,
    UsageError,
)
from ..memory import Region
from ..memory.sleep import Place, Remapped, SleepReport, WakeReport, on_remap, sleep_regions, wake_regions
from ..spec import Location, format_size
from . import streams
from .torch_allocator import (
    Serving,
    Workspaces,
    check_thread,
    check_torch,
    immortal,
    import_torch,
    release_lock,
    serve,
)
from .views import RegionViews, Spans, handed_out

if TYPE_CHECKING:
    import torch

_OfGraph = tuple[str, tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of one tag of a pool that have memory (`awake`) and that sleep. Whole segments of torch's count, tensors in
    them or not."""

    awake: int
    asleep: int


class _Segment:
    """Memory that torch was given: a region, and what the pool remembers of it."""

    __slots__ = ("asked", "is_noted", "of_graph", "pool", "tag", "views")

    def __init__(self, region: Region, block: _Block, asked: _Given) -> None:
        self.views = RegionViews.of(region)  # so that tensors on it are recognized as ours, and shared without a copy
        self.pool, self.tag, self.of_graph = block
        self.is_noted = False  # whether torch has it in its books: the call that asked for it is over
        self.asked = weakref.ref(asked)  # which goes with the thread that asked, and then the call is over as well

    @property
    def is_known(self) -> bool:
        """Whether torch has, or had, noted it."""
        return self.is_noted or self.asked() is None

    def why_it_fills(self) -> str:
        """Return why torch may put more into it, or writes to it by itself; have it not do so if that is possible."""
        if self.of_graph:
            return "it is memory of a captured graph, which writes to it whenever it is launched"
        if not self.pool._retire(self.tag):
            return f"a thread is in a block of use({self.tag!r}), so that torch may put more into that memory"
        return ""


def _why_not_whole(asked: Mapping[int, Spans]) -> dict[int, str]:
    """Return why segments cannot be published as they are; see :data:`.views.handed_out`.
    Published memory is read-only: a kernel that wrote to another tensor in it would end the context."""
    found = {
        address: segment.why_it_fills()
        for segment in _segments.copy()
        if (address := segment.views.region.address) in asked
    }
    unsaid = {address for address, reason in found.items() if not reason}
    if unsaid:
        torch = import_torch()
        _workspaces.let_go(torch)
        for held in torch.cuda.memory_snapshot():  # once for all: it takes longer the more torch has
            if (first := held["address"]) not in unsaid:
                continue
            for block in held["blocks"]:
                start, stop = block["address"] - first, block["address"] - first + block["size"]
                is_free = block["state"] == "inactive"
                if not is_free and not any(start < end and begin < stop for begin, end in asked[first]):
                    found[first] = "another tensor of torch's is in the same memory"
    return found


class _Block(NamedTuple):
    """A block that a thread is in, and allocates for."""

    pool: TorchPool
    tag: str  # empty in a bypass
    of_graph: bool = False


class _Given(list[_Segment]):
    """Segments that a thread was given, and that torch may not have noted yet."""


class _Here(threading.local):
    """The pools of a thread: it allocates for the innermost ``with pool.use(tag)``."""

    def __init__(self) -> None:
        self.within: list[_Block] = []
        self.entered: list[tuple[int, Any]] = []  # the pools of torch's that it allocates in, and their GPUs
        self.given = _Given()
        if threading.get_ident() not in [thread.ident for thread in threading.enumerate()]:
            immortal(self.given)  # not a thread of Python's, which may know it only while it calls: see _Segment.asked
        self.taken = 0  # how many it was ever given
        self.failed: BaseException | None = None


class _Graphs(NamedTuple):
    """A pool of torch's for captured graphs, and what serves it on whichever thread captures."""

    made: Any
    serving: Serving


_segments: dict[_Segment, None] = {}  # whoever takes one out is the one to unmap it
_freed: deque[_Segment] = deque()  # that torch gave back, and that are not unmapped yet
_looked: dict[int, int] = {}  # how often torch had freed on each GPU when all that it had freed was known
_serving: dict[int, Serving] = {}  # by thread; as long as the process
_workspaces = Workspaces()
_here = _Here()


def _requests(graph: _Block | None) -> Generator[int, int, None]:
    """Take sizes and give addresses; 0 sends torch to its own out-of-memory path. A generator waits inside a ``try``:
    no interrupt reaches ctypes, where torch would read a stray address. Each serves one thread, or one graph."""
    address = 0
    while True:
        try:
            while True:
                try:
                    address = _allocate((yield address), graph)
                except BaseException as error:  # noqa: BLE001  (see TorchPool.use, which raises it)
                    address = 0
                    _here.failed = error
        except BaseException as error:  # noqa: BLE001  (another interrupt, in the midst of that)
            address = 0
            _here.failed = error


def _allocate(nbytes: int, graph: _Block | None) -> int:
    _note_given()  # torch has come back for more: it has noted what it was given before
    if isinstance(_here.failed, Exception):
        _here.failed = None  # whoever asked has been told, by torch
    block = graph or _here.within[-1]  # a graph's is the graph's wherever it is captured
    pool = block.pool
    try:
        region = pool._create(nbytes)
    except (CapacityError, OutOfMemoryError):
        if not pool.trim():  # what torch has given back, to try again
            raise
        region = pool._create(nbytes)
    segment = _Segment(region, block, _here.given)
    _here.given.append(segment)
    _here.taken += 1
    _segments[segment] = None
    handed_out[region.address] = _why_not_whole
    return region.address


def _note_given() -> None:
    """Note that torch knows all that this thread gave it. Not to be called where a request is under way."""
    given = _here.given
    while given:
        given[-1].is_noted = True
        given.pop()


def _find_freed(torch: Any, ordinal: int) -> None:
    """Find the segments that torch has given back: those that it knew of before it is asked, and does not have now.
    A segment that is on its way to torch is not there either; it is left alone until its thread comes by again."""
    serving = _serving.get(threading.get_ident())
    if serving is not None and not serving.requests.gi_running:  # as it may be where a signal handler calls
        _note_given()
    stats = torch.cuda.memory_stats_as_nested_dict(ordinal) if _segments else {}
    times = stats.get("num_device_free", -1)
    if _looked.get(ordinal) == times != -1:
        return
    segments = _segments.copy()
    known = [segment for segment in segments if segment.is_known]
    if segments:
        held = {found["address"] for found in torch.cuda.memory_snapshot()}
        for segment in segments:
            if segment.views.region.address in held:
                segment.is_noted = True  # also if the thread that asked for it never comes by again
        for segment in known:
            if (address := segment.views.region.address) in held:
                continue
            try:
                _segments.pop(segment)  # before it is unmapped and the address is given out again
            except KeyError:  # another thread looks as well
                continue
            handed_out.pop(address, None)
            _freed.append(segment)
    if len(known) == len(segments):
        _looked[ordinal] = times


def _unmap_freed() -> int:
    freed = 0
    while True:
        try:
            segment = _freed.popleft()
        except IndexError:
            return freed
        freed += segment.views.region.nbytes
        segment.views.region.close()  # which waits for the device


def _at_exit() -> None:
    """Leave everything to the end of the process, which takes its memory along: nothing is freed in between."""
    for segment in (*_segments.copy(), *_freed.copy()):
        immortal(segment)


def _before_remap(what: Remapped) -> None:
    """Memory goes, perhaps with workspaces in it."""
    if (what.verb, what.when) == ("sleep", "before") and _workspaces.may_be_ours:
        ours = {segment.views.region.address for segment in _segments.copy()}
        if any(address in ours for _, address, _ in what.spans):
            _workspaces.let_go(import_torch())


class TorchPool:
    """Memory for PyTorch on one GPU, by tag: each is put to sleep and woken on its own.

    Parameters
    ----------
    device : str or Location
        The GPU.

    Attributes
    ----------
    margin : int
        Bytes that are left free on the GPU: what would take of them is out of memory. 0 unless you set it.

    Examples
    --------
    >>> pool = vram.TorchPool("cuda:0")  # doctest: +SKIP
    >>> with pool.use("weights"):  # doctest: +SKIP
    ...     model = build()
    >>> pool.sleep(offload=["weights"])  # doctest: +SKIP
    >>> pool.wake(["weights"])  # doctest: +SKIP

    Raises
    ------
    UnsupportedError
        If torch is not installed, is older than 2.10, lacks what this needs, was built without CUDA, or allocates with
        ``cudaMallocAsync``.

    Notes
    -----
    The first pool switches ``release_lock_on_cudamalloc`` on in torch's allocator settings, for the whole process, and
    leaves the other settings as they are. Switched off inside of :meth:`use`, threads that allocate may wait for each
    other for ever.
    """

    def __init__(self, device: str | Location) -> None:
        location = drivers.visible(Location.parse(device))
        if location.kind != "cuda" or not isinstance(location.id, int):
            raise UsageError(f"a pool of torch's is on a GPU, such as 'cuda:0', not on {location}")
        self.location = location
        self._ordinal, self._driver = location.id, drivers.get(location)
        check_torch(import_torch())
        self.margin = 0
        self._pools: dict[tuple[str, int, int], Any] = {}  # that nobody is in, by tag, thread, depth
        self._entered: dict[tuple[str, int, int], None] = {}  # those that a thread is in, or is about to enter
        self._graphs: dict[_OfGraph, _Graphs] = {}  # by tag and the number that torch has for it
        self._shared: dict[_OfGraph, tuple[int, int]] = {}  # which of these for what was passed as a pool
        self._tags: set[str] = set()
        self._process = os.getpid()

    def __repr__(self) -> str:
        usage = self.usage().values()
        awake, asleep = sum(one.awake for one in usage), sum(one.asleep for one in usage)
        return f"<TorchPool {self.location}, {format_size(awake)} awake, {format_size(asleep)} asleep>"

    @contextlib.contextmanager
    def use(self, tag: str) -> Iterator[None]:
        """Have what this thread allocates with torch on this GPU, in a block, come from this pool.

        Blocks nest, and are left by the thread that entered them. Other threads, such as those of backward, and other
        GPUs are served by torch as ever: see :meth:`tag_of`.

        Parameters
        ----------
        tag : str
            The name for :meth:`sleep` and :meth:`wake`.

        Raises
        ------
        AsleepError
            If memory of this tag is asleep: torch might give out a part of it.
        """
        with self._block(tag):
            yield

    @contextlib.contextmanager
    def capture(self, tag: str, pool: tuple[int, int] | None = None) -> Iterator[tuple[int, int]]:
        """Have the memory of a CUDA graph come from this pool: pass what this gives to ``torch.cuda.graph(pool=)``.

        Capture inside of the block, from whichever thread. A graph that is captured later has its memory here, too;
        but where its stream computed before, it may hold a workspace of cuBLAS's that is let go of with the next block.

        Parameters
        ----------
        tag : str
            As for :meth:`use`.
        pool : tuple of int, optional
            A handle that graphs which share memory have in common: the result of this call for one of them, its
            ``pool()``, or any of ``torch.cuda.graph_pool_handle()``. Otherwise this graph has its own.

        Raises
        ------
        AsleepError
            If memory of this tag is asleep.
        UsageError
            If another thread leaves the block than has entered it.
        """
        with self._block(tag, enters=False):
            graphs = self._graphs.get((tag, pool)) or self._graphs.get((tag, self._shared.get((tag, pool))))
            if graphs is None:
                torch = import_torch()
                serving = serve(torch, _requests(_Block(self, tag, of_graph=True)))
                graphs = _Graphs(self._make(torch, serving), serving)
                self._graphs[tag, graphs.made.id] = graphs
                if pool is not None:
                    self._shared[tag, pool] = graphs.made.id
            yield graphs.made.id
            graphs.serving.check()

    @contextlib.contextmanager
    def bypass(self) -> Iterator[None]:
        """Have what this thread allocates on this GPU, in a block inside of :meth:`use`, come from torch as ever.

        It is in torch's ordinary memory, which torch goes on with after the block. Allocations during the capture of a
        graph stay the graph's.
        """
        self._check_process()
        torch, thread, within, entered = import_torch(), threading.get_ident(), _here.within, _here.entered
        depth, elsewhere = len(within), [one for one in entered if one[0] != self._ordinal]
        left: list[Any] = []
        try:
            if not torch.cuda.is_current_stream_capturing():
                within.append(_Block(self, ""))
                _here.entered = elsewhere
                self._leave_all(torch, entered, left)
            yield
        finally:
            del within[depth:]
            check_thread(thread, "bypass()")
            _here.entered = entered
            self._enter_again(torch, left)

    @contextlib.contextmanager
    def _block(self, tag: str, *, enters: bool = True) -> Iterator[None]:
        """Serve this thread in a block; `enters` if torch is to allocate in a pool for it, and not for a graph."""
        if not isinstance(tag, str) or not tag:
            raise UsageError(f"a tag is a name, not {tag!r:.40}")
        self._check_process()
        if any(segment.views.region.asleep is not None for segment in self._of((tag,))):
            raise AsleepError(f"{tag!r} of {self!r} is asleep: wake it first")
        self.trim()
        self._tags.add(tag)
        torch = import_torch()
        release_lock(torch)
        serving = _serve(torch)
        if not enters:
            _workspaces.let_go(torch, always=True)
        thread, within, here = threading.get_ident(), _here.within, _Block(self, tag, of_graph=not enters)
        if not within and isinstance(_here.failed, Exception):
            _here.failed = None  # of a graph that was captured outside of any block
        with contextlib.ExitStack() as block:
            depth, taken = len(within), _here.taken
            if enters and within[-1:] != [here]:
                block.enter_context(self._enter(torch, tag, within.count(here), serving))
            within.append(here)
            try:
                yield
            except BaseException as error:
                failed, _here.failed = _here.failed, None
                if failed is not None and not isinstance(failed, Exception):
                    raise failed.with_traceback(None) from error  # an interrupt that came while torch was allocating
                if failed is not None:
                    error.add_note(f"vram: {type(failed).__name__}: {failed}")
                raise
            finally:
                del within[depth:]
                check_thread(thread, f"a block of {tag!r}")
                _note_given()
                _workspaces.leave(torch, grew=not enters or _here.taken > taken)
        failed, _here.failed = _here.failed, None
        serving.check()
        if failed is not None and not isinstance(failed, Exception):
            raise failed.with_traceback(None)

    @contextlib.contextmanager
    def _enter(self, torch: Any, tag: str, again: int, serving: Serving) -> Iterator[None]:
        key, entered = (tag, threading.get_ident(), again), _here.entered
        depth = len(entered)
        self._entered[key] = None  # first: see _retire
        made = None
        try:
            made = self._pools.pop(key, None)  # nobody else's while it is entered: close() would take it from torch
            if made is None:
                made = self._make(torch, serving)
            with torch.cuda.use_mem_pool(made, device=self._ordinal):
                entered.append((self._ordinal, made))
                yield
        finally:
            del entered[depth:]
            if made is not None:
                self._pools[key] = made
            self._entered.pop(key, None)

    def _leave_all(self, torch: Any, entered: list[tuple[int, Any]], left: list[Any]) -> None:
        for ordinal, made in reversed(entered):
            if ordinal == self._ordinal:
                left.append(made)
                torch._C._cuda_endAllocateToPool(ordinal, made.id)

    def _enter_again(self, torch: Any, left: list[Any]) -> None:
        while left:
            with contextlib.suppress(RuntimeError):  # after an interrupt it may not have been left
                torch._C._cuda_beginAllocateCurrentThreadToPool(self._ordinal, left[-1].id)
            torch._C._cuda_releasePool(self._ordinal, left[-1].id)  # which was counted as used before
            left.pop()

    def _retire(self, tag: str) -> bool:
        """Have torch put nothing more into the memory of a tag; false if a thread is about to. A pool that nobody can
        enter gets no further tensor, not even in place of a freed tensor, and gives memory back once it is empty."""
        keys = [key for key in self._pools.copy() if key[0] == tag]
        taken = {key: made for key in keys if (made := self._pools.pop(key, None)) is not None}
        if any(key[0] == tag for key in self._entered.copy()):
            self._pools.update(taken)
            return False
        for made in taken.values():
            import_torch()._C._cuda_releasePool(self._ordinal, made.id)
        return True

    def _make(self, torch: Any, serving: Serving) -> Any:
        with torch.cuda.device(self._ordinal):  # which a pool belongs to from its making on
            made = torch.cuda.MemPool(serving.allocator)
        immortal(made)  # its end would end the process, were it to come while anything is captured
        return made

    def _create(self, nbytes: int) -> Region:
        if self.margin:
            free, _ = self._driver.mem_info(self.location)
            if nbytes + self.margin > free:
                raise CapacityError(
                    f"{format_size(nbytes)} more would leave less than the margin of {format_size(self.margin)} of the "
                    f"{format_size(free)} that are free on {self.location}"
                )
        return Region.create(self.location, capacity=nbytes, nbytes=nbytes, managed=True, driver=self._driver)

    # -- sleep --------------------------------------------------------------------------------------------------
    def sleep(
        self,
        offload: Iterable[str] = (),
        discard: Iterable[str] = (),
        *,
        to: str | os.PathLike[str] = "host",
        after: object = None,
        shared: Literal["refuse", "unmap"] = "refuse",
    ) -> SleepReport:
        """Put the memory of some tags to sleep: all of it, or none; see :func:`vram.sleep`.

        Parameters
        ----------
        offload : iterable of str
            Tags whose bytes are put aside.
        discard : iterable of str
            Tags whose bytes are let go.
        to : "host" or a directory
            Where bytes are put.
        after : optional
            An event: the work that uses the memory is done when it is. By default the device is waited for.
        shared : "refuse" or "unmap"
            The way with memory that was published or shared: raise BusyError, or unmap it here, which frees nothing.
        """
        if shared not in ("refuse", "unmap"):
            raise UsageError(f"shared is 'refuse' or 'unmap', not {shared!r:.40}")
        where: Place = "host" if to == "host" else Path(os.fspath(to))
        aside, gone = _tags(offload), _tags(discard)
        if both := aside & gone:
            raise UsageError(f"{sorted(both)} cannot be put aside and let go at once")
        self._check_tags(aside | gone)
        self.trim()
        places: dict[Region, Place] = {segment.views.region: where for segment in self._of(aside)}
        places |= {segment.views.region: None for segment in self._of(gone)}
        event = None if after is None else streams.as_event(after)
        return sleep_regions(places, after=event, unmap_shared=shared == "unmap")

    def wake(self, tags: Iterable[str] | None = None, *, fill: int | None = None) -> WakeReport:
        """Wake the memory of some tags, or of all: all of it, or none; see :func:`vram.wake`.

        Parameters
        ----------
        tags : iterable of str, optional
            Which; by default all.
        fill : int, optional
            The byte that memory whose bytes were let go is filled with. By default it is zero.
        """
        if fill is not None and (type(fill) is not int or not 0 <= fill <= 255):
            raise UsageError(f"fill is a byte, 0 to 255, not {fill!r:.40}")
        self._check_process()
        wanted = None if tags is None else _tags(tags)
        if wanted is not None:
            self._check_tags(wanted)
        due = [segment.views.region for segment in self._of(wanted) if segment.views.region.asleep is not None]
        empty = [region for region in due if fill and region.asleep is not None and _discards(region)]
        report = wake_regions(due)
        for region in empty:
            region.driver.fill(region.address, fill or 0, region.nbytes)
        if empty:
            due[0].driver.synchronize(self.location)
        return report

    def close(self) -> None:
        """Have torch give back what no tensor is on; call it again for what its tensors left later. Idempotent.

        Blocks of :meth:`use` that are under way, and graphs that were captured with the memory, keep what they have.
        Empties torch's cache (:func:`torch.cuda.empty_cache`). The pool can be used again afterwards.
        """
        self._check_process()
        torch = import_torch()
        every: tuple[dict[Any, Any], ...] = (self._pools, self._graphs)
        for pools in every:
            while pools:
                try:
                    _, made = pools.popitem()
                except KeyError:  # another thread closes it as well
                    break
                number = (made.made if isinstance(made, _Graphs) else made).id
                torch._C._cuda_releasePool(self._ordinal, number)
        if _segments and not torch.cuda.is_current_stream_capturing():
            _workspaces.let_go(torch)
            torch.cuda.empty_cache()
        self.trim()

    # -- what it is ---------------------------------------------------------------------------------------------
    def usage(self) -> dict[str, Usage]:
        """Return the bytes of each tag, awake and asleep."""
        found: dict[str, Usage] = {}
        for segment in self._of(None):
            region, before = segment.views.region, found.get(segment.tag, Usage(0, 0))
            asleep = region.asleep is not None
            found[segment.tag] = Usage(
                before.awake + (0 if asleep else region.nbytes), before.asleep + (region.nbytes if asleep else 0)
            )
        return found

    def regions(self, tags: Iterable[str] | None = None) -> list[Region]:
        """Return the memory that torch was given, for who puts it to sleep in other ways than :meth:`sleep` knows.

        It stays torch's: close none, and change the size of none.

        Parameters
        ----------
        tags : iterable of str, optional
            Of which; by default of all.
        """
        return [segment.views.region for segment in self._of(None if tags is None else _tags(tags))]

    def tag_of(self, tensor: torch.Tensor) -> str:
        """Return the tag of the memory that a tensor is on.

        Raises
        ------
        UsageError
            If it is not of this pool: torch took the memory elsewhere, for another thread or another GPU.
        """
        storage = tensor.untyped_storage()
        address, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for segment in self._of(None):
            region = segment.views.region
            if region.address <= address and end <= region.address + region.nbytes:
                return segment.tag
        raise UsageError(
            f"a tensor of {tuple(tensor.shape)} on {tensor.device} is on memory that is not of {self!r}: torch serves "
            f"other threads, other GPUs, and what was allocated outside of use() itself"
        )

    def trim(self) -> int:
        """Give the device back what torch gave back; return the bytes. Nothing while this thread captures a graph."""
        if (_segments or _freed) and not (torch := import_torch()).cuda.is_current_stream_capturing():
            _find_freed(torch, self._ordinal)
            return _unmap_freed()
        return 0

    # -- inside -------------------------------------------------------------------------------------------------
    def _of(self, tags: Iterable[str] | None) -> list[_Segment]:
        return [one for one in _segments.copy() if one.pool is self and (tags is None or one.tag in tags)]

    def _check_tags(self, tags: set[str]) -> None:
        self._check_process()
        if unknown := tags - self._tags:
            raise UsageError(f"{self!r} has no memory called {sorted(unknown)}; it has {sorted(self._tags)}")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedError(f"{self!r} belongs to the parent of this fork: start workers with the spawn method")


def _discards(region: Region) -> bool:
    asleep: Any = region.asleep
    return bool(asleep.backup is not None and asleep.backup.discards)


def _tags(given: Iterable[str]) -> set[str]:
    if isinstance(given, str):
        raise UsageError(f"tags are a list of names, such as [{given!r}], not {given!r}")
    return set(given)


# -- what torch calls --------------------------------------------------------------------------------------------
def _serve(torch: Any) -> Serving:
    """Return what serves this thread, which is made once: torch may call it as long as there is a process."""
    thread = threading.get_ident()
    serving = _serving.get(thread)
    if serving is None:
        if not _serving:
            atexit.register(_at_exit)
        serving = _serving[thread] = serve(torch, _requests(None))
    serving.check()
    return serving


def _after_fork_in_child() -> None:
    """Forget the segments: they are the parent's."""
    for segment in _segments:
        handed_out.pop(segment.views.region.address, None)
    _segments.clear()
    _freed.clear()


on_remap(_before_remap)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
