"""Attach by name: against a bare descriptor over a socket, shared_memory, and a mapped file; and what size costs."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from safetensors import safe_open

import vram

from .. import driver as drivers
from ..keeper.client import close_client
from ..spec import HOST, format_size
from .children import child, own_keeper, socket_pair, workplace
from .files import write_weights
from .measure import Figure, Place, Result, Row, in_turns, places

__all__ = ["measure"]

_QUESTION = bytes(99)
_ROOM = socket.CMSG_SPACE(4)
_SIZES = (2 << 20, 64 << 20, 1 << 30, 8 << 30)
_SEGMENTS = (1, 16, 64, 256)
_SEGMENT = 2 << 20
_FLAT = 1.25
_BURST = 5
_FURTHER = 12.0  # us for each further segment


def measure(quick: bool) -> Result:
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
        rivals = stage.enter_context(_Rivals(compared))
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
def _touch(name: str, keeper: str) -> float:
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
    return _touch(name, keeper)


class _Rivals:
    """The same memory without us: a process to ask for a descriptor or a name, and a file."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._stage = contextlib.ExitStack()
        self._sock: socket.socket
        self._file: Path
        self.pid = 0

    def __enter__(self) -> _Rivals:
        with contextlib.ExitStack() as stage:
            self._sock, far = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
            server = stage.enter_context(child(_serve, far, self._nbytes))
            far.close()
            server.hear()
            self.pid = server.pid
            self._file = stage.enter_context(workplace()) / "w.safetensors"
            write_weights(self._file, {"w": self._nbytes}, sparse=True)
            stage.callback(self._sock.close)  # the server waits for this
            self._stage = stage.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stage.close()

    def raw(self) -> float:
        begin = time.perf_counter()
        self._sock.send(b"f" + _QUESTION)
        _, ancillary, _, _ = self._sock.recvmsg(200, _ROOM, socket.MSG_CMSG_CLOEXEC)
        (fd,) = array("i", ancillary[0][2])
        memory = mmap.mmap(fd, self._nbytes, prot=mmap.PROT_READ)
        _ = memory[0]
        spent = time.perf_counter() - begin
        memory.close()
        os.close(fd)
        return spent

    def _shared_memory(self, whole: bool) -> float:
        begin = time.perf_counter()
        self._sock.send(b"n" + _QUESTION)
        memory = SharedMemory(self._sock.recv(200).decode())
        _ = _first(memory)
        spent = time.perf_counter() - begin
        memory.close()
        return time.perf_counter() - begin if whole else spent

    def shared_memory(self) -> float:
        return self._shared_memory(False)

    def shared_memory_and_close(self) -> float:
        return self._shared_memory(True)

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
    name = f"size-{rivals._nbytes}"
    cases: dict[str, Callable[[], float]] = {
        "raw": rivals.raw,
        "touch": lambda: _touch(name, keeper),
        "close": lambda: _touch_and_close(name, keeper, wait=False),
        "release": lambda: _touch_and_close(name, keeper, wait=True),
        "shared": rivals.shared_memory,
        "shared closed": rivals.shared_memory_and_close,
        "file": rivals.mapped_file,
    }
    figures = _time(cases, rounds)
    connect = _time({"connect": lambda: _connect_and_touch(name, keeper)}, max(rounds // 3, 3))["connect"]
    where = place.name
    raw = Row(f"raw: descriptor, mmap, touch, {where}", figures["raw"])
    shared = Row(f"shared_memory: told the name, attach, touch, {where}", figures["shared"])
    closed = Row(f"shared_memory: the same and close, {where}", figures["shared closed"])
    mapped = Row(f"safetensors: open the file, touch, {where}", figures["file"])
    touch = Row.held(f"attach, touch, {where}", figures["touch"], raw, at_most=3)
    close = Row.held(f"attach, touch, close, {where}", figures["close"], raw, at_most=6)
    release = Row.held(f"attach, touch, release acknowledged, {where}", figures["release"], raw)
    for rival in (shared, mapped):
        if rival.figure.median < touch.figure.median:
            notes.append(f"wins: {rival.case}")
    return [
        raw,
        touch,
        close,
        release,
        shared,
        Row.held(touch.case, touch.figure, shared, at_most=1),
        closed,
        Row.held(close.case, close.figure, closed, at_most=1),
        mapped,
        Row.held(touch.case, touch.figure, mapped),
        Row.held(f"connect first, attach, touch, {where}", connect, raw),
    ]


def _sizes(sizes: list[int], keeper: str, rounds: int) -> list[Row]:
    def case(nbytes: int) -> Callable[[], float]:
        return lambda: _touch(f"size-{nbytes}", keeper)

    figures = _time({str(nbytes): case(nbytes) for nbytes in sizes}, rounds)
    first, *rest = (Row(f"attach {format_size(nbytes)}, touch", figures[str(nbytes)]) for nbytes in sizes)
    last = len(rest) - 1
    return [
        first,
        *(Row.held(r.case, r.figure, first, at_most=_FLAT if n == last else None) for n, r in enumerate(rest)),
    ]


def _segments(counts: tuple[int, ...], keeper: str, rounds: int) -> list[Row]:
    def case(count: int) -> Callable[[], float]:
        return lambda: _touch(f"segments-{count}", keeper)

    def closing(count: int) -> Callable[[], float]:
        return lambda: _touch_and_close(f"segments-{count}", keeper, wait=True)

    rounds = max(rounds // 3, 3)
    cases = {str(count): case(count) for count in counts} | {f"-{count}": closing(count) for count in counts}
    values = in_turns(cases, rounds, burst=_BURST)

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
