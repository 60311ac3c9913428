"""An array that both sides know is handed to another process, which answers: against raw sockets, and torch."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import vram

from ..errors import InternalError
from ..sharing.channel import Channel
from ..spec import Location
from .children import DEADLINE, Child, child, queue_pair, socket_pair
from .gpu import ordinal_of, torch_on
from .machine import fitting
from .measure import Figure, Place, Result, Row, in_turns, places, timed

_MESSAGE = bytes(100)
_NBYTES = 64 << 20


def on_host(quick: bool) -> Result:
    """Measure round trips between this process and one child, each kind on a connection of its own."""
    rows: list[Row] = []
    with vram.zeros(_NBYTES, "uint8", device="host") as array, _Ends.connected() as ends:
        for place in places():
            with place.hold(ends.pid):
                rows += _compare(place, ends, array, quick)
    notes = [
        f"the array has {_NBYTES >> 20} MiB; its size does not matter. The raw messages have 100 bytes each way",
        "one core: both processes are tied to it, so that the difference is all code; free: as the scheduler likes",
    ]
    return Result("handover", "An array handed to another process over an ArrayChannel, and its answer", rows, notes)


def on_gpu(quick: bool, location: Location) -> Result:
    """Measure the same with an array on a GPU; torch has a child of its own."""
    rows: list[Row] = []
    notes: list[str] = []
    nbytes = fitting(location, (2 << 20) if quick else _NBYTES, 1, 4, notes)
    with contextlib.ExitStack() as stage:
        array = stage.enter_context(vram.zeros(nbytes, "uint8", device=location))
        ends = stage.enter_context(_Ends.connected())
        torch = torch_on(location, notes)
        tensors = None
        if torch is not None:
            try:
                tensors = stage.enter_context(_Tensors.running(torch, location, nbytes))
            except InternalError as error:  # not every container lets it share memory
                notes.append(f"torch did not run: {str(error).strip().splitlines()[-1]}")
        for place in places():
            with place.hold(ends.pid, *([] if tensors is None else [tensors.pid])):
                rows += _compare_on_gpu(place, ends, array, tensors, quick)
    notes.append(
        f"the array has {nbytes >> 20} MiB; its size does not matter. The raw messages have 100 bytes each way; "
        f"torch's answer is a number, since it does not pass on a tensor that it received, and its "
        f"queues' threads run where they like"
    )
    return Result("handover", "A GPU array handed to another process and back", rows, notes)


class _Ends:
    """This process's ends of three connections to one child; made by :meth:`connected`."""

    def __init__(self, other: Child, packets: socket.socket, stream: socket.socket, channel: vram.ArrayChannel) -> None:
        self._other, self._channel, self._raw = other, channel, {"packets": packets, "stream": stream}
        self.pid = other.pid

    @classmethod
    @contextlib.contextmanager
    def connected(cls) -> Iterator[_Ends]:
        with contextlib.ExitStack() as stage:
            packets, far_packets = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
            stream, far_stream = stage.enter_context(socket_pair(socket.SOCK_STREAM))
            near, far = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
            other = stage.enter_context(child(_answer, far_packets, far_stream, far))
            for sock in (far_packets, far_stream, far):
                sock.close()
            other.hear()
            channel = stage.enter_context(vram.ArrayChannel(Channel(near.dup())))
            near.close()
            yield cls(other, packets, stream, channel)

    def raw(self, kind: str, repeat: int) -> Callable[[], float]:
        """Return what sends bytes there and back so often, and returns the seconds of one time."""
        sock = self._raw[kind]

        def there_and_back() -> None:
            sock.send(_MESSAGE)
            sock.recv(200)

        return self._case(kind, there_and_back, repeat)

    def hand_over(self, kind: str, array: vram.Array, repeat: int) -> Callable[[], float]:
        """Return the same for an array, whose answer is of a kind."""

        def there_and_back() -> None:
            self._channel.send(array)
            self._channel.recv()

        return self._case(kind, there_and_back, repeat)

    def hand_over_new(self, repeat: int) -> Callable[[], float]:
        """Return the same for an array that is made for it."""

        def there_and_back() -> None:
            with vram.empty(1 << 20, "uint8", device="host") as new:
                self._channel.send(new)
                self._channel.recv()

        return self._case("array", there_and_back, repeat)

    def _case(self, kind: str, work: Callable[[], object], repeat: int) -> Callable[[], float]:
        def burst() -> float:
            self._other.tell(kind, repeat + 1)
            work()  # wakes the other side up
            return timed(work, repeat)

        return burst


