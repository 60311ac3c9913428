"""Both ends of an array channel in one process: what does not need a second one."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.order import undone_until_waited_for
from tests.support.raw_cuda import CudaStranger

import standin
import vram
from vram import driver as drivers
from vram.handover.conversation import Conversation, Failure
from vram.handover.messages import Reference, Returned, Unref, encode
from vram.handover.remote_refs import RefToken, RemoteRefs
from vram.memory.foreign import ForeignRegion, find_foreign
from vram.sharing.channel import Channel
from vram.spec import Location

GPU = Location("cuda", 0)


@pytest.fixture
def ends() -> Iterator[tuple[vram.ArrayChannel, vram.ArrayChannel]]:
    one, other = vram.ArrayChannel.pair()
    with one, other:
        yield one, other


# -- memory that is closed here and comes back from who has it ------------------------------------------------------
DEVICES = ["host", pytest.param("cuda:0", marks=pytest.mark.standin)]


def lent(
    ends: tuple[vram.ArrayChannel, vram.ArrayChannel], rows: int = 4, device: str = "host", **options: Any
) -> tuple[vram.Array, vram.Array]:
    """Return an array that counts, and what the other end received of it."""
    sender, receiver = ends
    array = vram.empty((rows, 2), "int64", device=device, **options)
    array[...] = np.arange(2 * rows).reshape(rows, 2)
    sender.send(array)
    return array, receiver.recv(timeout=5.0)


def ask(ends: tuple[vram.ArrayChannel, vram.ArrayChannel]) -> None:
    """Have the second end hear what it is to forget, and the first one that it did."""
    for one, other in (ends, ends[::-1]):
        one.send("look")
        assert other.recv(timeout=5.0) == "look"


@pytest.mark.parametrize("device", DEVICES)
def test_s6_what_was_dropped_here_comes_back_as_the_same_memory(
    ends: tuple[vram.ArrayChannel, vram.ArrayChannel], device: str
) -> None:
    sender, receiver = ends
    array, there = lent(ends, device=device)
    array.close()
    del array
    gc.collect()
    receiver.send(there)  # before it heard that it was dropped
    home = sender.recv(timeout=5.0)
    home[...] = 7
    assert (there.to_host() == 7).all(), "what came back is other memory"
    receiver.send(there)
    assert sender.recv(timeout=5.0) is home, "one object while it is in use"
    receiver.send(there[1:3])
    part = sender.recv(timeout=5.0)
    assert (part.shape, part.address) == ((2, 2), home.address + 16)
    sender.send(home)
    again = receiver.recv(timeout=5.0)
    again[...] = 8
    assert (there.to_host() == 8).all()
    assert (home.to_host() == 8).all()


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_dropped_here_is_known_until_the_other_end_has_let_go(
    ends: tuple[vram.ArrayChannel, vram.ArrayChannel], device: str
) -> None:
    """And no longer, though the other end still uses it: from then on it is memory that the other end shares."""
    sender, receiver = ends
    array, there = lent(ends, device=device)
    array.close()
    assert len(sender._talk.exports.remembered) == 1
    ask(ends)
    assert len(sender._talk.exports.remembered) == 0, "memory is held for an end that has no more use for it"
    receiver.send(there)
    home = sender.recv(timeout=5.0)
    home[...] = 7
    assert (there.to_host() == 7).all()


def test_who_only_sends_holds_nothing_that_the_other_end_let_go_of(
    ends: tuple[vram.ArrayChannel, vram.ArrayChannel],
) -> None:
    sender, _ = ends
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        array, there = lent(ends)
        array.close()
        there.close()
        assert len(sender._talk.exports.remembered) <= 2
    assert len(os.listdir("/proc/self/fd")) <= fds + 10
    ask(ends)


def test_what_was_dropped_here_is_held_no_longer_than_the_other_end_is_there() -> None:
    """What that had sent back before it went still comes home."""
    one, other = vram.ArrayChannel.pair()
    with one:
        array, there = lent((one, other))
        array.close()
        other.send(there)
        other.close()
        home = one.recv(timeout=5.0)
        assert home.to_host().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert len(one._talk.exports.remembered) == 1
        with pytest.raises(vram.errors.PeerGoneError):
            one.recv(timeout=5.0)
        assert len(one._talk.exports.remembered) == 0, "memory is held for an end that is gone"
        assert (home.to_host() == there.to_host()).all()


@pytest.mark.parametrize("grown", [False, True], ids=["given back", "and grown again"])
def test_memory_that_was_given_back_comes_back_as_it_was(
    ends: tuple[vram.ArrayChannel, vram.ArrayChannel], grown: bool
) -> None:
    """Also where new memory has grown in its place: that is not what the other end has."""
    sender, receiver = ends
    count = 200_000
    array, there = lent(ends, count, chunk="1MiB", capacity=count)
    array.resize(8)
    if grown:
        array.resize(count)
        array[count - 1] = -1
    for _ in range(2):
        receiver.send(there)
        home = sender.recv(timeout=5.0)
        assert home is not array, "other memory has grown in its place"
        assert home.shape == (count, 2)
        assert home.numpy()[-1].tolist() == [2 * count - 2, 2 * count - 1]
        home[0] = 7
        assert there.numpy()[0].tolist() == [7, 7]
    array.resize(count)
    sender.send(array)
    again = receiver.recv(timeout=5.0)
    assert again is not there
    assert again.numpy()[-1].tolist() == array.numpy()[-1].tolist()
    receiver.send(again)
    assert sender.recv(timeout=5.0) is array
    array.close()


@pytest.mark.parametrize("rows", [0, 1])
def test_what_is_empty_or_small_comes_back_too(ends: tuple[vram.ArrayChannel, vram.ArrayChannel], rows: int) -> None:
    sender, receiver = ends
    array, there = lent(ends, rows)
    array.close()
    receiver.send(there)
    home = sender.recv(timeout=5.0)
    assert (home.shape, home.dtype) == ((rows, 2), there.dtype)


def test_s7_what_was_never_sent_does_not_come_back() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, vram.zeros(4, device="host") as array:
        channel.send(array)
        raw.send(encode(Returned(Reference(99, 1, 0, "float32", (4,)))))
        with pytest.raises(vram.errors.ClosedError, match="came back after it was closed"):
            channel.recv(timeout=5.0)
        array.close()
        raw.send(encode(Returned(Reference(1, 1, 0, "float32", (1 << 40,)))))
        with pytest.raises(vram.errors.ProtocolError, match="does not lie in its memory"):
            channel.recv(timeout=5.0)


def test_what_is_sent_while_it_is_forgotten_is_not_sent_under_its_old_number(
    ends: tuple[vram.ArrayChannel, vram.ArrayChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that receives forgets the memory while another one writes the message: the next must not repeat it."""
    sender, receiver = ends
    array, there = lent(ends)
    introduce = Conversation._introduce

    def meanwhile(self: Conversation, *arguments: Any) -> bytes:
        message = introduce(self, *arguments)
        if self is receiver._talk:
            monkeypatch.undo()
            array.close()
            sender.send("forget it")
            assert receiver.recv(timeout=5.0) == "forget it"  # as another thread would, right here
        return message

    monkeypatch.setattr(Conversation, "_introduce", meanwhile)
    for _ in range(3):
        receiver.send(there)
        home = sender.recv(timeout=5.0)
        home[...] = 5
        assert (there.to_host() == 5).all()


