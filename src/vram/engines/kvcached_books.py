"""The books over the pages of kvcached's tensors: which are in use, mapped ahead, or free. See :mod:`.kvcached`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ..errors import UsageError
from ..lifetime import let_in, shielded, waiting
from .kvcached_tensors import available_bytes, map_to_kv_tensors, unmap_from_kv_tensors

_T = TypeVar("_T")
_MOMENT = 0.02  # seconds in which the tools are done with the file
_LOOK = 0.1  # seconds after which a thread looks again by itself, since whoever ends tells nobody


class InternalPage:
    """A page that is in use, and which blocks of it are free.

    Attributes
    ----------
    page_id, page_size : int
        Its number and its bytes.
    """

    def __init__(self, page_id: int, page_size: int) -> None:
        self.page_id = page_id
        self.page_size = page_size
        self._count = 0
        self._free: list[int] = []

    def init(self, block_mem_size: int) -> None:
        """Divide it into blocks of so many bytes, all free. Blocks that reach over its end are none of its."""
        start, stop = self.get_block_range(self.page_id, self.page_size, block_mem_size)
        self._count = stop - start
        self._free = list(range(start, stop))

    def alloc(self, num_blocks: int = 1) -> list[int]:
        """Take blocks. RuntimeError if there are not enough."""
        if len(self._free) < num_blocks:
            raise RuntimeError("Not enough free blocks in page")
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        return taken

    def free(self, block_id: int) -> None:
        """Give a block back."""
        self._free.append(block_id)

    def free_batch(self, block_ids: list[int]) -> None:
        """Give blocks back."""
        self._free.extend(block_ids)

    def empty(self) -> bool:
        """Whether no block is taken."""
        return len(self._free) == self._count

    def full(self) -> bool:
        """Whether no block is free."""
        return not self._free

    def num_free_blocks(self) -> int:
        """Return how many are free."""
        return len(self._free)

    def get_free_blocks(self) -> list[int]:
        """Return those that are free."""
        return list(self._free)

    @staticmethod
    def get_block_range(page_id: int, page_size: int, block_mem_size: int) -> tuple[int, int]:
        """Return the first of its blocks, and the one behind the last."""
        return -(-page_id * page_size // block_mem_size), (page_id + 1) * page_size // block_mem_size

    @staticmethod
    def get_num_blocks(page_size: int, block_mem_size: int) -> int:
        """Return how many whole blocks are in a page."""
        return page_size // block_mem_size


class _Limits:
    """The three numbers that ``kvctl`` and ``kvtop`` share with an engine, in a locked file under /dev/shm. Only this
    user's file is believed, a lock is waited for a moment, and no failure gets out: the next note mends it."""

    _FORMAT = struct.Struct("<3q")  # the limit, what is in use, and what is mapped ahead; in bytes

    def __init__(self, name: str, total: int) -> None:
        self.path = os.path.join("/dev/shm", os.path.basename(name))
        if not os.path.basename(name).strip("."):
            raise UsageError(f"ipc_name is the name of a file in /dev/shm, not {name!r:.80}")
        self._limit = total  # as it was last read
        self._made: list[int] = []  # numbers of the files that were made here
        self._is_busy = False
        self._has_said = False
        weakref.finalize(self, _unlink, self.path, self._made, os.getpid())
        with self._saying():
            _unlink(self.path, None, os.getpid())
            self._make(0, 0)

    def note(self, used: int, ahead: int) -> None:
        """Say what is in use, if that can be said."""

        def write(fd: int) -> None:
            self._is_busy = not _lock(fd, fcntl.LOCK_EX, 0.0 if self._is_busy else _MOMENT)
            if self._is_busy:
                return
            there = os.pread(fd, self._FORMAT.size, 0)
            limit = self._FORMAT.unpack(there)[0] if len(there) == self._FORMAT.size else self._limit
            os.pwrite(fd, self._FORMAT.pack(limit, used, ahead), 0)

        with self._saying():
            try:
                _with_file(self.path, os.O_RDWR, write)
            except FileNotFoundError:
                self._make(used, ahead)

    def total(self) -> int | None:
        """Return the limit; None if there is none, or it cannot be read now."""

        def read(fd: int) -> int | None:
            there = os.pread(fd, self._FORMAT.size, 0) if _lock(fd, fcntl.LOCK_SH, _MOMENT) else b""
            return int(self._FORMAT.unpack(there)[0]) if len(there) == self._FORMAT.size else None

        found: int | None = None
        with contextlib.suppress(OSError):
            found = _with_file(self.path, os.O_RDONLY, read)
        if found is not None:
            self._limit = found
        return found

    def _make(self, used: int, ahead: int) -> None:
        numbers = self._FORMAT.pack(self._limit, used, ahead)

        def write(fd: int) -> None:
            self._made.append(os.fstat(fd).st_ino)
            _lock(fd, fcntl.LOCK_EX, _MOMENT)
            os.pwrite(fd, numbers, 0)

        try:
            _with_file(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, write)
        except FileExistsError:  # another user's; or another process of this one was quicker
            _with_file(self.path, os.O_RDWR, lambda _: None)

    @contextlib.contextmanager
    def _saying(self) -> Iterator[None]:
        """Say what is wrong, but once."""
        try:
            yield
        except OSError as error:
            if not self._has_said:
                self._has_said = True
                _say(f"kvctl has no say: {self.path} cannot be used: {error.strerror}")


