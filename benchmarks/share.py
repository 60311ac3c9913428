"""Memory lent directly to another process.

On the host against its descriptor handed over a raw socket; on a GPU by each route, tensors by the thousand, again and
again, against bare calls and torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import socket
import time
from array import array
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import vram
from vram import driver as drivers
from vram.bench.children import DEADLINE, Child, child, queue_pair, socket_pair, workplace
from vram.bench.gpu import Bare, bare_calls, ordinal_of, torch_on
from vram.bench.machine import fitting
from vram.bench.measure import Figure, Result, Row, in_turns, places, timed
from vram.driver.protocol import MAX_POOL_ALLOCATION
from vram.errors import InternalError
from vram.open_files import close_fds
from vram.sharing.channel import Channel, transmit
from vram.spec import Location, format_size

_TENSORS = 1000
_SIZES = (2 << 20, 16 << 30)
_MESSAGE = bytes(100)
_ROUTES = {
    "fd": "by descriptor (vram memory)",
    "legacy": "by 64-byte handle (cudaMalloc)",
    "pool": "by pool (cudaMallocAsync)",
}
_BARE = 4096  # bytes of a message between bare ends: a handle, or nothing


def on_host(quick: bool) -> Result:
    """Measure between this process and one child, for little memory and for much."""
    rows: list[Row] = []
    with _connected("host") as ends:
        for nbytes in (2 << 20,) if quick else (2 << 20, 1 << 30):
            for place in places():
                with place.hold(ends.other.pid), _on_host(nbytes) as (array, send):
                    what = f"{format_size(nbytes)}, {place.name}"
                    rival = f"{what}: raw descriptor, mapped, unmapped"
                    rows += _lent(ends, "host", nbytes, array, send, what, rival, 3 if quick else 40)
    notes = [
        "raw: the descriptor over a socket that is there already, mapped, unmapped, an answer. Lent already: one more "
        "borrower maps it and gives it back, which the lender acknowledges. Lent: from lend() until it was borrowed, "
        "given back and the path is gone, with a socket, a thread and a connection each time. Untouched memory: the "
        "pages are not what is measured"
    ]
    return Result("share", "Memory of the host lent to another process", rows, notes)


def on_gpu(quick: bool, location: Location) -> Result:
    """Measure between this process and one child; torch has a child of its own."""
    rows: list[Row] = []
    notes: list[str] = []
    device = f"cuda:{ordinal_of(location)}"
    with bare_calls(location) as bare, _connected(device) as ends:
        rows += _thousand(quick, location, device, ends, notes)
        for wanted in _SIZES[: 1 if quick else 2]:
            nbytes = fitting(location, wanted, 1, 1.5, notes)
            for route, words in _ROUTES.items():
                size = min(nbytes, MAX_POOL_ALLOCATION) if route == "pool" else nbytes
                what = f"{format_size(size)} {words}"
                with _on_gpu(route, size, bare, location) as (memory, send):
                    rows += _lent(ends, route, size, memory, send, what, f"{what}: bare calls", 3 if quick else 25)
        rows += _again(quick, bare, device, ends)
        rows += _staged(quick, location, notes)
    notes.append(
        "bare: the same calls of the driver in both processes, the handle passed over a socket that is there already; "
        "the sender exports its descriptor anew each time, as vram does once. New: from lend() until all was given "
        "back and the path is gone; a socket, a thread and a connection each time. Lent already: one more borrower"
    )
    return Result("share", "GPU memory lent to another process", rows, notes)


class _Ends(NamedTuple):
    """A path to lend at, this process's ends of two connections, and the process at the others."""

    path: str
    packets: socket.socket
    channel: vram.ArrayChannel
    other: Child


@contextlib.contextmanager
def _connected(device: str) -> Iterator[_Ends]:
    with contextlib.ExitStack() as stage:
        folder = stage.enter_context(workplace())
        packets, far_packets = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
        near, far = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
        other = stage.enter_context(child(_borrower, far_packets, far, device))
        far_packets.close()
        far.close()
        other.hear()
        channel = stage.enter_context(vram.ArrayChannel(Channel(near.dup())))
        near.close()
        yield _Ends(str(folder / "lent"), packets, channel, other)


# -- lent, and by hand ------------------------------------------------------------------------------------------------
_Send = Callable[[socket.socket], None]  # what a sender does without us


