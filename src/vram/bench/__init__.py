"""``vram bench``: what things cost on this machine, beside raw system calls and what people use otherwise.

One module for each case, with ``on_host(quick)``, ``on_gpu(quick, location)`` or both, which return one
:class:`~vram.bench.measure.Result`. The rivals are built in the same module and are run in turns with ours. The cases
that compare more than a machine are in a clone of vram, in ``benchmarks/``, which uses what is here.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
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
    "attach": "attach by name, touch, give back; against raw descriptors, shared_memory, a mapped file",
    "grow": "an array grown in place; against raw mmap calls, and numpy that copies or doubles",
    "publish-file": "a file of weights into shared memory; against sendfile",
}
GPU_NAMES = {
    "grow": "an array grown in place; against bare calls, and what allocates anew and copies",
    "attach": "64 segments by name, and 64 GiB in fresh processes; against bare import, map and set_access",
    "handover": "an array to another process and back; against a raw unix socket, and torch's tensors",
}


def run_benchmarks(only: list[str], *, quick: bool, progress: bool, device: str | Location = HOST) -> list[Result]:
    """Run the cases of :data:`NAMES`, or of :data:`GPU_NAMES`: all, or only those that are named.

    Raises UsageError for another name, and UnsupportedError if there is no such GPU, or nothing to speak to it with.
    """
    location = Location.parse(device)
    names = NAMES if location == HOST else GPU_NAMES
    for name in only:
        if name not in names:
            there = "" if location == HOST else f" --device {location}"
            raise UsageError(
                f"no benchmark of {location} is called {name!r}; there are {', '.join(names)}. More are in a clone of "
                f"vram: run `python -m benchmarks {name}{there}` in its directory"
            )
    modules = {name: f"{__name__}.{name.replace('-', '_')}" for name in names if not only or name in only}
    return measured(modules, location, quick=quick, progress=progress)


def measured(
    modules: Mapping[str, str], location: Location, *, quick: bool, progress: bool, **options: object
) -> list[Result]:
    """Run the modules of these cases, one after the other, and return what they found.

    `quick` takes small sizes and few rounds, which shows that everything runs; `progress` names each on stderr.
    """
    from .machine import describe

    machine = describe(location)
    results = []
    with _stoppable():
        for name, module in modules.items():
            if progress:
                print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
            begin = time.perf_counter()
            case = import_module(module)
            result: Result = case.on_host(quick) if location == HOST else case.on_gpu(quick, location, **options)
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
