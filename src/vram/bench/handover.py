"""An array that both sides know is handed to another process, which answers: against the same over bare sockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection

import vram

from ..sharing.channel import Channel
from .children import Child, child, socket_pair
from .measure import Figure, Place, Result, Row, in_turns, places, timed

__all__ = ["answer", "measure"]

_MESSAGE = bytes(100)
_NBYTES = 64 << 20


def measure(quick: bool) -> Result:
    """Measure round trips between this process and one child, each kind on a connection of its own."""
    rows: list[Row] = []
    with contextlib.ExitStack() as stage:
        packets, far_packets = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
        stream, far_stream = stage.enter_context(socket_pair(socket.SOCK_STREAM))
        near, far = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
        other = stage.enter_context(child(answer, far_packets, far_stream, far))
        for sock in (far_packets, far_stream, far):
            sock.close()
        other.hear()
        array = stage.enter_context(vram.zeros(_NBYTES, "uint8", device="host"))
        channel = stage.enter_context(vram.ArrayChannel(Channel(near.dup())))
        near.close()
        for place in places():
            with place.hold(other.pid):
                rows += _compare(place, other, packets, stream, channel, array, quick)
    notes = [
        f"the array has {_NBYTES >> 20} MiB; its size does not matter. The raw messages have 100 bytes each way",
        "one core: both processes are tied to it, so that the difference is all code; free: as the scheduler likes",
    ]
    return Result("handover", "An array handed to another process over an ArrayChannel, and its answer", rows, notes)


def _compare(
    place: Place,
    other: Child,
    packets: socket.socket,
    stream: socket.socket,
    channel: vram.ArrayChannel,
    array: vram.Array,
    quick: bool,
) -> list[Row]:
    repeat, rounds = (10, 3) if quick else (50, 60)

    def raw(sock: socket.socket) -> Callable[[], object]:
        def there_and_back() -> None:
            sock.send(_MESSAGE)
            sock.recv(200)

        return there_and_back

    def hand_over() -> None:
        channel.send(array)
        channel.recv()

    def hand_over_new() -> None:
        with vram.empty(1 << 20, "uint8", device="host") as new:
            channel.send(new)
            channel.recv()

    def case(kind: str, work: Callable[[], object], repeat: int = repeat) -> Callable[[], float]:
        def burst() -> float:
            other.tell(kind, repeat + 1)
            work()  # wakes the other side up
            return timed(work, repeat)

        return burst

    values = in_turns(
        {
            "packets": case("packets", raw(packets)),
            "stream": case("stream", raw(stream)),
            "array": case("array", hand_over),
            "touch": case("touch", hand_over),
            "back": case("back", hand_over),
            "new": case("array", hand_over_new, max(repeat // 5, 2)),
        },
        rounds,
    )
    figures = {name: Figure.of(seconds, "us", scale=1e6) for name, seconds in values.items()}
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


def answer(pipe: Connection, packets: socket.socket, stream: socket.socket, sock: socket.socket) -> None:
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
