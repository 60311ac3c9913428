"""The exchange over a file in memory: nothing unread is overwritten, and nothing is read half written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON
from tests.support.places import short_directory

from vram.errors import PeerGoneError, ProtocolError, WaitTimeoutError
from vram.transports import SharedMemoryExchange
from vram.transports.exchanges import _SLOTS


@pytest.fixture
def pair() -> Iterator[tuple[SharedMemoryExchange, SharedMemoryExchange]]:
    """Both ends, in this process; the first is the one that listened."""
    with short_directory() as place:
        path, made = str(Path(place) / "x"), []
        thread = threading.Thread(target=lambda: made.append(SharedMemoryExchange.listen(path, SOON)))
        thread.start()
        with SharedMemoryExchange.connect(path, SOON) as connected:
            thread.join(SOON)
            (listened,) = made
            with listened:
                yield listened, connected


def both_ways(
    pair: tuple[SharedMemoryExchange, SharedMemoryExchange],
) -> list[tuple[SharedMemoryExchange, SharedMemoryExchange]]:
    return [pair, (pair[1], pair[0])]


def test_what_is_unread_is_not_overwritten(pair: tuple[SharedMemoryExchange, SharedMemoryExchange]) -> None:
    """As many messages as there is room for, and not one more; again after each one that was read."""
    for sender, receiver in both_ways(pair):
        for number in range(_SLOTS):
            sender.send(b"%d" % number, timeout=0)
        for number in range(_SLOTS, 3 * _SLOTS):
            with pytest.raises(WaitTimeoutError, match="read nothing"):
                sender.send(b"one too many", timeout=0)
            assert receiver.recv(timeout=0)[0] == b"%d" % (number - _SLOTS)
            sender.send(b"%d" % number, timeout=0)
        for number in range(2 * _SLOTS, 3 * _SLOTS):
            assert receiver.recv(timeout=0)[0] == b"%d" % number
        with pytest.raises(WaitTimeoutError):
            receiver.recv(timeout=0)


def test_s7_numbers_that_cannot_be_are_refused(pair: tuple[SharedMemoryExchange, SharedMemoryExchange]) -> None:
    sender, receiver = pair
    fd = sender._fds[0]
    sender.send(b"x", timeout=0)
    for length in (4096, 0, 1 << 31):
        os.pwrite(fd, length.to_bytes(4, "little"), sender._slot(sender._end, 0) + 1)
        with pytest.raises(ProtocolError, match=f"{length} bytes"):
            receiver.recv(timeout=0)


def test_s7_a_file_that_was_cut_off_is_an_error_and_no_signal(
    pair: tuple[SharedMemoryExchange, SharedMemoryExchange],
) -> None:
    sender, receiver = pair
    os.ftruncate(sender._fds[0], 64)
    with pytest.raises(ProtocolError, match="cut off"):
        receiver.recv(timeout=0)


def test_the_last_words_of_who_is_gone_are_heard(pair: tuple[SharedMemoryExchange, SharedMemoryExchange]) -> None:
    sender, receiver = pair
    sender.send(b"last words", timeout=0)
    sender.close()
    assert receiver.recv(timeout=0)[0] == b"last words"
    with pytest.raises(PeerGoneError):
        receiver.recv(timeout=SOON)
