"""A memory pool for PyTorch whose memory is ours: it sleeps, wakes, and can be published without a copy.

torch takes the addresses of two functions to allocate and free segments with, so a pool needs neither a compiler nor
LD_PRELOAD. Everything that torch may call stays as long as the process: it caches segments, and frees some of them long
after the pool is gone.

torch calls both with the lock of its allocator held, and much of torch waits for that lock without letting go of
Python's (entering and leaving a pool, ``memory_stats()``, the end of a pool). A function that needs Python's lock there
would wait for ever. So neither needs it (decision 036):

- To free is native code that does nothing. Which segments torch has given back is found out later, by asking torch
  which it still has (:func:`_find_freed`), and they are unmapped by whoever comes next and captures no graph.
- To allocate is Python, but torch lets go of its lock around it: ``release_lock_on_cudamalloc``, a setting of torch's
  that is switched on here for the whole process (:func:`_release_lock`).

What fails in it becomes torch's own out-of-memory error, with ours as a note.

References
----------
PyTorch, ``torch.cuda.MemPool``, ``torch.cuda.use_mem_pool``, ``c10/cuda/CUDACachingAllocator.cpp`` (``alloc_block``,
``release_block``), and ``torch/csrc/cuda/CUDAPluggableAllocator.cpp``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .. import driver as drivers
from ..errors import (
    AsleepError,
    CapacityError,
    ForkedError,
    InternalError,
    OutOfMemoryError,
    UnsupportedError,
    UsageError,
)
from ..memory import Region
from ..memory.sleep import Place, SleepReport, WakeReport, sleep_regions, wake_regions
from ..spec import Location, format_size
from . import streams
from .views import RegionViews, handed_out

if TYPE_CHECKING:
    import torch

__all__ = ["TorchPool", "Usage"]

# torch passes a device and a stream as well. What reads fewer arguments than it is passed is right on x86-64 and arm64.
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
_NEEDED = ("cuda.MemPool", "cuda.use_mem_pool", "cuda.memory_snapshot", "cuda.memory._snapshot",
           "_C._cuda_customAllocator", "_C._cuda_releasePool", "_C._accelerator_setAllocatorSettings")  # fmt: skip
_OLDEST = (2, 10)  # before, the end of a pool that a graph uses ended the process, and inner pools were ignored
_OfGraph = tuple[str, tuple[int, int] | None]
_OPEN = "release_lock_on_cudamalloc"


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of one tag of a pool, by what torch was given: whole segments, tensors in them or not.

    Attributes
    ----------
    awake, asleep : int
        Bytes behind which there is memory, and bytes that sleep.
    """

    awake: int
    asleep: int


class _Segment:
    """Memory that torch was given: a region, and what the pool remembers of it."""

    __slots__ = ("claims", "is_known", "of_graph", "pool", "tag", "views")

    def __init__(self, region: Region, block: _Block) -> None:
        self.views = RegionViews.of(region)  # so that tensors on it are recognized as ours, and shared without a copy
        self.pool, self.tag, self.of_graph = block
        self.is_known = False  # whether torch has noted it: the call that asked for it is over
        self.claims = [None]  # none from when on somebody unmaps it

    def others(self, spans: Sequence[tuple[int, int]]) -> str:
        """Return what else of torch's is in it besides these spans, or may be later; see :data:`.views.handed_out`.

        What is published is read-only from then on: a kernel that wrote to another tensor in it would end the context.
        """
        if self.of_graph:
            return "it is memory of a captured graph, which writes to it whenever it is launched"
        if not self.pool._retire(self.tag):
            return f"a thread is in a block of use({self.tag!r}), so that torch may put more into that memory"
        torch, first = _import(), self.views.region.address
        for found in torch.cuda.memory_snapshot():
            if found["address"] != first:
                continue
            for block in found["blocks"]:
                start, stop = block["address"] - first, block["address"] - first + block["size"]
                is_free = block["state"] == "inactive"
                if not is_free and not any(start < end and begin < stop for begin, end in spans):
                    return "another tensor of torch's is in the same memory"
        return ""


class _Block(NamedTuple):
    """A block that a thread is in, and allocates for."""

    pool: TorchPool
    tag: str  # empty in a bypass
    of_graph: bool = False


class _Here(threading.local):
    """What a thread allocates for: the innermost ``with pool.use(tag)``."""

    def __init__(self) -> None:
        self.within: list[_Block] = []
        self.given: list[_Segment] = []  # that torch may not have noted yet
        self.failed: BaseException | None = None


class _Serving(NamedTuple):
    """What torch calls on one thread to allocate, and torch's object for it."""

    requests: Any  # a generator
    allocator: object


