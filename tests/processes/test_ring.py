"""Rings: frames in their order, whole, without a copy; whoever dies, stops or lies costs nobody else a frame."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.support import children as processes
from tests.support import ring_children as children
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.forked import end_of, refused
from tests.support.keeper_here import later
from tests.support.places import short_directory
from tests.support.ring_children import SHAPE, create, put, value

import vram
from vram.driver import words as shared
from vram.entries import frames as consuming
from vram.entries import ring as producing
from vram.errors import (
    BusyError,
    CapacityError,
    ClosedError,
    LeakWarning,
    MismatchError,
    NotFoundError,
    PeerGoneError,
    ProtocolError,
    TornError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
)
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import KeeperProcess

pytestmark = pytest.mark.usefixtures("kept")


def child(act: Callable[..., None], *given: Any) -> contextlib.AbstractContextManager[processes.Child]:
    """Run a function that is told the keeper's path and a pipe in a process of its own, which is killed in the end."""
    return processes.child(act, *given, first=(os.environ["VRAM_KEEPER"],), may_end=False)


def dropped(held: list[Any]) -> None:
    """Forget what is held, as if nobody had closed it."""
    held.clear()
    gc.collect()


def fail(ring: vram.Ring) -> None:
    """Begin a frame, write some of it, and fail."""
    with ring.next(timeout=0) as frame:
        frame.array[:5] = 99
        raise KeyError("wrong")


def ask(one: processes.Child) -> Any:
    one.tell()
    return one.said()


# -- one process, in words -------------------------------------------------------------------------------------------
def test_frames_come_in_their_order_where_they_were_written() -> None:
    with create() as ring, vram.Ring.attach("camera") as frames:
        assert (frames.shape, frames.dtype, frames.slots, frames.overwrites) == (SHAPE, np.uint8, 4, False)
        assert (ring.sequence, frames.behind) == (0, 0)
        put(ring, 1, 2, 3)
        assert frames.behind == 3
        for number in (1, 2, 3):
            frame = frames.next(timeout=0)
            assert (frame.sequence, value(frame), frame.skipped) == (number, number, 0)
            assert not frame.array.flags.writeable
            assert frame.is_whole()
        with pytest.raises(WaitTimeoutError, match=r"within 0\.01 s"):
            frames.next(timeout=0.01)
        assert ring.put(np.full(SHAPE, 4, np.uint8)) == 4
        with frames.next(timeout=0) as frame:
            assert value(frame) == 4
            address = frame.array.ctypes.data
        put(ring, 5, 6, 7, 8)
        assert [value(frames.next(timeout=0)) for _ in range(4)] == [5, 6, 7, 8]
        assert frames._view[3].ctypes.data == address  # four frames on, in the same place
        assert "at frame 8" in repr(ring)
        assert "at frame 8, 0 behind" in repr(frames)


def test_who_comes_late_begins_with_the_newest() -> None:
    with create() as ring:
        put(ring, *range(1, 12))
        with vram.Ring.attach("camera") as frames:
            assert value(frames.next(timeout=0)) == 11
            put(ring, 12, 13)
            assert [frames.next(timeout=0).sequence for _ in range(2)] == [12, 13]


def test_iterating_ends_with_the_ring() -> None:
    with create() as ring, vram.Ring.attach("camera") as frames, vram.Ring.attach("camera") as others:
        put(ring, 1, 2, 3)
        ring.close()
        assert [others.next(timeout=0).sequence for _ in range(3)] == [1, 2, 3]
        with pytest.raises(PeerGoneError, match="has closed the ring"):
            others.next(timeout=0)
        assert [frame.sequence for frame in frames] == [1, 2, 3]
        assert list(frames) == []
        with pytest.raises(PeerGoneError, match="has closed the ring 'camera', and all its frames were read"):
            frames.next()
        with pytest.raises(ClosedError):
            ring.next()
        ring.close()
        with pytest.raises(NotFoundError):
            vram.Ring.attach("camera")


