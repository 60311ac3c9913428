"""What of torch a pool needs, in Python, over a real lock: the pools of its allocator, and what of it waits for it.

It stands in for ``torch`` where there is no GPU, to call the functions that a pool hands to torch as torch does:
through their addresses, from any thread, with the lock of the allocator held unless the setting says otherwise.
Entering a pool, leaving it, statistics and snapshots wait for that lock with Python's lock in hand, as in torch 2.11:
``c10/cuda/CUDACachingAllocator.cpp`` and ``torch/csrc/cuda/Module.cpp``. It has no tensors; blocks are whole segments.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import vram
from vram.arrays import torch_pool

_HOLDING = ctypes.PyDLL(None)  # calls with Python's lock
_RELEASING = ctypes.CDLL(None)  # without


class OutOfMemoryError(RuntimeError):
    """torch's."""


class _Lock:
    """A lock that one call waits for and lets go of again, as torch's functions do: that of a file of the C library."""

    def __init__(self) -> None:
        _HOLDING.tmpfile.restype = ctypes.c_void_p
        self._file = ctypes.c_void_p(_HOLDING.tmpfile())

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it, having waited without Python's lock."""
        _RELEASING.flockfile(self._file)
        try:
            yield
        finally:
            _HOLDING.funlockfile(self._file)

    def close(self) -> None:
        """Nobody uses it any more."""
        _HOLDING.fclose(self._file)

    def pass_by(self) -> None:
        """Wait until nobody else holds it, with Python's lock."""
        _HOLDING.ftell(self._file)


class _MemPool:
    _numbers = itertools.count(1)

    def __init__(self, allocator: tuple[int, int] | None = None) -> None:
        self.id = (0, next(self._numbers))
        self.blocks: list[object] = []  # torch's own, where there is no allocator
        self.allocate: Callable[[int, int, object], int] = self._own
        self.release: Callable[[int, int, int, object], object] = lambda *_: None
        if allocator is not None:
            kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
            self.allocate = kind(allocator[0])
            kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
            self.release = kind(allocator[1])
        self.uses = 1
        self.cached: dict[int, int] = {}  # sizes by address: of what no "tensor" is on
        self.taken: dict[int, int] = {}

    def _own(self, size: int, device: int, stream: object) -> int:
        self.blocks.append(made := ctypes.create_string_buffer(size))
        return ctypes.addressof(made)


