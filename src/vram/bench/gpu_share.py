"""Memory that is there already, lent to another process: by each route, tensors by the thousand, again and again."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import vram

from .. import driver as drivers
from ..driver.foreign import MAX_POOL_ALLOCATION
from ..errors import InternalError
from ..sharing.channel import Channel, transmit
from ..spec import Location, format_size
from .bare_calls import Bare, bare_calls, ordinal_of
from .borrowers import BARE, borrower, take_lists
from .children import Child, child, socket_pair, workplace
from .gpu_torch import torch_on
from .machine import fitting
from .measure import Figure, Result, Row, in_turns, places, timed

__all__ = ["measure"]

_TENSORS = 1000
_SIZES = (2 << 20, 16 << 30)
_MESSAGE = bytes(100)
_ROUTES = {
    "fd": "by descriptor (vram memory)",
    "legacy": "by 64-byte handle (cudaMalloc)",
    "pool": "by pool (cudaMallocAsync)",
}


def measure(quick: bool, location: Location) -> Result:
    """Measure between this process and one child; torch has a child of its own."""
    rows: list[Row] = []
    notes: list[str] = []
    device = f"cuda:{ordinal_of(location)}"
    with contextlib.ExitStack() as stage:
        folder = stage.enter_context(workplace())
        packets, far_packets = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
        near, far = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
        bare = stage.enter_context(bare_calls(location))
        other = stage.enter_context(child(borrower, far_packets, far, device))
        far_packets.close()
        far.close()
        other.hear()
        channel = stage.enter_context(vram.ArrayChannel(Channel(near.dup())))
        near.close()
        path = str(folder / "lent")
        rows += _thousand(quick, location, device, path, other, notes)
        for wanted in _SIZES[: 1 if quick else 2]:
            nbytes = fitting(location, wanted, 1, 1.5, notes)
            for route in _ROUTES:
                size = min(nbytes, MAX_POOL_ALLOCATION) if route == "pool" else nbytes
                rows += _route(quick, route, size, bare, location, path, other, packets)
        rows += _again(quick, bare, device, channel, packets, other, notes)
        rows += _staged(quick, location, bare, notes)
    notes.append(
        "bare: the same calls of the driver in both processes, the handle passed over a socket that is there already; "
        "the sender exports its descriptor anew each time, as vram does once. New: from lend() until all was given "
        "back and the path is gone; a socket, a thread and a connection each time. Lent already: one more borrower"
    )
    return Result("share", "GPU memory lent to another process", rows, notes)


# -- tensors by the thousand ----------------------------------------------------------------------------------------
def _thousand(quick: bool, location: Location, device: str, path: str, other: Child, notes: list[str]) -> list[Row]:
    torch = torch_on(location, notes)
    if torch is None:
        return []
    count = 50 if quick else _TENSORS
    tensors = [torch.full((256, 16), float(number), device=device) for number in range(count)]
    torch.cuda.synchronize()
    named = {str(number): tensor for number, tensor in enumerate(tensors)}

    def ours() -> float:
        begin = time.perf_counter()
        with vram.lend(named, at=path):
            if other.ask("borrow", path, True) != count:
                raise InternalError("not all tensors arrived")
            spent = time.perf_counter() - begin
            other.ask("give back")
        return spent

    with _lists(torch) as send:
        cases = {"ours": ours, "list": lambda: send([tensors]), "each": lambda: send(tensors)}
        values = in_turns(cases, 3 if quick else 15)
    figures = {name: Figure.of(seconds, "ms", scale=1e3) for name, seconds in values.items()}
    each = Row(f"torch.multiprocessing: {count} CUDA tensors, a message each", figures["each"])
    batch = Row(f"torch.multiprocessing: {count} CUDA tensors, a list in one message", figures["list"])
    name = f"{count} torch tensors lent, and tensors in the other process"
    mine = Row.held(name, figures["ours"], each, at_most=0.05)
    segments = len({vram.share(tensor).region.address for tensor in tensors})
    notes.append(
        f"the {count} tensors lie in {segments} allocations of torch's, each opened once; torch sends the same ones "
        f"again each time, of which it remembers what it can, and vram lends them anew each time"
    )
    return [each, batch, mine, Row.held(name, figures["ours"], batch)]


@contextlib.contextmanager
def _lists(torch: Any) -> Iterator[Callable[[Any], float]]:
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    try:
        with child(take_lists, there, back) as far:
            far.hear()

            def send(messages: Any) -> float:
                begin = time.perf_counter()
                for message in messages:
                    there.put(message)
                for _ in messages:
                    back.get(timeout=120)
                return time.perf_counter() - begin

            try:
                yield send
            finally:
                there.put(None)
                back.get(timeout=120)
    finally:
        for queue in (there, back):
            queue.close()
            queue.join_thread()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


# -- each route -----------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _memory(route: str, nbytes: int, bare: Bare, location: Location) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Memory of one kind: what is lent, and what a bare sender makes of it, (bytes, descriptors to close)."""
    api, ok = bare.api, bare.ok
    device = f"cuda:{ordinal_of(location)}"
    if route == "fd":
        with vram.zeros(nbytes, "uint8", device=device) as array:
            handle = ok(api.cuMemRetainAllocationHandle(array.address))
            try:
                yield array, lambda: (b"-", [ok(api.cuMemExportToShareableHandle(handle, bare.fd_kind, 0))])
            finally:
                ok(api.cuMemRelease(handle))
    elif route == "legacy":
        address = int(ok(api.cuMemAlloc(nbytes)))
        try:
            yield (address, nbytes, device), lambda: (bare.bytes_of(ok(api.cuIpcGetMemHandle(address))), [])
        finally:
            ok(api.cuMemFree(address))
    else:
        driver = drivers.get(location)
        with vram.memory.Pool.create(driver, location) as pool, pool.allocate(nbytes) as region:
            number = region.infos[0].pool

            def export() -> tuple[bytes, list[int]]:
                fd = ok(api.cuMemPoolExportToShareableHandle(api.CUmemoryPool(number), bare.fd_kind, 0))
                return bare.bytes_of(ok(api.cuMemPoolExportPointer(region.address))), [fd]

            yield (region.address, nbytes, device), export


