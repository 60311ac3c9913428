"""Transports between processes where the other end does not keep to what was agreed (S7)."""

from __future__ import annotations

import pytest

import vram
from vram.errors import ProtocolError
from vram.exchange.wire import MemoryPart, Part
from vram.sharing.descriptor import MemoryDescriptor, SegmentEntry
from vram.transports import SocketExchange, VmmTransport, remote
from vram.transports.wire import WINDOW, Hello, Sent, encode

SOON = 60.0
GRANULE = 2 << 20
BYTE = Sent(1, 0, 1, "uint8", (1,))


def memory(number: int) -> bytes:
    """Describe a granule of the host."""
    descriptor = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, GRANULE, GRANULE)
    return encode(Part(MemoryPart(number, 0, True, True, descriptor)))


def test_s7_more_messages_than_may_be_under_way_are_refused() -> None:
    """As many as may be are kept while this end sends; one more is a peer that would fill our memory."""
    for count in (WINDOW, WINDOW + 1):
        one, other = SocketExchange.pair()
        with one, VmmTransport("host", "host", other) as transport, vram.zeros(1, "uint8", device="host") as array:
            (allocation,), _ = array.region.segments(0, 1)
            with allocation:
                one.send(encode(Hello(1, "vmm")))
                one.send(memory(1), [allocation.export()])
                for _ in range(count):
                    one.send(encode(BYTE))
                if count <= WINDOW:
                    transport.send(array)
                else:
                    with pytest.raises(ProtocolError, match=f"more than {WINDOW} messages"):
                        transport.send(array)
                for _ in range(WINDOW):
                    transport.recv(timeout=SOON).close()


def test_s7_more_memories_than_may_be_described_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_MEMORIES", 3)
    one, other = SocketExchange.pair()
    with one, VmmTransport("host", "host", other) as transport, vram.zeros(1, "uint8", device="host") as array:
        (allocation,), _ = array.region.segments(0, 1)
        with allocation:
            one.send(encode(Hello(1, "vmm")))
            for number in range(1, 5):
                one.send(memory(number), [allocation.export()])
            one.send(encode(BYTE))
            with pytest.raises(ProtocolError, match="more than 3 memories"):
                transport.recv(timeout=SOON)
            assert transport.statistics().imported == 3
