"""What a peer of a channel does to who receives and sends there: it costs a bounded time and bounded memory (S7)."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON
from tests.support.floods import ended, long_array
from tests.support.keeper_here import later
from tests.support.memfds import WRITABLE, memfds

import vram
from vram import ArrayChannel
from vram.errors import PeerGoneError, ProtocolError, UsageError, WaitTimeoutError
from vram.handover import array_channel
from vram.handover.messages import AwaitedPart, Closed, MemoryPart, NextPart, Part, Reference, Shared, Value, encode
from vram.open_files import close_fds
from vram.sharing.channel import Channel, DescriptorsLostError
from vram.sharing.descriptor import MemoryDescriptor, SegmentEntry
from vram.transports import SocketExchange

pytestmark = pytest.mark.slow  # goes with the defence against peers of a channel

GRANULE = 2 << 20


# -- receiving --------------------------------------------------------------------------------------------------------
def shown(number: int, *, asks: bool) -> bytes:
    """Memory of one descriptor, whose sender waits for the acknowledgement or not."""
    memory = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, GRANULE, GRANULE)
    part = MemoryPart(number, 0, True, True, memory)
    return encode(AwaitedPart(part) if asks else Part(part))


def fill(channel: vram.ArrayChannel) -> int:
    """Send until the other end, which reads nothing, has no room; return how many messages that took."""
    for count in itertools.count():
        try:
            channel.send(b"x" * 1000, timeout=0)
        except WaitTimeoutError:
            return count
    raise AssertionError


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for longer than its deadline waits for ever."""
    monkeypatch.setattr(array_channel, "_PATIENCE", 1e9)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("timeout", [0, 0.05])
def test_a_receiver_hears_of_its_deadline_where_its_peer_reads_no_acknowledgement(timeout: float) -> None:
    """And nothing is lost: each part is acknowledged once, as soon as the other end reads."""
    count = 5
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1, GRANULE, seals=WRITABLE) as fds:
        sent = fill(channel)
        for number in range(1, count + 1):
            raw.send(shown(number, asks=True), fds, timeout=SOON)
        for _ in range(3):
            found = ended(lambda: channel.recv(timeout=timeout), channel)
            assert isinstance(found, WaitTimeoutError), found
        raw.send(encode(Shared(Reference(count, 1, 0, "uint8", (4,)))), timeout=SOON)
        raw.send(encode(Value("last")), timeout=SOON)
        assert channel.recv(timeout=SOON).numpy().tobytes() == b"0\0\0\0", "what comes behind is not held up"
        for _ in range(sent):
            raw.recv(timeout=SOON)
        assert channel.recv(timeout=SOON) == "last"
        assert [raw.recv(timeout=SOON)[0] for _ in range(count)] == [encode(NextPart())] * count
        with pytest.raises(WaitTimeoutError):
            raw.recv(timeout=0)


def test_a_receiver_acknowledges_as_soon_as_its_peer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for that as it waits for messages: its peer may send nothing before."""
    waits = threading.Event()
    poll = Channel._poll

    def told(self: Channel, events: int, timeout: float | None) -> list[tuple[int, int]]:
        waits.set()
        return poll(self, events, timeout)

    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1, GRANULE, seals=WRITABLE) as fds:
        sent = fill(channel)
        raw.send(shown(1, asks=True), fds, timeout=SOON)
        with pytest.raises(WaitTimeoutError):
            channel.recv(timeout=0)
        monkeypatch.setattr(Channel, "_poll", told)
        thread, came = later(lambda: channel.recv(timeout=SOON))
        assert waits.wait(SOON)
        monkeypatch.undo()
        for _ in range(sent):
            raw.recv(timeout=SOON)
        assert raw.recv(timeout=SOON)[0] == encode(NextPart())
        raw.send(encode(Value("then")), timeout=SOON)
        thread.join(SOON)
        assert came == ["then"]


def test_a_sender_acknowledges_what_its_peer_had_no_room_for() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1, GRANULE, seals=WRITABLE) as fds:
        sent = fill(channel)
        raw.send(shown(1, asks=True), fds, timeout=SOON)
        with pytest.raises(WaitTimeoutError):
            channel.recv(timeout=0)
        for _ in range(sent):
            raw.recv(timeout=SOON)
        channel.send("more", timeout=SOON)
        assert {raw.recv(timeout=SOON)[0] for _ in range(2)} == {encode(NextPart()), encode(Value("more"))}


def test_what_a_peer_sent_before_it_went_is_received_though_it_hears_no_acknowledgement() -> None:
    raw, end = Channel.pair()
    with vram.ArrayChannel(end) as channel, memfds(1, GRANULE, seals=WRITABLE) as fds:
        with raw:
            raw.send(shown(1, asks=True), fds, timeout=SOON)
            raw.send(encode(Shared(Reference(1, 1, 0, "uint8", (4,)))), timeout=SOON)
        assert channel.recv(timeout=SOON).numpy().tobytes() == b"0\0\0\0"
        with pytest.raises(PeerGoneError):
            channel.recv(timeout=SOON)


# -- sending ----------------------------------------------------------------------------------------------------------
class Clock:
    """The time, which somebody can turn on."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.turned = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.turned


def test_one_deadline_is_for_all_parts_of_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that takes each part just in time has a sender wait for one timeout, not for one a part."""
    clock = Clock()
    monkeypatch.setattr(array_channel, "time", clock)
    raw, end = Channel.pair()

    def take_one() -> None:
        close_fds(raw.recv(timeout=SOON)[1])
        clock.turned += 2 * SOON
        raw.send(encode(NextPart()), timeout=SOON)

    with raw, vram.ArrayChannel(end) as channel, long_array() as one, long_array() as other:
        thread, came = later(take_one)
        found = ended(lambda: channel.send([one, other], timeout=SOON), channel)
        thread.join(SOON)
        assert came == [None]
        assert isinstance(found, WaitTimeoutError), found
        assert "took no part of the memory" in str(found)


@pytest.mark.parametrize("timeout", [-1, "1", True, float("nan"), 10**400])
def test_a_sender_says_what_is_no_timeout(timeout: object) -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, pytest.raises(UsageError, match="not a number of seconds"):
        channel.send(1, timeout=timeout)  # type: ignore[arg-type]


# -- what is no memory ------------------------------------------------------------------------------------------------
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
    exchange = SocketExchange(Channel(one))
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