def _compare(place: Place, ends: _Ends, array: vram.Array, quick: bool) -> list[Row]:
    repeat, rounds = (10, 3) if quick else (50, 60)
    cases = {kind: ends.raw(kind, repeat) for kind in ("packets", "stream")}
    cases |= {kind: ends.hand_over(kind, array, repeat) for kind in ("array", "touch", "back")}
    figures = _time({**cases, "new": ends.hand_over_new(max(repeat // 5, 2))}, rounds)
    where = place.name
    bare = [
        Row(f"raw SEQPACKET socket, {where}", figures["packets"]),
        Row(f"raw STREAM socket, {where}", figures["stream"]),
    ]
    fastest = min(bare, key=lambda row: row.figure.median)
    return [
        *bare,
        Row.held(f"array there, a number back, {where}", figures["array"], fastest, at_most=2),
        Row.held(f"array there, its first byte back, {where}", figures["touch"], fastest),
        Row.held(f"array there and back, {where}", figures["back"], fastest),
        Row.held(f"a new array of 1 MiB each time, {where}", figures["new"], fastest),
    ]


def _compare_on_gpu(place: Place, ends: _Ends, array: vram.Array, tensors: _Tensors | None, quick: bool) -> list[Row]:
    repeat, rounds = (10, 3) if quick else (50, 40)
    cases = {"raw": ends.raw("packets", repeat)}
    cases |= {kind: ends.hand_over(kind, array, repeat) for kind in ("array", "back")}
    if tensors is not None:
        cases["torch"] = lambda: timed(tensors.round_trip, repeat // 5)
    figures = _time(cases, rounds)
    bare = Row(f"raw SEQPACKET socket, {place.name}", figures["raw"])
    ours = Row.held(f"array there and back, {place.name}", figures["back"], bare, at_most=3)
    rows = [bare, ours, Row.held(f"array there, a number back, {place.name}", figures["array"], bare)]
    if tensors is not None:
        theirs = Row.held(f"torch.multiprocessing: the same CUDA tensor again, {place.name}", figures["torch"], bare)
        rows += [theirs, Row.held(ours.case, ours.figure, theirs, at_most=0.1)]
    return rows


def _time(cases: dict[str, Callable[[], float]], rounds: int) -> dict[str, Figure]:
    return {name: Figure.of(seconds, "us", scale=1e6) for name, seconds in in_turns(cases, rounds).items()}


def _answer(pipe: Connection, packets: socket.socket, stream: socket.socket, sock: socket.socket) -> None:
    """The other process: told what comes and how often, so that it waits on one connection only."""
    with vram.ArrayChannel(Channel(sock)) as channel:
        pipe.send("ready")
        while True:
            kind, times = pipe.recv()
            if kind in ("packets", "stream"):
                raw = packets if kind == "packets" else stream
                for _ in range(times):
                    raw.send(raw.recv(200))
            elif kind == "array":
                for _ in range(times):
                    array = channel.recv()
                    channel.send(1)
            elif kind == "touch":
                for _ in range(times):
                    array = channel.recv()
                    channel.send(int(array.numpy()[0]))
            else:
                for _ in range(times):
                    array = channel.recv()
                    channel.send(array)
            array = None


# -- torch's tensors --------------------------------------------------------------------------------------------------
class _Tensors:
    """A process that gets one CUDA tensor again and again through torch's queues; made by :meth:`running`."""

    def __init__(self, nbytes: int, torch: Any, device: str, there: Any, back: Any, other: Child) -> None:
        self._tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        self._there, self._back, self._other = there, back, other
        self.pid = other.pid

    @classmethod
    @contextlib.contextmanager
    def running(cls, torch: Any, location: Location, nbytes: int) -> Iterator[_Tensors]:
        import torch.multiprocessing as processes

        try:
            with queue_pair(processes.get_context("spawn")) as pair, child(_take_tensors, *pair) as other:
                other.hear()
                made = cls(nbytes, torch, f"cuda:{ordinal_of(location)}", *pair, other)
                made.round_trip()
                try:
                    yield made
                finally:
                    pair[0].put(None)  # it lets go of the tensor before we do
                    made._answered()
                    made._tensor = None
        finally:
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def round_trip(self) -> None:
        self._there.put(self._tensor)
        self._answered()

    def _answered(self) -> None:
        for _ in range(DEADLINE):
            with contextlib.suppress(queue.Empty):
                self._back.get(timeout=1)
                return
            if trace := self._other.trouble():
                raise InternalError(f"the other process of torch's failed:\n{trace}")
        raise InternalError(f"no answer came through torch's queue within {DEADLINE} s")


def _take_tensors(pipe: Connection, there: Any, back: Any) -> None:
    """The other process of torch's: a number for each tensor. Ends with None, or when its parent hangs up."""
    import torch

    torch.cuda.init()
    pipe.send("ready")
    while not pipe.poll(0):
        with contextlib.suppress(queue.Empty):
            value = there.get(timeout=0.2)
            is_over = value is None
            del value
            back.put(1)
            if is_over:
                return