_segments: dict[int, _Segment] = {}  # by address; each step is one dictionary operation
_freed: deque[_Segment] = deque()  # that torch gave back, and that are not unmapped yet
_looked: dict[int, int] = {}  # how often torch had freed on each GPU when all that it had freed was known
_serving: dict[int, _Serving] = {}  # by thread; as long as the process
_here = _Here()


def _requests() -> Generator[int, int, None]:
    """Take sizes and give addresses; 0 sends torch to its own out-of-memory path.

    A generator, one a thread, since nothing may be raised to ctypes: torch would take for an address what happened to
    be on the stack. An interrupt at the first instruction of a function is raised before any ``try`` in it. Here it is
    raised where the generator waits, inside of one.
    """
    address = 0
    while True:
        try:
            while True:
                try:
                    address = _allocate((yield address))
                except BaseException as error:  # noqa: BLE001  (see TorchPool.use, which raises it)
                    address = 0
                    _here.failed = error
        except BaseException as error:  # noqa: BLE001  (another interrupt, in the midst of that)
            address = 0
            _here.failed = error


def _allocate(nbytes: int) -> int:
    _note_given()  # torch has come back for more: it has noted what it was given before
    if isinstance(_here.failed, Exception):
        _here.failed = None  # whoever asked has been told, by torch
    block = _here.within[-1]
    pool = block.pool
    try:
        region = pool._create(nbytes)
    except (CapacityError, OutOfMemoryError):
        if not pool.trim():  # what torch has given back, to try again
            raise
        region = pool._create(nbytes)
    segment = _Segment(region, block)
    _here.given.append(segment)
    _segments[region.address] = segment
    handed_out[region.address] = segment.others
    return region.address


def _note_given() -> None:
    """Note that torch knows all that this thread gave it. Not to be called where a request is under way."""
    given = _here.given
    while given:
        given[-1].is_known = True
        given.pop()


def _find_freed(torch: Any, ordinal: int) -> None:
    """Find the segments that torch has given back: those that it knew of before it is asked, and does not have now.

    A segment that is on its way to torch is not there either; it is left alone until its thread comes by again.
    """
    serving = _serving.get(threading.get_ident())
    if serving is not None and not serving.requests.gi_running:  # as it may be where a signal handler calls
        _note_given()
    stats = torch.cuda.memory_stats_as_nested_dict(ordinal) if _segments else {}
    times = stats.get("num_device_free", -1)
    if _looked.get(ordinal) == times != -1:
        return
    segments = _segments.copy()
    known = {address: segment for address, segment in segments.items() if segment.is_known}
    if known:
        held = {found["address"] for found in torch.cuda.memory_snapshot()}
        for address, segment in known.items():
            if address in held:
                continue
            try:
                segment.claims.pop()  # one of those who look at once
            except IndexError:
                continue
            del _segments[address]  # before it is unmapped and the address is given out again
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
    for segment in (*_segments.copy().values(), *_freed.copy()):
        _immortal(segment)


