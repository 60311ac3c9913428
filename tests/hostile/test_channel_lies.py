"""What a peer of an array channel says wrongly, or at length, while this end only sends; and memory that is lost.

It costs a bounded memory and no descriptor, ends the connection, or is put right.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import tracemalloc
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON
from tests.support.floods import ended, flooded, long_array, unread
from tests.support.memfds import memfds

import vram
from vram.errors import ProtocolError, WaitTimeoutError
from vram.handover import conversation
from vram.handover.conversation import Failure
from vram.handover.messages import (
    MAX_UNMAPPED,
    Closed,
    Mixed,
    NextPart,
    Reference,
    Returned,
    Unmap,
    Unref,
    Value,
    encode,
)
from vram.sharing.channel import MAX_FDS, Channel, DescriptorsLostError

NEVER_SENT = encode(Unref(((1 << 60, 1),)))
GRANULE = 2 << 20
LOCKS = 8_000  # of a file: each close goes through them


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def listening() -> Iterator[tuple[Channel, vram.ArrayChannel]]:
    """A peer, and an end that has sent memory which is dropped: from here on it listens whenever it sends."""
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel:
        channel.send(vram.zeros(4, "uint8", device="host"))
        gc.collect()
        assert channel._talk.exports.remembered
        yield raw, channel


def kept(channel: vram.ArrayChannel) -> BaseException:
    """Return the one error that is kept for who receives."""
    (failure,) = channel._talk.inbox
    assert isinstance(failure, Failure)
    return failure.error


@pytest.mark.parametrize(("count", "says"), [(0, "given back"), (20, "which has none")])
def test_what_a_sender_hears_wrongly_is_for_who_receives_and_keeps_nothing_but_its_words(count: int, says: str) -> None:
    with listening() as (raw, channel), memfds(1) as (memory,):
        before = descriptors()
        raw.send(NEVER_SENT, [memory] * count)
        raw.send(encode(Value("next")))
        channel.send(1, timeout=SOON)
        assert descriptors() <= before
        error = kept(channel)
        assert error.__traceback__ is None, "it keeps the frames, and all that is in them"
        assert error.__context__ is None
        with pytest.raises(ProtocolError, match=says):
            channel.recv(timeout=SOON)
        assert channel.recv(timeout=SOON) == "next"


def test_what_is_no_message_keeps_no_frame_of_its_parsing() -> None:
    with listening() as (raw, channel):
        raw.send(NEVER_SENT[:3] + b"\x07")
        channel.send(1, timeout=SOON)
        error = kept(channel)
        assert (error.__traceback__, error.__context__) == (None, None)


@pytest.mark.parametrize("timeout", [0, 0.2])
def test_a_receiver_beside_a_flood_hears_of_its_deadline(timeout: float) -> None:
    with flooded(encode(Closed((1,) * MAX_UNMAPPED))) as end, vram.ArrayChannel(end) as channel:
        found = ended(lambda: channel.recv(timeout=timeout), channel)
        assert isinstance(found, WaitTimeoutError), found


def test_a_sender_hears_a_bounded_part_of_what_is_there() -> None:
    with listening() as (raw, channel):
        for _ in range(conversation._MOST_AT_ONCE + 20):
            raw.send(encode(Closed((1 << 40,))), timeout=SOON)
        channel.send(1, timeout=SOON)
        assert unread(channel._channel) == 20


def test_a_sender_hears_of_a_peer_that_acknowledges_nothing_and_loses_nothing() -> None:
    with flooded(padding=0) as end, vram.ArrayChannel(end) as channel, long_array() as array:
        found = ended(lambda: channel.send(array), channel)
        assert isinstance(found, ProtocolError), found
        assert "without acknowledging" in str(found)
        assert len(channel._talk.inbox) == conversation._MOST_AHEAD
        for number in range(conversation._MOST_AHEAD + 10):
            assert channel.recv(timeout=SOON)[0] == number


def test_a_sender_goes_on_once_there_is_room_and_the_answer_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "_MOST_AHEAD", 3)
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, long_array() as array:
        for number in range(5):
            raw.send(encode(Value(number)))
        raw.send(encode(NextPart()))
        with pytest.raises(ProtocolError, match="3 messages wait here"):
            channel.send(array, timeout=SOON)
        assert [channel.recv(timeout=SOON) for _ in range(3)] == [0, 1, 2]
        channel.send(array, timeout=SOON)
        assert [channel.recv(timeout=SOON) for _ in range(2)] == [3, 4]


def test_who_listens_takes_nothing_while_as_much_waits_as_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "_MOST_AHEAD", 0)
    with listening() as (raw, channel):
        for _ in range(5):
            raw.send(encode(Closed((1 << 40,))))
        channel.send(1, timeout=SOON)
        assert unread(channel._channel) == 5


def test_what_waits_to_be_received_takes_no_more_memory_than_its_messages() -> None:
    """64 KiB of empty dicts take seventy times as much once they are made: 1.2 GB where 16 MiB were meant."""
    bomb, count = encode(Value([{}] * 60_000)), 3
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, long_array() as array:
        tracemalloc.start()
        try:
            for _ in range(count):
                raw.send(bomb, timeout=SOON)
            with pytest.raises(WaitTimeoutError):
                channel.send(array, timeout=1.0)
            assert len(channel._talk.inbox) == count
            assert tracemalloc.get_traced_memory()[0] < 4 << 20  # where they took 13 MB
        finally:
            tracemalloc.stop()
        for _ in range(count):
            assert channel.recv(timeout=SOON) == [{}] * 60_000


def test_a_value_that_is_none_is_refused_when_it_is_asked_for() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel:
        raw.send(b"\x92\xa1x\xa1\xff")  # text that is not UTF-8
        with pytest.raises(ProtocolError, match="not a message"):
            channel.recv(timeout=SOON)


# -- descriptors that nothing has, and time ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "message",
    [Value(1), Mixed([], ()), Unref(()), Unmap(()), Closed(()), NextPart(), Returned(Reference(1, 0, 0, "uint8", ()))],  # type: ignore[arg-type]
    ids=lambda message: type(message).__name__,
)
def test_descriptors_with_what_has_none_cost_their_message_and_nothing_else(message: object) -> None:
    """They were left to a finalizer, out of which no interrupt comes, and the next message brought more."""
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1) as (memory,):
        before = descriptors()
        raw.send(encode(message), [memory] * 20)
        with pytest.raises(ProtocolError, match=f"20 descriptors came with a {type(message).__name__}") as caught:
            channel.recv(timeout=SOON)
        assert caught.value.__traceback__ is not None, "all that its frames have is there still"
        assert descriptors() == before
        with vram.ArrayChannel(raw) as other, vram.zeros(4, "uint8", device="host") as array:
            other.send(array, timeout=SOON)
            with channel.recv(timeout=SOON) as found:
                array[:] = 7
                assert found.to_host().tolist() == [7] * 4


def test_descriptors_with_what_is_no_message_are_closed_at_once() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1) as (memory,):
        before = descriptors()
        raw.send(b"\xc1", [memory] * 20)
        with pytest.raises(ProtocolError, match="not a message") as caught:
            channel.recv(timeout=SOON)
        assert caught.value.__traceback__ is not None, "all that its frames have is there still"
        assert descriptors() == before


def test_a_message_whose_descriptors_found_no_room_costs_nothing_else_either() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1) as (memory,):
        raw.send(encode(Value(1)), [memory] * 2)
        raw.send(encode(Value("next")))
        with room_for(1), pytest.raises(DescriptorsLostError):
            channel.recv(timeout=SOON)
        assert channel.recv(timeout=SOON) == "next"


def test_an_array_whose_lengths_no_array_has_is_its_senders_mistake() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, vram.zeros(4, "uint8", device="host") as array:
        channel.send(array, timeout=SOON)
        raw.send(encode(Returned(Reference(1, 0, 0, "uint8", (2**62, 2**62, 0)))))
        with pytest.raises(ProtocolError, match="addresses end"):
            channel.recv(timeout=SOON)


# -- no descriptor left ---------------------------------------------------------------------------------------------
@contextlib.contextmanager
def room_for(count: int) -> Iterator[None]:
    """This process has room for so many more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with memfds(1) as (fd,):
        filled = [os.dup(fd)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + count + 1, hard))
            with contextlib.suppress(OSError):
                while True:
                    filled.append(os.dup(fd))
            for _ in range(count):
                os.close(filled.pop())
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for number in filled:
                os.close(number)


