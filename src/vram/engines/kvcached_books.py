"""The books over the pages of kvcached's tensors: which are in use, mapped ahead, or free. See :mod:`.kvcached`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable

from ..errors import UsageError
from .kvcached_tensors import available_bytes, map_to_kv_tensors, unmap_from_kv_tensors

__all__ = ["InternalPage", "PageAllocator"]


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
    """What ``kvctl`` and ``kvtop`` share with an engine: three numbers in a file under /dev/shm, with a lock on it."""

    _FORMAT = struct.Struct("<3q")  # the limit, what is in use, and what is mapped ahead; in bytes

    def __init__(self, name: str, total: int) -> None:
        self.path = os.path.join("/dev/shm", os.path.basename(name))
        if not os.path.basename(name).strip("."):
            raise UsageError(f"ipc_name is the name of a file in /dev/shm, not {name!r:.80}")
        self._change(lambda _: (total, 0, 0))
        weakref.finalize(self, _unlink, self.path, os.getpid())

    def note(self, used: int, ahead: int) -> None:
        """Say what is in use."""
        self._change(lambda numbers: (numbers[0], used, ahead))

    def total(self) -> int | None:
        """Return the limit; None if there is none."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            there = os.pread(fd, self._FORMAT.size, 0)
        finally:
            os.close(fd)
        return int(self._FORMAT.unpack(there)[0]) if len(there) == self._FORMAT.size else None

    def _change(self, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            there = os.pread(fd, self._FORMAT.size, 0).ljust(self._FORMAT.size, b"\0")
            os.pwrite(fd, self._FORMAT.pack(*change(self._FORMAT.unpack(there))), 0)
        finally:
            os.close(fd)


def _unlink(path: str, maker: int) -> None:
    if os.getpid() == maker:
        with contextlib.suppress(OSError):
            os.unlink(path)


class PageAllocator:
    """Which pages of a group's tensors are in use, which are mapped ahead, and which are free.

    Parameters
    ----------
    num_layers, mem_size_per_layer, page_size, num_kv_buffers : int
        What the pages are of: `mem_size_per_layer` is of keys or of values, in bytes.
    world_size, pp_rank : int
        How many processes have such tensors, in which all map the same pages (see `set_broadcast_map_callback`).
    async_sched : bool
        Taken, and without effect: unmapping always waits for the device.
    contiguous_layout, group_id
        As they were given to :func:`init_kvcached` and :func:`create_kv_tensors`.
    enable_page_prealloc : bool
        Map some pages ahead, in a thread.
    ipc_name : str
        What ``kvctl`` calls this by.
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
        self._changed = threading.Condition()
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
    def alloc_page(self) -> InternalPage:
        """Take a page, mapped. RuntimeError if none is left, or there is no memory for it."""
        with self._changed:
            self._wait_for_one()
            self._free_count -= 1
            if self._reserved:
                page = self._reserved.popleft()
                if len(self._reserved) < self._least:
                    self._want()
                self._note()
                return InternalPage(page, self._page)
            page = self._free.popleft()
        try:
            self._map([page])
        except BaseException as error:
            with self._changed:
                self._free.appendleft(page)
                self._free_count += 1
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(f"Failed to map page {page}: {error}") from error
        with self._changed:
            if self._ahead:
                self._want()
            self._note()
        return InternalPage(page, self._page)

    def _wait_for_one(self) -> None:
        """Wait until a page can be taken. RuntimeError if none will come."""
        while not self._reserved and not self._free:
            if self._free_count <= 0:
                raise RuntimeError("No free pages left")
            if not self._ahead:
                raise RuntimeError("Inconsistent page allocator state: no free pages available")
            self._changed.wait()  # the thread that maps ahead has them

    def free_page(self, page_id: int) -> None:
        """Give a page back: to those that stay mapped, or its memory to the device."""
        self.free_pages([page_id])

    def free_pages(self, page_ids: list[int]) -> None:
        """Give pages back; see :meth:`free_page`."""
        with self._changed:
            room = max(0, self._most - len(self._reserved))
            self._reserved.extend(page_ids[:room])
            self._free_count += len(page_ids[:room])
            self._note()
            self._changed.notify_all()
        self._unmap(page_ids[room:], counted=False)

    def resize(self, new_mem_size: int) -> bool:
        """Set how many bytes of keys or values of a layer may be in use. False if more are in use."""
        count = new_mem_size // self._page
        with self._changed:
            if count < self._total - self._free_count:
                return False
            if count >= self._total:
                more = count - self._total
                again = min(more, len(self._reclaimed))
                self._free.extend(self._reclaimed.popleft() for _ in range(again))
                self._free.extend(range(self._known, self._known + more - again))
                self._known += more - again
                self._free_count += more
                self._total = count
                self._note()
                self._changed.notify_all()
                return True
            if self._reclaim(count):
                return True
            if not self._reserved:
                return False
            trimmed = list(self._reserved)
            self._reserved.clear()
        self._unmap(trimmed, counted=True)
        with self._changed:
            return self._reclaim(count)

    def _reclaim(self, count: int) -> bool:
        less = self._total - count
        if len(self._free) < less:
            return False
        self._reclaimed.extend(self._free.pop() for _ in range(less))
        self._free_count -= less
        self._total = count
        return True

    def trim(self) -> None:
        """Give the memory of what is mapped ahead back to the device."""
        with self._changed:
            trimmed = list(self._reserved)
            self._reserved.clear()
            self._note()
        self._unmap(trimmed, counted=True)

    def reset_free_page_order(self) -> None:
        """Take the lowest free page next."""
        with self._changed:
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
        with self._changed:
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
    def start_prealloc_thread(self) -> None:
        """Begin to map ahead, and to look at the limit."""
        if not self._ahead:
            return
        with self._changed:
            if self._ends is not None:
                return
            self._ends = ends = threading.Event()
            self._want()
            self._threads = [
                threading.Thread(target=work, args=(weakref.ref(self), ends, self._changed), daemon=True, name=name)
                for work, name in ((_map_ahead, "vram: kvcached pages"), (_watch, "vram: kvcached limit"))
            ]
        for thread in self._threads:
            thread.start()

    def stop_prealloc_thread(self) -> None:
        """End that; returns when it has ended."""
        with self._changed:
            ends, self._ends = self._ends, None
            threads, self._threads = self._threads, []
            if ends is not None:
                ends.set()
                self._changed.notify_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def __del__(self) -> None:
        ends = getattr(self, "_ends", None)
        if ends is not None:
            ends.set()  # nothing is waited for here; the threads look at it

    def _want(self) -> None:
        self._wanted = True
        self._changed.notify_all()

    def _reserve(self) -> None:
        """Map what is to be mapped ahead."""
        with self._changed:
            self._wanted = False
            missing = min(self._least - len(self._reserved), len(self._free))
            if missing <= 0:
                return
            missing = min(missing, self.get_avail_physical_pages())
            pages = [self._free.popleft() for _ in range(missing)]
        if not pages:
            return
        try:
            self._map(pages)
        except BaseException:
            with self._changed:
                self._free.extendleft(reversed(pages))
                self._changed.notify_all()
            raise
        with self._changed:
            self._reserved.extend(pages)
            self._note()
            self._changed.notify_all()

    # -- inside -----------------------------------------------------------------------------------------------------
    def _offsets(self, pages: list[int]) -> list[int]:
        each = self._page * (self._layers * self._buffers if self._contiguous else 1)
        return [page * each for page in pages]

    def _map(self, pages: list[int]) -> None:
        broadcast = self._broadcast_map if self._world > 1 or self._by_ipc else None
        if broadcast is not None:
            broadcast(self._world, self._offsets(pages))
        elif not map_to_kv_tensors(self._offsets(pages), self._group):
            raise RuntimeError("Failed to map pages to KV tensors")

    def _unmap(self, pages: list[int], *, counted: bool) -> None:
        """Unmap pages that are in no list, and note them as free: also if it fails, since to map them again is right.

        `counted` is whether they count as free already.
        """
        if not pages:
            return
        broadcast = self._broadcast_unmap if self._world > 1 or self._by_ipc else None
        try:
            if broadcast is not None:
                broadcast(self._world, self._offsets(pages))
            elif not unmap_from_kv_tensors(self._offsets(pages), self._group):
                raise RuntimeError("Failed to unmap pages from KV tensors")
        finally:
            with self._changed:
                self._free.extend(pages)
                if not counted:
                    self._free_count += len(pages)
                self._note()
                self._changed.notify_all()

    def _note(self) -> None:
        each = self._layers * self._page * self._buffers
        self._limits.note((self._total - self._free_count) * each, len(self._reserved) * each)


def _map_ahead(allocator: weakref.ref[PageAllocator], ends: threading.Event, changed: threading.Condition) -> None:
    while not ends.is_set():
        with changed:
            here = allocator()
            wanted = here is not None and here._wanted
            del here
            if not wanted:
                changed.wait(0.1)  # it may also be collected, which tells nobody
                continue
        here = allocator()
        if here is None:
            return
        try:
            here._reserve()
        except Exception as error:  # noqa: BLE001  (the next page is mapped when it is asked for, and says why not)
            sys.stderr.write(f"vram: kvcached: no pages were mapped ahead: {error}\n")
        del here


def _watch(allocator: weakref.ref[PageAllocator], ends: threading.Event, changed: threading.Condition) -> None:
    while not ends.wait(0.1):
        here = allocator()
        if here is None:
            return
        here._target = here.check_and_get_resize_target(here._each)
        del here
