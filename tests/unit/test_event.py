"""Owned events, and one for each stream, on the stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.faulty_driver import FaultyDriver
from tests.support.forked import end_of, refused
from tests.support.order import undone_until_waited_for

import standin
import vram
from vram import driver as drivers
from vram.errors import ClosedError, DriverError, LeakWarning, OutOfMemoryError, UnsupportedError, UsageError
from vram.memory import Event, EventPool
from vram.spec import HOST, Location

pytestmark = pytest.mark.standin
HERE, THERE = Location("cuda", 0), Location("cuda", 1)
FEW = 6


@pytest.fixture
def driver() -> Any:
    return drivers.get(HERE)


@pytest.fixture
def deferred() -> Iterator[standin.Standin]:
    """Asynchronous work stays undone until something waits for it."""
    with undone_until_waited_for() as control:
        yield control


@pytest.fixture
def streams(driver: Any) -> Iterator[list[int]]:
    made = [driver.stream_create(HERE) for _ in range(FEW)]
    yield made
    for stream in made:
        driver.stream_destroy(stream)


@pytest.fixture
def region(driver: Any) -> Iterator[vram.memory.Region]:
    with vram.memory.Region.create(HERE, driver=driver, capacity="2MiB", nbytes="2MiB") as made:
        yield made


def test_what_was_recorded_is_waited_for(
    driver: Any, deferred: standin.Standin, streams: list[int], region: vram.memory.Region
) -> None:
    first, second, *_ = streams
    with Event.create(driver, "cuda:0") as event:
        assert event.is_done  # nothing was recorded
        driver.fill_async(region.address, 7, 4096, first)
        event.record(first)
        assert not event.is_done
        event.wait(second)
        driver.copy_async(region.address + 8192, region.address, 4096, second)
        driver.stream_synchronize(second, HERE)
        assert event.is_done
        found = bytearray(4)
        driver.copy_out(memoryview(found), region.address + 8192)
        assert found == b"\7\7\7\7"
        driver.fill_async(region.address, 8, 4096, first)
        event.record(first)
        assert not event.is_done
        event.synchronize()
        assert event.is_done
        event.record()
        event.wait()
    assert deferred.illegal() == 0


def test_what_it_says_of_itself(driver: Any) -> None:
    with Event.create(driver, HERE, interprocess=True) as event:
        assert (event.driver, event.location, event.is_interprocess, event.is_imported) == (driver, HERE, True, False)
        assert event.driver_event
        assert repr(event) == "<Event cuda:0, interprocess>"
    assert event.is_closed
    assert repr(event) == "<Event cuda:0, interprocess, closed>"
    for use in (event.record, event.wait, event.synchronize, event.export, lambda: event.is_done):
        with pytest.raises(ClosedError):
            use()
    with pytest.raises(ClosedError):
        event.driver_event
    event.close()


def test_mistakes_are_refused(driver: Any, streams: list[int]) -> None:
    with Event.create(driver, HERE) as event:
        with pytest.raises(UsageError, match="interprocess=True"):
            event.export()
        for stream in (-1, 1 << 64, "1", None, True, 1.0):
            for use in (event.record, event.wait):
                with pytest.raises(UsageError, match="stream"):
                    use(stream)
        there = driver.stream_create(THERE)
        with pytest.raises(UsageError, match="no stream"):
            event.record(there)
        event.wait(there)  # which any stream can
        event.wait(1, THERE)
        driver.stream_destroy(there)
        for use in (event.record, event.wait):
            with pytest.raises(UsageError, match="no stream"):
                use(there)
    with Event.create(driver, HERE, interprocess=True) as event, pytest.raises(UsageError, match="this very process"):
        Event.import_(driver, event.export(), HERE)
    for place in ("host", "cuda:99", "cuda:host"):
        with pytest.raises(UsageError):
            Event.create(driver, place)


def test_the_host_has_no_events() -> None:
    host = drivers.get(HOST)
    for make in (
        lambda: Event.create(host, HOST),
        lambda: Event.import_(host, bytes(64), HOST),
        lambda: EventPool(host, HOST),
    ):
        with pytest.raises(UnsupportedError, match="host driver"):
            make()


# -- lifetime -------------------------------------------------------------------------------------------------------
def test_i1_an_event_is_given_back_once_and_after_what_needs_it(driver: Any) -> None:
    before = len(driver.work.events.out)
    event = Event.create(driver, HERE)
    claim = event.handle.claim("somebody")
    with pytest.raises(vram.errors.BusyError, match="somebody"):
        event.close(strict=True)
    event.close()
    assert len(driver.work.events.out) == before + 1
    claim.release()
    assert len(driver.work.events.out) == before


def test_i2_a_forgotten_event_is_given_back_and_said(driver: Any) -> None:
    before = len(driver.work.events.out)
    with pytest.warns(LeakWarning, match="event on cuda:0 was not closed"):
        Event.create(driver, HERE)
    assert len(driver.work.events.out) == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_i7_in_a_forked_child_it_is_inert(driver: Any) -> None:
    event, pool = Event.create(driver, HERE, interprocess=True), EventPool(driver, HERE)
    pool.on()

    def work() -> int:
        count = refused(event.record, event.wait, event.synchronize, event.export, pool.on, lambda: event.is_done)
        event.close()
        pool.close()
        return count

    with pool._lock:  # as if another thread had been in it
        assert end_of(work) == 6
    event.record()
    event.close()
    pool.close()


# -- one for each stream --------------------------------------------------------------------------------------------
def test_each_stream_has_an_event_of_its_own(driver: Any, deferred: standin.Standin, streams: list[int]) -> None:
    with EventPool(driver, HERE, FEW) as pool:
        given = [pool.on(stream) for stream in streams]
        assert len(set(map(id, given))) == FEW == len(pool)
        assert [pool.on(stream) for stream in streams] == given  # again, re-recorded
        assert {event.is_interprocess for event in given if event} == {True}
        assert pool.on() is None  # no more than that
        assert pool.on(streams[0]) is given[0]
        assert repr(pool) == "<EventPool cuda:0, 6 of 6 events>"
    assert repr(pool) == "<EventPool cuda:0, closed>"
    assert all(event.is_closed for event in given if event)
    with pytest.raises(ClosedError):
        pool.on()
    pool.close()


def test_it_is_recorded_again_and_only_waits_longer(
    driver: Any, deferred: standin.Standin, streams: list[int], region: vram.memory.Region
) -> None:
    with EventPool(driver, HERE) as pool:
        driver.fill_async(region.address, 7, 4096, streams[0])
        event = pool.on(streams[0])
        assert event is not None
        assert not event.is_done
        driver.fill_async(region.address, 8, 4096, streams[0])
        assert pool.on(streams[0]) is event
        event.synchronize()
        found = bytearray(1)
        driver.copy_out(memoryview(found), region.address)
        assert found == b"\10"


def test_the_default_stream_has_two_names_and_one_event(driver: Any) -> None:
    with EventPool(driver, HERE, 1) as pool:
        assert pool.on(0) is pool.on(1) is pool.on() is not None
        assert pool.on(2) is None  # of each thread: another one


def test_when_the_driver_has_no_more_the_caller_synchronises(driver: Any, streams: list[int]) -> None:
    faulty = FaultyDriver(driver)
    with EventPool(faulty, HERE) as pool:
        first = pool.on(streams[0])
        with faulty.inject("event_create", error=lambda: OutOfMemoryError("cuEventCreate", 2, "OUT_OF_MEMORY")):
            assert pool.on(streams[1]) is None
            assert pool.on(streams[0]) is first
        assert pool.on(streams[1]) is not None  # there may be some again


def test_a_failure_leaves_nothing_and_disturbs_nobody(driver: Any, streams: list[int]) -> None:
    faulty = FaultyDriver(driver)
    before = driver.work.events.out.copy()
    with EventPool(faulty, HERE) as pool:
        for method in ("event_create", "event_record"):
            with faulty.inject(method), pytest.raises(DriverError):
                pool.on(streams[0])
            assert len(pool) == 0
            assert driver.work.events.out == before
        first = pool.on(streams[0])
        for method in ("stream_wait", "event_record"):
            with faulty.inject(method), pytest.raises(DriverError):
                pool.on(streams[0])
        assert pool.on(streams[0]) is first
        stream = driver.stream_create(THERE)
        with pytest.raises(UsageError):
            pool.on(stream)
        driver.stream_destroy(stream)
        assert len(pool) == 1
    assert driver.work.events.out == before
