"""A GPU array that both sides know is handed to another process and back: against a bare socket, and against torch."""

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
from .bare_calls import ordinal_of
from .children import DEADLINE, Child, child, socket_pair
from .gpu_torch import torch_on
from .handover import answer
from .machine import fitting
from .measure import Figure, Place, Result, Row, in_turns, places, timed

__all__ = ["measure"]

_MESSAGE = bytes(100)
_NBYTES = 64 << 20


def measure(quick: bool, location: Location) -> Result:
    """Measure round trips between this process and one child; torch has a child of its own."""
    rows: list[Row] = []
    notes: list[str] = []
    nbytes = fitting(location, (2 << 20) if quick else _NBYTES, 1, 4, notes)
    with contextlib.ExitStack() as stage:
        packets, far_packets = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
        stream, far_stream = stage.enter_context(socket_pair(socket.SOCK_STREAM))
        near, far = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
        other = stage.enter_context(child(answer, far_packets, far_stream, far))
        for sock in (far_packets, far_stream, far, stream):
            sock.close()
        other.hear()
        array = stage.enter_context(vram.zeros(nbytes, "uint8", device=location))
        channel = stage.enter_context(vram.ArrayChannel(Channel(near.dup())))
        near.close()
        torch = torch_on(location, notes)
        tensors = None
        if torch is not None:
            try:
                tensors = stage.enter_context(_Tensors.running(torch, location, nbytes))
            except InternalError as error:  # not every container lets it share memory
                notes.append(f"torch did not run: {str(error).strip().splitlines()[-1]}")
        for place in places():
            with place.hold(other.pid, *([] if tensors is None else [tensors.pid])):
                rows += _compare(place, other, packets, channel, array, tensors, quick)
    notes.append(
        f"the array has {nbytes >> 20} MiB; its size does not matter. The raw messages have 100 bytes each way; "
        f"torch's answer is a number, since it does not pass on a tensor that it received, and its "
        f"queues' threads run where they like"
    )
    return Result("handover", "A GPU array handed to another process and back", rows, notes)


def _compare(
    place: Place,
    other: Child,
    packets: socket.socket,
    channel: vram.ArrayChannel,
    array: vram.Array,
    tensors: _Tensors | None,
    quick: bool,
) -> list[Row]:
    repeat, rounds = (10, 3) if quick else (50, 40)

    def raw() -> None:
        packets.send(_MESSAGE)
        packets.recv(200)

    def hand_over() -> None:
        channel.send(array)
        channel.recv()

    def case(kind: str, work: Callable[[], object]) -> Callable[[], float]:
        def burst() -> float:
            other.tell(kind, repeat + 1)
            work()  # wakes the other side up
            return timed(work, repeat)

        return burst

    cases = {"raw": case("packets", raw), "there": case("array", hand_over), "back": case("back", hand_over)}
    if tensors is not None:
        cases["torch"] = lambda: timed(tensors.round_trip, repeat // 5)
    values = in_turns(cases, rounds)
    figures = {name: Figure.of(seconds, "us", scale=1e6) for name, seconds in values.items()}
    bare = Row(f"raw SEQPACKET socket, {place.name}", figures["raw"])
    ours = Row.held(f"array there and back, {place.name}", figures["back"], bare, at_most=3)
    rows = [bare, ours, Row.held(f"array there, a number back, {place.name}", figures["there"], bare)]
    if tensors is not None:
        theirs = Row.held(f"torch.multiprocessing: the same CUDA tensor again, {place.name}", figures["torch"], bare)
        rows += [theirs, Row.held(ours.case, ours.figure, theirs, at_most=0.1)]
    return rows


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

        context = processes.get_context("spawn")
        pair = context.Queue(), context.Queue()
        try:
            with child(_take_tensors, *pair) as other:
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
            for each in pair:
                each.close()
                each.join_thread()
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
