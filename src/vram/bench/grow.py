"""The benchmark of growing in place.

On the host against bare mmap, and numpy, which has to copy; on a GPU against the bare calls, and what allocates anew
and copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import vram

from .. import driver as drivers
from ..errors import InternalError
from ..memory import Region
from ..spec import HOST, Location, format_size
from .children import child, status
from .gpu import Bare, bare_calls, ordinal_of, torch_on
from .machine import fitting
from .measure import Figure, Result, Row, in_turns, warm_memory

_STEPS = 32
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_STEP = 256 << 20  # on a GPU
_Look = Callable[[], object]  # called when most memory is held
_Sizes = range  # all sizes in turn; the step is the first of them


def on_host(quick: bool) -> Result:
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


# mmap at an address, which Python's own module cannot do.
_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc["mmap"], _libc["munmap"]
_mmap.restype = ctypes.c_ssize_t
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _raw(step: int) -> float:
    """Do what growing has to do, and nothing else."""
    reserved = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _mmap(None, step * _STEPS, 0, reserved, -1, 0)
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
            if _mmap(base + number * step, step, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) == -1:
                raise InternalError(f"mmap of {step} bytes: {os.strerror(ctypes.get_errno())}")
        return time.perf_counter() - begin
    finally:
        _munmap(base, step * _STEPS)
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


# -- on a GPU -----------------------------------------------------------------------------------------------------
def on_gpu(quick: bool, location: Location) -> Result:
    """Measure growth step by step, and in passes of their own the most memory that is held at one time."""
    notes: list[str] = []
    with bare_calls(location) as bare:
        steps = 8 if quick else _STEPS
        step = fitting(location, (2 << 20) if quick else _STEP, steps, 2.25, notes)
        sizes = range(step, step * steps + 1, step)
        ways: dict[str, Callable[[_Look], float]] = {
            "raw": lambda look: _bare_growth(bare, sizes, look),
            "region": lambda look: _region(location, sizes, look),
            "array": lambda look: _array(location, sizes, look),
            "copy": lambda look: _by_copies(bare, sizes, look),
        }
        torch = torch_on(location, notes)
        if torch is not None:
            ways["torch"] = lambda look: _by_torch(torch, location, sizes, look)
        took = in_turns({name: _timed(way) for name, way in ways.items()}, 2 if quick else 7, warm=1)
        peaks = {name: _peak(bare, way, sizes) for name, way in ways.items()}
    figures = {name: Figure.of(seconds, "ms", scale=1e3) for name, seconds in took.items()}
    raw = Row("bare calls: create, map, set_access", figures["raw"])
    copying = Row.held("cuMemAlloc, copy, cuMemFree each step", figures["copy"], raw)
    rows = [
        raw,
        Row.held("Region.grow", figures["region"], raw, at_most=1.1),
        Row.held("Array.resize", figures["array"], raw, at_most=1.1),
        copying,
        Row.held("Array.resize", figures["array"], copying, at_most=0.1),
    ]
    if torch is not None:
        other = Row("torch.empty, copy each step", figures["torch"])
        rows += [other, Row.held("Array.resize", figures["array"], other)]
    rows += [
        Row("bare calls, most memory", peaks["raw"]),
        Row.limited("Array.resize, most memory", peaks["array"], at_most=1.01),
        Row("cuMemAlloc and copy, most memory", peaks["copy"]),
    ]
    if torch is not None:
        rows.append(Row("torch.empty and copy, most memory", peaks["torch"]))
    notes.append(
        f"0 to {format_size(sizes[-1])} in {steps} steps of {format_size(step)}, nothing written. Most memory: "
        f"by cuMemGetInfo, over the size reached; other programs on this GPU would show in it"
    )
    return Result("grow", "An array on the GPU grown in place", rows, notes)


def _timed(way: Callable[[_Look], float]) -> Callable[[], float]:
    return lambda: way(lambda: None)


def _peak(bare: Bare, way: Callable[[_Look], float], sizes: _Sizes) -> Figure:
    before = bare.free_bytes()
    least = [before]
    way(lambda: least.append(bare.free_bytes()))
    return Figure.of([(before - min(least)) / sizes[-1]], "x its size")


def _bare_growth(bare: Bare, sizes: _Sizes, look: _Look) -> float:
    """Do what growing has to do, and nothing else."""
    api, ok = bare.api, bare.ok
    base = int(ok(api.cuMemAddressReserve(sizes[-1], 0, 0, 0)))
    handles: list[Any] = []
    mapped = 0
    try:
        begin = time.perf_counter()
        step = sizes.step
        for _ in sizes:
            address = base + mapped
            handles.append(ok(api.cuMemCreate(step, bare.prop, 0)))
            ok(api.cuMemMap(address, step, 0, handles[-1], 0))
            mapped += step
            ok(api.cuMemSetAccess(address, step, bare.grants, 1))
            look()
        return time.perf_counter() - begin
    finally:
        if mapped:
            api.cuMemUnmap(base, mapped)
        for handle in handles:
            api.cuMemRelease(handle)
        api.cuMemAddressFree(base, sizes[-1])


def _region(location: Location, sizes: _Sizes, look: _Look) -> float:
    with Region.create(location, capacity=sizes[-1]) as region:
        begin = time.perf_counter()
        for nbytes in sizes:
            region.grow(nbytes)
            look()
        return time.perf_counter() - begin


def _array(location: Location, sizes: _Sizes, look: _Look) -> float:
    with vram.empty(0, "uint8", device=location, capacity=sizes[-1]) as array:
        begin = time.perf_counter()
        for nbytes in sizes:
            array.resize(nbytes)
            look()
        return time.perf_counter() - begin


def _by_copies(bare: Bare, sizes: _Sizes, look: _Look) -> float:
    api, ok = bare.api, bare.ok
    held: list[Any] = []
    try:
        begin = time.perf_counter()
        for nbytes in sizes:
            held.append(ok(api.cuMemAlloc(nbytes)))
            look()
            if len(held) > 1:
                ok(api.cuMemcpyDtoDAsync(held[1], held[0], nbytes - sizes.step, 0))
                ok(api.cuStreamSynchronize(0))
                ok(api.cuMemFree(held.pop(0)))
        return time.perf_counter() - begin
    finally:
        for address in held:
            api.cuMemFree(address)


def _by_torch(torch: Any, location: Location, sizes: _Sizes, look: _Look) -> float:
    """Its cache is emptied afterwards: what grows has no old blocks of the right sizes."""
    try:
        tensor = torch.empty(0, dtype=torch.uint8, device=f"cuda:{ordinal_of(location)}")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for nbytes in sizes:
            larger = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
            look()
            larger[: len(tensor)].copy_(tensor)
            tensor = larger
            del larger
        torch.cuda.synchronize()
        return time.perf_counter() - begin
    finally:
        tensor = None
        torch.cuda.empty_cache()
