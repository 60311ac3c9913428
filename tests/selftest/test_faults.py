"""The fault injector fails what it was told to fail, and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.deadlines import SOON
from tests.support.faulty_driver import UNDO, FaultyDriver

from vram.driver.host import HostDriver
from vram.driver.protocol import HostMemory
from vram.errors import DriverError, OutOfMemoryError, UsageError
from vram.spec import HOST, Access, HandleKind

G = 2 << 20


@pytest.fixture
def driver() -> FaultyDriver:
    return FaultyDriver(HostDriver())


def _use(driver: FaultyDriver) -> None:
    """A careful user: takes back what it made, whatever fails on the way, in six calls and three undo calls."""
    address = driver.address_reserve(G)
    try:
        handle = driver.mem_create(G, HOST, HandleKind.POSIX_FD)
        try:
            driver.mem_map(address, G, 0, handle)
            try:
                driver.mem_set_access(address, G, Access.READ_WRITE, (HOST,))
                driver.fill(address, 7, 10)
                driver.populate(address, G)
            finally:
                driver.mem_unmap(address, G)
        finally:
            driver.mem_release(handle)
    finally:
        driver.address_free(address, G)


def test_counts_and_names_calls(driver):
    _use(driver)
    assert driver.count() == 9
    assert driver.count("mem_map") == 1
    assert driver.count(UNDO) == 3
    assert driver.calls[0] == "address_reserve"
    assert driver.calls[-1] == "address_free"
    driver.live(), driver.name
    assert driver.count() == 9
    driver.clear()
    assert driver.calls == ()


def test_the_nth_call_of_a_method_fails_once(driver):
    with driver.inject("address_reserve", 2) as fault:
        first = driver.address_reserve(G)
        with pytest.raises(DriverError, match=r"address_reserve \(injected\)"):
            driver.address_reserve(G)
        second = driver.address_reserve(G)
    assert fault.fired == ("address_reserve",)
    for address in (first, second):
        driver.address_free(address, G)


def test_forever_means_until_it_is_removed(driver):
    fault = driver.inject("mem_create", 1, lambda: OutOfMemoryError("mem_create", 12, "ENOMEM"), forever=True)
    for _ in range(3):
        with pytest.raises(OutOfMemoryError):
            driver.mem_create(G, HOST, HandleKind.NONE)
    fault.remove()
    fault.remove()
    driver.mem_release(driver.mem_create(G, HOST, HandleKind.NONE))
    assert len(fault.fired) == 3


def test_a_failed_call_has_done_nothing(driver):
    for method in ("address_reserve", "mem_create"):
        with driver.inject(method), pytest.raises(DriverError):
            _use(driver)
        assert not any((driver.live().reservations, driver.live().handles, driver.live().mappings))


def test_undo_calls_can_fail_and_be_made_again(driver):
    handle = driver.mem_create(G, HOST, HandleKind.NONE)
    with driver.inject(UNDO), pytest.raises(DriverError):
        driver.mem_release(handle)
    assert driver.live().handles == 1
    driver.mem_release(handle)
    assert driver.live().handles == 0


def test_faults_that_could_never_happen_are_refused(driver):
    for bad in ({"method": "mem_mapp"}, {"nth": 0}, {"method": ()}, {"method": ("mem_map", "live")}):
        with pytest.raises(UsageError):
            driver.inject(**bad)


def test_offers_what_the_wrapped_driver_offers(driver):
    assert isinstance(driver, HostMemory)
    assert isinstance(driver, HostMemory)
    assert isinstance(driver, FaultyDriver)
    assert not isinstance(FaultyDriver(object()), HostMemory)


def test_calls_of_other_threads_neither_count_nor_fail_where_only_this_one_is_meant() -> None:
    driver = FaultyDriver(HostDriver())
    with driver.inject("mem_granularity", 2, forever=True, only_here=True) as fault:
        with ThreadPoolExecutor(1) as pool:
            for _ in range(3):
                pool.submit(driver.mem_granularity, HOST, HandleKind.POSIX_FD).result(SOON)
        driver.mem_granularity(HOST, HandleKind.POSIX_FD)
        assert fault.fired == ()
        with pytest.raises(DriverError, match="injected"):
            driver.mem_granularity(HOST, HandleKind.POSIX_FD)
    assert fault.fired == ("mem_granularity",)