def _route(
    quick: bool,
    route: str,
    nbytes: int,
    bare: Bare,
    location: Location,
    path: str,
    other: Child,
    packets: socket.socket,
) -> list[Row]:
    with _memory(route, nbytes, bare, location) as (memory, export):

        def raw() -> float:
            other.tell("bare", route, nbytes, 1)
            begin = time.perf_counter()
            data, fds = export()
            transmit(packets, data, fds)
            packets.recv(BARE)
            for fd in fds:
                os.close(fd)
            return time.perf_counter() - begin

        def new() -> float:
            other.tell("borrow", path, False)
            begin = time.perf_counter()
            with vram.lend(memory, at=path, writable=True):
                other.hear()
                other.ask("give back")
            return time.perf_counter() - begin

        values = in_turns({"raw": raw, "new": new}, 3 if quick else 25)
        with vram.lend(memory, at=path, writable=True):
            again = [other.ask("again", path, 5) for _ in range(3 if quick else 25)]
    what = f"{format_size(nbytes)} {_ROUTES[route]}"
    rival = Row(f"{what}: bare calls", Figure.of(values["raw"], "us", scale=1e6))
    return [
        rival,
        Row.held(f"{what}: lent already, borrowed, given back", Figure.of(again, "us", scale=1e6), rival, at_most=1.5),
        Row.held(f"{what}: lent, borrowed, given back", Figure.of(values["new"], "us", scale=1e6), rival),
    ]