def lose_a_part(sender: vram.ArrayChannel, receiver: vram.ArrayChannel, array: vram.Array) -> None:
    """Send an array of which a part finds no room."""
    sender.send(array, timeout=SOON)
    with room_for(1), pytest.raises(DescriptorsLostError, match="no room for its descriptors"):
        receiver.recv(timeout=SOON)
    with pytest.raises(ProtocolError, match="not known here"):
        receiver.recv(timeout=SOON)


@pytest.mark.parametrize("hears", ["recv", "send"])
def test_memory_of_which_a_part_was_lost_is_sent_anew(hears: str) -> None:
    """Its sender believed that it was known there, and never sent it again."""
    sender, receiver = vram.ArrayChannel.pair()
    with sender, receiver, vram.zeros(3 * GRANULE, "uint8", device="host", chunk=GRANULE) as array:
        lose_a_part(sender, receiver, array)
        if hears == "recv":
            with pytest.raises(WaitTimeoutError):
                sender.recv(timeout=0)
        else:
            for number in range(conversation._LISTENS):
                sender.send(number, timeout=SOON)
                assert receiver.recv(timeout=SOON) == number
        sender.send(array, timeout=SOON)
        found = receiver.recv(timeout=SOON)
        array[-1] = 7
        assert found.to_host()[-1] == 7
        assert len(sender._talk.exports.numbers()) == 1
        sender.send(array, timeout=SOON)
        assert receiver.recv(timeout=SOON) is found


def test_a_part_that_is_lost_keeps_its_sender_waiting_no_longer() -> None:
    """The part asks for an acknowledgement: the next part comes once it is there."""
    sender, receiver = vram.ArrayChannel.pair()
    with sender, receiver, long_array() as array:
        with pytest.raises(WaitTimeoutError):
            sender.send(array, timeout=0)
        with room_for(1), pytest.raises(DescriptorsLostError):
            receiver.recv(timeout=SOON)
        sender.send(array, timeout=SOON)  # begun before it is heard that it is of no use
        for wrong in ("came after 0", "not known here"):
            with pytest.raises(ProtocolError, match=wrong):
                receiver.recv(timeout=SOON)
        with pytest.raises(WaitTimeoutError):
            sender.send(array, timeout=0)
        with pytest.raises(WaitTimeoutError):  # acknowledges the first part
            receiver.recv(timeout=0)
        sender.send(array, timeout=SOON)
        found = receiver.recv(timeout=SOON)
        assert found.nbytes == array.nbytes
        assert len(found.region.layout) > MAX_FDS
