"""A peer of a transport that reads nothing, gives in drops, or gives up all that it begins: a `recv` ends in its time.

Nothing is lost by that: the next call goes on where the last one was.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON
from tests.support.floods import ended, unread
from tests.support.remote_transports import GRANULE, memory

import vram
from vram.errors import ProtocolError, WaitTimeoutError
from vram.handover.messages import Closed, MemoryPart, NextPart, Part, Reference, Shared
from vram.sharing.descriptor import MemoryDescriptor, SegmentEntry
from vram.transports import ShmTransport, SocketExchange, VmmTransport, remote, shm
from vram.transports.remote import RemoteTransport
from vram.transports.wire import VERSION, Chunk, Drained, Hello, Received, decode, encode

KINDS: dict[str, type[RemoteTransport]] = {"vmm": VmmTransport, "shm": ShmTransport}
BYTE = {
    "vmm": encode(Shared(Reference(1, 1, 0, "uint8", (1,)))),
    "shm": encode(Chunk(Reference(1, 1, 0, "uint8", (1,)), 0, 1, 1)),
}


@contextlib.contextmanager
def greeted(kind: str, *, described: bool = True) -> Iterator[tuple[SocketExchange, SocketExchange, RemoteTransport]]:
    """A peer, this end's exchange, and this end, which was told of the peer's memory 1: sevens."""
    one, other = SocketExchange.pair()
    with one, KINDS[kind]("host", "host", other) as transport, vram.zeros(1, "uint8", device="host") as array:
        array[0] = 7
        (allocation,), _ = array.region.segments(0, 1)
        with allocation:
            one.send(encode(Hello(VERSION, kind)), timeout=SOON)
            if described:
                one.send(memory(1), [allocation.export()], timeout=SOON)
            yield one, other, transport


def fill(exchange: SocketExchange) -> None:
    with contextlib.suppress(WaitTimeoutError):
        while True:
            exchange.send(encode(Closed((1 << 40,))), timeout=0)


def read(exchange: SocketExchange) -> list[object]:
    """Return all that is there to be read, but for what filled it."""
    found: list[object] = []
    with contextlib.suppress(WaitTimeoutError):
        while True:
            found.append(decode(exchange.recv(timeout=0)[0]))
    return [one for one in found if not isinstance(one, (Closed, Hello))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_hears_of_its_deadline_where_its_peer_reads_nothing(kind: str) -> None:
    """To say that something was received had no deadline: a recv with one waited for ever."""
    with greeted(kind) as (one, other, transport):
        fill(other)
        one.send(BYTE[kind], timeout=SOON)
        for timeout in (0.2, 0):
            found = ended(lambda timeout=timeout: transport.recv(timeout=timeout), transport)  # type: ignore[misc]
            assert isinstance(found, WaitTimeoutError), found
        read(one)
        with transport.recv(timeout=SOON) as array:
            assert array.to_host().tolist() == [7]
        said = read(one)
        assert said.count(Received(1)) == 1
        assert [message for message in said if isinstance(message, Drained)] == [Drained(1)] * (kind == "shm")


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_waits_for_no_other_thread_beyond_its_deadline(kind: str) -> None:
    """One without a deadline, which waits for such a peer."""
    with greeted(kind) as (one, _, transport):
        one.send(BYTE[kind], timeout=SOON)
        with transport._acking:
            found = ended(lambda: transport.recv(timeout=0.2), transport)
            assert isinstance(found, WaitTimeoutError), found
        with transport.recv(timeout=SOON) as array:
            assert array.to_host().tolist() == [7]
        assert read(one).count(Received(1)) == 1


def test_a_part_of_memory_is_acknowledged_in_the_time_of_the_call() -> None:
    with greeted("vmm", described=False) as (one, other, transport), vram.zeros(1, "uint8", device="host") as array:
        fill(other)
        (allocation,), _ = array.region.segments(0, 1)
        with allocation:
            descriptor = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, GRANULE, 2 * GRANULE)
            part = MemoryPart(1, 0, False, True, descriptor)
            one.send(encode(Part(part)), [allocation.export()], timeout=SOON)
        one.send(BYTE["vmm"], timeout=SOON)
        ended(lambda: transport.ready, transport)
        for timeout in (0.2, 0):
            found = ended(lambda timeout=timeout: transport.recv(timeout=timeout), transport)  # type: ignore[misc]
            assert isinstance(found, WaitTimeoutError), found
        read(one)
        transport.recv(timeout=SOON).close()
        assert read(one)[:2] == [NextPart(), Received(1)]


def test_the_deadline_of_a_receiver_is_for_all_of_a_message() -> None:
    """Each piece had the whole time anew."""
    pieces = 200
    gone = threading.Event()
    with greeted("shm") as (one, _, transport):

        def drip() -> None:
            for at in range(pieces):
                reference = Reference(1, 1, at, "uint8", (pieces,))
                one.send(encode(Chunk(reference, at, 1, at + 1)), timeout=SOON)
                gone.wait(0.03)

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        found = ended(lambda: transport.recv(timeout=0.3), transport)
        assert isinstance(found, WaitTimeoutError), found
        gone.set()  # the rest at once
        with transport.recv(timeout=SOON) as array:
            assert array.to_host().tolist() == [7] + [0] * (pieces - 1)
        thread.join(SOON)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_receiver_hears_of_its_deadline_where_something_always_is_there(
    given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline was looked at only where a piece was waited for."""
    pieces = 20
    with greeted("shm") as (one, _, transport):
        for at in range(pieces):
            one.send(encode(Chunk(Reference(1, 1, at, "uint8", (pieces,)), at, 1, at + 1)), timeout=SOON)
            if given_up and not at:
                break
        assert transport.ready
        if given_up:
            one.send(encode(Chunk(Reference(1, 1, 1, "uint8", (1,)), 0, 1, 2)), timeout=SOON)
        with monkeypatch.context() as patch:
            patch.setattr(remote, "_MOST_LATE", 0.0)
            with pytest.raises(WaitTimeoutError, match="the rest of a message"):
                transport.recv(timeout=0)
        assert transport._inbox[0].done == 1
        with transport.recv(timeout=0) as array:
            assert array.to_host().tolist() == ([0] if given_up else [7] + [0] * (pieces - 1))


@pytest.mark.parametrize("call", ["recv", "listen"])
def test_what_is_heard_without_time_takes_a_bounded_time(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number was bounded, and each may take as long as it takes to close what comes along."""
    with greeted("vmm", described=False) as (one, other, transport):
        for _ in range(5):
            one.send(encode(Closed((1 << 40,))), timeout=SOON)
        monkeypatch.setattr(remote, "_MOST_LATE", 0.0)
        if call == "recv":
            with pytest.raises(WaitTimeoutError):
                transport.recv(timeout=0)
        else:
            transport._listen()
        assert unread(other) == 5  # it heard the greeting


def test_what_is_begun_and_given_up_costs_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring has as much room as its maker likes, and who only sends has no use for what is in it."""
    monkeypatch.setattr(shm, "_MOST_IN_RING", 20)
    with greeted("shm") as (one, _, transport), vram.zeros(1, "uint8", device="host") as array:
        assert isinstance(transport, ShmTransport)
        for stop in range(1, 31):
            one.send(encode(Chunk(Reference(1, 1, 0, "uint8", (2,)), 0, 1, stop)), timeout=SOON)
        with pytest.raises(ProtocolError, match="that cannot be"):
            transport.send(array)
        assert len(transport._in_ring) == 20
        assert len(transport._inbox) == 1