def test_an_end_that_was_given_away_closes_without_ending_the_connection() -> None:
    one, other = vram.ArrayChannel.pair()
    with one, other:
        taken = vram.ArrayChannel(socket.socket(fileno=os.dup(one.give_away())))
        one.close()
        with taken:
            other.send("still there")
            assert taken.recv(timeout=120.0) == "still there"
        with pytest.raises(vram.errors.PeerGoneError):
            other.recv(timeout=120.0)


# -- memory that lives as long as its maker: what is kept, and counted ----------------------------------------------
class MadePool(CudaStranger):
    """A pool of a GPU that can be shared, and what was allocated from it, all of which goes with the block."""

    def __init__(self, where: Location) -> None:
        assert isinstance(where.id, int)
        super().__init__(where.id)
        self._where = where
        self.number = self.pool()

    def region(self, nbytes: int) -> ForeignRegion:
        """Return new memory as a region, for the caller to close."""
        return find_foreign(drivers.get(self._where), self.allocate(self.number, nbytes), nbytes)[0]


class Owner:
    """Somebody's array, which owns memory."""


@pytest.fixture
def pooled() -> Iterator[vram.Array]:
    """An array on memory of a pool, with an owner; all of it is gone at the end."""
    if (why := standin.missing()) is not None:
        pytest.skip(why)
    with MadePool(GPU) as pool, pool.region(1 << 20) as region:
        array = vram.Array(region, "int32", 100, offset=64, keeps=Owner())
        yield array
        array.close()


