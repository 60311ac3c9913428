"""What a peer of a channel does to who receives and sends there: it costs a bounded time and bounded memory (S7)."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from tests.support.deadlines import SOON
from tests.support.floods import ended, long_array
from tests.support.keeper_here import later
from tests.support.memfds import WRITABLE, memfds

import vram
from vram.errors import PeerGoneError, UsageError, WaitTimeoutError
from vram.handover import conversation
from vram.handover.messages import AwaitedPart, MemoryPart, NextPart, Part, Reference, Shared, Value, encode
from vram.open_files import close_fds
from vram.sharing.channel import Channel
from vram.sharing.descriptor import MemoryDescriptor, SegmentEntry

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
    monkeypatch.setattr(conversation, "time", clock)
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
