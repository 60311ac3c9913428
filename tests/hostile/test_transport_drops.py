"""A peer of a transport that reads nothing: a `recv` ends in its time.

Nothing is lost by that: the next call goes on where the last one was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON
from tests.support.remote_transports import greeting, memory, piece

import vram
from vram.errors import WaitTimeoutError
from vram.handover.messages import Closed, Received, Reference, Shared, decode_message, encode
from vram.transports import ShmTransport, SocketExchange, VmmTransport
from vram.transports.remote import RemoteTransport

KINDS: dict[str, type[RemoteTransport]] = {"vmm": VmmTransport, "shm": ShmTransport}
BYTE = {"vmm": encode(Shared(Reference(1, 1, 0, "uint8", (1,)))), "shm": piece(0, 1, 1)}


@contextlib.contextmanager
def greeted(kind: str) -> Iterator[tuple[SocketExchange, SocketExchange, RemoteTransport]]:
    """A peer, this end's exchange, and this end, which was told of the peer's memory 1: sevens."""
    one, other = SocketExchange.pair()
    with one, KINDS[kind]("host", "host", other) as transport, vram.zeros(1, "uint8", device="host") as array:
        array[0] = 7
        (allocation,), _ = array.region.segments(0, 1)
        with allocation:
            one.send(greeting(kind), timeout=SOON)
            one.send(memory(1), [allocation.export()], timeout=SOON)
            yield one, other, transport


def fill(exchange: SocketExchange) -> None:
    with contextlib.suppress(WaitTimeoutError):
        while True:
            exchange.send(encode(Closed((1 << 40,))), timeout=0)


def receipts(exchange: SocketExchange) -> list[object]:
    """Return the receipts that are there, and read all else."""
    found: list[object] = []
    with contextlib.suppress(WaitTimeoutError):
        while True:
            found.append(decode_message(exchange.recv(timeout=0)[0]))
    return [one for one in found if isinstance(one, Received)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_waits_for_no_peer_that_reads_nothing(kind: str) -> None:
    """That hears of the receipt once it reads, with a later call."""
    with greeted(kind) as (one, other, transport):
        fill(other)
        one.send(BYTE[kind], timeout=SOON)
        with transport.recv(timeout=SOON) as array:
            assert array.to_host().tolist() == [7]
        assert receipts(one) == []
        with pytest.raises(WaitTimeoutError):
            transport.recv(timeout=0)
        assert receipts(one) == [Received(1)]
