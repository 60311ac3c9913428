"""``vram bench``: what things cost here, side by side with raw system calls and with what people use otherwise.

One module a question; each has ``measure(quick)`` and returns one :class:`~vram.bench.measure.Result`. The rivals are
built in the same module, of the same processes and the same kind of connection, and are run in turns with ours.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .measure import Result

__all__ = ["NAMES", "run_benchmarks"]

NAMES = ("handover", "queues", "attach", "grow", "put", "share", "start", "scale")


def run_benchmarks(only: list[str], *, quick: bool, progress: bool) -> list[Result]:
    """Run benchmarks, one after the other, and return what they found.

    Parameters
    ----------
    only : list of str
        Names out of :data:`NAMES`; empty for all.
    quick : bool
        Small sizes and few rounds: shows that everything runs. Its figures are not worth quoting.
    progress : bool
        Say on stderr which one runs.

    Raises
    ------
    UsageError
        For a name that no benchmark has.
    """
    unknown = [name for name in only if name not in NAMES]
    if unknown:
        raise UsageError(f"no benchmark is called {unknown[0]!r}; there are {', '.join(NAMES)}")
    results = []
    with _stoppable():
        for name in NAMES:
            if only and name not in only:
                continue
            if progress:
                print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
            begin = time.perf_counter()
            result: Result = import_module(f".{name}", __name__).measure(quick)
            if quick:
                result.notes.append("--quick: it ran, but sizes and rounds are too small for figures worth quoting")
            results.append(result)
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