def _say(what: str) -> None:
    with contextlib.suppress(Exception):
        sys.stderr.write(f"vram: kvcached: {what}\n")


def _with_file(path: str, flags: int, act: Callable[[int], _T]) -> _T:
    """Call a function with a descriptor of a file of the limits. OSError if it is not there, or none of this user's."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        what = os.fstat(fd)
        if not _is_ours(what):
            kind = f"{stat.filemode(what.st_mode)}, {what.st_size} bytes, of user {what.st_uid}"
            raise OSError(errno.EPERM, f"it is there already, and something else ({kind})")
        return act(fd)
    finally:
        os.close(fd)


def _is_ours(what: os.stat_result) -> bool:
    is_this_user_s = stat.S_ISREG(what.st_mode) and what.st_uid == os.geteuid()
    return is_this_user_s and what.st_size <= _Limits._FORMAT.size


def _lock(fd: int, how: int, seconds: float) -> bool:
    """Lock a file until it is closed; whether that came about in so many seconds."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
        time.sleep(0.001)


def _unlink(path: str, numbers: list[int] | None, maker: int) -> None:
    """Remove the file of the limits, if it is one of these, or any of this user's; and only in the process it is of."""
    with contextlib.suppress(OSError):
        what = os.lstat(path)
        if os.getpid() == maker and _is_ours(what) and (numbers is None or what.st_ino in numbers):
            os.unlink(path)