# -- the same again -------------------------------------------------------------------------------------------------
def _again(
    quick: bool,
    bare: Bare,
    device: str,
    channel: vram.ArrayChannel,
    packets: socket.socket,
    other: Child,
    notes: list[str],
) -> list[Row]:
    api, ok = bare.api, bare.ok
    times = 200 if quick else 10_000
    repeat = 20 if quick else 250
    address = int(ok(api.cuMemAlloc(2 << 20)))
    rows: list[Row] = []
    try:
        shared = vram.share((address, 2 << 20, device))

        def raw() -> None:
            packets.send(_MESSAGE)
            packets.recv(200)

        def hand_over() -> None:
            channel.send(shared)
            channel.recv()

        def case(kind: str, work: Callable[[], object]) -> Callable[[], float]:
            def burst() -> float:
                other.tell(kind, repeat + 1)
                work()  # wakes the other side up
                return timed(work, repeat)

            return burst

        before = None
        for place in places():
            with place.hold(other.pid):
                values = in_turns({"raw": case("packets", raw), "ours": case("array", hand_over)}, times // repeat)
            rival = Row(f"raw SEQPACKET socket, {place.name}", Figure.of(values["raw"], "us", scale=1e6))
            ours = Figure.of(values["ours"], "us", scale=1e6)
            name = f"the same cudaMalloc memory over a channel, a number back, {place.name}"
            rows += [rival, Row.held(name, ours, rival, at_most=3)]
            before = before or _counts(other.pid)
        grown = [now - then for now, then in zip(_counts(other.pid), before or (), strict=True)]
        rows += [
            Row.limited(f"{times} of them: descriptors left behind", Figure.of([grown[0]], "fds"), at_most=0),
            Row.limited(f"{times} of them: growth of memory", Figure.of([grown[1] / 2**20], "MiB"), at_most=1),
        ]
        shared.close()
    finally:
        ok(api.cuMemFree(address))
    return rows


def _counts(pid: int) -> tuple[int, int]:
    """Return the descriptors of this process and another, and the largest resident size, in bytes, of this one."""
    fds = sum(len(os.listdir(f"/proc/{who}/fd")) for who in ("self", pid))
    return fds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- through the host -----------------------------------------------------------------------------------------------
def _staged(quick: bool, location: Location, bare: Bare, notes: list[str]) -> list[Row]:
    """GPU to GPU (or to itself, where there is one) through pinned memory, against the pinned copies alone."""
    from ..transports.staged import StagedTransport

    driver: Any = drivers.get(location)
    here = Location("cuda", ordinal_of(location))
    there = Location("cuda", (ordinal_of(location) + 1) % driver.device_count())
    nbytes = fitting(location, (16 << 20) if quick else (1 << 30), 2, 1.5, notes)
    with contextlib.ExitStack() as stage:
        source = stage.enter_context(vram.zeros(nbytes, "uint8", device=here))
        target = stage.enter_context(vram.zeros(nbytes, "uint8", device=there))
        staged = stage.enter_context(StagedTransport(here, there))
        pinned = stage.enter_context(vram.zeros(nbytes, "uint8", device="host", populate=True))
        driver.host_register(pinned.address, nbytes, here)
        stage.callback(driver.host_unregister, pinned.address)
        out, into = driver.stream_create(here), driver.stream_create(there)
        stage.callback(driver.stream_destroy, into)
        stage.callback(driver.stream_destroy, out)

        def half(to: int, fro: int, stream: int, place: Location) -> float:
            def work() -> None:
                driver.copy_async(to, fro, nbytes, stream)
                driver.stream_synchronize(stream, place)

            return nbytes / timed(work)

        def through() -> None:
            staged.send(source)
            staged.recv(target)

        values = in_turns(
            {
                "out": lambda: half(pinned.address, source.address, out, here),
                "in": lambda: half(target.address, pinned.address, into, there),
                "staged": lambda: nbytes / timed(through),
            },
            3 if quick else 15,
        )
    figures = {name: Figure.of(rates, "GB/s", scale=1e-9) for name, rates in values.items()}
    down, up = (
        Row(f"pinned copy, {way}", figures[key]) for way, key in (("GPU to host", "out"), ("host to GPU", "in"))
    )
    slower = min((down, up), key=lambda row: row.figure.median)
    if there == here:
        notes.append("one GPU: what is staged goes from it and back to it, so both directions share one link")
    return [down, up, Row.held(f"staged {here} to {there}", figures["staged"], slower, at_least=0.8)]