def test_a_block_that_raises_leaves_no_frame() -> None:
    with create() as ring, vram.Ring.attach("camera") as frames:
        put(ring, 1)
        for _ in range(9):
            with pytest.raises(KeyError):
                fail(ring)
        assert (ring.sequence, frames.behind) == (1, 1)
        put(ring, 2)
        assert [value(frames.next(timeout=0)) for _ in range(2)] == [1, 2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros((1000, 64), np.uint8), r"shape \(64, 1000\) and dtype uint8; this has shape \(1000, 64\)"),
        (np.zeros(SHAPE, np.uint16), "this has shape .* and dtype uint16"),
        (np.zeros(SHAPE[1], np.uint8), r"this has shape \(1000,\)"),
    ],
)
def test_frames_of_another_shape_are_refused(given: Any, said: str) -> None:
    with create() as ring:
        with pytest.raises(MismatchError, match=said):
            ring.put(given)
        assert ring.sequence == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slots": 1}, "slots must be a whole number from 2 to 256, not 1"),
        ({"slots": 257}, "slots must be"),
        ({"slots": True}, "slots must be"),
        ({"max_consumers": 0}, "max_consumers must be"),
        ({"shape": (0, 5)}, r"shape \(0, 5\) have no bytes"),
        ({"shape": -1}, "shape"),
        ({"dtype": "object"}, "object"),
        ({"overwrite": 1}, "overwrite"),
        ({"max_lag": -1}, "max_lag"),
        ({"overwrite": True, "max_lag": 1}, "leave max_lag out"),
        ({"name": "a b"}, "is not a name"),
        ({"device": "tape"}, "tape"),
    ],
)
def test_what_is_no_ring_is_refused_before_anything_is_made(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        vram.Ring.create(options.pop("name", "camera"), **{"shape": SHAPE, "dtype": "uint8", **options})
    assert not vram.list_entries()


def test_frames_on_a_gpu_are_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match="swap=True"):
        create(device="cuda:0")


def test_a_ring_is_read_and_written_as_one() -> None:
    vram.publish("plain", {"frames": np.zeros((4, 5))})
    vram.publish("updated", {"frames": np.zeros((4, 5))}, updatable=True)
    for name in ("plain", "updated"):
        with pytest.raises(UsageError, match=f"{name!r} is no ring"):
            vram.Ring.attach(name)
    with create(), vram.attach("camera") as lease:
        assert lease["frames"].shape == (4, *SHAPE)
        assert not lease.torn
        with pytest.raises(UsageError, match=r"'camera' is a ring.*vram\.Ring\.attach\('camera'\)"), lease.reading():
            pass
        with pytest.raises(UsageError, match="'camera' is a ring"):
            lease.wait(newer_than=1, timeout=0)
        with pytest.raises(UsageError, match="'camera' is a ring: its frames are written by"), vram.update("camera"):
            pass


# -- back-pressure ---------------------------------------------------------------------------------------------------
def test_the_producer_waits_for_who_holds_a_frame() -> None:
    with create() as ring, vram.Ring.attach("camera") as frames:
        put(ring, 1, 2, 3, 4)
        first = frames.next(timeout=0)
        with pytest.raises(BusyError, match=r"no room for frame 5: 1 consumer did not give frame 1 back") as caught:
            put(ring, 5, timeout=0.02)
        assert str(os.getpid()) in caught.value.holders[0]
        assert value(first) == 1
        assert first.is_whole()
        first.close()
        put(ring, 5)
        assert [value(frames.next(timeout=0)) for _ in range(4)] == [2, 3, 4, 5]


def test_the_producer_goes_on_as_soon_as_there_is_room() -> None:
    with create() as ring, vram.Ring.attach("camera") as frames:
        put(ring, 1, 2, 3, 4)
        thread, came = later(lambda: put(ring, 5, timeout=SOON))
        assert [value(frames.next(timeout=SOON)) for _ in range(5)] == [1, 2, 3, 4, 5]
        thread.join(SOON)
        assert came == [None]