def _immortal(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


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
    leaves the other settings as they are. Whoever switches it off inside of :meth:`use` can make threads that allocate
    wait for each other for ever.
    """

    def __init__(self, device: str | Location) -> None:
        location = drivers.visible(Location.parse(device))
        if location.kind != "cuda" or not isinstance(location.id, int):
            raise UsageError(f"a pool of torch's is on a GPU, such as 'cuda:0', not on {location}")
        self.location = location
        self._ordinal = location.id
        _check_torch(_import())
        self.margin = 0
        self._pools: dict[tuple[str, int, int], Any] = {}  # that nobody is in, by tag, thread, depth
        self._entered: dict[tuple[str, int, int], None] = {}  # those that a thread is in, or is about to enter
        self._graphs: dict[_OfGraph, Any] = {}  # for captured graphs, by tag and the number that torch has for it
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

        Blocks nest. Other threads, such as those of backward, and other GPUs are served by torch as ever: see
        :meth:`tag_of`.

        Parameters
        ----------
        tag : str
            What :meth:`sleep` and :meth:`wake` call it by.

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

        Parameters
        ----------
        tag : str
            As for :meth:`use`.
        pool : tuple of int, optional
            What graphs that are to share memory have in common: what this gave for one of them, its ``pool()``, or any
            of ``torch.cuda.graph_pool_handle()``. Otherwise this graph has its own.

        Raises
        ------
        AsleepError
            If memory of this tag is asleep.
        """
        with self._block(tag, enters=False) as serving:
            number = pool if (tag, pool) in self._graphs else self._shared.get((tag, pool))
            if number is None or (tag, number) not in self._graphs:
                made = self._make(_import(), serving)
                number = made.id
                self._graphs[tag, number] = made
                if pool is not None:
                    self._shared[tag, pool] = number
            yield number

    @contextlib.contextmanager
    def bypass(self) -> Iterator[None]:
        """Have what this thread allocates on this GPU, in a block inside of :meth:`use`, come from torch as ever."""
        self._check_process()
        torch, within = _import(), _here.within
        depth = len(within)
        with torch.cuda.device(self._ordinal):
            made = torch.cuda.MemPool()
        _immortal(made)  # as in _make
        try:
            with torch.cuda.use_mem_pool(made, device=self._ordinal):
                within.append(_Block(self, ""))
                try:
                    yield
                finally:
                    del within[depth:]
        finally:
            torch._C._cuda_releasePool(self._ordinal, made.id)

    @contextlib.contextmanager
    def _block(self, tag: str, *, enters: bool = True) -> Iterator[_Serving]:
        """Serve this thread in a block; `enters` if torch is to allocate in a pool for it, and not for a graph."""
        if not isinstance(tag, str) or not tag:
            raise UsageError(f"a tag is a name, not {tag!r:.40}")
        self._check_process()
        if any(segment.views.region.asleep is not None for segment in self._of((tag,))):
            raise AsleepError(f"{tag!r} of {self!r} is asleep: wake it first")
        self.trim()
        self._tags.add(tag)
        torch = _import()
        _release_lock(torch)
        serving = _serve(torch)
        within, here = _here.within, _Block(self, tag, of_graph=not enters)
        with contextlib.ExitStack() as block:
            depth = len(within)
            if enters and within[-1:] != [here]:
                block.enter_context(self._enter(torch, tag, within.count(here), serving))
            within.append(here)
            try:
                yield serving
            except BaseException as error:
                failed, _here.failed = _here.failed, None
                if failed is not None and not isinstance(failed, Exception):
                    raise failed.with_traceback(None) from error  # an interrupt that came while torch was allocating
                if failed is not None:
                    error.add_note(f"vram: {type(failed).__name__}: {failed}")
                raise
            finally:
                del within[depth:]
                _note_given()
                _leave_workspaces(torch)
        failed, _here.failed = _here.failed, None
        _check_serving(serving)
        if failed is not None and not isinstance(failed, Exception):
            raise failed.with_traceback(None)

    @contextlib.contextmanager
    def _enter(self, torch: Any, tag: str, again: int, serving: _Serving) -> Iterator[None]:
        key = (tag, threading.get_ident(), again)
        self._entered[key] = None  # first: see _retire
        made = None
        try:
            made = self._pools.pop(key, None)  # nobody else's while it is entered: close() would take it from torch
            if made is None:
                made = self._make(torch, serving)
            with torch.cuda.use_mem_pool(made, device=self._ordinal):
                yield
        finally:
            if made is not None:
                self._pools[key] = made
            self._entered.pop(key, None)

    def _retire(self, tag: str) -> bool:
        """Have torch put nothing more into the memory of a tag, but take other memory; false if a thread is about to.

        Where torch has let go of a tensor it would put the next, and beside one as well. Of a pool that nobody can
        enter any more it does neither, and gives memory back once no tensor is on it.
        """
        keys = [key for key in self._pools.copy() if key[0] == tag]
        taken = {key: made for key in keys if (made := self._pools.pop(key, None)) is not None}
        if any(key[0] == tag for key in self._entered.copy()):
            self._pools.update(taken)
            return False
        for made in taken.values():
            _import()._C._cuda_releasePool(self._ordinal, made.id)
        return True

    def _make(self, torch: Any, serving: _Serving) -> Any:
        with torch.cuda.device(self._ordinal):  # which a pool belongs to from its making on
            made = torch.cuda.MemPool(serving.allocator)
        _immortal(made)  # its end would end the process, were it to come while anything is captured
        return made

    def _create(self, nbytes: int) -> Region:
        if self.margin:
            free, _ = drivers.get(self.location).mem_info(self.location)
            if nbytes + self.margin > free:
                raise CapacityError(
                    f"{format_size(nbytes)} more would leave less than the margin of {format_size(self.margin)} of the "
                    f"{format_size(free)} that are free on {self.location}"
                )
        return Region.create(self.location, capacity=nbytes, nbytes=nbytes, managed=True)

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
            What to do with memory that was published or shared: raise BusyError, or unmap it here, which frees nothing.
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
        torch = _import()
        every: tuple[dict[Any, Any], ...] = (self._pools, self._graphs)
        for pools in every:
            while pools:
                try:
                    _, made = pools.popitem()
                except KeyError:  # another thread closes it as well
                    break
                torch._C._cuda_releasePool(self._ordinal, made.id)
        if _segments and not torch.cuda.is_current_stream_capturing():
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
        if (_segments or _freed) and not (torch := _import()).cuda.is_current_stream_capturing():
            _find_freed(torch, self._ordinal)
            return _unmap_freed()
        return 0

    # -- inside -------------------------------------------------------------------------------------------------
    def _of(self, tags: Iterable[str] | None) -> list[_Segment]:
        known = _segments.copy().values()
        return [one for one in known if one.claims and one.pool is self and (tags is None or one.tag in tags)]

    def _check_tags(self, tags: set[str]) -> None:
        self._check_process()
        if unknown := tags - self._tags:
            raise UsageError(f"{self!r} has no memory called {sorted(unknown)}; it has {sorted(self._tags)}")

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedError(f"{self!r} belongs to the parent of this fork: start workers with the spawn method")


def _leave_workspaces(torch: Any) -> None:
    """Have torch take its cuBLAS workspaces anew where it next needs them: they are to outlive what sleeps here."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def _discards(region: Region) -> bool:
    asleep: Any = region.asleep
    return bool(asleep.backup is not None and asleep.backup.discards)


def _tags(given: Iterable[str]) -> set[str]:
    if isinstance(given, str):
        raise UsageError(f"tags are a list of names, such as [{given!r}], not {given!r}")
    return set(given)


# -- torch ------------------------------------------------------------------------------------------------------
def _import() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(
            "a pool for torch", "torch", "no such package", "Install it, or use vram.empty(...).torch()"
        ) from error
    return torch


def _check_torch(torch: Any) -> None:
    """Check that this torch has all that a pool needs, and have it let go of its lock."""
    built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    have = f"torch {torch.__version__}, built {built}"
    missing = [f"torch.{name}" for name in _NEEDED if not _has(torch, name)]
    if missing or torch.version.cuda is None:
        raise UnsupportedError("a pool for torch", ", ".join(missing) or "a torch built with CUDA", have)
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < _OLDEST:
        raise UnsupportedError("a pool for torch", f"torch {_OLDEST[0]}.{_OLDEST[1]} or newer", have)
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        raise UnsupportedError("a pool for torch", "torch's own allocator", f"{backend} (PYTORCH_ALLOC_CONF)")
    _release_lock(torch)
    if torch.cuda.memory._snapshot()["allocator_settings"].get(_OPEN) is not True:
        raise UnsupportedError("a pool for torch", f"torch's setting {_OPEN}, which has no effect here", have)


def _has(torch: Any, name: str) -> bool:
    found = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def _release_lock(torch: Any) -> None:
    """Have torch let go of its allocator's lock while it calls :func:`_allocate`.

    Without it, a thread that allocates in a pool holds torch's lock and waits for Python's, and one that enters a pool
    holds Python's and waits for torch's. The settings that somebody else made last are kept; torch drops those that are
    not named again.
    """
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    given = read() if read else torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    settings = [*filter(None, given.replace(" ", "").strip(",").split(",")), f"{_OPEN}:True"]
    if settings[-2:-1] != settings[-1:]:
        torch._C._accelerator_setAllocatorSettings(",".join(settings))


def _serve(torch: Any) -> _Serving:
    """Return what serves this thread, which is made once: torch may call it as long as there is a process."""
    thread = threading.get_ident()
    serving = _serving.get(thread)
    if serving is None:
        if not _serving:
            atexit.register(_at_exit)
        requests = _requests()
        next(requests)
        allocate = _ALLOCATE(requests.send)
        release = ctypes.CDLL(None).labs  # native, and does nothing: it takes an integer and returns another
        allocator = torch._C._cuda_customAllocator(
            *(ctypes.cast(function, ctypes.c_void_p).value for function in (allocate, release))
        )
        for thing in (requests, allocate, allocator):
            _immortal(thing)
        serving = _serving[thread] = _Serving(requests, allocator)
    _check_serving(serving)
    return serving


def _check_serving(serving: _Serving) -> None:
    if serving.requests.gi_frame is None:
        raise InternalError(
            "an interrupt in the midst of another came while torch was allocating: what it allocated on this thread "
            "may be anywhere. End the process"
        )


def _after_fork_in_child() -> None:
    """What torch has there is the parent's."""
    for address in _segments:
        handed_out.pop(address, None)
    _segments.clear()
    _freed.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
