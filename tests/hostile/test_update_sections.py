"""Updates in place, against strangers with many leases, and what interrupts or misuses a section or an update (S7)."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler

import pytest
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import keeper_here, later
from tests.support.update_children import publish, seen

import vram
from vram.errors import BusyError, UsageError
from vram.handover.pickling import shut_down
from vram.keeper.client import close_client


# -- what interrupts a section, or misuses an update -----------------------------------------------------------------
@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with keeper_here() as server:
        monkeypatch.setenv("VRAM_KEEPER", server.path)
        yield server.path
        close_client(server.path)


@contextlib.contextmanager
def alarms(handler: Callable[[], None]) -> Iterator[None]:
    """Have SIGALRM do something in this thread, in the length of a block."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_interrupts_a_section_that_waits_sees_no_half_of_an_update(path: str) -> None:
    publish()
    begun, go_on = threading.Event(), threading.Event()

    def write() -> None:
        with vram.update("w", timeout=SOON) as arrays:
            arrays["a0"].fill(2)
            begun.set()
            assert go_on.wait(SOON)
            arrays["a1"].fill(2)
            arrays["a2"].fill(2)

    with vram.attach("w") as lease:
        assert seen(lease) == (1, [1])
        (slot,) = lease._pages[0].slots_of.values()
        came: list[object] = []

        def look() -> None:
            if not slot.depth:  # this thread does not wait yet
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                return
            try:
                came.append(seen(lease, timeout=0.0))
            except BusyError as error:
                came.append(str(error))
            go_on.set()

        with alarms(look):
            thread, result = later(write)
            assert begun.wait(SOON)
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            assert seen(lease, timeout=SOON) == (2, [2])
        thread.join(SOON)
        assert result == [None]
        (said,) = came
        assert "is entering a section of the same lease" in str(said)
        with lease.reading(), lease.reading() as inner:
            assert inner == 2


def test_what_is_updated_in_place_is_not_sent_and_its_sender_hears_so(path: str) -> None:
    arrays = publish()
    one, two = vram.ArrayChannel.pair()
    with one, two:
        with pytest.raises(UsageError, match=r"updatable=True.*attach it there"):
            one.send(arrays["a0"])
        with pytest.raises(UsageError, match=r"updatable=True.*attach it there"):
            ForkingPickler.dumps(arrays["a0"])
        shut_down()  # what a process begins that pickles
        with vram.attach("w") as lease, vram.update("w") as mine:
            for array in mine.values():
                with pytest.raises(UsageError, match="send a copy"):
                    one.send({"a": array})
            copy = vram.copy(lease["a0"])
        one.send(copy)
        assert int(two.recv(timeout=SOON).numpy()[0]) == 1


def test_a_block_that_closes_its_arrays_ends_none_of_the_publisher(path: str) -> None:
    publish()
    with vram.update("w", timeout=SOON) as arrays:
        for array in arrays.values():
            array.fill(2)
            array.close()
    with vram.update("w", timeout=SOON) as arrays:
        for array in arrays.values():
            array.fill(3)
    with vram.attach("w") as lease:
        assert seen(lease) == (3, [3])


def test_an_update_ends_once(path: str) -> None:
    publish()
    with vram.attach("w") as lease:
        one = vram.update("w")
        with one as arrays:
            for array in arrays.values():
                array.fill(2)
        with pytest.raises(UsageError, match="is over"):
            one.__exit__(None, None, None)
        assert seen(lease) == (2, [2])
        one.__exit__(KeyError, KeyError(), None)
        assert (seen(lease), lease.torn) == ((2, [2]), False)


def test_a_lease_that_had_a_section_leaves_no_descriptor_to_the_collector(path: str) -> None:
    publish()

    def read() -> None:
        with vram.attach("w") as lease, lease.reading():
            pass

    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    read()
    gc.collect()
    gc.disable()
    try:
        before = count()
        for _ in range(5):
            read()
        until(lambda: count() <= before, seconds=5.0)  # the keeper, which is here, closes in threads
    finally:
        gc.enable()