def test_all_are_waited_for_and_nobody_who_left() -> None:
    with create() as ring, vram.Ring.attach("camera") as fast, vram.Ring.attach("camera") as slow:
        put(ring, 1, 2, 3, 4)
        kept = slow.next(timeout=0)
        for _ in range(4):
            fast.next(timeout=0).close()
        with pytest.raises(BusyError, match="1 consumer did not"):
            put(ring, 5, timeout=0)
        view = kept.array  # which keeps the lease at the keeper, and nobody waiting
        slow.close()
        put(ring, 5, 6, 7, 8)
        assert [value(fast.next(timeout=0)) for _ in range(4)] == [5, 6, 7, 8]
        assert view[0, 0] == 5
        del view, kept


def test_who_was_dropped_is_waited_for_no_more() -> None:
    with create() as ring:
        frames = vram.Ring.attach("camera")
        put(ring, 1, 2, 3, 4)
        held = [frames]
        del frames
        with pytest.warns(LeakWarning):
            dropped(held)
        put(ring, *range(5, 20), timeout=SOON)


def test_who_lags_is_given_up_and_told() -> None:
    with create(max_lag=0.05) as ring, vram.Ring.attach("camera") as slow, vram.Ring.attach("camera") as fast:
        put(ring, 1, 2, 3, 4)
        frame = slow.next(timeout=0)
        for number in range(5, 14):
            while fast.behind:
                fast.next(timeout=0).close()
            put(ring, number, timeout=SOON)
        assert not frame.is_whole()
        for _ in range(2):
            with pytest.raises(TornError, match="as long as its max_lag says"):
                slow.next(timeout=0)
        with vram.Ring.attach("camera") as again:
            assert value(again.next(timeout=0)) == 13


def test_a_block_over_a_frame_that_was_lost_says_so() -> None:
    def read(frames: vram.Frames, ring: vram.Ring) -> None:
        with frames.next(timeout=0):
            put(ring, 2, 3, 4, 5)

    with create(max_lag=0) as ring, vram.Ring.attach("camera") as frames:
        put(ring, 1)
        with pytest.raises(TornError, match="max_lag"):
            read(frames, ring)


def test_more_consumers_than_there_is_room_for_are_told() -> None:
    with create(max_consumers=2) as ring, contextlib.ExitStack() as stage:
        three = [stage.enter_context(vram.Ring.attach("camera")) for _ in range(3)]
        put(ring, 1, 2, 3, 4)
        for each in three:
            assert value(each.next(timeout=0)) == 1
            assert value(each.next(timeout=0)) == 2
        put(ring, 5, timeout=SOON)
        for each in three[:2]:
            assert [value(each.next(timeout=0)) for _ in range(3)] == [3, 4, 5]
        with pytest.raises(CapacityError, match="max_consumers"):
            three[2].next(timeout=0)
        three[0].close()
        with vram.Ring.attach("camera") as another:
            put(ring, 6, 7, 8, timeout=SOON)
            assert another.next(timeout=0).is_whole()


# -- overwriting -----------------------------------------------------------------------------------------------------
def test_a_ring_that_overwrites_waits_for_nobody_and_says_what_was_lost() -> None:
    with create(overwrite=True) as ring, vram.Ring.attach("camera") as frames:
        assert frames.overwrites
        put(ring, 1, timeout=0)
        frame = frames.next(timeout=0)
        put(ring, 2, 3, 4, timeout=0)
        assert frame.is_whole()
        with ring.next(timeout=0):
            assert not frame.is_whole()  # as soon as somebody may write over it
        put(ring, *range(6, 20), timeout=0)
        assert not frame.is_whole()
        newest = frames.next(timeout=0)
        assert (newest.sequence, value(newest), newest.skipped, newest.is_whole()) == (19, 19, 17, True)
        put(ring, 20, timeout=0)
        assert (frames.next(timeout=0).sequence, frames.behind) == (20, 0)


def test_a_frame_that_was_never_finished_is_passed_over() -> None:
    with create(overwrite=True, slots=2) as ring, vram.Ring.attach("camera") as frames:
        put(ring, 1, 2, timeout=0)
        with pytest.raises(KeyError):
            fail(ring)  # over the first one
        got = frames.next(timeout=0)
        assert (got.sequence, value(got), got.skipped) == (2, 2, 1)


