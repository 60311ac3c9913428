"""What a peer of an array channel says wrongly while this end only sends; and memory that is lost.

It costs no descriptor, ends the connection, or is put right.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import resource
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON
from tests.support.memfds import WRITABLE, memfds

import vram
from vram.errors import ProtocolError, WaitTimeoutError
from vram.handover import conversation
from vram.handover.conversation import Failure
from vram.handover.messages import (
    Closed,
    MemoryPart,
    Mixed,
    NextPart,
    Part,
    Reference,
    Returned,
    Shared,
    Unmap,
    Unref,
    Value,
    encode,
)
from vram.sharing.channel import MAX_FDS, Channel, DescriptorsLostError
from vram.sharing.descriptor import MemoryDescriptor, SegmentEntry

NEVER_SENT = encode(Unref(((1 << 60, 1),)))
GRANULE = 2 << 20


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


@contextlib.contextmanager
def long_array() -> Iterator[vram.Array]:
    """An array whose descriptors go in two messages: the second waits until the first is acknowledged."""
    with vram.zeros(1, "uint8", device="host", capacity=(MAX_FDS + 2) * (2 << 20)) as array:
        for count in range(2, MAX_FDS + 2):
            array.resize((count - 1) * (2 << 20) + 1)
        assert len(array.region.layout) > MAX_FDS
        yield array


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


def test_what_comes_before_an_answer_is_kept_for_who_receives() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, long_array() as array:
        for number in range(5):
            raw.send(encode(Value(number)))
        raw.send(encode(NextPart()))
        channel.send(array, timeout=SOON)
        assert [channel.recv(timeout=SOON) for _ in range(5)] == [0, 1, 2, 3, 4]


# -- what is not read -----------------------------------------------------------------------------------------------
def shown(number: int) -> bytes:
    """Memory of one descriptor, whose sender waits for the acknowledgement."""
    memory = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, GRANULE, GRANULE)
    return encode(Part(MemoryPart(number, 0, True, True, memory), asks=True))


def fill(channel: vram.ArrayChannel) -> int:
    """Send until the other end, which reads nothing, has no room; return how many messages that took."""
    for count in itertools.count():
        try:
            channel.send(b"x" * 1000, timeout=0)
        except WaitTimeoutError:
            return count
    raise AssertionError


def test_each_part_is_acknowledged_once_as_soon_as_the_other_end_reads() -> None:
    count = 5
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1, GRANULE, seals=WRITABLE) as fds:
        sent = fill(channel)
        for number in range(1, count + 1):
            raw.send(shown(number), fds, timeout=SOON)
        for _ in range(3):
            with pytest.raises(WaitTimeoutError):
                channel.recv(timeout=0)
        raw.send(encode(Shared(Reference(count, 1, 0, "uint8", (4,)))), timeout=SOON)
        raw.send(encode(Value("last")), timeout=SOON)
        assert channel.recv(timeout=SOON).numpy().tobytes() == b"0\0\0\0", "what comes behind is not held up"
        for _ in range(sent):
            raw.recv(timeout=SOON)
        assert channel.recv(timeout=SOON) == "last"
        assert [raw.recv(timeout=SOON)[0] for _ in range(count)] == [encode(NextPart())] * count
        with pytest.raises(WaitTimeoutError):
            raw.recv(timeout=0)


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


def test_a_message_whose_descriptors_found_no_room_costs_nothing_else_either() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1) as (memory,):
        raw.send(encode(Value(1)), [memory] * 2)
        raw.send(encode(Value("next")))
        with room_for(1), pytest.raises(DescriptorsLostError):
            channel.recv(timeout=SOON)
        assert channel.recv(timeout=SOON) == "next"


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
        assert len(sender._talk.exports.by_id) == 1
        sender.send(array, timeout=SOON)
        assert receiver.recv(timeout=SOON) is found
