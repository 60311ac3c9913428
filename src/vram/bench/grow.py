"""Growing in place: against bare mmap, and against numpy, which has to copy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import vram

from .. import driver as drivers
from ..errors import InternalError
from ..spec import HOST, format_size
from .children import child, status
from .measure import Figure, Result, Row, in_turns, warm_memory

__all__ = ["measure"]

_STEPS = 32
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10


def measure(quick: bool) -> Result:
    """Measure growth in 32 steps: without touching it here, with every byte written in one process for each way."""
    step = (1 if quick else 64) << 20
    notes: list[str] = []
    available, _ = drivers.get(HOST).mem_info(HOST)
    while step * _STEPS * 5 // 2 > available and step > 1 << 20:
        step //= 2
    total = step * _STEPS
    notes.append(f"0 to {format_size(total)} in {_STEPS} steps of {format_size(step)}")
    # The driver's granularity is 2 MiB: smaller steps would share chunks.
    rows = [*_untouched(max(step, 2 << 20), 3 if quick else 40), *_written(step, 1 if quick else 3, notes)]
    return Result("grow", "An array grown in place", rows, notes)


# -- untouched --------------------------------------------------------------------------------------------------
def _untouched(step: int, rounds: int) -> list[Row]:
    values = in_turns({"raw": lambda: _raw(step), "vram": lambda: _resize(step)}, rounds)
    raw = Row("raw: memfd_create, ftruncate, mmap, untouched", Figure.of(values["raw"], "us", scale=1e6))
    return [raw, Row.held("resize, untouched", Figure.of(values["vram"], "us", scale=1e6), raw, at_most=2)]


def _resize(step: int) -> float:
    with vram.empty(0, "uint8", device="host", capacity=step * _STEPS) as array:
        begin = time.perf_counter()
        for number in range(1, _STEPS + 1):
            array.resize(number * step)
        return time.perf_counter() - begin


class _Libc:
    """mmap at an address, which Python's own module cannot do."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.mmap = libc.mmap
        self.mmap.restype = ctypes.c_ssize_t
        number = ctypes.c_int
        self.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_longlong]
        self.munmap = libc.munmap
        self.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


_libc = _Libc()


def _raw(step: int) -> float:
    """Do what growing has to do, and nothing else."""
    reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _libc.mmap(None, step * _STEPS, 0, reserved, -1, 0)
    if base == -1:
        raise InternalError(f"mmap of {step * _STEPS} bytes of addresses: {os.strerror(ctypes.get_errno())}")
    fds: list[int] = []
    try:
        begin = time.perf_counter()
        for number in range(_STEPS):
            fd = os.memfd_create("rival", os.MFD_CLOEXEC)
            fds.append(fd)
            os.ftruncate(fd, step)
            flags = mmap.MAP_SHARED | _MAP_FIXED
            if _libc.mmap(base + number * step, step, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) == -1:
                raise InternalError(f"mmap of {step} bytes: {os.strerror(ctypes.get_errno())}")
        return time.perf_counter() - begin
    finally:
        _libc.munmap(base, step * _STEPS)
        for fd in fds:
            os.close(fd)


# -- written ----------------------------------------------------------------------------------------------------
def _written(step: int, rounds: int, notes: list[str]) -> list[Row]:
    ways = {"vram": _in_place, "copy": _by_copying, "doubling": _by_doubling}
    with contextlib.ExitStack() as stage:
        others = {name: stage.enter_context(child(_grower, way, step)) for name, way in ways.items()}
        for other in others.values():
            other.hear()
        peaks: dict[str, list[float]] = {name: [] for name in ways}

        def case(name: str) -> Callable[[], float]:
            def once() -> float:
                seconds, peak = others[name].ask("grow")
                peaks[name].append(peak)
                return float(seconds)

            return once

        values = in_turns({name: case(name) for name in ways}, rounds, warm=0)
    took = {name: Figure.of(seconds, "s") for name, seconds in values.items()}
    held = {name: Figure.of(copies, "x its size") for name, copies in peaks.items()}
    copying = Row("numpy: allocate and copy each step, written", took["copy"])
    doubling = Row.held("numpy: double when full, written", took["doubling"], copying)
    ours = Row.held("resize, written", took["vram"], copying, at_most=0.25)
    if doubling.figure.median < ours.figure.median:
        notes.append(
            f"wins: {doubling.case}. It copies log2({_STEPS}) times in all, its memory is private (fresh pages come "
            f"cheaper, in large pages where the kernel gives them), it moves, and nobody else can see it. A size that "
            f"is a power of two is its best case for memory"
        )
    return [
        copying,
        doubling,
        ours,
        Row.held(ours.case, ours.figure, doubling),
        Row("numpy: allocate and copy, most memory", held["copy"]),
        Row("numpy: double when full, most memory", held["doubling"]),
        Row.limited("resize, most memory", held["vram"], at_most=1.01),
    ]


def _grower(pipe: Connection, way: Callable[[int], None], step: int) -> None:
    """Grow as often as the parent asks for it: each time the seconds, and the most memory at one time."""
    way(1 << 16)  # imports and the like are over now
    pipe.send("ready")
    while pipe.recv():
        warm_memory(2 * step * _STEPS)
        with contextlib.suppress(OSError):  # not every kernel has it; the peak is the same every time
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = status("self", "VmRSS")
        begin = time.perf_counter()
        way(step)
        seconds = time.perf_counter() - begin
        pipe.send((seconds, (status("self", "VmHWM") - before) / (step * _STEPS)))


def _in_place(step: int) -> None:
    with vram.empty(0, "uint8", device="host", capacity=step * _STEPS) as array:
        for number in range(_STEPS):
            array.resize((number + 1) * step)
            array.numpy()[number * step :] = 1


def _by_copying(step: int) -> None:
    array = np.empty(0, "uint8")
    for number in range(_STEPS):
        larger = np.empty((number + 1) * step, "uint8")
        larger[: number * step] = array
        array = larger
        array[number * step :] = 1


def _by_doubling(step: int) -> None:
    array = np.empty(step, "uint8")
    for number in range(_STEPS):
        if (number + 1) * step > len(array):
            larger = np.empty(2 * len(array), "uint8")
            larger[: number * step] = array
            array = larger
        array[number * step : (number + 1) * step] = 1
