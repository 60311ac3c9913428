"""What a peer sends that is no memory, and how long a lender may take: both end at a bound of the client's."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON
from tests.support.memfds import memfds

from vram import ArrayChannel
from vram.errors import PeerGoneError, ProtocolError
from vram.handover.messages import Closed, Value, encode
from vram.transports import SocketExchange

pytestmark = pytest.mark.slow  # goes with the defence against lenders

SAYS = {"a value": encode(Value(1)), "an end": encode(Closed((1,)))}


@pytest.fixture
def stranger() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        yield one, other


def is_ended(sock: socket.socket) -> bool:
    with contextlib.suppress(BrokenPipeError):
        sock.send(b"more")
        return False
    return True


@pytest.mark.parametrize("what", SAYS)
@pytest.mark.parametrize("kind", ["socket", "pipe", "device"])
def test_a_channel_ends_with_the_first_descriptor_that_is_no_memory(
    stranger: tuple[socket.socket, socket.socket], what: str, kind: str
) -> None:
    one, other = stranger
    reader, writer = os.pipe()
    with open("/dev/zero", "rb") as device, open(reader, "rb"), open(writer, "wb"), memfds(1) as (memory,):
        fd = {"socket": other.fileno(), "pipe": reader, "device": device.fileno()}[kind]
        for _ in range(5):
            socket.send_fds(other, [SAYS[what]], [memory, fd])
        with ArrayChannel(one) as channel:
            with pytest.raises(ProtocolError, match="no shared memory, nor a GPU's"):
                channel.recv(timeout=SOON)
            assert is_ended(other)
            for timeout in (SOON, 0, None):
                with pytest.raises(PeerGoneError):  # the four others were left in the socket
                    channel.recv(timeout=timeout)
            with pytest.raises(PeerGoneError):
                channel.send(2, timeout=SOON)


def test_an_exchange_ends_with_it_too(stranger: tuple[socket.socket, socket.socket]) -> None:
    one, other = stranger
    socket.send_fds(other, [b"anything"], [other.fileno()])
    exchange = SocketExchange(one)
    with pytest.raises(ProtocolError, match="no shared memory"):
        exchange.recv(timeout=SOON)
    assert is_ended(other)
    exchange.close()
