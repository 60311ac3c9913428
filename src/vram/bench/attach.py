"""Attach by name, up to the first byte read.

On the host against a bare descriptor over a socket, shared_memory, and a mapped file, and what size costs; on a GPU
against the bare import, map and set_access of the same descriptors.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from safetensors import safe_open

import vram

from .. import driver as drivers
from ..errors import InternalError
from ..keeper.client import KeeperClient, close_client
from ..open_files import close_fds
from ..spec import HOST, Location, format_size
from .children import child, own_keeper, socket_pair, workplace
from .files import write_weights
from .gpu import Bare, bare_calls
from .machine import fitting
from .measure import Figure, Place, Result, Row, in_turns, places

_QUESTION = bytes(99)
_ROOM = socket.CMSG_SPACE(4)
_SIZES = (2 << 20, 64 << 20, 1 << 30, 8 << 30)
_SEGMENTS = (1, 16, 64, 256)
_SEGMENT = 2 << 20
_FLAT = 1.25
_BURST = 5
_FURTHER = 12.0  # us for each further segment
# On a GPU:
_GPU_SEGMENTS = 64
_GPU_SEGMENT = 256 << 20
_FEW = 4  # segments of the entry that fresh processes attach
_LARGE = 16 << 30  # bytes of each
_MODEL = "model"
_BYTE = 0x5A


def on_host(quick: bool) -> Result:
    """Measure from the call to the first byte read, and to the end of what has to be given back."""
    rounds = 3 if quick else 50
    notes: list[str] = []
    sizes = _affordable(_SIZES[:2] if quick else _SIZES, notes)
    segments = _SEGMENTS[:2] if quick else _SEGMENTS
    compared = sizes[-1] if quick else min(sizes[-1], 1 << 30)
    with contextlib.ExitStack() as stage:
        keeper = stage.enter_context(own_keeper())
        pid = vram.statistics(keeper=keeper).pid
        for nbytes in sizes:
            _publish(f"size-{nbytes}", nbytes, nbytes, keeper)
        for count in segments:
            _publish(f"segments-{count}", count * _SEGMENT, _SEGMENT, keeper)
        rivals = stage.enter_context(_Rivals.running(compared))
        rows: list[Row] = []
        for place in places():
            with place.hold(pid, rivals.pid):
                rows += _compare(place, keeper, rivals, rounds, notes)
        with places()[0].hold(pid):
            rows += _sizes(sizes, keeper, rounds)
        rows += _segments(segments, keeper, rounds)
    notes.append(
        f"compared on {format_size(compared)}; untouched but for one byte. The raw case is: ask over a socket, get a "
        f"descriptor, map it, read a byte; nothing is given back. The process is connected to its keeper already"
    )
    return Result("attach", "Attach by name, up to the first byte read", rows, notes)


def _affordable(sizes: tuple[int, ...], notes: list[str]) -> list[int]:
    """Leave out what the driver would refuse on a machine of this size."""
    available, _ = drivers.get(HOST).mem_info(HOST)
    kept = [nbytes for nbytes in sizes if nbytes < available * 3 // 4]
    if len(kept) < len(sizes):
        notes.append(f"larger than {format_size(kept[-1])} did not run: {format_size(available)} are available")
    return kept


def _publish(name: str, nbytes: int, chunk: int, keeper: str) -> None:
    with vram.zeros(nbytes, "uint8", device="host", chunk=chunk) as array:
        vram.publish(name, {"w": array}, keeper=keeper)


# -- the cases --------------------------------------------------------------------------------------------------
def touch(name: str, keeper: str) -> float:
    """Return the seconds from the call to the first byte; what is given back is not in it."""
    begin = time.perf_counter()
    lease = vram.attach(name, keeper=keeper)
    _ = lease["w"].numpy()[0]
    spent = time.perf_counter() - begin
    del _
    lease.close()
    return spent


def _touch_and_close(name: str, keeper: str, *, wait: bool) -> float:
    begin = time.perf_counter()
    lease = vram.attach(name, keeper=keeper)
    _ = lease["w"].numpy()[0]
    lease.close(wait=wait)
    return time.perf_counter() - begin


def _connect_and_touch(name: str, keeper: str) -> float:
    close_client(keeper)
    return touch(name, keeper)


class _Rivals:
    """The same memory without us: a process to ask for a descriptor or a name, and a file; made by :meth:`running`."""

    def __init__(self, nbytes: int, sock: socket.socket, file: Path, pid: int) -> None:
        self.nbytes, self.pid = nbytes, pid
        self._sock, self._file = sock, file

    @classmethod
    @contextlib.contextmanager
    def running(cls, nbytes: int) -> Iterator[_Rivals]:
        with (
            socket_pair(socket.SOCK_SEQPACKET) as (sock, far),
            child(_serve, far, nbytes) as server,
            workplace() as folder,
            contextlib.closing(sock),  # the server waits for this
        ):
            far.close()
            server.hear()
            file = folder / "w.safetensors"
            write_weights(file, {"w": nbytes}, sparse=True)
            yield cls(nbytes, sock, file, server.pid)

    def raw(self) -> float:
        begin = time.perf_counter()
        self._sock.send(b"f" + _QUESTION)
        _, ancillary, _, _ = self._sock.recvmsg(200, _ROOM, socket.MSG_CMSG_CLOEXEC)
        (fd,) = array("i", ancillary[0][2])
        memory = mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ)
        _ = memory[0]
        spent = time.perf_counter() - begin
        memory.close()
        os.close(fd)
        return spent

    def shared_memory(self, *, whole: bool) -> float:
        begin = time.perf_counter()
        self._sock.send(b"n" + _QUESTION)
        memory = SharedMemory(self._sock.recv(200).decode())
        _ = _first(memory)
        spent = time.perf_counter() - begin
        memory.close()
        return time.perf_counter() - begin if whole else spent

    def mapped_file(self) -> float:
        begin = time.perf_counter()
        with safe_open(self._file, framework="np") as source:
            _ = source.get_slice("w")[0:1][0]
            return time.perf_counter() - begin


def _first(memory: SharedMemory) -> object:
    buffer: Any = memory.buf  # None once it is closed, say its annotations
    return buffer[0]


def _serve(pipe: Connection, sock: socket.socket, nbytes: int) -> None:
    """Tell whoever asks the name of shared memory, or send a descriptor of it."""
    fd = os.memfd_create("rival", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        shared = SharedMemory(create=True, size=nbytes)
        try:
            pipe.send("ready")
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
            while question := sock.recv(200):
                if question[:1] == b"f":
                    sock.sendmsg([_QUESTION], rights)
                else:
                    sock.send(shared.name.encode())
        finally:
            shared.close()
            shared.unlink()
    finally:
        os.close(fd)


# -- what is compared -------------------------------------------------------------------------------------------
def _compare(place: Place, keeper: str, rivals: _Rivals, rounds: int, notes: list[str]) -> list[Row]:
    name = f"size-{rivals.nbytes}"
    cases: dict[str, Callable[[], float]] = {
        "raw": rivals.raw,
        "touch": partial(touch, name, keeper),
        "close": partial(_touch_and_close, name, keeper, wait=False),
        "release": partial(_touch_and_close, name, keeper, wait=True),
        "shared": partial(rivals.shared_memory, whole=False),
        "shared closed": partial(rivals.shared_memory, whole=True),
        "file": rivals.mapped_file,
    }
    figures = _time(cases, rounds)
    connect = _time({"connect": lambda: _connect_and_touch(name, keeper)}, max(rounds // 3, 3))["connect"]
    where = place.name
    raw = Row(f"raw: descriptor, mmap, touch, {where}", figures["raw"])
    shared = Row(f"shared_memory: told the name, attach, touch, {where}", figures["shared"])
    closed = Row(f"shared_memory: the same and close, {where}", figures["shared closed"])
    mapped = Row(f"safetensors: open the file, touch, {where}", figures["file"])
    touched = Row.held(f"attach, touch, {where}", figures["touch"], raw, at_most=3)
    close = Row.held(f"attach, touch, close, {where}", figures["close"], raw, at_most=6)
    release = Row.held(f"attach, touch, release acknowledged, {where}", figures["release"], raw)
    for rival in (shared, mapped):
        if rival.figure.median < touched.figure.median:
            notes.append(f"wins: {rival.case}")
    return [
        raw,
        touched,
        close,
        release,
        shared,
        Row.held(touched.case, touched.figure, shared, at_most=1),
        closed,
        Row.held(close.case, close.figure, closed, at_most=1),
        mapped,
        Row.held(touched.case, touched.figure, mapped),
        Row.held(f"connect first, attach, touch, {where}", connect, raw),
    ]


def _sizes(sizes: list[int], keeper: str, rounds: int) -> list[Row]:
    figures = _time({str(nbytes): partial(touch, f"size-{nbytes}", keeper) for nbytes in sizes}, rounds)
    first, *rest = (Row(f"attach {format_size(nbytes)}, touch", figures[str(nbytes)]) for nbytes in sizes)
    last = len(rest) - 1
    return [
        first,
        *(Row.held(r.case, r.figure, first, at_most=_FLAT if n == last else None) for n, r in enumerate(rest)),
    ]


def _segments(counts: tuple[int, ...], keeper: str, rounds: int) -> list[Row]:
    cases: dict[str, Callable[[], float]] = {str(n): partial(touch, f"segments-{n}", keeper) for n in counts}
    cases |= {f"-{n}": partial(_touch_and_close, f"segments-{n}", keeper, wait=True) for n in counts}
    values = in_turns(cases, max(rounds // 3, 3), burst=_BURST)

    def further(prefix: str) -> Figure:
        """Microseconds for each segment but the first, round by round."""
        few, many = values[f"{prefix}{counts[0]}"], values[f"{prefix}{counts[-1]}"]
        each = [(b - a) / (counts[-1] - counts[0]) for a, b in zip(few, many, strict=True)]
        return Figure.of(each, "us", scale=1e6)

    rows = [Row(f"attach {count} segments, touch", Figure.of(values[str(count)], "us", scale=1e6)) for count in counts]
    return [
        *rows,
        Row.limited("each further segment, attach and touch", further(""), at_most=_FURTHER),
        Row("each further segment, release acknowledged too", further("-")),
    ]


def _time(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, Figure]:
    return {name: Figure.of(s, "us", scale=1e6) for name, s in in_turns(cases, rounds, burst=_BURST).items()}


# -- on a GPU -----------------------------------------------------------------------------------------------------
def on_gpu(quick: bool, location: Location) -> Result:
    """Measure from the call until all of it is mapped and readable; the publisher is another process."""
    notes: list[str] = []
    segment = fitting(location, (2 << 20) if quick else _GPU_SEGMENT, _GPU_SEGMENTS, 1.25, notes)
    with contextlib.ExitStack() as stage:
        keeper = stage.enter_context(own_keeper())
        bare = stage.enter_context(bare_calls(location))
        publisher = stage.enter_context(child(_publisher, keeper, str(location), segment, _GPU_SEGMENTS))
        publisher.hear()
        fds = stage.enter_context(_descriptors(keeper))
        _check_bytes(keeper, segment, _GPU_SEGMENTS)
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
        f"{format_size(segment * _GPU_SEGMENTS)} in {_GPU_SEGMENTS} segments, published by another process; the "
        f"process has a context and is connected to its keeper already. Bare: one import and one map for each "
        f"descriptor, already received, and one set_access over all of them"
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
        _check_bytes(keeper, segment, _FEW)
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
        fds = reader.attach(_MODEL).fds
        try:
            yield fds
        finally:
            close_fds(fds)


def _check_bytes(keeper: str, segment: int, count: int) -> None:
    """Look at a byte of each segment, once: what is measured has to be right."""
    with vram.attach(_MODEL, keeper=keeper) as lease:
        array = lease["w"]
        found = bytearray(1)
        for number in range(count):
            array.region.driver.copy_out(memoryview(found), array.address + (number + 1) * segment - 1)
            if found[0] != _BYTE:
                raise InternalError(f"segment {number} of the attached array has {found[0]:#x} at its end")


def _attach(keeper: str, *, released: bool) -> float:
    begin = time.perf_counter()
    lease = vram.attach(_MODEL, keeper=keeper)
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
        vram.publish(_MODEL, {"w": array}, keeper=keeper)
    pipe.send("ready")
    pipe.recv()
