"""What runs in the other processes of the tests of transports and of 64-byte handles."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from tests.support.deadlines import SOON

import vram
from vram import driver as drivers
from vram.arrays import Array
from vram.memory.foreign import find_foreign
from vram.spec import Location
from vram.testing.transport import ARENA
from vram.transports import IpcTransport, PipeExchange, SharedMemoryExchange, ShmTransport, SocketExchange, VmmTransport

WAYS: dict[str, Any] = {"socket": SocketExchange, "pipes": PipeExchange, "memory": SharedMemoryExchange}
KINDS: dict[str, Any] = {"ipc": IpcTransport, "vmm": VmmTransport, "shm": ShmTransport}


def cuda_malloc(nbytes: int, device: int = 0) -> int:
    """Return the address of new memory of cudaMalloc."""
    from tests.standin.calls import ok

    ok("cuInit", 0)
    ok("cuCtxPushCurrent", ok("cuDevicePrimaryCtxRetain", device))
    address = int(ok("cuMemAlloc", nbytes))
    ok("cuCtxPopCurrent")  # left current, it would be in the way of tests that look
    return address


def cuda_free(address: int) -> None:
    """Free it."""
    from tests.standin.calls import ok

    ok("cuCtxPushCurrent", ok("cuDevicePrimaryCtxRetain", 0))
    ok("cuMemFree", address)
    ok("cuCtxPopCurrent")


def legacy_array(address: int, nbytes: int) -> Array:
    """Return an array over memory of cudaMalloc."""
    region, offset = find_foreign(drivers.get(Location("cuda")), address, nbytes)
    return Array(region, "uint8", nbytes, offset=offset)


def arena_of(kind: str, src: str) -> Array:
    """Return the memory that a child sends from."""
    if kind == "ipc":
        return legacy_array(cuda_malloc(ARENA, int(src.partition(":")[2])), ARENA)
    return vram.empty(ARENA, "uint8", device=src)


class Dying:
    """An exchange that ends its process with SIGKILL instead of sending for the nth time."""

    def __init__(self, inner: Any, after: int) -> None:
        self._inner, self._left = inner, after
        self.carries_fds, self.most = inner.carries_fds, inner.most

    def send(self, payload: bytes, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        self._inner.send(payload, fds, timeout=timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def sender(pipe: Connection) -> None:
    """Connect as told, again and again, and do as told until the pipe ends."""
    pipe.send("here")
    arenas: dict[tuple[str, str], Array] = {}
    with contextlib.suppress(EOFError):
        while True:
            kind, way, path, src, dst = pipe.recv()
            if (kind, src) not in arenas:
                arenas[kind, src] = arena_of(kind, src)
            try:
                transport = KINDS[kind](src, dst, WAYS[way].connect(path, SOON), timeout=SOON)
            except vram.errors.PeerGoneError:  # a test that needed no sender is over already
                pipe.recv()
                continue
            with transport:
                _serve(pipe, transport, arenas[kind, src])


def _serve(pipe: Connection, transport: Any, arena: Array) -> None:
    while True:
        word, *rest = pipe.recv()
        if word == "end":
            return
        try:
            pipe.send(_done(transport, arena, word, *rest))
        except vram.errors.VramError as error:
            pipe.send((type(error).__name__, str(error)))


def _done(transport: Any, arena: Array, word: str, data: bytes = b"", offset: int = 0) -> object:
    part = arena[offset : offset + len(data)]
    if data:
        part[...] = np.frombuffer(data, np.uint8)
    if word == "send":
        transport.send(part)
    elif word == "export":
        return transport.export(part).payload
    elif word == "synchronize":
        transport.synchronize(timeout=SOON)
    elif word == "statistics":
        found = transport.statistics()
        return found.sent.messages, found.sent.nbytes
    return "done"


def dying_sender(pipe: Connection, kind: str, way: str, path: str, place: str, after: int) -> None:
    """Send memory of many segments, or of cudaMalloc, and die at the nth message."""
    array = arena_of(kind, place) if kind == "ipc" else vram.empty(260 << 21, "uint8", device=place, chunk="2MiB")
    exchange = Dying(WAYS[way].connect(path, SOON), after)
    transport = KINDS[kind](place, place, exchange, timeout=SOON)
    transport.send(array)
    transport.synchronize(timeout=SOON)
    pipe.send("alive")


def receiver(pipe: Connection, kind: str, way: str, path: str, place: str) -> None:
    """Receive once, say so, and wait to be killed."""
    transport = KINDS[kind](place, place, WAYS[way].connect(path, SOON))
    array = transport.recv(timeout=SOON)
    pipe.send(array.nbytes)
    pipe.recv()


def holder(pipe: Connection, kind: str, path: str, place: str) -> None:
    """Connect, and receive nothing; wait to be killed."""
    with KINDS[kind](place, place, SocketExchange.connect(path, SOON)):
        pipe.send("here")
        pipe.recv()


def talker(pipe: Connection, way: str, path: str) -> None:
    """Bring every message back, twice as long."""
    with WAYS[way].connect(path, SOON) as exchange, contextlib.suppress(vram.errors.PeerGoneError):
        while True:
            payload, fds = exchange.recv(timeout=SOON)
            for fd in fds:
                os.close(fd)
            exchange.send((payload * 2)[: exchange.most], timeout=SOON)
    with contextlib.suppress(BrokenPipeError):  # a test that does not ask has ended
        pipe.send("gone")


def owner(pipe: Connection, nbytes: int, device: int) -> None:
    """Make memory of cudaMalloc with known bytes; say what its handle is, from an address inside; do as told."""
    address = cuda_malloc(nbytes, device)
    array = legacy_array(address, nbytes)
    array[...] = (np.arange(nbytes) % 251).astype("uint8")
    pipe.send("here")
    with contextlib.suppress(EOFError):
        while True:
            word, *rest = pipe.recv()
            if word == "handle":
                handle = vram.sharing.IpcMemHandle.of(address + rest[0])
                pipe.send((handle.to_bytes(), handle.offset, handle.nbytes, handle.allocation_nbytes))
            elif word == "look":
                pipe.send(array.to_host().tobytes())
            elif word == "free":
                array.close()
                cuda_free(address)
                pipe.send("freed")


def without_peers(pipe: Connection) -> None:
    """Say what each transport answers where two GPUs are no peers, and what is chosen."""
    from vram.transports import PeerTransport, StagedTransport, select

    answers = {}
    for cls in (IpcTransport, VmmTransport, PeerTransport, StagedTransport, ShmTransport):
        answer = cls.available("cuda:0", "cuda:1")
        answers[cls.kind] = (bool(answer), getattr(answer, "reason", ""))
    refused = ""
    try:
        PeerTransport("cuda:0", "cuda:1").close()
    except vram.errors.UnsupportedError as error:
        refused = str(error)
    chosen = select("cuda:0", "cuda:1", nbytes="1MiB")
    with chosen.transport() as transport, vram.zeros(70_000, "uint8", device="cuda:0") as array:
        array[...] = 7
        transport.send(array)
        with transport.recv() as came:
            moved = int(came.to_host().min())
    pipe.send((answers, refused, chosen.best.kind, moved))


def without_a_driver(pipe: Connection) -> None:
    """Say what each transport answers where there is no driver at all, and what a selection says."""
    from vram.transports.selection import TRANSPORTS, select

    answers = {}
    for cls in TRANSPORTS:
        answer = cls.available("cuda:0", "cuda:0")
        answers[cls.kind] = (bool(answer), getattr(answer, "reason", ""))
    try:
        select("cuda:0", "host").transport().close()
        said = "chosen"
    except vram.errors.UnsupportedError as error:
        said = str(error)
    pipe.send((answers, select("host", "host").best.kind, said))


def taker(pipe: Connection, kind: str, path: str, src: str, dst: str) -> None:
    """Receive what it is told to, and say what it sees; what came is kept until it is told to drop it."""
    kept: list[Array] = []
    with KINDS[kind](src, dst, SocketExchange.connect(path, SOON), timeout=SOON) as transport:
        pipe.send("here")
        with contextlib.suppress(EOFError):
            while True:
                word, *rest = pipe.recv()
                if word == "recv":
                    kept.append(transport.recv(timeout=SOON))
                    pipe.send(kept[-1].to_host().tobytes())
                elif word == "import":
                    kept.append(transport.import_(rest[0]))
                    pipe.send(kept[-1].to_host().tobytes())
                elif word == "read":
                    pipe.send(kept[-1].to_host().tobytes())
                elif word == "drop":
                    while kept:
                        kept.pop().close()
                    transport.synchronize(timeout=SOON)  # a call of its own, with which the other end hears of it
                    pipe.send("dropped")
                elif word == "opens":
                    import standin

                    pipe.send((standin.Standin().live().get("ipc_opens", 0), transport.statistics().imported))
    for array in kept:
        array.close()


def filler(pipe: Connection, path: str) -> None:
    """Send memory that a stream is still to fill, by that stream; do the work when told to."""
    import standin

    driver: Any = drivers.get(Location("cuda"))
    control = standin.Standin()
    stream = driver.stream_create(Location("cuda", 0))
    array = vram.zeros(4096, "uint8", device="cuda:0")
    with VmmTransport("cuda:0", "cuda:0", SocketExchange.connect(path, SOON), timeout=SOON) as transport:
        control.defer()
        for value in (7, 8):
            driver.fill_async(array.address, value, 4096, stream)
            transport.send(array, stream)
            pipe.send(control.live()["pending"])
            assert pipe.recv() == "work"
            driver.stream_synchronize(stream, Location("cuda", 0))
            pipe.send("done")
            if pipe.recv() == "end":  # the event is not recorded again before whoever waits for it has seen it
                break
        control.defer(False)
