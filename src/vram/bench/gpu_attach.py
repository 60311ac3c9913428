"""Attach GPU memory of many segments by name: against the bare import, map and set_access of the same descriptors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import vram

from .. import driver as drivers
from ..errors import InternalError
from ..keeper.client import KeeperClient
from ..sharing.channel import close_fds
from ..spec import Location, format_size
from .bare_calls import Bare, bare_calls
from .children import child, own_keeper
from .machine import fitting
from .measure import Figure, Result, Row, in_turns

__all__ = ["measure"]

_SEGMENTS = 64
_SEGMENT = 256 << 20
_FEW = 4  # segments of the entry that fresh processes attach
_LARGE = 16 << 30  # bytes of each
_NAME = "model"
_BYTE = 0x5A


def measure(quick: bool, location: Location) -> Result:
    """Measure from the call until all of it is mapped and readable; the publisher is another process."""
    notes: list[str] = []
    segment = fitting(location, (2 << 20) if quick else _SEGMENT, _SEGMENTS, 1.25, notes)
    with contextlib.ExitStack() as stage:
        keeper = stage.enter_context(own_keeper())
        bare = stage.enter_context(bare_calls(location))
        publisher = stage.enter_context(child(_publisher, keeper, str(location), segment, _SEGMENTS))
        publisher.hear()
        fds = stage.enter_context(_descriptors(keeper))
        _check(keeper, segment, _SEGMENTS)
        values = in_turns(
            {
                "bare": lambda: _bare(bare, fds, segment),
                "attach": lambda: _attach(keeper, released=False),
                "release": lambda: _attach(keeper, released=True),
            },
            2 if quick else 25,
        )
    figures = {name: Figure.of(seconds, "ms", scale=1e3) for name, seconds in values.items()}
    raw = Row("bare calls: import, map, set_access", figures["bare"])
    notes.append(
        f"{format_size(segment * _SEGMENTS)} in {_SEGMENTS} segments, published by another process; the process has a "
        f"context and is connected to its keeper already. Bare: one import and one map for each descriptor, already "
        f"received, and one set_access over all of them"
    )
    rows = [
        raw,
        Row.held("attach", figures["attach"], raw, at_most=1.3),
        Row.held("attach, release acknowledged", figures["release"], raw),
    ]
    rows += _in_fresh_processes(quick, location, notes)
    return Result("attach", "Attach GPU memory by name, mapped and readable", rows, notes)


def _in_fresh_processes(quick: bool, location: Location, notes: list[str]) -> list[Row]:
    """Measure the first attach of processes that have a context and nothing else of ours: against bare calls, first.

    Each process does both, and the other one first in turns, so that neither pays for what the other has brought up.
    """
    segment = fitting(location, (2 << 20) if quick else _LARGE, _FEW, 1.1, notes)
    took: dict[str, list[float]] = {}
    with own_keeper() as keeper, child(_publisher, keeper, str(location), segment, _FEW) as publisher:
        publisher.hear()
        _check(keeper, segment, _FEW)
        for number in range(2 if quick else 14):
            first = ("attach", "bare")[number % 2]
            with child(_fresh, keeper, str(location), segment, first) as process:
                for name, seconds in process.hear().items():
                    took.setdefault(f"{name} first" if name == first else name, []).append(seconds)
    what = f"{format_size(segment * _FEW)} in {_FEW} segments, in a fresh process"
    figures = {name: Figure.of(seconds, "ms", scale=1e3) for name, seconds in took.items()}
    raw = Row(f"bare import, map, set_access: {what}", figures["bare first"])
    later = Row(f"bare import, map, set_access, after an attach: {what}", figures["bare"])
    notes.append(
        f"fresh: one attach in each process, which has a context and has loaded the modules that attaching takes; it "
        f"connects to its keeper on the way. The bare calls have their {_FEW} descriptors already"
    )
    return [
        raw,
        Row.held(f"attach: {what}", figures["attach first"], raw, at_most=1.3),
        Row.limited(f"attach, on the clock: {what}", figures["attach first"], at_most=50),
        Row("the modules that attaching takes, loaded before it", figures["load"]),
        Row("a connection, and the descriptors from the keeper, which bare calls are given", figures["asked"]),
        later,
        Row.held(f"attach, after bare calls: {what}", figures["attach"], later),
    ]


@contextlib.contextmanager
def _descriptors(keeper: str) -> Iterator[Sequence[int]]:
    """Hold the descriptors of the entry, as a reader gets them, and a lease for them."""
    with KeeperClient.connect(keeper, label="bare calls") as reader:
        fds = reader.attach(_NAME).fds
        try:
            yield fds
        finally:
            close_fds(fds)


def _check(keeper: str, segment: int, count: int) -> None:
    """Look at a byte of each segment, once: what is measured has to be right."""
    with vram.attach(_NAME, keeper=keeper) as lease:
        array = lease["w"]
        found = bytearray(1)
        for number in range(count):
            array.region.driver.copy_out(memoryview(found), array.address + (number + 1) * segment - 1)
            if found[0] != _BYTE:
                raise InternalError(f"segment {number} of the attached array has {found[0]:#x} at its end")


def _attach(keeper: str, *, released: bool) -> float:
    begin = time.perf_counter()
    lease = vram.attach(_NAME, keeper=keeper)
    spent = time.perf_counter() - begin
    lease.close(wait=released)
    return time.perf_counter() - begin if released else spent


def _bare(bare: Bare, fds: Sequence[int], segment: int) -> float:
    api, ok = bare.api, bare.ok
    total = segment * len(fds)
    base = int(ok(api.cuMemAddressReserve(total, 0, 0, 0)))
    handles: list[Any] = []
    mapped = 0
    try:
        begin = time.perf_counter()
        for fd in fds:
            handles.append(ok(api.cuMemImportFromShareableHandle(fd, bare.fd_kind)))
            ok(api.cuMemMap(base + mapped, segment, 0, handles[-1], 0))
            mapped += segment
        ok(api.cuMemSetAccess(base, total, bare.grants, 1))
        return time.perf_counter() - begin
    finally:
        if mapped:
            api.cuMemUnmap(base, mapped)
        for handle in handles:
            api.cuMemRelease(handle)
        api.cuMemAddressFree(base, total)


def _fresh(pipe: Connection, keeper: str, device: str, segment: int, first: str) -> None:
    """Measure one attach and the bare calls for the same memory, in this order or the other; send the seconds."""
    took: dict[str, float] = {}
    with bare_calls(Location.parse(device)) as bare:
        begin = time.perf_counter()
        vram.attach  # noqa: B018  (which loads them)
        took["load"] = time.perf_counter() - begin
        if first == "attach":
            took["attach"] = _attach(keeper, released=False)
        begin = time.perf_counter()
        with _descriptors(keeper) as fds:
            took["asked"] = time.perf_counter() - begin
            took["bare"] = _bare(bare, fds, segment)
        if first != "attach":
            took["attach"] = _attach(keeper, released=False)
    pipe.send(took)


def _publisher(pipe: Connection, keeper: str, device: str, segment: int, count: int) -> None:
    """The other process: publish, and stay until the parent hangs up."""
    location = Location.parse(device)
    with vram.empty(count * segment, "uint8", device=location, chunk=segment) as array:
        drivers.get(location).fill(array.address, _BYTE, array.nbytes)
        vram.publish(_NAME, {"w": array}, keeper=keeper)
    pipe.send("ready")
    pipe.recv()