def _lent(
    ends: _Ends, route: str, nbytes: int, memory: Any, send: _Send, what: str, rival: str, rounds: int
) -> list[Row]:
    path, packets, _, other = ends

    def raw() -> float:
        other.tell("bare", route, nbytes)
        begin = time.perf_counter()
        send(packets)
        packets.recv(_BARE)
        return time.perf_counter() - begin

    def new() -> float:
        other.tell("borrow", path, False)
        begin = time.perf_counter()
        with vram.lend(memory, at=path, writable=True):
            other.hear()
            other.ask("give back")
        return time.perf_counter() - begin

    values = in_turns({"raw": raw, "new": new}, rounds)
    with vram.lend(memory, at=path, writable=True):
        values["again"] = [other.ask("again", path, 5) for _ in range(rounds)]
    figures = {name: Figure.of(seconds, "us", scale=1e6) for name, seconds in values.items()}
    bare = Row(rival, figures["raw"])
    return [
        bare,
        Row.held(f"{what}: lent already, borrowed, given back", figures["again"], bare, at_most=1.5),
        Row.held(f"{what}: lent, borrowed, given back", figures["new"], bare),
    ]


@contextlib.contextmanager
def _on_host(nbytes: int) -> Iterator[tuple[vram.Array, _Send]]:
    """Memory of the host, and what sends its descriptor."""
    with vram.zeros(nbytes, "uint8", device="host") as array:
        (allocation,), _ = array.region.segments(0, nbytes)
        fd = allocation.export()
        yield array, lambda packets: transmit(packets, b"-", [fd])
        allocation.close()


@contextlib.contextmanager
def _on_gpu(route: str, nbytes: int, bare: Bare, location: Location) -> Iterator[tuple[Any, _Send]]:
    """Memory of one kind, and what exports and sends it by bare calls."""
    api, ok = bare.api, bare.ok
    device = f"cuda:{ordinal_of(location)}"

    def send_fd(packets: socket.socket, fd: int, data: bytes = b"-") -> None:
        transmit(packets, data, [fd])
        os.close(fd)

    if route == "fd":
        with vram.zeros(nbytes, "uint8", device=device) as array:
            handle = ok(api.cuMemRetainAllocationHandle(array.address))
            try:
                yield (
                    array,
                    lambda packets: send_fd(packets, ok(api.cuMemExportToShareableHandle(handle, bare.fd_kind, 0))),
                )
            finally:
                ok(api.cuMemRelease(handle))
    elif route == "legacy":
        address = int(ok(api.cuMemAlloc(nbytes)))
        try:
            yield (
                (address, nbytes, device),
                lambda packets: transmit(packets, _bytes_of(ok(api.cuIpcGetMemHandle(address))), []),
            )
        finally:
            ok(api.cuMemFree(address))
    else:
        with pooled(location, nbytes) as (pool, address):

            def send(packets: socket.socket) -> None:
                fd = ok(api.cuMemPoolExportToShareableHandle(pool, bare.fd_kind, 0))
                send_fd(packets, fd, _bytes_of(ok(api.cuMemPoolExportPointer(address))))

            yield (address, nbytes, device), send


@contextlib.contextmanager
def pooled(location: Location, nbytes: int) -> Iterator[tuple[Any, int]]:
    """Yield a pool of a GPU that can be shared, and the address of memory from it."""
    from cuda.bindings import driver as api

    def ok(outcome: tuple[Any, ...]) -> Any:
        if int(outcome[0]):
            raise InternalError(f"the driver says {outcome[0]!r}")
        return outcome[1] if len(outcome) == 2 else None

    props = api.CUmemPoolProps()
    props.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.handleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    props.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = location.id
    ok(api.cuInit(0))
    ok(api.cuCtxPushCurrent(ok(api.cuDevicePrimaryCtxRetain(location.id))))
    pool = ok(api.cuMemPoolCreate(props))
    address = int(ok(api.cuMemAllocFromPoolAsync(nbytes, pool, 0)))
    ok(api.cuStreamSynchronize(0))
    try:
        yield pool, address
    finally:
        ok(api.cuMemFreeAsync(address, 0))
        ok(api.cuStreamSynchronize(0))
        ok(api.cuMemPoolDestroy(pool))
        ok(api.cuCtxPopCurrent())
        ok(api.cuDevicePrimaryCtxRelease(location.id))


def _bytes_of(struct: Any) -> bytes:
    """Return the 64 bytes of one of the driver's structs."""
    return ctypes.string_at(int(struct.getPtr()), 64)


def _struct(kind: Any, data: bytes) -> Any:
    made = kind()
    ctypes.memmove(int(made.getPtr()), data, 64)
    return made


# -- tensors by the thousand ----------------------------------------------------------------------------------------
def _thousand(quick: bool, location: Location, device: str, ends: _Ends, notes: list[str]) -> list[Row]:
    torch = torch_on(location, notes)
    if torch is None:
        return []
    count = 50 if quick else _TENSORS
    tensors = [torch.full((256, 16), float(number), device=device) for number in range(count)]
    torch.cuda.synchronize()
    named = {str(number): tensor for number, tensor in enumerate(tensors)}

    def ours() -> float:
        begin = time.perf_counter()
        with vram.lend(named, at=ends.path):
            if ends.other.ask("borrow", ends.path, True) != count:
                raise InternalError("not all tensors arrived")
            spent = time.perf_counter() - begin
            ends.other.ask("give back")
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

    try:
        with queue_pair(processes.get_context("spawn")) as (there, back), child(_take_lists, there, back) as far:
            far.hear()

            def send(messages: Any) -> float:
                begin = time.perf_counter()
                for message in messages:
                    there.put(message)
                for _ in messages:
                    back.get(timeout=DEADLINE)
                return time.perf_counter() - begin

            try:
                yield send
            finally:
                there.put(None)
                back.get(timeout=DEADLINE)
    finally:
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


