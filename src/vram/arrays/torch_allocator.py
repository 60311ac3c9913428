"""The parts of torch's allocator that a pool needs and no public function gives, checked in one place.

References
----------
PyTorch, ``torch/csrc/cuda/Module.cpp``, ``c10/cuda/CUDACachingAllocator.cpp`` (settings, ``beginAllocateToPool``), and
``aten/src/ATen/cuda/CublasHandlePool.cpp`` (workspaces).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator
from typing import Any, NamedTuple

from ..errors import InternalError, UnsupportedError, UsageError

# torch passes a device and a stream as well: on x86-64 and arm64 a function may read fewer arguments than it is passed.
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)

_NEEDED = (
    "cuda.MemPool", "cuda.use_mem_pool", "cuda.memory_snapshot", "cuda.memory._snapshot", "_C._cuda_customAllocator",
    "_C._cuda_beginAllocateCurrentThreadToPool", "_C._cuda_endAllocateToPool", "_C._cuda_releasePool",
    "_C._accelerator_setAllocatorSettings",
)  # fmt: skip
_OLDEST = (2, 10)  # before, the end of a pool that a graph uses ended the process, and inner pools were ignored
_OPEN = "release_lock_on_cudamalloc"


def import_torch() -> Any:
    """Return torch, or say that it is missing."""
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(
            "a pool for torch", "torch", "no such package", "Install it, or use vram.empty(...).torch()"
        ) from error
    return torch


def check_torch(torch: Any) -> None:
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
    release_lock(torch)
    if torch.cuda.memory._snapshot()["allocator_settings"].get(_OPEN) is not True:
        raise UnsupportedError("a pool for torch", f"torch's setting {_OPEN}, which has no effect here", have)


def _has(torch: Any, name: str) -> bool:
    found = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def release_lock(torch: Any) -> None:
    """Have torch let go of its allocator's lock while it calls a pool for memory: else two threads, with that lock and
    with Python's, wait for each other. Earlier settings are named again, since torch drops all others."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    given = read() if read else torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    settings = [*filter(None, given.replace(" ", "").strip(",").split(",")), f"{_OPEN}:True"]
    if settings[-2:-1] != settings[-1:]:
        torch._C._accelerator_setAllocatorSettings(",".join(settings))


def immortal(thing: object) -> None:
    """Keep something as long as the process, because torch may call or free it as late as that."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class Serving(NamedTuple):
    """The generator that torch calls to allocate, and torch's object for it, which a torch pool is made with.
    `requests` takes sizes and gives addresses, or 0."""

    requests: Any
    allocator: object

    def check(self) -> None:
        """Check that it goes on serving."""
        if self.requests.gi_frame is None:
            raise InternalError(
                "an interrupt in the midst of another came while torch was allocating: what it allocated on this "
                "thread may be anywhere. End the process"
            )


def serve(torch: Any, requests: Generator[int, int, None]) -> Serving:
    """Have torch ask a generator for memory, which it may as long as there is a process."""
    next(requests)
    allocate = _ALLOCATE(requests.send)
    release = ctypes.CDLL(None).labs  # native, and does nothing: it takes an integer and returns another
    allocator = torch._C._cuda_customAllocator(
        *(ctypes.cast(function, ctypes.c_void_p).value for function in (allocate, release))
    )
    for thing in (requests, allocate, allocator):
        immortal(thing)
    return Serving(requests, allocator)


def check_thread(entered_by: int, what: str) -> None:
    """Check that a block, in which torch allocates for one thread only, is left by the thread that entered it."""
    if threading.get_ident() != entered_by:
        raise UsageError(
            f"{what} is left by another thread than the one that entered it, which torch may still allocate for there. "
            f"Leave it where it was entered"
        )


class Workspaces:
    """The cuBLAS workspaces that torch keeps for each thread and stream, which may lie in memory of a pool that sleeps.
    torch lets go of all or none, and a captured graph may hold the address of its own, so they are let go of before
    :meth:`TorchPool.capture`, and else only while some may lie in a pool (`may_be_ours`)."""

    def __init__(self) -> None:
        self.may_be_ours = False

    def leave(self, torch: Any, *, grew: bool) -> None:
        """Note that a thread has left a block; `grew` if memory was made in it. torch may also have put a workspace
        into memory that it had before: that is seen to when that memory is to go."""
        self.may_be_ours = True
        if grew:
            self.let_go(torch)

    def let_go(self, torch: Any, *, always: bool = False) -> None:
        """Have torch take workspaces anew where it next needs them, if any may be in memory of a pool, or `always`.
        Not while this thread captures a graph, which holds those that it has used so far."""
        if (self.may_be_ours or always) and not torch.cuda.is_current_stream_capturing():
            self.may_be_ours = False  # first: a block that is left meanwhile says so again
            clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
            if clear is not None:
                clear()
