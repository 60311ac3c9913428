"""The cost of being there at all: the import, and the keeper's start and size."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from vram.bench.children import DEADLINE, workplace
from vram.bench.measure import Figure, Result, Row, in_turns, timed
from vram.errors import InternalError
from vram.keeper.private import KeeperProcess

from .entries import fill, rss

_HEAVY = ("numpy", "torch", "socket", "ctypes", "vram.driver")


def on_host(quick: bool) -> Result:
    """Measure whole processes, a bare interpreter and one that imports vram in turns; and keepers, one by one."""
    notes: list[str] = []
    rows = [*_import(2 if quick else 25, notes), *_keeper(2 if quick else 9)]
    return Result("start", "Starting", rows, notes)


def _import(rounds: int, notes: list[str]) -> list[Row]:
    values = in_turns(
        {"bare": lambda: timed(lambda: python_says("pass")), "vram": lambda: timed(lambda: python_says("import vram"))},
        rounds,
        warm=1,
    )
    more = [ours - bare for ours, bare in zip(values["vram"], values["bare"], strict=True)]
    loaded = python_says(f"import sys, vram; print(*(name for name in {_HEAVY} if name in sys.modules))")
    bare = Row("python -c pass", Figure.of(values["bare"], "ms", scale=1e3))
    figure = Figure.of(more, "ms", scale=1e3)
    notes.append(f"of {', '.join(_HEAVY)}, importing vram loads {loaded or 'none'}")
    return [
        bare,
        Row.held("python -c 'import vram'", Figure.of(values["vram"], "ms", scale=1e3), bare),
        Row(
            "import vram: beyond the bare interpreter, in pairs",
            figure,
            None,
            "",
            "at most 60 ms, numpy not loaded",
            figure.median <= 60 and "numpy" not in loaded.split(),
        ),
    ]


def python_says(code: str) -> str:
    """Run code in an interpreter of its own and return what it prints. Raises InternalError if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        # Installed files are compiled; those of a checkout are, once they were used, unless this forbids it.
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    )
    if done.returncode:
        raise InternalError(f"python -c {code!r} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


def _keeper(rounds: int) -> list[Row]:
    entries = 1_000
    started, bare, full = [], [], []
    with workplace() as directory:
        for number in range(rounds):
            begin = time.perf_counter()
            keeper = KeeperProcess(f"{directory}/{number}.sock")
            started.append(time.perf_counter() - begin)
            try:
                bare.append(rss(keeper.pid))
                if number == rounds - 1:
                    fill(keeper.path, entries)
                    full.append(rss(keeper.pid))
            finally:
                keeper.stop()
    return [
        Row.limited("keeper: from its start until it serves", Figure.of(started, "s"), at_most=0.3),
        Row("keeper: resident, without entries", Figure.of(bare, "MiB")),
        Row.limited(f"keeper: resident, with {entries} entries", Figure.of(full, "MiB"), at_most=40),
    ]