class TorchLike(ModuleType):
    """A module to be found as ``torch``.

    Parameters
    ----------
    keep_lock : bool
        Whether it keeps its lock around allocations whatever the settings are, as torch does by default.
    """

    def __init__(self, keep_lock: bool = False) -> None:
        super().__init__("torch")
        self.__version__ = "2.11.0+like"
        self.Tensor = type("Tensor", (), {})  # of which there are none
        self.version = SimpleNamespace(cuda="13.0")
        self.lock = _Lock()
        self.settings = "roundup_power2_divisions:[256:1,>:4],max_split_size_mb:64"
        self.keep_lock = keep_lock
        self.pools: list[_MemPool] = []
        self.ordinary = _MemPool()  # where it allocates in no pool
        self.ordinary.uses = 0  # so that its cache is emptied
        self.entered: list[tuple[int, _MemPool]] = []
        self.frees = 0
        self.emptying = threading.Lock()
        self.capturing = False
        self.workspaces: dict[object, int] = {}  # addresses by thread and stream
        self._C = SimpleNamespace(
            _cuda_customAllocator=lambda allocate, free: (allocate, free),
            _cuda_releasePool=self._release,
            _cuda_beginAllocateCurrentThreadToPool=self._begin,
            _cuda_endAllocateToPool=self._end,
            _accelerator_setAllocatorSettings=lambda settings: setattr(self, "settings", settings),
            _accelerator_getAllocatorSettings=lambda: self.settings,
            _cuda_clearCublasWorkspaces=self._clear_workspaces,
        )
        self.cuda = SimpleNamespace(
            MemPool=self._make,
            use_mem_pool=self._use,
            memory_snapshot=self.snapshot,
            memory_stats_as_nested_dict=self._stats,
            get_allocator_backend=lambda: "native",
            is_current_stream_capturing=lambda: self.capturing,
            empty_cache=self.empty_cache,
            device=self._device,
            current_device=lambda: 0,
            mem_get_info=lambda ordinal: (3, 10),
            graph=self._graph,
            memory=SimpleNamespace(
                _snapshot=lambda: {"allocator_settings": {"release_lock_on_cudamalloc": self.opens}}
            ),
        )

    @property
    def opens(self) -> bool:
        """Whether it lets go of its lock around allocations."""
        return "release_lock_on_cudamalloc:True" in self.settings

    @contextmanager
    def _device(self, ordinal: int) -> Iterator[None]:
        yield

    def _make(self, allocator: tuple[int, int] | None = None) -> _MemPool:
        self.lock.pass_by()
        made = _MemPool(allocator)
        self.pools.append(made)
        return made

    @contextmanager
    def _use(self, pool: _MemPool, device: int) -> Iterator[None]:
        self._begin(device, pool.id)
        try:
            yield
        finally:
            self._end(device, pool.id)
            self._release(device, pool.id)

    def _begin(self, device: int, number: tuple[int, int]) -> None:
        self.lock.pass_by()
        pool = self._pool(number)
        assert pool.uses
        pool.uses += 1  # nobody else has it: the pool under test sees to that
        if pool in [one for _, one in list(self.entered)]:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.entered.append((threading.get_ident(), pool))

    def _end(self, device: int, number: tuple[int, int]) -> None:
        self.lock.pass_by()
        found = [entry for entry in list(self.entered) if entry[1].id == number]
        if not found:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.entered.remove(found[0])

    def _pool(self, number: tuple[int, int]) -> _MemPool:
        return next(one for one in self.pools if one.id == number)

    @contextmanager
    def _graph(self, graph: object, pool: tuple[int, int], stream: object, capture_error_mode: str) -> Iterator[None]:
        """Capture: the graph uses the pool as long as it lives."""
        entry = (threading.get_ident(), self._pool(pool))
        entry[1].uses += 1
        self.entered.append(entry)
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
            self.entered.remove(entry)

    def _release(self, device: int, number: tuple[int, int]) -> None:
        self.lock.pass_by()
        pool = self._pool(number)
        pool.uses -= 1
        assert pool.uses >= 0

    def _stats(self, ordinal: int) -> dict[str, int]:
        self.lock.pass_by()
        return {"num_device_free": self.frees}

    def snapshot(self) -> list[dict[str, Any]]:
        """Say which segments it has, and the blocks in them."""
        self.lock.pass_by()
        return [
            {"address": address, "blocks": [{"address": address, "size": size, "state": state}]}
            for pool in (self.ordinary, *list(self.pools))
            for state, found in (("inactive", pool.cached), ("active_allocated", pool.taken))
            for address, size in found.copy().items()
        ]

    def empty(self, nbytes: int) -> int:
        """Allocate as ``torch.empty`` does, and return the address."""
        size = -(-nbytes // (2 << 20)) * (2 << 20)
        me = threading.get_ident()
        pool = next((one for thread, one in reversed(list(self.entered)) if thread == me), self.ordinary)
        address = next((one for one, cached in pool.cached.items() if cached >= size), None)
        if address is not None:
            pool.taken[address] = pool.cached[address]  # first: no snapshot is to miss it
            del pool.cached[address]
            return address
        if self.opens and not self.keep_lock:
            address = pool.allocate(size, 0, None)
        else:
            with self.lock.held():
                address = pool.allocate(size, 0, None)
        if not address:
            raise OutOfMemoryError("CUDA out of memory")
        assert not any(address in (*one.cached, *one.taken) for one in (self.ordinary, *self.pools)), "twice"
        pool.taken[address] = size
        return address

    def multiply(self, stream: object = 0) -> int:
        """Multiply matrices on a stream, and return where the workspace for that is, which stays."""
        key = (threading.get_ident(), stream)
        if key not in self.workspaces:
            self.workspaces[key] = self.empty(8 << 20)
        return self.workspaces[key]

    def _clear_workspaces(self) -> None:
        while self.workspaces:
            self.drop(self.workspaces.popitem()[1])

    def drop(self, address: int) -> None:
        """Free a "tensor": its segment stays in the cache."""
        pool = next(one for one in (self.ordinary, *self.pools) if address in one.taken)
        pool.cached[address] = pool.taken[address]
        del pool.taken[address]

    def give_back(self) -> None:
        """Have nothing any more, as after the last tensor and the last pool."""
        self.capturing = False
        for pool in (self.ordinary, *self.pools):
            pool.cached.clear()
            pool.taken.clear()
        self.workspaces.clear()
        self.frees += 1

    def empty_cache(self) -> None:
        """Give back the cached segments of pools that nobody uses any more."""
        with self.emptying:
            for pool in (self.ordinary, *list(self.pools)):
                while not pool.uses and pool.cached:
                    address, size = pool.cached.popitem()
                    self.frees += 1
                    pool.release(address, size, 0, None)


@pytest.fixture(name="torch")
def as_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchLike]:
    """Something like torch, to be imported as torch. What it was given it gives back in the end."""
    made = TorchLike()
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr(torch_pool, "_serving", {})
    monkeypatch.setattr(torch_pool, "_looked", {})
    yield made
    made.give_back()
    for segment in torch_pool._segments.copy():
        segment.is_noted = True
        segment.pool.trim()
    gc.collect()
    vram.memory.trim()
    made.lock.close()
    assert not torch_pool._segments
    assert not torch_pool._freed


def write(address: int, text: bytes) -> None:
    ctypes.memmove(address, text, len(text))  # what is a GPU's memory on hardware is the host's here


def read(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)