class PageAllocator:
    """Which pages of a group's tensors are in use, which are mapped ahead, and which are free.

    Parameters
    ----------
    num_layers, mem_size_per_layer, page_size, num_kv_buffers : int
        The size of each layer: `mem_size_per_layer` is of keys or of values, in bytes.
    world_size, pp_rank : int
        How many processes have such tensors, in which all map the same pages (see `set_broadcast_map_callback`).
    async_sched : bool
        Taken, and without effect: unmapping always waits for the device.
    contiguous_layout, group_id
        As they were given to :func:`init_kvcached` and :func:`create_kv_tensors`.
    enable_page_prealloc : bool
        Map some pages ahead, in a thread.
    ipc_name : str
        The name of this for ``kvctl``.
    """

    def __init__(
        self,
        num_layers: int,
        mem_size_per_layer: int,
        page_size: int,
        world_size: int = 1,
        pp_rank: int = 0,
        async_sched: bool = False,
        contiguous_layout: bool = True,
        enable_page_prealloc: bool = True,
        num_kv_buffers: int = 2,
        group_id: int = 0,
        ipc_name: str = "",
    ) -> None:
        if min(num_layers, page_size, num_kv_buffers) < 1 or mem_size_per_layer < 0:
            raise UsageError(
                f"{num_layers} layers, {num_kv_buffers} buffers, pages of {page_size} bytes: each has to be at least 1"
            )
        self._layers, self._each, self._page = num_layers, mem_size_per_layer, page_size
        self._buffers, self._group, self._world = num_kv_buffers, group_id, world_size
        self._contiguous, self._ahead = contiguous_layout, enable_page_prealloc
        self._total = self._free_count = mem_size_per_layer // page_size
        self._known = self._total  # numbers that some page has, those beyond the limit included
        self._least = min(self._free_count, int(os.environ.get("KVCACHED_MIN_RESERVED_PAGES", "5")))
        self._most = min(self._free_count, int(os.environ.get("KVCACHED_MAX_RESERVED_PAGES", "10")))
        self._usable = float(os.environ.get("KVCACHED_GPU_UTILIZATION", "0.95"))
        self._free = deque(range(self._total))
        self._reserved: deque[int] = deque()  # free, and mapped
        self._reclaimed: deque[int] = deque()  # beyond the limit
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._wanted = False  # of the thread that maps ahead
        self._ends: threading.Event | None = None
        self._threads: list[threading.Thread] = []
        self._broadcast_map: Callable[[int, list[int]], object] | None = None
        self._broadcast_unmap: Callable[[int, list[int]], object] | None = None
        self._by_ipc = False
        self._target = -1
        name = ipc_name or os.environ.get("KVCACHED_IPC_NAME", "")
        if not name:
            name = f"kvcached_engine_{os.getpgrp()}" + (f"_g{group_id}" if group_id else "")
        self._limits = _Limits(name, mem_size_per_layer * num_layers * num_kv_buffers)

    # -- pages ----------------------------------------------------------------------------------------------------
    @shielded(undo=lambda self, page: self.free_page(page.page_id))
    def alloc_page(self) -> InternalPage:
        """Take a page, mapped. RuntimeError if none is left, or there is no memory for it."""
        with self._changed:
            while not (self._reserved or self._free):
                if self._free_count <= 0:
                    raise RuntimeError("No free pages left")
                if not self._ahead:
                    raise RuntimeError("Inconsistent page allocator state: no free pages available")
                self._changed.wait(_LOOK)  # the thread that maps ahead has them
                let_in()
            is_mapped = len(self._reserved) > 0
            page = (self._reserved or self._free).popleft()
            self._free_count -= 1
        try:
            if not is_mapped:
                self._map([page])
        except BaseException as error:
            with self._changed:
                self._free_count += 1
                self._free.appendleft(page)
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(f"Failed to map page {page}: {error}") from error
        with self._lock:
            if self._ahead and len(self._reserved) < self._least:
                self._want()
            self._note()
        return InternalPage(page, self._page)

    @shielded
    def free_page(self, page_id: int) -> None:
        """Give a page back: to those that stay mapped, or its memory to the device."""
        self.free_pages([page_id])

    @shielded
    def free_pages(self, page_ids: Sequence[int]) -> None:
        """Give pages back; see :meth:`free_page`. They are free also if their unmapping fails, or Ctrl-C ends it."""
        with self._changed:
            room = max(0, self._most - len(self._reserved))
            kept, leaving = page_ids[:room], page_ids[room:]
            self._reserved += kept
            self._free_count += len(kept)
            self._changed.notify_all()
        try:
            self._unmap(list(leaving))
        finally:
            with self._changed:
                self._free += leaving  # to map again what is mapped is right
                self._free_count += len(leaving)
                self._note()
                self._changed.notify_all()

    @shielded
    def resize(self, new_mem_size: int) -> bool:
        """Set how many bytes of keys or values of a layer may be in use. False if more are in use."""
        count = new_mem_size // self._page
        if self._limit_to(count):
            return True
        if count < self.get_num_inuse_pages():
            return False
        self.trim()
        return self._limit_to(count)

    def _limit_to(self, count: int) -> bool:
        """Set how many pages there are. False if that is less than are in use, or mapped ahead."""
        with self._changed:
            more = count - self._total
            if len(self._free) + more < 0:
                return False
            for _ in range(-more):
                self._reclaimed.append(self._free.pop())
            for _ in range(more):
                if self._reclaimed:
                    self._free.append(self._reclaimed.popleft())
                else:
                    self._free.append(self._known)
                    self._known += 1
            self._free_count += more
            self._total = count
            self._note()
            self._changed.notify_all()
            return True

    @shielded
    def trim(self) -> None:
        """Give the memory of what is mapped ahead back to the device."""
        with self._lock:
            leaving, self._reserved = self._reserved, deque()
        try:
            self._unmap(list(leaving))
        finally:
            with self._changed:
                self._free += leaving
                self._note()
                self._changed.notify_all()

    @shielded
    def reset_free_page_order(self) -> None:
        """Take the lowest free page next."""
        with self._lock:
            self._free = deque(sorted(self._free))

    # -- how many ---------------------------------------------------------------------------------------------------
    def get_num_free_pages(self) -> int:
        """Return how many are not in use."""
        return self._free_count

    def get_num_inuse_pages(self) -> int:
        """Return how many are in use."""
        return self.get_page_state()["inuse_pages"]

    def get_num_total_pages(self) -> int:
        """Return how many there are."""
        return self._total

    def get_num_reserved_pages(self) -> int:
        """Return how many are free and mapped."""
        return len(self._reserved)

    def get_page_state(self) -> dict[str, int]:
        """Return all of these, of one moment."""
        with self._lock:
            return {
                "total_pages": self._total,
                "free_pages": self._free_count,
                "inuse_pages": self._total - self._free_count,
                "reserved_pages": len(self._reserved),
            }

    def get_avail_physical_pages(self) -> int:
        """Return for how many pages, in all layers, the device has memory."""
        available, total = available_bytes()
        usable = max(0, available - int(total * (1.0 - self._usable)))
        return usable // self._page // self._layers // self._buffers

    @shielded
    def check_and_get_resize_target(self, current_mem_size: int) -> int:
        """Return what ``kvctl`` set the bytes of keys or values of a layer to, if that is something else; or -1."""
        total = self._limits.total()
        each = current_mem_size if total is None else total // self._layers // self._buffers
        return each if each != current_mem_size else -1

    def get_resize_target(self) -> int:
        """Return the same as of at most 0.1 s ago, against the bytes in the beginning, once the thread runs."""
        return self._target

    def get_page_id(self, block_id: int, block_mem_size: int) -> int:
        """Return the page that a block is in."""
        return block_id * block_mem_size // self._page

    def group_indices_by_page(self, indices: list[int], block_mem_size: int) -> dict[int, list[int]]:
        """Return blocks by the pages that they are in."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for block in indices:
            found[block * block_mem_size // self._page].append(block)
        return dict(found)

    # -- other processes ------------------------------------------------------------------------------------------
    def set_broadcast_map_callback(self, callback: Callable[[int, list[int]], object]) -> None:
        """Have this called with the number of processes and offsets instead of mapping here, if there are several."""
        self._broadcast_map = callback

    def set_broadcast_unmap_callback(self, callback: Callable[[int, list[int]], object]) -> None:
        """Have this called instead of unmapping here."""
        self._broadcast_unmap = callback

    def set_use_worker_ipc(self, use_worker_ipc: bool) -> None:
        """Have them called also if there is one process, which is another one."""
        self._by_ipc = bool(use_worker_ipc)

    # -- ahead ------------------------------------------------------------------------------------------------------
    @shielded
    def start_prealloc_thread(self) -> None:
        """Begin to map ahead, and to look at the limit."""
        if not self._ahead:
            return
        with self._lock:
            if self._ends is not None:
                return
            ends = threading.Event()
            threads = [
                threading.Thread(target=work, args=(weakref.ref(self), ends), daemon=True, name=name)
                for work, name in ((_map_ahead, "vram: kvcached pages"), (_watch, "vram: kvcached limit"))
            ]
            self._want()
            try:
                for thread in threads:
                    thread.start()
            except RuntimeError:  # there is none to be had
                ends.set()
                raise
            self._ends, self._threads = ends, threads

    @shielded
    def stop_prealloc_thread(self) -> None:
        """End that; returns when it has ended."""
        with self._changed:
            ends, threads = self._ends, self._threads
            if ends is not None:
                ends.set()
                self._changed.notify_all()
                self._ends = None
        for thread in threads:
            while thread is not threading.current_thread() and thread.is_alive():
                thread.join(_LOOK)
                let_in()
        with self._lock:
            if self._threads is threads:
                self._threads = []

    def __del__(self) -> None:
        ends = getattr(self, "_ends", None)
        if ends is not None:
            ends.set()  # nothing is waited for here; the threads look at it

    def _want(self) -> None:
        self._wanted = True
        self._changed.notify_all()

    def _reserve(self) -> None:
        """Map what is to be mapped ahead. For a thread."""
        with self._lock:
            self._wanted = False
            if self._least <= len(self._reserved) or not self._free:
                return
        most = self.get_avail_physical_pages()
        with self._lock:
            missing = max(0, min(self._least - len(self._reserved), len(self._free), most))
            pages = [self._free.popleft() for _ in range(missing)]
        is_mapped = False
        try:
            if pages:
                self._map(pages)
                is_mapped = True
        finally:
            with self._changed:
                if is_mapped:
                    self._reserved += pages
                else:
                    self._free.extendleft(reversed(pages))
                self._note()
                self._changed.notify_all()

    # -- inside -----------------------------------------------------------------------------------------------------
    def _offsets(self, pages: list[int]) -> list[int]:
        each = self._page * (self._layers * self._buffers if self._contiguous else 1)
        return [page * each for page in pages]

    def _map(self, pages: list[int]) -> None:
        broadcast = self._broadcast_map if self._world > 1 or self._by_ipc else None
        if broadcast is not None:
            waiting(broadcast, self._world, self._offsets(pages))
        elif not map_to_kv_tensors(self._offsets(pages), self._group):
            raise RuntimeError("Failed to map pages to KV tensors")

    def _unmap(self, pages: list[int]) -> None:
        if not pages:
            return
        broadcast = self._broadcast_unmap if self._world > 1 or self._by_ipc else None
        if broadcast is not None:
            waiting(broadcast, self._world, self._offsets(pages))
        elif not unmap_from_kv_tensors(self._offsets(pages), self._group):
            raise RuntimeError("Failed to unmap pages from KV tensors")

    def _note(self) -> None:
        each = self._layers * self._page * self._buffers
        self._limits.note((self._total - self._free_count) * each, len(self._reserved) * each)


def _map_ahead(allocator: weakref.ref[PageAllocator], ends: threading.Event) -> None:
    while not ends.is_set():
        here = allocator()
        if here is None:
            return
        changed = here._changed
        with changed:
            if not here._wanted:
                del here  # it may be collected while this waits, which tells nobody
                changed.wait(_LOOK)
                continue
        try:
            here._reserve()
        except Exception as error:  # noqa: BLE001  (the next page is mapped when it is asked for, and says why not)
            _say(f"no pages were mapped ahead: {error}")
        del here


def _watch(allocator: weakref.ref[PageAllocator], ends: threading.Event) -> None:
    while not ends.wait(_LOOK):
        here = allocator()
        if here is None:
            return
        here._target = here.check_and_get_resize_target(here._each)
        del here
