"""Channels that carry memory which lives only as long as its maker: kept, counted, opened once, in order (S6, S10)."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
from tests.support.channel_children import serve
from tests.support.children import CHILDREN
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.lend_children import COUNT, START, Sources, numbers
from tests.support.order import undone_until_waited_for

import standin
import vram
from vram import driver as drivers
from vram import lifetime
from vram.errors import PeerGoneError, UnsupportedError
from vram.handover.remote_refs import unreturned
from vram.spec import Location

pytestmark = pytest.mark.standin
GPU = Location("cuda", 0)
BY_HANDLE = ("legacy", "pool")


class Peer:
    """The other end, in another process; it does what it is told over the channel itself."""

    def __init__(self) -> None:
        self.channel, theirs = vram.ArrayChannel.pair()
        self.process = CHILDREN.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, *words: Any) -> Any:
        """Have it do something, and return what it says."""
        self.channel.send(list(words), timeout=SOON)
        return self.channel.recv(timeout=SOON)

    def give(self, value: Any, key: str = "", **options: Any) -> None:
        """Send it an array, which it keeps under `key`."""
        assert self.tell("take", key, bool(options.pop("there", False))) == "go on"
        self.channel.send(value, timeout=SOON, **options)
        assert self.channel.recv(timeout=SOON) == "taken"

    def end(self) -> None:
        with contextlib.suppress(vram.errors.VramError):
            self.channel.send(None, timeout=1)
        self.channel.close()
        self.wait()

    def wait(self) -> None:
        """Wait until it has ended, or end it."""
        self.process.join(120)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


@pytest.fixture(scope="module")
def running_peer() -> Iterator[Peer]:
    peer = Peer()
    peer.tell("warm up")
    yield peer
    peer.end()


@pytest.fixture
def peer(running_peer: Peer) -> Iterator[Peer]:
    """The other process; a test that leaves anything in it, or kept for it, fails."""
    before = running_peer.tell("books")
    yield running_peer
    running_peer.tell("drop")
    cool(running_peer.channel)
    gc.collect()
    until(lambda: running_peer.tell("books") == before, what=f"{before} in the other process")
    assert not running_peer.channel._talk.remote_refs.idle
    assert len(running_peer.channel._talk.remote_refs) == 0


def cool(channel: vram.ArrayChannel) -> None:
    """What was sent last is as everything else from now on."""
    channel._talk.outbox.append(("idle", channel._talk.warm))
    channel._talk.warm = 0
    channel._talk.send_outbox()


def is_freed(gone: weakref.ref[Any], peer: Peer) -> None:
    """The other end was told to close it, and has said that it did; or the owner is still there: the test fails."""

    def look() -> bool:
        peer.tell("nothing")
        gc.collect()
        return gone() is None

    until(look, what="the end of the owner")


@pytest.fixture
def sources() -> Iterator[Sources]:
    with Sources() as made:
        yield made


@pytest.fixture(autouse=True)
def forget(request: pytest.FixtureRequest) -> Iterator[None]:
    """What was sent last stays with the channel, by design."""
    yield
    if "peer" in request.fixturenames:
        running = request.getfixturevalue("running_peer")
        cool(running.channel)
        until(
            lambda: running.tell("nothing") and not running.channel._talk.remote_refs.idle, what="what is closed there"
        )


@pytest.mark.parametrize("kind", BY_HANDLE)
def test_it_is_the_same_memory(kind: str, peer: Peer, sources: Sources) -> None:
    x = sources.make(kind)
    peer.give(x)
    assert peer.tell("read", "") == numbers().tolist()
    peer.tell("fill", "", 5)
    with vram.share(x) as here:
        assert (here.to_host() == 5).all()
    address, offset = sources.addresses[kind], START
    assert vram.share(x).address == address + offset


@pytest.mark.parametrize("kind", BY_HANDLE)
@pytest.mark.parametrize("drops", [False, True])
def test_s6_a_thousand_times_is_opened_once_and_nothing_grows(
    kind: str, drops: bool, peer: Peer, sources: Sources
) -> None:
    """Whether the receiver keeps what it got, or drops each before the next."""
    x = vram.share(sources.make(kind))
    channel = peer.channel
    peer.tell("clear calls")

    def counts() -> tuple[Any, ...]:
        return (
            len(os.listdir("/proc/self/fd")), len(lifetime.live()), drivers.get(GPU).live(),
            len(channel._talk.remote_refs), peer.tell("books"),
        )  # fmt: skip

    for number in range(1003):
        assert peer.tell("take", "", False) == "go on"
        channel.send(x, timeout=SOON)
        assert channel.recv(timeout=SOON) == "taken"
        if drops:
            peer.tell("drop")
        if number == 2:
            before = counts()
    assert counts() == before
    assert peer.tell("calls", {"legacy": "cuIpcOpenMemHandle", "pool": "cuMemPoolImportPointer"}[kind]) == 1
    x.close()


@pytest.mark.parametrize("kind", BY_HANDLE)
def test_i1_the_owner_is_there_as_long_as_the_memory_is_open_elsewhere(kind: str, peer: Peer, sources: Sources) -> None:
    """To free it is undefined until the other end has closed it, whether anybody looks at it there or not."""
    x = sources.make(kind)
    open_there = peer.tell("books")
    peer.give(x)
    gone = weakref.ref(x)
    del x
    peer.tell("drop")
    gc.collect()
    assert gone() is not None, "it was sent last, and may be sent again"
    cool(peer.channel)
    gc.collect()
    assert gone() is not None, "it is told to close it, and has not said that it has"
    is_freed(gone, peer)
    assert peer.tell("books") == open_there


@pytest.mark.parametrize("kind", BY_HANDLE)
def test_what_is_shared_anew_while_it_is_out_is_not_opened_again(kind: str, peer: Peer, sources: Sources) -> None:
    """The sender let go of its array, not of the memory; the receiver still has what it got first."""
    x, other = sources.make(kind), sources.make("legacy")
    peer.tell("clear calls")
    array = vram.share(x)
    peer.give(array, "first")
    array.close()
    del array
    peer.give(other, "other")
    gc.collect()
    again = vram.share(x)
    peer.give(again, "second")
    assert peer.tell("read", "first") == peer.tell("read", "second") == numbers().tolist()
    assert peer.tell("addresses", "first") == peer.tell("addresses", "second")
    again.close()
    opened = peer.tell("calls", {"legacy": "cuIpcOpenMemHandle", "pool": "cuMemPoolImportPointer"}[kind])
    assert opened == (2 if kind == "legacy" else 1), "of two allocations, or of one"


@pytest.mark.parametrize("kind", BY_HANDLE)
def test_what_comes_back_home(kind: str, peer: Peer, sources: Sources) -> None:
    """The same object where it is still there; else one whose owner is kept as before."""
    x = sources.make(kind)
    array = vram.share(x)
    peer.give(array)
    assert peer.tell("give back", "") is array
    part = array[10:20]
    peer.give(part, "part")
    assert peer.tell("give back", "part") is part
    back = peer.tell("give part", "", 100, 200)
    assert (back.to_host() == numbers()[100:200]).all()
    back.close()
    gone = weakref.ref(x)
    array.close()
    part.close()
    del x, array, part, back
    cool(peer.channel)
    gc.collect()
    assert gone() is not None
    home = peer.tell("give back", "")
    assert (home.to_host() == numbers()).all()
    peer.tell("drop")
    gc.collect()
    assert gone() is not None, "the array that came home keeps it"
    assert (home.to_host() == numbers()).all()
    home.close()
    del home
    is_freed(gone, peer)


# -- the end of a channel -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", BY_HANDLE)
@pytest.mark.parametrize("who", ["receiver", "killed receiver"])
def test_either_end_may_go_first(kind: str, who: str, sources: Sources) -> None:
    peer = Peer()
    x = sources.make(kind)
    gone = weakref.ref(x)
    try:
        peer.give(x)
        peer.give(vram.share(x)[5:10], "part")
        if who == "receiver":
            assert peer.tell("close") == "closing"
            with pytest.raises(PeerGoneError):
                peer.channel.recv(timeout=SOON)
            peer.channel.close()
        else:
            os.kill(peer.process.pid, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(PeerGoneError):
                peer.channel.recv(timeout=SOON)
            assert time.monotonic() - started < AT_ONCE
            with pytest.raises(PeerGoneError):
                peer.channel.send(x)
            peer.channel.close()
        del x
        gc.collect()
        assert gone() is None
        assert drivers.get(GPU).live().mappings == 0
    finally:
        peer.end()


@pytest.mark.parametrize("kind", BY_HANDLE)
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_sender_that_ends_leaves_the_memory_to_who_uses_it(kind: str, how: str, sources: Sources) -> None:
    """The receiver cannot say any more when it is done, and must not find other bytes there."""
    peer = Peer()
    x = sources.make(kind)
    gone = weakref.ref(x)
    peer.give(x)
    channels = [peer.channel]
    del peer.channel
    with pytest.warns(vram.errors.ReleaseWarning, match="1 arrays of memory that lives only as long as its maker"):
        channels[0].close() if how == "closed" else channels.clear()
    channels.clear()
    del x
    gc.collect()
    assert gone() is not None
    peer.wait()
    (left,) = unreturned
    unreturned.clear()
    left.close()  # this process would end now
    del left
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", BY_HANDLE)
def test_a_sender_that_is_closed_hears_what_was_dropped_before(kind: str, sources: Sources) -> None:
    peer = Peer()
    try:
        x = sources.make(kind)
        gone = weakref.ref(x)
        peer.give(x)
        peer.channel.send(["drop"], timeout=SOON)  # and its answer is not waited for
        peer.channel.close()
        del x
        gc.collect()
        assert gone() is None
    finally:
        peer.end()


# -- other ways -----------------------------------------------------------------------------------------------------
def return_it(kind: str) -> vram.Array:
    """What a worker must not do."""
    with Sources() as sources:
        return vram.share(sources.make(kind))


@pytest.mark.usefixtures("hand_over")
@pytest.mark.parametrize("kind", BY_HANDLE)
def test_s3_pickles_are_refused_and_name_the_copy(kind: str, sources: Sources) -> None:
    with vram.share(sources.make(kind)) as x, pytest.raises(UnsupportedError, match=r"vram\.copy"):
        ForkingPickler.dumps(x)


@pytest.mark.usefixtures("hand_over")
def test_s3_a_worker_that_returns_memory_which_dies_with_it_is_told() -> None:
    with CHILDREN.Pool(1) as pool:
        with pytest.raises(Exception, match=r"vram\.copy"):
            pool.apply_async(return_it, ("legacy",)).get(SOON)
        pool.terminate()
        pool.join()


# -- order ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def own_peer() -> Iterator[Peer]:
    """Another process whose channel ends with the test: it keeps its events as long as it is there, by design."""
    peer = Peer()
    yield peer
    peer.end()


@pytest.fixture
def deferred(own_peer: Peer) -> Iterator[standin.Standin]:
    with undone_until_waited_for(lambda on: own_peer.tell("defer", on)) as control:
        yield control


@pytest.mark.parametrize("kind", ["cuda:0", *BY_HANDLE])
def test_s10_without_a_stream_the_sender_waits(
    kind: str, own_peer: Peer, sources: Sources, deferred: standin.Standin, stream: int
) -> None:
    driver: Any = drivers.get(GPU)
    with vram.share(sources.make(kind)) as x:
        for value in (3, 4):  # anew each time, also where only an id travels
            driver.fill_async(x.address, value, x.nbytes, stream)
            own_peer.give(x)
            assert own_peer.tell("read", "") == [value * 0x01010101] * COUNT


@pytest.mark.parametrize("there", [False, True], ids=["the receiver", "its stream"])
@pytest.mark.parametrize("kind", ["cuda:0", "pool"])
def test_s10_with_a_stream_the_other_end_waits(
    kind: str, there: bool, own_peer: Peer, sources: Sources, deferred: standin.Standin, stream: int
) -> None:
    driver: Any = drivers.get(GPU)
    with vram.share(sources.make(kind)) as x:
        for value in (3, 4, 5):
            driver.fill_async(x.address, value, x.nbytes, stream)
            assert own_peer.tell("take", "", there) == "go on"
            own_peer.channel.send(x, stream=stream, timeout=SOON)
            assert deferred.live()["pending"] > 0, "sending waited"
            timer = threading.Timer(0.05, lambda: driver.stream_synchronize(stream, GPU))
            timer.start()
            assert own_peer.channel.recv(timeout=SOON) == "taken"
            found = own_peer.tell("copy on stream" if there else "read", "")
            timer.join()
            assert found == [value * 0x01010101] * COUNT
    assert deferred.live()["events"] == 1, "one for the stream, however often"


def test_a_deadline_is_for_the_work_of_the_sender_too_and_loses_nothing(
    own_peer: Peer, sources: Sources, deferred: standin.Standin, stream: int
) -> None:
    driver: Any = drivers.get(GPU)
    with vram.share(sources.make("cuda:0")) as x:
        driver.fill_async(x.address, 7, x.nbytes, stream)
        assert own_peer.tell("take in vain", "", 0.2) == "go on"
        own_peer.channel.send(x, stream=stream, timeout=SOON)
        assert own_peer.channel.recv(timeout=SOON) == "WaitTimeoutError"
        assert deferred.live()["pending"] > 0
        driver.stream_synchronize(stream, GPU)
        assert own_peer.channel.recv(timeout=SOON) == "taken"
        assert own_peer.tell("read", "") == [0x07070707] * COUNT


def test_s10_more_streams_than_events_are_waited_for(
    own_peer: Peer, sources: Sources, deferred: standin.Standin
) -> None:
    driver: Any = drivers.get(GPU)
    streams = [driver.stream_create(GPU) for _ in range(35)]
    with vram.share(sources.make("cuda:0")) as x:
        for number, one in enumerate(streams):
            driver.fill_async(x.address, number, x.nbytes, one)
            assert own_peer.tell("take", "", False) == "go on"
            own_peer.channel.send(x, stream=one, timeout=SOON)
            if number < 32:
                driver.stream_synchronize(one, GPU)
            assert own_peer.channel.recv(timeout=SOON) == "taken"
            assert own_peer.tell("read", "")[0] == number * 0x01010101
    for one in streams:
        driver.stream_destroy(one)


def test_s10_where_the_driver_has_no_event_left_the_sender_waits(
    own_peer: Peer, sources: Sources, deferred: standin.Standin, stream: int
) -> None:
    driver: Any = drivers.get(GPU)
    with vram.share(sources.make("cuda:0")) as x:
        driver.fill_async(x.address, 6, x.nbytes, stream)
        deferred.fail("cuEventCreate", 1, 2, forever=True)
        own_peer.give(x, stream=stream)
        assert own_peer.tell("read", "") == [0x06060606] * COUNT
        deferred.clear()


@pytest.mark.parametrize("wrong", [0, -1, True, "s", 1 << 64, object()])
def test_i10_what_is_no_stream_is_refused(wrong: object, peer: Peer, sources: Sources) -> None:
    with vram.share(sources.make("cuda:0")) as x, pytest.raises(vram.errors.UsageError):
        peer.channel.send(x, stream=wrong)
    assert peer.tell("nothing") == "nothing"


def test_a_stream_of_another_gpu_is_refused(own_peer: Peer, sources: Sources) -> None:
    driver: Any = drivers.get(GPU)
    other = driver.stream_create(Location("cuda", 1))
    with vram.share(sources.make("legacy")) as x, pytest.raises(vram.errors.UsageError, match="stream"):
        own_peer.channel.send(x, stream=other)
    driver.stream_destroy(other)
    assert own_peer.tell("nothing") == "nothing"
