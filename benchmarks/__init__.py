"""``python -m benchmarks``, in a clone: every case beside its rivals, those of ``vram bench`` included.

One module for each case, made as those of :mod:`vram.bench`. Nothing here is installed.
"""

from __future__ import annotations

from vram import bench
from vram.bench.measure import Result
from vram.errors import UsageError
from vram.spec import HOST, Location

# In the order in which they run, with what each measures.
NAMES = {
    **bench.NAMES,
    "queues": "an array through multiprocessing.Queue and Pool; against a number, and torch's tensors",
    "many": "1,000 small arrays in one entry, published and attached; against one array of their size, and a file",
    "tables": "a DataFrame of 1 GiB published and attached; against copying it, pickling, and parquet (needs pandas)",
    "share": "memory of the host lent to another process; against a descriptor over a raw socket",
    "workers": "the memory that 8 workers on one model take; against a mapped file, and loading it",
    "engine": "sections of an entry that is updated in place, and updates; against a lock, and writing alone",
    "asleep": "leases that sleep and wake, entries saved; against bare calls, and plain writes and reads",
    "ring": "1080p frames to three consumers by vram.Ring; against shared_memory by hand, and queues that pickle",
    "follow": "a new version, seen by 100 followers in 20 processes; against a bare notice to each process",
    "allreduce": "sums over the memory of four processes; against torch's gloo (needs torch)",
    "nodes": "an entry to another keeper over loopback, checked; against bare sendfile, 16 readers, and deltas",
    "start": "import vram, start a keeper, and the keeper's memory; against a bare interpreter",
    "first-use": "import of each verb in a fresh process, and how many modules; against numpy's",
    "scale": "attach among 1,000 readers and 10,000 entries; against one of each",
    "watched": "attach while the keeper is scraped each second, watched by vram top, and logs; against nobody",
    "survive": "a keeper that goes on when it is killed; against one that does not",
}
# The same for a GPU. The case that needs all of its memory comes last.
GPU_NAMES = {
    **bench.GPU_NAMES,
    "calls": "each call of virtual memory management; against the bare call of cuda-bindings",
    "share": "memory of any kind lent to another process; against bare calls of each route, torch, raw sockets",
    "engine": "memory asleep and awake, arrays grown, a pool, weights updated; against copies, bare calls, torch",
    "asleep": "leases that sleep and wake; against the bare calls",
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
    """Run the cases that are named, or all, as :func:`vram.bench.measured` does.

    `tune` is a file for the table of routes that ``allreduce`` on GPUs then measures first and goes by; `gpus` has
    ``allreduce`` and ``decoder`` measure groups of this many GPUs only. Raises UsageError for what no case takes.
    """
    location = Location.parse(device)
    names, installed = (NAMES, bench.NAMES) if location == HOST else (GPU_NAMES, bench.GPU_NAMES)
    if unknown := [name for name in only if name not in names]:
        raise UsageError(f"no benchmark of {location} is called {unknown[0]!r}; there are {', '.join(names)}")
    if tune is not None and (location == HOST or only != ["allreduce"]):
        raise UsageError(
            "a table of routes is measured by one benchmark alone: `allreduce`, of a GPU (--device cuda:0)"
        )
    if gpus is not None and (location == HOST or not only or not set(only) <= _BY_GPUS):
        raise UsageError(f"a number of GPUs is taken by these benchmarks of GPUs only: {', '.join(sorted(_BY_GPUS))}")
    modules = {
        name: f"{'vram.bench' if name in installed else __name__}.{name.replace('-', '_')}"
        for name in names
        if not only or name in only
    }
    options = {key: value for key, value in {"tune": tune, "gpus": gpus}.items() if value is not None}
    return bench.measured(modules, location, quick=quick, progress=progress, **options)
