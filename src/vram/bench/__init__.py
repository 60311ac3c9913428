"""``vram bench``: what things cost here, side by side with raw system calls and with what people use otherwise.

One module a question, with ``on_host(quick)``, ``on_gpu(quick, location)`` or both, which return one
:class:`~vram.bench.measure.Result`. The rivals are built in the same module, of the same processes and the same kind of
connection, and are run in turns with ours.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..spec import HOST, Location

if TYPE_CHECKING:
    from .measure import Result

# In the order in which they run, with what each measures.
NAMES = {
    "handover": "an array to another process and an answer, over an ArrayChannel; against a raw unix socket",
    "queues": "the same through multiprocessing.Queue and Pool; against a number, and torch's tensors",
    "attach": "attach by name, touch, give back; against raw descriptors, shared_memory, a mapped file",
    "many": "1,000 small arrays in one entry, published and attached; against one array of their size, and a file",
    "tables": "a DataFrame of 1 GiB published and attached; against copying it, pickling, and parquet (needs pandas)",
    "grow": "an array grown in place; against raw mmap calls, and numpy that copies or doubles",
    "publish-file": "a file of weights into shared memory; against sendfile",
    "share": "memory of the host lent to another process; against a descriptor over a raw socket",
    "workers": "the memory that 8 workers on one model take; against a mapped file, and loading it",
    "engine": "sections of an entry that is updated in place, and updates; against a lock, and writing alone",
    "ring": "1080p frames to three consumers by vram.Ring; against shared_memory by hand, and queues that pickle",
    "follow": "a new version, seen by 100 followers in 20 processes; against a bare notice to each process",
    "allreduce": "sums over the memory of four processes; against torch's gloo (needs torch)",
    "nodes": "an entry to another keeper over loopback, checked; against bare sendfile, and 16 readers of one source",
    "start": "import vram, start a keeper, and the keeper's memory; against a bare interpreter",
    "first-use": "import of each verb in a fresh process, and how many modules; against numpy's",
    "scale": "attach among 1,000 readers and 10,000 entries; against one of each",
    "watched": "attach while the keeper is scraped each second, watched by vram top, and logs; against nobody",
    "survive": "a keeper that goes on when it is killed; against one that does not",
    "hostile": "attach beside another user who asks and holds as much as it can; against alone (needs root)",
}
# The same for a GPU. What needs all of its memory comes last.
GPU_NAMES = {
    "calls": "each call of virtual memory management; against the bare call of cuda-bindings",
    "grow": "an array grown in place; against bare calls, and what allocates anew and copies",
    "attach": "64 segments by name, and 64 GiB in fresh processes; against bare import, map and set_access",
    "handover": "an array to another process and back; against a raw unix socket, and torch's tensors",
    "share": "memory of any kind lent to another process; against bare calls of each route, torch, raw sockets",
    "engine": "memory asleep and awake, arrays grown, a pool, weights updated; against copies, bare calls, torch",
    "weights": "a file of weights to the GPU; against the pinned copy rate, and reading it at all",
    "allreduce": "all-reduces between GPUs, in graphs; against NCCL and torch's symmetric memory (one GPU: ours alone)",
    "decoder": "a tensor-parallel stack of decoder layers in torch, with each of those all-reduces (two GPUs)",
    "pairs": "memory of each GPU attached and borrowed on each other one; against bare calls (two GPUs)",
    "keeper": "a keeper full of GPU memory: its own size, and that it has no context",
}

_BY_GPUS = frozenset({"allreduce", "decoder"})  # they measure groups of several sizes


def run_benchmarks(
    only: list[str],
    *,
    quick: bool,
    progress: bool,
    device: str | Location = HOST,
    tune: str | None = None,
    gpus: int | None = None,
) -> list[Result]:
    """Run benchmarks, one after the other, and return what they found.

    Parameters
    ----------
    only : list of str
        Names out of :data:`NAMES`, for a GPU out of :data:`GPU_NAMES`; empty for all.
    quick : bool
        Small sizes and few rounds: shows that everything runs. Its figures are not worth quoting.
    progress : bool
        Say on stderr which one runs.
    device : str or Location
        ``"host"`` or a GPU, such as ``"cuda:0"``.
    tune : str, optional
        A file: have ``allreduce`` on GPUs measure a table of routes first, write it there, and go by it.
    gpus : int, optional
        Have ``allreduce`` and ``decoder`` measure groups of this many GPUs only; by default of 2, 4 and 8, as far as
        there are so many.

    Returns
    -------
    list of Result
        One for each benchmark, in the order of its list of names.

    Raises
    ------
    UsageError
        For a name that no benchmark has, a device that is neither, `tune` or `gpus` with a benchmark that does not
        take it, and `gpus` below 2 or above the number of GPUs.
    UnsupportedError
        If there is no such GPU, or nothing to speak to it with.
    """
    location = Location.parse(device)
    names = NAMES if location == HOST else GPU_NAMES
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UsageError(f"no benchmark of {location} is called {unknown[0]!r}; there are {', '.join(names)}")
    if tune is not None and (location == HOST or only != ["allreduce"]):
        raise UsageError(
            "a table of routes is measured by one benchmark alone: `allreduce`, of a GPU (--device cuda:0)"
        )
    if gpus is not None and (location == HOST or not only or not set(only) <= _BY_GPUS):
        raise UsageError(f"a number of GPUs is taken by these benchmarks of GPUs only: {', '.join(sorted(_BY_GPUS))}")
    from .machine import describe

    machine = describe(location)
    results = []
    with _stoppable():
        for name in names:
            if only and name not in only:
                continue
            if progress:
                print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
            begin = time.perf_counter()
            module = import_module(f".{name.replace('-', '_')}", __name__)
            said = {"tune": tune, "gpus": gpus}
            more = {key: value for key, value in said.items() if value is not None}
            result: Result = module.on_host(quick) if location == HOST else module.on_gpu(quick, location, **more)
            if quick:
                result.notes.append("--quick: it ran, but sizes and rounds are too small for figures worth quoting")
            results.append(replace(result, machine=machine))
            if progress:
                print(f"{time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    return results


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM end this as Ctrl-C does, so that files of a gigabyte do not stay."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