# -- the words -------------------------------------------------------------------------------------------------------
def joining(monkeypatch: pytest.MonkeyPatch, at: int) -> list[vram.Frames]:
    """Have a consumer join at the n-th barrier or fence of a producer, as in another process."""
    joined: list[vram.Frames] = []
    count = iter(range(1 << 30))

    def passing(barrier: Callable[[], None]) -> None:
        barrier()
        if next(count) == at:
            joined.append(vram.Ring.attach("camera"))

    for name in ("barrier", "fence"):
        monkeypatch.setattr(producing.shared, name, functools.partial(passing, getattr(shared, name)))
    return joined


@pytest.mark.parametrize("at", range(20))
def test_who_joins_at_any_step_of_the_producer_loses_no_frame(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Each frame from its first one on is whole as long as it holds it, wherever the producer was when it joined."""
    with create(slots=2) as ring:
        joined = joining(monkeypatch, at)
        for number in range(1, 30):
            with contextlib.suppress(BusyError):
                put(ring, number, timeout=0)
            if joined:
                break
        (frames,) = joined
        monkeypatch.undo()
        with frames:
            expected = max(1, ring.sequence - 1, frames._cursor + 1)
            for _ in range(6):
                with contextlib.suppress(BusyError):
                    put(ring, ring.sequence + 1, timeout=0)
                frame = frames.next(timeout=0)
                with contextlib.suppress(BusyError):
                    put(ring, ring.sequence + 1, timeout=0)
                assert frame.is_whole()
                assert frame.sequence == expected
                assert value(frame) == frame.sequence
                expected += 1


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_frame_is_said_to_be_gone_before_it_is_and_to_be_there_after(
    monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """What the slot says at each fence. Where the processor does not keep that order a fence is a barrier of all."""
    barriers: list[int] = []
    said: list[tuple[int, int, int]] = []
    fence = shared.fence
    with create(slots=2, overwrite=True) as ring, vram.Ring.attach("camera") as frames, monkeypatch.context() as patch:
        put(ring, 1, 2)
        words, view = ring._words, frames._view

        def noted() -> None:
            said.append((words[consuming.SLOTS], words[consuming.HEAD], int(view[0, 0, 0])))
            fence()

        patch.setattr(shared, "_IS_ORDERED", machine == "x86_64")
        patch.setattr(shared, "barrier", functools.partial(barriers.append, 0))
        patch.setattr(producing.shared, "fence", noted)
        put(ring, 3)
        assert said == [(0, 2, 1), (0, 2, 3)]
        assert (ring._words[consuming.SLOTS], ring.sequence) == (3, 3)
        assert len(barriers) == (0 if machine == "x86_64" else 2)


@pytest.mark.parametrize("lie", [2**64 - 1, 2**63, 1, 3, 1000])
def test_a_consumer_that_lies_costs_only_itself(lie: int) -> None:
    """Another one gets every frame, whole; the producer waits no longer than it was told to (S7)."""
    with create(max_lag=0) as ring, vram.Ring.attach("camera") as liar, vram.Ring.attach("camera") as honest:
        assert liar._page is not None
        for number in range(1, 40):
            liar._page.slots[0] = lie
            put(ring, number, timeout=SOON)
            frame = honest.next(timeout=0)
            assert (frame.sequence, value(frame), frame.is_whole()) == (number, number, True)
            frame.close()
        liar._cursor, liar._held = 0, 0
        with pytest.raises(TornError):
            liar.next(timeout=0)


def test_a_consumer_cannot_write_what_others_look_at() -> None:
    with create(), vram.Ring.attach("camera") as frames:
        with pytest.raises(TypeError, match="read-only"):
            frames._words[consuming.HEAD] = 9
        with pytest.raises(ValueError, match="read-only"):
            frames._view[0, 0, 0] = 1


@pytest.mark.parametrize(
    ("word", "value", "said"), [(consuming.LIMIT, 99, "may write over every frame"), (1, 0, "is no ring")]
)
def test_a_producer_that_says_what_cannot_be_is_refused(word: int, value: int, said: str) -> None:
    with create() as ring:
        ring._words[word] = value
        with pytest.raises((ProtocolError, UsageError), match=said):
            vram.Ring.attach("camera")


def test_s7_a_producer_whose_frames_go_back_is_not_waited_for() -> None:
    with create() as ring, vram.Ring.attach("camera") as frames:
        put(ring, 1, 2)
        for _ in range(2):
            frames.next(timeout=0).close()
        ring._words[consuming.HEAD] = 1
        with pytest.raises(ProtocolError, match="frame 1 is its newest, and it had said 2 before"):
            frames.next(timeout=0.2)


def test_only_the_producer_may_ask_for_its_consumers() -> None:
    with create() as ring, vram.Ring.attach("camera"):
        rows = ring._client.pages("camera", ring._version, 0, first=True).rows
        assert [row.word for row in rows] == [1]
        with KeeperClient.connect(os.environ["VRAM_KEEPER"], label="other") as other:
            with pytest.raises(UsageError, match="did not publish 'camera'"):
                other.pages("camera", ring._version, 0, first=True)


# -- threads, forks, drops -------------------------------------------------------------------------------------------
def test_threads_of_the_producer_take_turns() -> None:
    with create(overwrite=True) as ring:
        with ring.next() as frame:
            with pytest.raises(BusyError, match="this thread is writing a frame"), ring.next():
                pass
            thread, came = later(lambda: put(ring, 2, timeout=0))
            thread.join(SOON)
            assert isinstance(came[0], BusyError)
            assert "another thread" in str(came[0])
            frame.array[...] = 1
        with pytest.raises(UsageError, match="begun before"), frame:
            pass
        done = [threading.Thread(target=put, args=(ring, *range(50))) for _ in range(4)]
        for each in done:
            each.start()
        for each in done:
            each.join(SOON)
        assert ring.sequence == 201


def test_a_ring_that_was_dropped_ends_and_warns() -> None:
    ring = create()
    with vram.Ring.attach("camera") as frames:
        put(ring, 1)
        held = [ring]
        del ring
        with pytest.warns(LeakWarning, match="ring 'camera'"):
            dropped(held)
        assert [frame.sequence for frame in frames] == [1]


# -- one producer ----------------------------------------------------------------------------------------------------
def told_why(ring: vram.Ring, why: str) -> None:
    """Put frames until the producer is told that nobody who attaches gets them; it is told so from then on."""

    said: list[str] = []

    def is_told() -> bool:
        try:
            ring.put(np.zeros(SHAPE, np.uint8), timeout=SOON)
        except NotFoundError as error:
            said.append(str(error))
        return bool(said)

    until(is_told, what="a producer that was told")
    assert re.search(why, said[0])
    before = ring.sequence
    for _ in range(2):
        with pytest.raises(NotFoundError, match=why), ring.next(timeout=0):
            pass
    assert ring.sequence == before


def test_a_ring_that_was_replaced_serves_who_has_it_and_its_producer_is_told() -> None:
    with create() as old, vram.Ring.attach("camera") as frames:
        put(old, 1)
        with old.next() as begun:
            begun.array[...] = 2
            new = create(replace=True)
        with new:
            told_why(old, f"pid {os.getpid()}.* has replaced it by version {new._version}.*replace=True")
            assert [value(frames.next(timeout=0)) for _ in range(2)] == [1, 2]
            put(new, 2)
            with vram.Ring.attach("camera") as others:
                assert value(others.next(timeout=0)) == 2
                old.close()
                frames.close()
                put(new, 3)
                assert value(others.next(timeout=0)) == 3


def test_a_producer_that_lives_is_replaced_only_by_who_says_so() -> None:
    with child(children.produce_on) as one:
        assert one.said() == "created"
        with vram.Ring.attach("camera") as frames:
            for options in ({}, {"overwrite": True}, {"replace": False}):
                with pytest.raises(BusyError, match=r"a process that lives produces .*replace=True") as caught:
                    create(**options)
                assert f"pid {one.process.pid}," in caught.value.holders[0]
            assert ask(one) == 1
            assert value(frames.next(timeout=SOON)) == 1  # nothing has changed for it
        with create(replace=True) as ring:
            until(lambda: ask(one) == "NotFoundError", what="a producer that was told")
            put(ring, 5)
            with vram.Ring.attach("camera") as frames:
                assert value(frames.next(timeout=0)) == 5


def test_a_ring_of_this_process_is_replaced_once_it_is_closed_or_dropped() -> None:
    ring = create()
    with pytest.raises(BusyError, match="this process produces"):
        create()
    ring.put(np.zeros(SHAPE, np.uint8))
    ring.close()
    held = [create()]
    with pytest.warns(LeakWarning):
        dropped(held)
    create().close()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_producer_whose_name_was_removed_or_is_something_else_is_told(overwrite: bool) -> None:
    with create(overwrite=overwrite) as ring:
        put(ring, 1)
        vram.publish("camera", {"w": np.zeros(4)})
        told_why(ring, "has replaced it by version")
    assert vram.entry("camera").version  # closing took nothing from who has the name now
    with create(overwrite=overwrite) as ring:  # what is no ring is replaced, as by vram.publish
        vram.remove("camera")
        told_why(ring, "was taken out of the catalogue")


def test_a_producer_that_waits_for_its_consumers_is_told_meanwhile() -> None:
    with create() as ring, vram.Ring.attach("camera") as frames:
        put(ring, 1, 2, 3, 4)
        frame = frames.next(timeout=0)
        thread, came = later(lambda: put(ring, 5, timeout=AT_ONCE))
        with create(replace=True):
            thread.join(SOON)
        assert isinstance(came[0], NotFoundError)
        assert value(frame) == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_no_part_in_a_ring_i7() -> None:
    with create() as ring, vram.Ring.attach("camera") as frames, create("over", overwrite=True) as over:
        with vram.Ring.attach("over") as newest:
            put(ring, 1, 2, 3, 4)
            put(over, 1)
            held = [frames.next(timeout=0)]

            def work() -> int:
                count = refused(*(functools.partial(one.next, timeout=0) for one in (ring, frames, over, newest)))
                held[0].close()
                frames.close()
                dropped(held)
                return count

            assert end_of(work) == 4
            with pytest.raises(BusyError):
                put(ring, 5, timeout=0)  # what the child did is not what this process did
            assert held[0].is_whole()


# -- processes -------------------------------------------------------------------------------------------------------
def test_three_processes_get_every_frame_whole() -> None:
    with create() as ring, contextlib.ExitStack() as stage:
        three = [stage.enter_context(child(children.consume)) for _ in range(3)]
        for one in three:
            assert one.said() == "ready"
        put(ring, *[number % 251 for number in range(1, 401)], timeout=SOON)
        ring.close()
        for one in three:
            assert one.said() == ([(number, number % 251) for number in range(1, 401)], "")


def test_a_killed_consumer_is_not_waited_for() -> None:
    with create() as ring, child(children.hold) as one, vram.Ring.attach("camera") as mine:
        assert one.said() == "ready"
        put(ring, 1, 2, 3, 4)
        assert ask(one) == (1, 1)
        for _ in range(4):
            mine.next(timeout=0).close()
        with pytest.raises(BusyError, match="1 consumer"):
            put(ring, 5, timeout=0)
        one.kill()
        mine.close()
        put(ring, *range(5, 20), timeout=SOON)


@pytest.fixture
def stopped() -> Iterator[Callable[[processes.Child], None]]:
    """Stop a process, and have it go on before it is ended."""
    pids: list[int] = []

    def stop(one: processes.Child) -> None:
        pid = one.process.pid
        assert pid
        os.kill(pid, signal.SIGSTOP)
        pids.append(pid)
        with open(f"/proc/{pid}/stat") as file:
            while file.read().rpartition(")")[2].split()[0] != "T":
                file.seek(0)

    yield stop
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_stopped_consumer_is_given_up_and_told(stopped: Callable[[processes.Child], None]) -> None:
    with create(max_lag=0.05) as ring, child(children.hold) as one:
        assert one.said() == "ready"
        put(ring, 1, 2, 3, 4)
        assert ask(one) == (1, 1)
        stopped(one)
        put(ring, *range(5, 50), timeout=SOON)
        os.kill(one.process.pid or 0, signal.SIGCONT)
        kind, text = ask(one)
        assert kind == "TornError"
        assert "max_lag" in text


def test_a_producer_killed_in_the_middle_of_a_frame_leaves_only_whole_ones() -> None:
    with child(children.produce_and_stop, 3) as producer:
        assert producer.said() == "created"
        with child(children.consume) as consumer, vram.Ring.attach("camera") as frames:
            assert consumer.said() == "ready"
            assert ask(producer) == "halfway"
            producer.kill()
            assert consumer.said() == ([(1, 1), (2, 2), (3, 3)], "PeerGoneError")
            assert [value(frames.next()) for _ in range(3)] == [1, 2, 3]
            with pytest.raises(PeerGoneError, match="the producer of the ring 'camera' is gone"):
                frames.next()
        with create() as ring, vram.Ring.attach("camera") as frames:  # another goes on under the name
            put(ring, 4)
            assert value(frames.next(timeout=0)) == 4


def test_a_lease_that_was_over_is_no_reason_to_wait_and_is_told() -> None:
    """A connection may be cut off while its process lives: its frames are written over, and it learns that."""
    with create() as ring:
        with KeeperClient.connect(os.environ["VRAM_KEEPER"], label="cut off") as own:
            lease = vram.Lease(own, own.attach("camera"), "r")
            frames = consuming.Frames(lease)
            put(ring, 1, 2, 3, 4)
            frame = frames.next(timeout=0)
            with pytest.raises(BusyError):
                put(ring, 5, timeout=0)
        put(ring, 5, timeout=SOON)
        assert not frame.is_whole()
        with pytest.raises(TornError, match="was overwritten before it was given back: the lease was over"):
            frames.next(timeout=0)
        frames.close()


# -- other keepers ---------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def another_keeper(monkeypatch: pytest.MonkeyPatch, *options: str, **how: Any) -> Iterator[KeeperProcess]:
    """Run a keeper, as this process's default for the length of a block."""
    with short_directory() as place, monkeypatch.context() as patch:
        keeper = KeeperProcess(f"{place}/k", options, **how)
        patch.setenv("VRAM_KEEPER", keeper.path)
        try:
            yield keeper
        finally:
            close_client(keeper.path)
            keeper.stop()


def test_a_ring_goes_on_when_its_keeper_is_killed_and_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    with another_keeper(monkeypatch, "--survive") as keeper, create() as ring, vram.Ring.attach("camera") as frames:
        put(ring, 1, 2, 3, 4)
        first = frames.next(timeout=0)
        before = vram.statistics().pid
        os.kill(before, signal.SIGKILL)
        until(lambda: vram.statistics().pid != before, what="the next keeper")
        goes_on(ring, frames, first, keeper.path)


def goes_on(ring: vram.Ring, frames: vram.Frames, first: vram.Frame, path: str) -> None:
    """Put frames 5 to 8 where one consumer holds frame 1 and others come and go."""
    with pytest.raises(BusyError, match=r"no room for frame 5: 1 consumer did not give frame 1 back") as caught:
        put(ring, 5, timeout=0.01)
    assert str(os.getpid()) in caught.value.holders[0]
    assert (value(first), first.is_whole()) == (1, True)
    assert value(frames.next(timeout=0)) == 2
    with processes.child(children.hold, first=(path,), may_end=False) as dead:
        assert dead.said() == "ready"
        assert ask(dead) == (4, 4)
        put(ring, 5)
        dead.kill()
        assert [value(frames.next(timeout=0)) for _ in range(3)] == [3, 4, 5]
        put(ring, 6, 7, 8, timeout=SOON)
    with vram.Ring.attach("camera") as late:
        assert value(late.next(timeout=0)) == 8
        assert [value(frames.next(timeout=0)) for _ in range(3)] == [6, 7, 8]
        thread, came = later(lambda: [frame.sequence for frame in late])
        ring.close()
        thread.join(SOON)
        assert came == [[]]
