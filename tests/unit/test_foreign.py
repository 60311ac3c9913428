"""Regions over memory of others: of another library in this process, and of another process, on the stand-in."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.faulty_driver import FaultyDriver
from tests.support.forked import end_of, refused
from tests.support.other_process import OtherProcess
from tests.support.raw_cuda import CudaStranger, Maker

import standin
from vram import driver as drivers
from vram.arrays import Array
from vram.errors import ClosedError, UsageError
from vram.lifetime import live, own
from vram.memory import Region
from vram.memory import foreign as memory_of_others
from vram.memory.foreign import find_foreign, look_up, open_handle
from vram.memory.kinds import LEGACY
from vram.spec import Access, HandleKind, Location

pytestmark = pytest.mark.standin
HERE = Location("cuda", 0)
FD = HandleKind.POSIX_FD
G = 2 << 20
READ, RW = Access.READ, Access.READ_WRITE


@pytest.fixture
def driver() -> Any:
    return drivers.get(HERE)


@pytest.fixture
def stranger() -> Iterator[CudaStranger]:
    with CudaStranger() as made:
        yield made


@pytest.fixture(scope="module")
def neighbour() -> Iterator[OtherProcess]:
    with OtherProcess(Maker) as other:
        yield other


@pytest.fixture
def theirs(neighbour: OtherProcess) -> Iterator[tuple[int, bytes]]:
    base = neighbour.call("legacy", G)
    window = neighbour.call("window_open", base, G, HERE, RW)
    yield base, neighbour.call("ipc_export", base)
    neighbour.call("window_close", window)
    neighbour.call("free", base)


def seen(driver: Any, address: int, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    driver.copy_out(memoryview(found), address)
    return bytes(found)


# -- of another library ---------------------------------------------------------------------------------------------
def test_a_region_over_the_allocation_that_an_address_lies_in(driver: Any, stranger: CudaStranger) -> None:
    base = stranger.legacy(5000)
    region, offset = find_foreign(driver, base + 100, 50)
    assert (region.address, region.nbytes, region.capacity, offset) == (base, 5000, 5000, 100)
    assert (region.made_by, region.kinds, region.location) == ("legacy", HandleKind.LEGACY_IPC, HERE)
    assert region.is_imported
    array = Array(region, "u1", (50,), offset=offset)
    array[:] = np.arange(50)
    assert seen(driver, base + 105, 2) == b"\5\6"
    with pytest.raises(UsageError, match="no descriptor"):
        region.segments(0, 10)
    for change in (lambda: region.grow(6000), lambda: region.shrink(1), lambda: region.extend([], 6000)):
        with pytest.raises(UsageError):
            change()
    region.freeze()
    array.close()
    region.close()


def test_the_same_memory_is_the_same_region_while_it_is_in_use(driver: Any, stranger: CudaStranger) -> None:
    base = stranger.legacy(5000)
    region, _ = find_foreign(driver, base, 10)
    assert find_foreign(driver, base + 4000, 1000)[0] is region
    read_only, _ = find_foreign(driver, base, 10, access=READ)
    assert read_only is not region
    assert read_only.access is READ
    driver.fill(base, 1, 10)  # the right of the one is not taken away by the other
    region.close()
    again, _ = find_foreign(driver, base, 10)
    assert again is not region
    again.close()
    with pytest.raises(UsageError, match="READ"):
        driver.fill(base, 1, 10)
    read_only.close()


def test_mapped_memory_of_several_allocations(driver: Any, stranger: CudaStranger) -> None:
    """Held on its own, and so beyond its owner, only from the moment on that somebody wants to have it."""
    base = stranger.mapped((G, 2 * G, G), FD)
    before = driver.live()
    region, offset = find_foreign(driver, base + G - 4, 8)
    assert (region.address, region.chunks, offset) == (base, (G, 2 * G), G - 4)
    assert driver.live().handles == before.handles
    driver.copy_in(base + G - 4, memoryview(b"12345678"))
    (first, second), start = region.segments(offset, offset + 8)
    assert start == G - 4
    assert driver.live().handles == before.handles + 2
    other, _ = find_foreign(driver, base + G, 1)
    (again,), _ = other.segments(0, 1)
    assert again.driver_handle == second.driver_handle  # once, however many regions it is a part of
    os.fstat(second.export())
    region.close()
    other.close()
    stranger.free(base)
    assert second.nbytes == 2 * G
    for allocation in (first, second, again):
        allocation.close()
    assert driver.live() == before


def test_what_is_no_memory_of_one_kind(driver: Any, stranger: CudaStranger) -> None:
    legacy, mapped = stranger.legacy(4096), stranger.mapped((G,), FD)
    for address, nbytes in ((legacy, 4097), (legacy + 4095, 2), (mapped, G + 1), (0, 1), (5, 1), (id(driver), 8)):
        with pytest.raises(UsageError):
            find_foreign(driver, address, nbytes)
        with pytest.raises(UsageError):
            look_up(driver, address, nbytes)
    assert len(look_up(driver, mapped, 0)) == 1


def test_memory_of_several_gpus(driver: Any, stranger: CudaStranger) -> None:
    """Copies between memory of others and ours, and among others, whichever GPU each is on."""
    there = Location("cuda", 1)
    data = bytes(range(256)) * 16
    bases = [stranger.legacy(4096), stranger.mapped((G,), FD), stranger.pooled(4096, shareable=False)[1]]
    with CudaStranger(1) as other, Region.create(there, driver=driver, capacity=G, nbytes=G) as ours:
        far = [other.legacy(4096), other.mapped((G,), FD), other.pooled(4096, shareable=False)[1]]
        regions = [find_foreign(driver, base, 4096)[0] for base in (*bases, *far)]
        assert [region.location.id for region in regions] == [0, 0, 0, 1, 1, 1]
        driver.copy_in(bases[0], memoryview(data))
        row = [*bases, ours.address, *far, bases[0]]
        for source, target in itertools.pairwise(row):
            driver.copy(target, source, 4096)
            assert seen(driver, target, 4096) == data
            driver.fill(source, 0, 4096)
        for region in regions:
            region.close()


def test_memory_that_another_gpu_works_on_stays_where_it_is(driver: Any, theirs: tuple[int, bytes]) -> None:
    other = Location("cuda", 1)
    with open_handle(driver, LEGACY, theirs[1], G, HERE, user=other) as region:
        assert (region.location, region.users) == (HERE, (other,))
        again = region.opened.region(Access.READ)
        assert (again.location, again.users, again.address) == (HERE, (other,), region.address)
        again.close()


def test_i1_what_must_outlive_it_does(driver: Any, theirs: tuple[int, bytes]) -> None:
    faulty, log = FaultyDriver(driver), list[str]()
    lease = own("lease", lambda: log.append(str(faulty.calls[-2:])))
    region = open_handle(faulty, LEGACY, theirs[1], G, HERE, depends=(lease.handle,))
    array = Array(region, "u1", (10,))
    lease.release()
    region.close()
    assert log == []
    array.close()
    assert log == ["('synchronize', 'ipc_close')"]
    with pytest.raises(ClosedError):
        open_handle(faulty, LEGACY, theirs[1], G, HERE, depends=(lease.handle,))


def test_i1_work_on_it_is_done_before_it_is_closed(driver: Any, theirs: tuple[int, bytes]) -> None:
    control = standin.Standin()
    control.clear()
    stream = driver.stream_create(HERE)
    control.defer()
    try:
        region = open_handle(driver, LEGACY, theirs[1], G, HERE)
        driver.fill_async(region.address, 7, G, stream)
        region.close()
    finally:
        control.defer(False)
    assert control.illegal() == 0
    driver.stream_destroy(stream)


def test_i2_forgotten_regions_are_closed(driver: Any, stranger: CudaStranger, theirs: tuple[int, bytes]) -> None:
    before = {handle.label for handle in live()}

    class Knot:
        def __init__(self) -> None:
            self.me = self
            self.opened = Array(open_handle(driver, LEGACY, theirs[1], G, HERE), "u1", (9,))
            self.found = Array(find_foreign(driver, stranger.legacy(4096), 9)[0], "u1", (9,))

    Knot()
    gc.collect()
    assert {handle.label for handle in live()} == before
    assert not driver.foreign.windows


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_i7_in_a_forked_child_it_is_inert(driver: Any, stranger: CudaStranger, theirs: tuple[int, bytes]) -> None:
    base = stranger.legacy(4096)
    region, opened = find_foreign(driver, base, 1)[0], open_handle(driver, LEGACY, theirs[1], G, HERE)

    def work() -> int:
        count = refused(
            lambda: region.pin(0, 1),
            lambda: opened.pin(0, 1),
            lambda: find_foreign(driver, base, 1),
            lambda: open_handle(driver, LEGACY, theirs[1], G, HERE),
        )
        region.close()
        opened.close()
        return count

    with memory_of_others._known.lock:  # as if another thread had been in it
        assert end_of(work) == 4
    assert seen(driver, base, 1) == seen(driver, base, 1)
    region.close()
    opened.close()
