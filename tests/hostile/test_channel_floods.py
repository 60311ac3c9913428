"""A peer of an array channel, or of a transport, that says without end what nobody asked for.

It costs whoever is connected with it a bounded time and bounded memory, and what it did say is not lost.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON
from tests.support.floods import ended, flooded, long_array, unread

import vram
from vram.errors import ProtocolError, WaitTimeoutError
from vram.handover import array_channel, outbox
from vram.handover.messages import MAX_UNMAPPED, Closed, NextPart, Unmap, Value, encode
from vram.sharing.channel import Channel
from vram.transports import SocketExchange, VmmTransport, remote, wire

pytestmark = pytest.mark.slow  # goes with the defence against peers of a channel

FEW = 64  # dealt with where there is no time left
SLOW = encode(Closed((1,) * MAX_UNMAPPED))  # takes longer to hear than to send


@pytest.mark.parametrize("timeout", [0, 0.0, 0.2])
def test_a_receiver_beside_a_flood_hears_of_its_deadline(timeout: float) -> None:
    with flooded(SLOW) as end, vram.ArrayChannel(end) as channel:
        found = ended(lambda: channel.recv(timeout=timeout), channel)
        assert isinstance(found, WaitTimeoutError), found


def test_a_receiver_without_time_takes_a_bounded_part_of_what_is_there_and_loses_nothing() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel:
        for _ in range(FEW + 36):
            raw.send(encode(Closed((1,))))
        raw.send(encode(Value("at last")))
        with pytest.raises(WaitTimeoutError, match="only other messages"):
            channel.recv(timeout=0)
        assert channel.recv(timeout=0) == "at last"
        for _ in range(FEW + 36):
            raw.send(encode(Closed((1,))))
        with pytest.raises(WaitTimeoutError):
            channel.recv(timeout=0)
        assert unread(end) == 36


def test_a_sender_hears_a_bounded_part_of_what_is_there() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel:
        array = vram.zeros(4, "uint8", device="host")
        channel.send(array)
        del array
        gc.collect()
        assert channel._exports.remembered  # from here on a sender listens
        for _ in range(FEW + 36):
            raw.send(encode(Closed((1 << 40,))))
        channel.send(1, timeout=SOON)
        assert unread(end) == 36


def test_what_is_unmapped_and_was_never_shared_costs_a_bounded_memory() -> None:
    """The peer reads nothing of what it would be told."""
    raw, end = Channel.pair()
    count = 16 + outbox._MOST_DUE // MAX_UNMAPPED * 2

    def tell() -> None:
        for number in range(count):
            raw.send(encode(Unmap(tuple(range(number * MAX_UNMAPPED, (number + 1) * MAX_UNMAPPED)))), timeout=SOON)
        raw.send(encode(Value("done")), timeout=SOON)

    with raw, vram.ArrayChannel(end) as channel:
        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        assert channel.recv(timeout=SOON) == "done"
        teller.join(SOON)
        due = len(channel._outbox._items)
        assert MAX_UNMAPPED < due <= outbox._MOST_DUE + MAX_UNMAPPED, due
        told = 0
        while True:  # what is due is said as soon as it reads
            try:
                told += len(raw.recv(timeout=0)[0]) > MAX_UNMAPPED
            except WaitTimeoutError:
                if not channel._outbox:
                    break
                with contextlib.suppress(WaitTimeoutError):
                    channel.recv(timeout=0)
        assert told >= due // MAX_UNMAPPED


@pytest.mark.parametrize(("padding", "most"), [(0, 4096), (60_000, (16 << 20) // 60_000 + 1)])
def test_a_sender_that_waits_for_an_answer_takes_a_bounded_part_of_what_else_comes(padding: int, most: int) -> None:
    with flooded(padding=padding) as end, vram.ArrayChannel(end) as channel, long_array() as array:
        found = ended(lambda: channel.send(array, timeout=5.0), channel)
        assert isinstance(found, WaitTimeoutError), found
        assert 1 <= len(channel._inbox) <= most
        for number in range(most + 10):  # nothing of it is lost, and the rest comes behind it
            assert channel.recv(timeout=SOON)[0] == number
        assert not channel._ahead


def test_a_sender_without_a_deadline_hears_of_a_peer_that_acknowledges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_channel, "_PATIENCE", 0.2)
    with flooded(padding=0) as end, vram.ArrayChannel(end) as channel, long_array() as array:
        found = ended(lambda: channel.send(array), channel)
        assert isinstance(found, ProtocolError), found
        assert "without acknowledging" in str(found)
        assert channel.recv(timeout=SOON)[0] == 0


def test_a_sender_goes_on_once_there_is_room_and_the_answer_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_channel, "_MOST_AHEAD", 3)
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, long_array() as array:
        for number in range(5):
            raw.send(encode(Value(number)))
        raw.send(encode(NextPart()))
        with pytest.raises(WaitTimeoutError):
            channel.send(array, timeout=1.0)  # in which it takes three of the numbers that came
        assert len(channel._inbox) == 3
        assert [channel.recv(timeout=SOON) for _ in range(3)] == [0, 1, 2]
        channel.send(array, timeout=SOON)
        assert [channel.recv(timeout=SOON) for _ in range(2)] == [3, 4]


@pytest.fixture
def greeted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SocketExchange, VmmTransport]]:
    """A transport that hears twenty messages at a time, and was told many that say nothing."""
    monkeypatch.setattr(remote, "_MOST_AT_ONCE", 20)
    one, other = SocketExchange.pair()
    with one, VmmTransport("host", "host", other) as transport:
        one.send(wire.encode(wire.Hello(wire.VERSION, "vmm", b"0" * 16)))
        assert transport.ready or transport._peer
        for _ in range(60):
            one.send(wire.encode(Closed((1,))))
        yield other, transport


def test_a_transport_hears_a_bounded_part_of_what_is_there(greeted: tuple[SocketExchange, VmmTransport]) -> None:
    exchange, transport = greeted
    transport._listen()
    assert unread(exchange) == 40


def test_a_transport_without_time_takes_a_bounded_part_too(greeted: tuple[SocketExchange, VmmTransport]) -> None:
    exchange, transport = greeted
    with pytest.raises(WaitTimeoutError, match="no message came"):
        transport.recv(timeout=0)
    assert unread(exchange) == 40
