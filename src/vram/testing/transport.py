"""The contract of transports, as a suite: run it on every implementation, and on every way its ends can be connected.

Inherit, and supply a fixture ``ends``: a sender at the source, and the transport that receives here. For a transport
within one process, or with both ends in one, that is :class:`LocalEnds`::

    class TestMyTransport(TransportContract):
        @pytest.fixture
        def ends(self):
            transport = MyTransport("host", "host")
            with contextlib.closing(LocalEnds(transport, transport)) as ends:  # it sends and it receives
                yield ends

A sender in another process is a subclass of :class:`Ends`.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ..arrays import Array
from ..arrays.create import empty
from ..errors import ClosedError, RangeError, UsageError, WaitTimeoutError
from ..spec import Access, Location
from ..transports import Estimate, ExportedBuffer, Transport, Yes

SOON = 120.0  # seconds that a test waits for what ends on its own, whatever the machine does besides
ARENA = 1 << 20  # bytes at the source that what is sent lies in
POISON = 0xA5
_ODD = ((1, 0), (3, 1), (255, 13), (4097, 7), (65_536, 65_531), (700_001, 300_007), (ARENA, 0), (ARENA - 1, 1))


class Ends(ABC):
    """A sender at the source, wherever that runs, and the transport that receives here.

    Attributes
    ----------
    receiver : Transport
        This process's end.
    sender : Transport or None
        The other end, if that is in this process too; may be the same.
    elsewhere : Location or None
        A place that is not the destination, if there is one.
    """

    receiver: Transport
    sender: Transport | None = None
    elsewhere: Location | None = None

    @abstractmethod
    def send(self, data: bytes, offset: int = 0) -> None:
        """Put bytes at an offset of the arena at the source, and send an array on them."""

    @abstractmethod
    def export(self, data: bytes, offset: int = 0) -> ExportedBuffer:
        """Put bytes at an offset of the arena at the source, and return a handle to an array on them."""

    def close(self) -> None:
        """End the sender and close what is here."""
        self.receiver.close()


class LocalEnds(Ends):
    """Both ends in this process, with memory of vram at the source."""

    sender: Transport

    def __init__(self, sender: Transport, receiver: Transport, elsewhere: Location | None = None) -> None:
        self.sender, self.receiver, self.elsewhere = sender, receiver, elsewhere
        self.arena = empty(ARENA, "uint8", device=sender.src)

    def send(self, data: bytes, offset: int = 0) -> None:
        """Send an array on the arena."""
        with self._put(data, offset) as part:
            self.sender.send(part)

    def export(self, data: bytes, offset: int = 0) -> ExportedBuffer:
        """Export an array on the arena."""
        return self.sender.export(self._put(data, offset))

    def _put(self, data: bytes, offset: int) -> Array:
        part = self.arena[offset : offset + len(data)]
        if data:
            part[...] = np.frombuffer(data, np.uint8)
        return part

    def close(self) -> None:
        """Close both ends and give the memory back."""
        self.sender.close()
        self.receiver.close()
        self.arena.close()


class TransportContract:
    """Derive from it, and give it a fixture ``ends``."""

    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        """Return the ends under test, and close them afterwards."""
        raise NotImplementedError

    @pytest.fixture
    def noise(self, request: pytest.FixtureRequest) -> random.Random:
        """Random bytes that are others in each run; the seed is shown where a test fails."""
        seed = time.time_ns()
        request.node.add_report_section("setup", "seed", str(seed))
        return random.Random(seed)

    def test_bytes_of_odd_sizes_and_offsets_arrive(self, ends: Ends, noise: random.Random) -> None:
        for nbytes, offset in _ODD:
            data = noise.randbytes(nbytes)
            ends.send(data, offset)
            with ends.receiver.recv(timeout=SOON) as came:
                assert (came.nbytes, came.dtype, came.shape) == (nbytes, np.dtype("uint8"), (nbytes,))
                assert content(came) == data, f"{nbytes} bytes at {offset}"

    def test_a_given_buffer_is_filled_and_nothing_around_it(self, ends: Ends, noise: random.Random) -> None:
        with empty(ARENA + 64, "uint8", device=ends.receiver.dst) as around:
            for nbytes, offset in _ODD:
                around[...] = POISON
                data = noise.randbytes(nbytes)
                ends.send(data, offset)
                with around[17 : 17 + nbytes] as buffer:
                    assert ends.receiver.recv(buffer, timeout=SOON) is buffer
                seen = content(around)
                assert seen[17 : 17 + nbytes] == data
                assert set(seen[:17] + seen[17 + nbytes :]) == {POISON}

    def test_zero_bytes_are_a_message_too(self, ends: Ends) -> None:
        with empty(16, "uint8", device=ends.receiver.dst) as buffer:
            buffer[...] = POISON
            for given, offset in ((None, 0), (None, 4096), (buffer, 3)):
                ends.send(b"", offset)
                with ends.receiver.recv(given, timeout=SOON) as came:
                    assert (came.nbytes, came.shape) == (0, (0,))
            assert set(content(buffer)) == {POISON}

    def test_messages_come_in_the_order_of_sending(self, ends: Ends, noise: random.Random) -> None:
        parts = [noise.randbytes(noise.randrange(1, 4000)) for _ in range(20)]
        for number, data in enumerate(parts):
            ends.send(data, 4096 * number + number)
        for data in parts:
            with ends.receiver.recv(timeout=SOON) as came:
                assert content(came) == data

    def test_what_came_outlives_the_transport(self, ends: Ends, noise: random.Random) -> None:
        """I6: an array in use keeps its memory. The memory's maker still lives."""
        data = noise.randbytes(5003)
        ends.send(data, 3)
        with ends.receiver.recv(timeout=SOON) as came:
            ends.receiver.close()
            assert content(came) == data

    def test_a_handle_brought_by_hand(self, ends: Ends, noise: random.Random) -> None:
        data = noise.randbytes(4099)
        handle = ends.export(data, 21)
        assert handle.kind == ends.receiver.kind
        with ends.receiver.import_(handle) as came:
            assert content(came) == data
        with pytest.raises(UsageError):
            ends.receiver.import_(ExportedBuffer("other", handle.payload, handle.fds, handle.keeps))

    def test_it_says_which_method_it_is_and_when_it_is_ready(self, ends: Ends) -> None:
        receiver = ends.receiver
        assert receiver.exchange
        ends.send(b"here")
        assert receiver.ready
        receiver.recv(timeout=SOON).close()
        if ends.sender is not None and ends.sender is not receiver:
            assert ends.sender.ready
            ends.sender.close()
            assert not receiver.ready
        receiver.close()
        assert not receiver.ready

    def test_a_buffer_that_does_not_fit_is_refused_and_the_message_stays(self, ends: Ends) -> None:
        place = ends.receiver.dst
        ends.send(b"abc" * 33, 1)
        with empty(98, "uint8", device=place) as small, empty(99, "uint8", device=place) as frozen:
            small[...] = POISON
            frozen.region.freeze()
            assert frozen.region.access is Access.READ
            for buffer, error in ((small, RangeError), (frozen, UsageError)):
                with pytest.raises(error):
                    ends.receiver.recv(buffer, timeout=SOON)
            assert set(content(small)) == {POISON}
        with empty(99, "uint8", device=place) as right:
            assert content(ends.receiver.recv(right, timeout=SOON)) == b"abc" * 33

    def test_a_buffer_at_another_place_is_refused(self, ends: Ends) -> None:
        if ends.elsewhere is None:
            pytest.skip("there is one place only")
        with empty(8, "uint8", device=ends.elsewhere) as wrong:
            ends.send(b"abc")
            with pytest.raises(UsageError):
                ends.receiver.recv(wrong, timeout=SOON)
            ends.receiver.recv(timeout=SOON).close()
            if ends.sender is not None and ends.sender.src != ends.elsewhere:
                for use in (ends.sender.send, ends.sender.export):
                    with pytest.raises(UsageError):
                        use(wrong)

    def test_nothing_sent_is_waited_for_and_no_longer(self, ends: Ends) -> None:
        for timeout in (0, 0.02):
            started = time.monotonic()
            with pytest.raises(WaitTimeoutError):
                ends.receiver.recv(timeout=timeout)
            assert timeout <= time.monotonic() - started < SOON

    def test_i2_a_closed_transport_says_so_and_closes_again(self, ends: Ends) -> None:
        receiver = ends.receiver
        ends.send(b"never received")
        with empty(8, "uint8", device=receiver.dst) as buffer:
            with receiver as same:
                assert same is receiver
            receiver.close()
            uses: Any = (
                lambda: receiver.send(buffer), receiver.recv, lambda: receiver.recv(buffer),
                lambda: receiver.export(buffer), receiver.synchronize,
                lambda: receiver.import_(ExportedBuffer(receiver.kind)),
            )  # fmt: skip
            for use in uses:
                with pytest.raises(ClosedError):
                    use()
        assert receiver.statistics().received.messages == 0

    def test_an_estimate_is_measured_once_and_remembered(self, ends: Ends) -> None:
        found = ends.receiver.estimate()
        assert isinstance(found, Estimate)
        assert 1e6 < found.bandwidth < 1e14
        assert 0 < found.latency < 1
        assert found.seconds(0) == found.latency < found.seconds(1 << 20) < found.seconds(1 << 30)
        assert ends.receiver.estimate() is found

    def test_it_is_available_where_it_works(self, ends: Ends) -> None:
        receiver = ends.receiver
        for kind in (lambda place: place, str):
            assert isinstance(type(receiver).available(kind(receiver.src), kind(receiver.dst)), Yes)
        answer = type(receiver).available(receiver.src, "cuda:4095")
        assert not answer
        assert getattr(answer, "reason", "")
        with pytest.raises(UsageError):
            type(receiver).available(receiver.src, "nowhere")


def content(array: Array) -> bytes:
    """Return an array's bytes, read from where it is mapped."""
    out = bytearray(array.nbytes)
    array.region.driver.copy_out(memoryview(out), array.address)
    return bytes(out)
