"""What a peer sends that is no memory, and how long a lender may take: both end at a bound of the client's."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON
from tests.support.memfds import memfds

from vram import ArrayChannel
from vram.errors import PeerGoneError, ProtocolError
from vram.handover.messages import Closed, Value, encode
from vram.sharing.channel import Channel, DescriptorsLostError
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


# -- no descriptor left ---------------------------------------------------------------------------------------------
def test_a_message_that_finds_no_room_says_how_many_of_its_descriptors_came() -> None:
    """And says it where not even a module can be loaded any more."""
    one, other = Channel.pair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with one, other, memfds(3) as fds:
        other.send(b"three", fds, timeout=SOON)
        keep = [os.dup(fds[0])]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(keep[0], *fds) + 2, hard))
            while True:
                try:
                    keep.append(os.dup(fds[0]))
                except OSError:
                    break
            os.close(keep.pop())
            with pytest.raises(DescriptorsLostError, match="1 of those of a message"):
                one.recv(timeout=SOON)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in keep:
                os.close(fd)