# -- the same again -------------------------------------------------------------------------------------------------
def _again(quick: bool, bare: Bare, device: str, ends: _Ends) -> list[Row]:
    _, packets, channel, other = ends
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
def _staged(quick: bool, location: Location, notes: list[str]) -> list[Row]:
    """GPU to GPU (or to itself, where there is one) through pinned memory, against the pinned copies alone."""
    from vram.transports.staged import StagedTransport

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


# -- the other process ------------------------------------------------------------------------------------------------
def _borrower(pipe: Connection, packets: socket.socket, sock: socket.socket, device: str) -> None:
    """Told what comes over which connection. Ends when its parent hangs up."""
    location = Location.parse(device)
    with contextlib.ExitStack() as stage:
        bare = None if location.kind == "host" else stage.enter_context(bare_calls(location))
        channel = stage.enter_context(vram.ArrayChannel(Channel(sock)))
        pipe.send("ready")
        while True:
            what, *rest = pipe.recv()
            if what == "borrow":
                _borrow(pipe, *rest)
            elif what == "again":
                _borrow_again(pipe, *rest)
            elif what == "bare":
                _bare(packets, bare, *rest)
            elif what == "packets":
                for _ in range(rest[0]):
                    packets.send(packets.recv(200))
            else:
                for _ in range(rest[0]):
                    value = channel.recv()
                    channel.send(1)
                value = None  # noqa: F841  (let go of before the next command)


def _borrow(pipe: Connection, path: str, as_torch: bool) -> None:
    """Borrow all of it, have every array in hand, say so; give it back when told."""
    lease = vram.borrow(path)
    held: Any = lease.torch() if as_torch else dict(lease.items())
    pipe.send(len(held))
    pipe.recv()
    held.clear()
    lease.close(wait=True)
    pipe.send("given back")


def _borrow_again(pipe: Connection, path: str, times: int) -> None:
    """Borrow and give back what is lent already."""
    begin = time.perf_counter()
    for _ in range(times):
        vram.borrow(path).close()
    pipe.send((time.perf_counter() - begin) / times)


def _bare(packets: socket.socket, bare: Bare | None, kind: str, nbytes: int) -> None:
    """Receive a handle, open what it stands for, close it, answer: what every hand-written way comes to."""
    payload, ancillary, _, _ = packets.recvmsg(_BARE, 1024)
    fds = array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    if kind == "host":
        mmap.mmap(fds[0], nbytes, prot=mmap.PROT_READ).close()
    elif bare is not None:
        _open(bare, kind, nbytes, payload, list(fds))
    close_fds(list(fds))
    packets.send(b"done")


def _open(bare: Bare, kind: str, nbytes: int, payload: bytes, fds: list[int]) -> None:
    api, ok = bare.api, bare.ok
    if kind == "fd":
        base = ok(api.cuMemAddressReserve(nbytes, 0, 0, 0))
        handle = ok(api.cuMemImportFromShareableHandle(fds[0], bare.fd_kind))
        ok(api.cuMemMap(base, nbytes, 0, handle, 0))
        ok(api.cuMemRelease(handle))
        ok(api.cuMemSetAccess(base, nbytes, bare.grants, 1))
        ok(api.cuMemUnmap(base, nbytes))
        ok(api.cuMemAddressFree(base, nbytes))
    elif kind == "legacy":
        ok(api.cuIpcCloseMemHandle(ok(api.cuIpcOpenMemHandle(_struct(api.CUipcMemHandle, payload), 1))))
    else:
        pool = ok(api.cuMemPoolImportFromShareableHandle(fds[0], bare.fd_kind, 0))
        address = ok(api.cuMemPoolImportPointer(pool, _struct(api.CUmemPoolPtrExportData, payload)))
        ok(api.cuMemFreeAsync(address, 1))
        ok(api.cuStreamSynchronize(1))
        ok(api.cuMemPoolDestroy(pool))


def _take_lists(pipe: Connection, there: Any, back: Any) -> None:
    """The other process of torch's: takes tensors, or lists of them, out of a queue. Ends with None."""
    import torch

    torch.cuda.init()
    pipe.send("ready")
    while (tensors := there.get()) is not None:
        back.put(len(tensors))
        del tensors
    back.put(0)