@pytest.mark.standin
class TestKept:
    def test_a_part_has_one_number_while_it_is_out(self, pooled: vram.Array) -> None:
        refs = RemoteRefs()
        number = refs.keep(pooled, 7)
        assert refs.keep(pooled, 7) == number
        assert refs.incref(number)
        with pooled[10:20] as part:
            other = refs.keep(part, 7)
        assert other != number
        assert len(refs) == 2
        refs.decref(number, 2)
        refs.decref(number, 1)
        assert len(refs) == 1
        assert not refs.incref(number), "what it meant is over"
        assert refs.keep(pooled, 7) not in (number, other), "no number is used again"
        refs.close()
        assert len(refs) == 0

    def test_the_owner_is_let_go_once_the_memory_is_closed_there(self, pooled: vram.Array) -> None:
        """To free what is open elsewhere is undefined, whether anybody looks at it there or not."""
        assert pooled.pin is not None
        gone = weakref.ref(pooled.pin.keeps)
        refs = RemoteRefs()
        number = refs.keep(pooled, 7)
        assert refs.keep(pooled, 7) == number
        pooled.close()
        assert refs.decref(number, 1) is None
        assert 7 not in refs.idle
        assert refs.decref(number, 1) == 7
        assert 7 in refs.idle
        assert len(refs) == 0, "nobody uses it"
        gc.collect()
        assert gone() is not None
        refs.closed(8)
        refs.closed(7)
        gc.collect()
        assert gone() is None
        refs.closed(7)  # of a memory that is not known nothing is to be done

    def test_what_is_sent_again_while_it_is_idle_is_in_use(self, pooled: vram.Array) -> None:
        refs = RemoteRefs()
        with pooled[:10] as part:
            assert refs.decref(refs.keep(part, 7), 1) == 7
        number = refs.keep(pooled, 7)
        assert 7 not in refs.idle
        assert refs.decref(number, 1) == 7
        refs.close()
        assert 7 not in refs.idle

    @pytest.mark.parametrize("times", [0, 3, 2**62])
    def test_s7_more_than_were_sent_are_not_given_back(self, times: int, pooled: vram.Array) -> None:
        refs = RemoteRefs()
        number = refs.keep(pooled, 7)
        assert refs.incref(number)
        for wrong in ((number, times), (number + 1, 1), (0, 1)):
            with pytest.raises(vram.errors.ProtocolError):
                refs.decref(*wrong)
        assert len(refs) == 1
        refs.decref(number, 2)
        assert len(refs) == 0
        refs.close()

    def test_what_comes_back_is_kept_on_its_own(self, pooled: vram.Array) -> None:
        assert pooled.pin is not None
        gone = weakref.ref(pooled.pin.keeps)
        refs = RemoteRefs()
        number = refs.keep(pooled, 7)
        pooled.close()
        back = refs.find(7, 64 + 40, 40)
        assert back is not None
        assert (back.start, back.stop) == (104, 144)
        for wrong in ((8, 64, 4), (7, 60, 8), (7, 64, 401)):
            assert refs.find(*wrong) is None
        refs.decref(number, 1)
        gc.collect()
        assert gone() is not None
        assert refs.find(7, 64, 4) is None
        refs.closed(7)
        gc.collect()
        assert gone() is not None
        back.release()
        del back
        gc.collect()
        assert gone() is None

    def test_i3_a_token_tells_once_and_how_often(self) -> None:
        told: list[tuple[int, int]] = []
        token = RefToken(5, told.append)
        token.times += 2
        cycle: list[Any] = [token]
        cycle.append(cycle)
        del token, cycle
        gc.collect()
        assert told == [(5, 3)]

    def test_what_could_not_be_sent_is_not_counted(
        self, pooled: vram.Array, ends: tuple[vram.ArrayChannel, vram.ArrayChannel]
    ) -> None:
        """Nobody would ever give it back."""
        sender, receiver = ends
        sent = 0
        with contextlib.suppress(vram.errors.WaitTimeoutError):
            while True:
                sender.send(pooled, timeout=0)
                sent += 1
        assert [kept.count for kept in sender._talk.remote_refs._kept.values()] == [sent]
        receiver.close()
        with pytest.raises(vram.errors.PeerGoneError):
            sender.send(pooled)
        assert not sender._talk.remote_refs, "nor kept for an end that is gone"

    def test_what_is_done_with_is_told_once_the_other_end_reads_again(self) -> None:
        """Also by who only receives."""
        raw, end = Channel.pair()
        with raw, vram.ArrayChannel(end) as channel:
            count = 0
            with contextlib.suppress(vram.errors.WaitTimeoutError):
                while True:
                    channel.send(0, timeout=0)
                    count += 1
            channel._talk.note("unref", (7, 2))  # as the last view of a received array does
            for _ in range(count):
                raw.recv(timeout=120.0)
            with pytest.raises(vram.errors.WaitTimeoutError):
                channel.recv(timeout=0)
            assert raw.recv(timeout=0) == (encode(Unref(((7, 2),))), [])

    def test_an_event_that_could_not_be_told_is_told_the_next_time(
        self, ends: tuple[vram.ArrayChannel, vram.ArrayChannel]
    ) -> None:
        sender, receiver = ends
        driver: Any = drivers.get(Location("cuda", 0))
        stream = driver.stream_create(Location("cuda", 0))
        count = 0
        with vram.zeros(10, device="cuda:0") as array:
            with contextlib.suppress(vram.errors.WaitTimeoutError):
                while True:
                    sender.send(0, timeout=0)
                    count += 1
            for _ in range(2):
                with pytest.raises(vram.errors.WaitTimeoutError):
                    sender.send(array, stream=stream, timeout=0)
            for _ in range(count):
                receiver.recv(timeout=120.0)
            for _ in range(2):
                sender.send(array, stream=stream, timeout=120.0)
                receiver.recv(timeout=120.0)
        driver.stream_destroy(stream)

    @pytest.mark.parametrize("there", [False, True], ids=["the receiver", "its stream"])
    def test_s10_in_one_process_the_receiver_waits_for_the_work(
        self, there: bool, ends: tuple[vram.ArrayChannel, vram.ArrayChannel]
    ) -> None:
        """The driver opens no event in the process that made it."""
        sender, receiver = ends
        driver: Any = drivers.get(GPU)
        streams = [driver.stream_create(GPU) for _ in range(2)]
        with undone_until_waited_for() as control, vram.zeros(10, "int32", device="cuda:0") as array:
            driver.fill_async(array.address, 3, array.nbytes, streams[0])
            sender.send(array, stream=streams[0])
            assert control.live()["pending"] > 0, "sending waited"
            found = receiver.recv(stream=streams[1] if there else None, timeout=5.0)
            assert control.live().get("pending", 0) == 0, "the array is there before what fills it"
            assert (found.to_host() == 0x03030303).all()
            found.close()
        for stream in streams:
            driver.stream_destroy(stream)

    def test_timeouts_that_are_none(self, ends: tuple[vram.ArrayChannel, vram.ArrayChannel]) -> None:
        for wrong in ("x", -1, float("nan")):
            with pytest.raises(vram.errors.UsageError, match="timeout"):
                ends[0].recv(timeout=wrong)  # type: ignore[arg-type]

    def test_what_the_other_end_cannot_open_is_not_kept_for_it(
        self, ends: tuple[vram.ArrayChannel, vram.ArrayChannel]
    ) -> None:
        """In one process the driver opens no legacy handle; the receiver says so, and gives back."""
        sender, receiver = ends
        with CudaStranger() as stranger:
            base = stranger.legacy(4096)
            with vram.share((base, 4096, "cuda:0")) as array:
                sender.send(array)
                with pytest.raises(vram.errors.UnsupportedError, match="process that made it"):
                    receiver.recv(timeout=120.0)
                with pytest.raises(vram.errors.ProtocolError):
                    receiver.recv(timeout=120.0)
                gc.collect()
                sender.send("next")
                assert receiver.recv(timeout=120.0) == "next"
                assert len(sender._talk.remote_refs) == 0


def test_i2_a_failure_keeps_nothing_that_its_callers_held(
    ends: tuple[vram.ArrayChannel, vram.ArrayChannel],
) -> None:
    """An error that its own frame keeps is a cycle: the locals of all callers stayed until some collection."""
    channel = ends[0]
    channel._talk.inbox.append(Failure(vram.errors.ProtocolError("what a thread that sends has found")))

    def fail() -> weakref.ref[Owner]:
        held = Owner()
        with pytest.raises(vram.errors.ProtocolError):
            channel.recv(timeout=0)
        return weakref.ref(held)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()
