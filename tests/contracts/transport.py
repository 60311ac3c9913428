"""The contract of transports, and what every transport of this project does besides."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import SOON

from vram.arrays.create import empty
from vram.errors import UsageError
from vram.testing import Ends, TransportContract
from vram.testing.transport import POISON, content


class FullTransportContract(TransportContract):
    def test_a_larger_buffer_is_filled_from_its_beginning(self, ends: Ends, noise: random.Random) -> None:
        data = noise.randbytes(1001)
        with empty((8, 512), "uint16", device=ends.receiver.dst) as buffer:
            buffer[...] = 0xA5A5
            ends.send(data, 5)
            with ends.receiver.recv(buffer, timeout=SOON) as came:
                assert (came.address, came.shape, came.dtype) == (buffer.address, (1001,), np.dtype("uint8"))
                assert content(came) == data
            assert set(content(buffer)[1001:]) == {POISON}

    def test_what_is_sent_again_is_seen_again_and_opened_once(self, ends: Ends, noise: random.Random) -> None:
        imported = set()
        with empty(3001, "uint8", device=ends.receiver.dst) as buffer:
            for _ in range(30):
                data = noise.randbytes(3001)
                ends.send(data, 11)
                ends.receiver.recv(buffer, timeout=SOON)
                assert content(buffer) == data
                imported.add(ends.receiver.statistics().imported)
        assert imported in ({0}, {1})

    def test_what_was_exported_is_found_again_and_nothing_else(self, ends: Ends, noise: random.Random) -> None:
        sender = ends.sender
        if sender is None:
            pytest.skip("the sender is in another process")
        data = noise.randbytes(1001)
        with empty(1001, "uint8", device=sender.src) as array, empty(5, "uint8", device=sender.src) as other:
            array[...] = np.frombuffer(data, np.uint8)
            for _ in range(2):  # to ask exports nothing
                assert sender.exported_handle(array) is None
            for handle in (sender.export(array), sender.exported_handle(array)):
                if handle is not None:
                    with ends.receiver.import_(handle) as came:
                        assert content(came) == data
            assert ends.receiver.statistics().imported <= 1
            assert sender.exported_handle(other) is None

    def test_statistics_count_up(self, ends: Ends) -> None:
        before = ends.receiver.statistics().received
        assert (before.messages, before.nbytes, before.seconds) == (0, 0, 0.0)
        with empty(2000, "uint8", device=ends.receiver.dst) as buffer:
            for nbytes in (1000, 0, 2000):
                ends.send(bytes(nbytes), 9)
                ends.receiver.recv(buffer, timeout=SOON)
        moved = [ends.receiver.statistics().received]
        if ends.sender is not None:
            ends.sender.synchronize(timeout=SOON)
            moved.append(ends.sender.statistics().sent)
        for count in moved:
            assert (count.messages, count.nbytes) == (3, 3000)
            assert 0 < count.seconds < SOON

    def test_what_is_no_array_is_refused(self, ends: Ends) -> None:
        odd: Any
        for odd in (b"bytes", 5, np.zeros(3)):
            for use in (ends.receiver.send, ends.receiver.export, ends.receiver.recv):
                with pytest.raises(UsageError):
                    use(odd)
        moved = ends.receiver.statistics()
        assert (moved.sent.messages, moved.received.messages) == (0, 0)
