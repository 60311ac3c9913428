"""Memory of the host lent directly to another process: against its descriptor handed over a raw socket."""

from __future__ import annotations

import contextlib
import socket
import time

import vram

from ..sharing.channel import Channel, transmit
from ..spec import format_size
from .borrowers import BARE, borrower
from .children import Child, child, socket_pair, workplace
from .measure import Figure, Result, Row, in_turns, places

__all__ = ["measure"]


def measure(quick: bool) -> Result:
    """Measure between this process and one child, for little memory and for much."""
    rows: list[Row] = []
    with contextlib.ExitStack() as stage:
        folder = stage.enter_context(workplace())
        packets, far_packets = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
        near, far = stage.enter_context(socket_pair(socket.SOCK_SEQPACKET))
        other = stage.enter_context(child(borrower, far_packets, far, "host"))
        far_packets.close()
        far.close()
        other.hear()
        with vram.ArrayChannel(Channel(near.dup())):
            near.close()
            for nbytes in (2 << 20,) if quick else (2 << 20, 1 << 30):
                for place in places():
                    with place.hold(other.pid):
                        rows += _lent(quick, nbytes, place.name, str(folder / "lent"), other, packets)
    notes = [
        "raw: the descriptor over a socket that is there already, mapped, unmapped, an answer. Lent already: one more "
        "borrower maps it and gives it back, which the lender acknowledges. Lent: from lend() until it was borrowed, "
        "given back and the path is gone, with a socket, a thread and a connection each time. Untouched memory: the "
        "pages are not what is measured"
    ]
    return Result("share", "Memory of the host lent to another process", rows, notes)


def _lent(quick: bool, nbytes: int, where: str, path: str, other: Child, packets: socket.socket) -> list[Row]:
    with vram.zeros(nbytes, "uint8", device="host") as array:
        (allocation,), _ = array.region.segments(0, nbytes)
        fd = allocation.export()

        def raw() -> float:
            other.tell("bare", "host", nbytes, 1)
            begin = time.perf_counter()
            transmit(packets, b"-", [fd])
            packets.recv(BARE)
            return time.perf_counter() - begin

        def new() -> float:
            other.tell("borrow", path, False)
            begin = time.perf_counter()
            with vram.lend(array, at=path, writable=True):
                other.hear()
                other.ask("give back")
            return time.perf_counter() - begin

        values = in_turns({"raw": raw, "new": new}, 3 if quick else 40)
        with vram.lend(array, at=path, writable=True):
            again = [other.ask("again", path, 5) for _ in range(3 if quick else 40)]
        allocation.close()
    what = f"{format_size(nbytes)}, {where}"
    rival = Row(f"{what}: raw descriptor, mapped, unmapped", Figure.of(values["raw"], "us", scale=1e6))
    return [
        rival,
        Row.held(f"{what}: lent already, borrowed, given back", Figure.of(again, "us", scale=1e6), rival, at_most=1.5),
        Row.held(f"{what}: lent, borrowed, given back", Figure.of(values["new"], "us", scale=1e6), rival),
    ]
