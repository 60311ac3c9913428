"""GPU memory grown in place: against the bare calls, and against what allocates anew and copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import vram

from ..memory import Region
from ..spec import Location, format_size
from .bare_calls import Bare, bare_calls, ordinal_of
from .gpu_torch import torch_on
from .machine import fitting
from .measure import Figure, Result, Row, in_turns

__all__ = ["measure"]

_STEPS = 32
_STEP = 256 << 20
_Look = Callable[[], object]  # called when most memory is held
_Sizes = range  # all sizes in turn; the step is the first of them


def measure(quick: bool, location: Location) -> Result:
    """Measure growth step by step, and in passes of their own the most memory that is held at one time."""
    notes: list[str] = []
    with bare_calls(location) as bare:
        steps = 8 if quick else _STEPS
        step = fitting(location, (2 << 20) if quick else _STEP, steps, 2.25, notes)
        sizes = range(step, step * steps + 1, step)
        ways: dict[str, Callable[[_Look], float]] = {
            "raw": lambda look: _raw(bare, sizes, look),
            "region": lambda look: _region(location, sizes, look),
            "array": lambda look: _array(location, sizes, look),
            "copy": lambda look: _by_copying(bare, sizes, look),
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
    return lambda: way(_nothing)


def _nothing() -> None:
    pass


def _peak(bare: Bare, way: Callable[[_Look], float], sizes: _Sizes) -> Figure:
    before = bare.free_bytes()
    least = [before]
    way(lambda: least.append(bare.free_bytes()))
    return Figure.of([(before - min(least)) / sizes[-1]], "x its size")


def _raw(bare: Bare, sizes: _Sizes, look: _Look) -> float:
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


def _by_copying(bare: Bare, sizes: _Sizes, look: _Look) -> float:
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
