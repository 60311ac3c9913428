"""The exchange over a file in memory: nothing unread is overwritten, and no half is taken for a whole."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON

from vram.errors import PeerGoneError, ProtocolError, WaitTimeoutError
from vram.keeper.private import short_directory
from vram.transports import SharedMemoryExchange
from vram.transports.memory_file import _COUNT, _HEAD, _SLOTS, _checksum


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


def test_s7_a_message_counts_when_all_of_it_is_there(pair: tuple[SharedMemoryExchange, SharedMemoryExchange]) -> None:
    """In whatever order its bytes show; an older one in the same slot is no part of it."""
    for sender, receiver in both_ways(pair):
        for _ in range(_SLOTS):  # until each slot holds what was read long ago
            sender.send(b"an old message", timeout=0)
            receiver.recv(timeout=0)
        number, payload = _SLOTS + 1, b"a new message!"
        head, at = _HEAD.pack(number, len(payload), _checksum(number, payload)), sender._slot(sender._end, number)
        for written in (head, head + payload[:1], head + payload[:-1]):
            os.pwrite(sender._fd, written, at)
            with pytest.raises(WaitTimeoutError):
                receiver.recv(timeout=0)
        os.pwrite(sender._fd, head + payload, at)
        assert receiver.recv(timeout=0)[0] == payload


@pytest.mark.parametrize("shown", range(1, _HEAD.size))
def test_s7_a_head_that_shows_in_part_is_no_mistake(
    pair: tuple[SharedMemoryExchange, SharedMemoryExchange], shown: int
) -> None:
    """The slot was never used: where the length will be there is 0, or a byte of what it will be."""
    sender, receiver = pair
    payload = bytes(1027)
    head, at = _HEAD.pack(1, len(payload), _checksum(1, payload)), sender._slot(sender._end, 1)
    os.pwrite(sender._fd, head[:shown] + bytes(_HEAD.size - shown), at)
    with pytest.raises(WaitTimeoutError):
        receiver.recv(timeout=0)
    os.pwrite(sender._fd, head + payload, at)
    assert receiver.recv(timeout=0)[0] == payload


def test_s7_a_count_of_messages_read_counts_when_all_of_it_is_there(
    pair: tuple[SharedMemoryExchange, SharedMemoryExchange],
) -> None:
    """A sender that believes half of one would overwrite what is unread."""
    for sender, receiver in both_ways(pair):
        for number in range(_SLOTS):
            sender.send(b"%d" % number, timeout=0)
        os.pwrite(sender._fd, _COUNT.pack(_SLOTS, 12345), 64 * (1 + receiver._end))
        with pytest.raises(WaitTimeoutError):
            sender.send(b"over what is unread", timeout=0)
        assert [receiver.recv(timeout=0)[0] for _ in range(_SLOTS)] == [b"%d" % number for number in range(_SLOTS)]
        sender.send(b"again", timeout=0)
        assert receiver.recv(timeout=0)[0] == b"again"


def test_s7_numbers_that_cannot_be_are_refused(pair: tuple[SharedMemoryExchange, SharedMemoryExchange]) -> None:
    sender, receiver = pair
    for length in (4096, 1 << 31):
        os.pwrite(sender._fd, _HEAD.pack(1, length, 0), sender._slot(sender._end, 1))
        with pytest.raises(ProtocolError, match=f"{length} bytes"):
            receiver.recv(timeout=0)
    ahead = (1).to_bytes(8, "little")
    os.pwrite(sender._fd, ahead + zlib.crc32(ahead).to_bytes(4, "little"), 64 * (1 + receiver._end))
    with pytest.raises(ProtocolError, match="read 1 messages of 0"):
        sender.send(b"x", timeout=0)


def test_s7_a_file_that_was_cut_off_is_an_error_and_no_signal(
    pair: tuple[SharedMemoryExchange, SharedMemoryExchange],
) -> None:
    sender, receiver = pair
    os.ftruncate(sender._fd, 4096)
    with pytest.raises(ProtocolError, match="cut off"):
        receiver.recv(timeout=0)


def test_the_last_words_of_who_is_gone_are_heard(pair: tuple[SharedMemoryExchange, SharedMemoryExchange]) -> None:
    sender, receiver = pair
    sender.send(b"last words", timeout=0)
    sender.close()
    assert receiver.recv(timeout=0)[0] == b"last words"
    with pytest.raises(PeerGoneError):
        receiver.recv(timeout=SOON)
