"""The C++ part of kvcached, ``kvcached.vmm_ops``, over vram's memory: :func:`install` puts it in that place.

kvcached gives each layer a tensor over addresses that have no memory yet, and puts pages behind them where blocks of
the KV cache are used: anywhere, not only from the front on. So this does not grow regions (:func:`vram.resize`); it
maps pages into a reservation, one by one. Behind every page that is not mapped lies one page of zeros that all of them
share, as in kvcached: to read there is no fault, and what is written there is seen in all of them.

Differences from kvcached's own:

- Mapping and unmapping a number of pages, in all layers, comes about as a whole or not at all. In kvcached what was
  done before the failure stays, and a failing driver call ends the process.
- Errors are exceptions: those of :mod:`vram.errors`, and ``RuntimeError`` where kvcached catches that.
- Unmapping waits for the work of the device, always, and not with ``async_sched`` alone.
- A tensor that outlives :func:`shutdown_kvcached` keeps its addresses; in kvcached it dangles.
- Pages whose unmapping failed are not lost.
- The file that ``kvctl`` opens is this user's alone. One of that name that another user made is not used, a lock on it
  is waited for a moment only, and when one of several engines with one name ends, the limit stays.

Written after ovg-project/kvcached at commit e8e6406: ``csrc/torch_bindings.cpp``, ``allocator.cpp``, ``ftensor.cpp``,
``page_allocator.cpp`` and ``mem_info_tracker.hpp``.
"""

from __future__ import annotations

import sys

from ..errors import UsageError
from .kvcached_books import InternalPage, PageAllocator
from .kvcached_tensors import (
    create_kv_tensors,
    init_kvcached,
    kv_tensors_created,
    map_to_kv_tensors,
    shutdown_kvcached,
    unmap_from_kv_tensors,
)

__all__ = [
    "InternalPage",
    "PageAllocator",
    "create_kv_tensors",
    "init_kvcached",
    "install",
    "kv_tensors_created",
    "map_to_kv_tensors",
    "shutdown_kvcached",
    "unmap_from_kv_tensors",
]


def install() -> None:
    """Have kvcached use this instead of its compiled extension. Before its modules are imported.

    Raises
    ------
    UsageError
        If kvcached's own extension is loaded already, and its memory may be in use.
    """
    here, name = sys.modules[__name__], "kvcached.vmm_ops"
    if sys.modules.get(name, here) is not here:
        raise UsageError(f"{name} is loaded already: call vram.engines.kvcached.install() before kvcached is imported")
    sys.modules[name] = here
    package = sys.modules.get("kvcached")
    if package is not None:
        package.vmm_ops = here  # type: ignore[attr-defined]
