"""What a region must do on every driver; a part of the memory contract."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import pytest
from tests.support.threads import race

from vram import lifetime
from vram.driver.protocol import Driver
from vram.errors import (
    AccessDeniedError,
    BusyError,
    CapacityError,
    ClosedError,
    LeakWarning,
    RangeError,
    UnsupportedError,
    UsageError,
)
from vram.lifetime import own
from vram.memory import PhysicalAllocation, Region
from vram.spec import Access, HandleKind, Location

FD = HandleKind.POSIX_FD
RW, READ = Access.READ_WRITE, Access.READ


def store(driver: Driver, address: int, data: bytes) -> None:
    driver.copy_in(address, memoryview(data))


def load(driver: Driver, address: int, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    driver.copy_out(memoryview(found), address)
    return bytes(found)


class MemorySuite:
    """What the suites of this room stand on: after every test the books are as they were before."""

    offers: frozenset[str] = frozenset()  # the driver's capabilities, as of a DriverContract

    @pytest.fixture
    def granule(self, driver: Driver, location: Location) -> int:
        """The driver's granularity, in bytes."""
        return driver.mem_granularity(location, FD).recommended

    @pytest.fixture(autouse=True)
    def _books(self, driver: Driver) -> Iterator[None]:
        gc.collect()
        before, handles = driver.live(), set(lifetime.live())
        yield
        gc.collect()
        assert driver.live() == before
        assert set(lifetime.live()) == handles


class RegionContract(MemorySuite):
    """Regions: growing, shrinking, pins; segments, importing, extending, freezing, copying on write."""

    # -- size ---------------------------------------------------------------------------------------------------
    def test_a_region_costs_addresses_until_it_grows(self, driver: Driver, location: Location, granule: int) -> None:
        before = driver.live()
        with Region.create(location, driver=driver, capacity=1000 * granule) as region:
            assert (region.nbytes, region.mapped, [*region.chunks]) == (0, 0, [])
            assert region.capacity == 1000 * granule
            assert driver.live().nbytes == before.nbytes
            assert driver.live().reservations == before.reservations + 1
        assert driver.live() == before

    @pytest.mark.parametrize("capacity", [0, 1])
    def test_a_region_has_room_for_a_granule_at_least(
        self, driver: Driver, location: Location, granule: int, capacity: int
    ) -> None:
        with Region.create(location, driver=driver, capacity=capacity) as region:
            assert region.capacity == granule
            with region.pin(0, 0, "an empty array"):
                assert region.segments(0, 0) == ((), 0)

    def test_growing_keeps_address_and_contents_i5(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=16 * granule, nbytes=10) as region:
            address = region.address
            store(driver, address, b"0123456789")
            for size in (11, granule, granule + 1, 5 * granule, 16 * granule):
                region.grow(size)
                assert (region.address, region.nbytes) == (address, size)
                assert load(driver, address, 10) == b"0123456789"
                assert load(driver, address + size - 1, 1) == b"\0"
            assert sum(region.chunks) == region.mapped == 16 * granule

    def test_a_chunk_is_what_was_asked_for_and_at_least_its_share(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        with Region.create(location, driver=driver, capacity=1024 * granule, nbytes=1) as region:
            region.grow(4 * granule)
            assert [*region.chunks] == [4 * granule]
            region.grow(4 * granule + 1)
            assert [*region.chunks] == [4 * granule, 4 * granule]
            region.grow(29 * granule - 1)
            assert [*region.chunks] == [4 * granule, 4 * granule, 21 * granule]

    def test_the_ceiling_cuts_the_last_chunk(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=5 * granule, chunk=2 * granule, nbytes=1) as region:
            assert [*region.chunks] == [2 * granule]
            region.grow(5 * granule)
            assert [*region.chunks] == [2 * granule, 2 * granule, granule]
            store(driver, region.address + 4 * granule - 2, b"over the seam")
            region.shrink(3 * granule)
            assert [*region.chunks] == [2 * granule, 2 * granule]

    def test_past_the_ceiling_nothing_changes_i4(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=2 * granule, nbytes=granule) as region:
            before = driver.live()
            for call in (region.grow, region.resize):
                with pytest.raises(CapacityError, match=str(2 * granule)):
                    call(2 * granule + 1)
            assert region.nbytes == granule
            assert driver.live() == before
        with pytest.raises(CapacityError):
            Region.create(location, driver=driver, capacity=granule, nbytes=granule + 1)

    def test_shrinking_gives_back_whole_chunks(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=8 * granule, chunk=granule, nbytes=4 * granule) as region:
            for number in range(4):
                store(driver, region.address + number * granule, bytes([number + 1]) * 8)
            physical = driver.live().nbytes
            region.shrink(granule + 1)
            assert [*region.chunks] == [granule, granule]
            assert driver.live().nbytes == physical - 2 * granule
            region.grow(3 * granule)
            assert load(driver, region.address + granule, 8) == b"\2" * 8  # in a chunk that was kept
            assert load(driver, region.address + 2 * granule, 8) == bytes(8)  # in a new one
            region.shrink(0)
            assert (region.nbytes, [*region.chunks]) == (0, [])

    def test_what_a_shrink_left_can_be_cleared(self, driver: Driver, location: Location, granule: int) -> None:
        """Before the memory leaves the process: not once it has, nor while a pin reaches there."""
        with Region.create(location, driver=driver, capacity=8 * granule, chunk=granule, nbytes=3 * granule) as region:
            assert region.remains == (3 * granule, 3 * granule)  # new memory has nothing behind the end
            driver.fill(region.address, 7, 3 * granule)
            region.shrink(granule + 9)
            assert region.remains == (granule + 9, 2 * granule)  # a whole chunk is gone with what was in it
            with region.pin(0, 8 * granule, full=True):
                assert not region.may_clear
                assert not region.clear()
                assert load(driver, region.address + granule, 16) == b"\7" * 16
            assert region.may_clear
            assert region.clear()
            assert load(driver, region.address + granule, 16) == b"\7" * 9 + bytes(7)
            assert region.remains == (granule + 9, granule + 9)
            assert region.clear()  # there is nothing to do
            region.segments(0, granule + 9)[0][1].export()
            region.shrink(granule + 1)
            assert region.remains == (granule + 1, granule + 9)
            assert not region.may_clear  # another process may show what was there

    def test_each_verb_goes_its_own_way(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=4 * granule, nbytes=granule) as region:
            with pytest.raises(UsageError, match="shrink or resize"):
                region.grow(granule - 1)
            with pytest.raises(UsageError, match="grow or resize"):
                region.shrink(granule + 1)
            region.grow(granule)
            region.shrink(granule)
            region.resize(3 * granule)
            region.resize("1B")
            assert region.nbytes == 1
            with pytest.raises(UsageError, match="use grow"):
                region.extend([], 2)

    @pytest.mark.parametrize("wrong", [{"capacity": -1}, {"capacity": 1, "nbytes": "x"}, {"capacity": 1, "chunk": 0}])
    def test_impossible_numbers_are_refused(self, driver: Driver, location: Location, wrong: dict[str, int]) -> None:
        with pytest.raises(UsageError):
            Region.create(location, driver=driver, **wrong)

    # -- pins ---------------------------------------------------------------------------------------------------
    def test_shrinking_below_a_pin_is_refused_and_changes_nothing_i6(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        with Region.create(location, driver=driver, capacity=4 * granule, chunk=granule, nbytes=3 * granule) as region:
            store(driver, region.address + 2 * granule, b"looked at")
            pin = region.pin(granule, 2 * granule + 9, "a view")
            other = region.pin(0, 5, "a small one")
            before = driver.live()
            for size in (2 * granule + 8, granule, 0):  # inside the chunk counts
                with pytest.raises(BusyError, match="a view") as caught:
                    region.shrink(size)
                assert len(caught.value.holders) == (2 if size == 0 else 1)
            assert (region.nbytes, driver.live()) == (3 * granule, before)
            assert load(driver, region.address + 2 * granule, 9) == b"looked at"
            region.shrink(2 * granule + 9)
            pin.release()
            pin.release()
            assert pin.is_released
            region.shrink(5)
            other.release()
            region.shrink(0)

    def test_closing_under_a_pin_takes_effect_with_the_pin_i6(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        before = driver.live()
        region = Region.create(location, driver=driver, capacity=2 * granule, nbytes=granule)
        pin = region.pin(0, granule, "the last view")
        address = region.address
        store(driver, address, b"still here")
        with pytest.raises(BusyError, match="the last view"):
            region.close(strict=True)
        assert not region.is_closed
        region.close()
        region.close()
        for call, numbers in ((region.grow, (granule,)), (region.pin, (0, 1)), (region.segments, (0, 1))):
            with pytest.raises(ClosedError):
                call(*numbers)
        del region, call
        gc.collect()
        assert load(driver, address, 10) == b"still here"
        pin.release()
        assert driver.live() == before

    def test_a_pin_can_be_taken_again_within_its_span(self, driver: Driver, location: Location, granule: int) -> None:
        region = Region.create(location, driver=driver, capacity=2 * granule, nbytes=2 * granule)
        first = region.pin(10, 20, "first")
        region.close()  # what is looked at stays, and can be looked at again
        second = first.subpin(12, 15, "second")
        assert (second.start, second.stop, second.handle) == (12, 15, first.handle)
        assert first.others() == ("second [12:15]",)
        with pytest.raises(RangeError, match="10 to 20"):
            first.subpin(9, 20)
        first.release()
        with pytest.raises(ClosedError, match="first"):
            first.subpin(12, 15)
        store(driver, region.address + 12, b"yes")
        second.release()

    def test_a_forgotten_pin_lets_go(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=granule, nbytes=granule) as region:
            loop: list[object] = [region.pin(0, granule)]
            loop.append(loop)
            with pytest.raises(BusyError):
                region.shrink(0)
            del loop
            gc.collect()
            region.shrink(0)

    def test_a_pin_lies_within_the_region(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=2 * granule, nbytes=10) as region:
            for span in ((0, 11), (-1, 5), (6, 5), (11, 11)):
                with pytest.raises(RangeError):
                    region.pin(*span)
            with pytest.raises(RangeError):
                region.pin(0, 2 * granule + 1, full=True)
            with region.pin(0, 2 * granule, "all of it", full=True):
                with pytest.raises(BusyError, match="all of it"):
                    region.shrink(9)
                region.grow(2 * granule)
            region.shrink(9)

    # -- pages, threads and forgetting ------------------------------------------------------------------------------
    def test_populating_touches_pages_and_keeps_contents(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        if "HostMemory" not in self.offers:
            with pytest.raises(UnsupportedError, match="CPU"):
                Region.create(location, driver=driver, capacity=granule, populate=True)
            with Region.create(location, driver=driver, capacity=granule, nbytes=1) as region:
                with pytest.raises(UnsupportedError, match="CPU"):
                    region.populate()
            return
        with Region.create(location, driver=driver, capacity=2 * granule, nbytes=1, populate=True) as region:
            store(driver, region.address, b"kept")
            region.grow(2 * granule)
            region.populate()
            assert load(driver, region.address, 4) == b"kept"
            region.shrink(0)
            region.populate()
        with pytest.raises(UsageError, match="access"):
            Region.create(location, driver=driver, capacity=granule, populate=True, access=Access.NONE)

    def test_a_forgotten_region_is_given_back_and_reported_i2(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        before = driver.live()
        with pytest.warns(LeakWarning, match="region of"):
            Region.create(location, driver=driver, capacity=granule, nbytes=1)
        assert driver.live() == before
        Region.create(location, driver=driver, capacity=granule, nbytes=1, managed=True)  # as an array does: no warning
        gc.collect()
        assert driver.live() == before

    def test_threads_change_size_one_after_the_other(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=64 * granule, chunk=granule) as region:

            def work(seed: int) -> None:
                for step in range(40):
                    region.resize((seed * 7 + step * 11) % 17 * granule)
                    pin = region.pin(0, 0, f"thread {seed}")
                    pin.release()

            race(*(partial(work, seed) for seed in range(4)))
            region.resize(3 * granule)
            assert [*region.chunks] == [granule] * 3
            store(driver, region.address, b"\1" * (3 * granule))

    # -- sharing ------------------------------------------------------------------------------------------------
    def test_segments_cover_a_span(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=8 * granule, chunk=granule, nbytes=3 * granule) as region:
            every, start = region.segments(0, 3 * granule)
            assert ([segment.nbytes for segment in every], start) == ([granule] * 3, 0)
            some, start = region.segments(granule + 5, 2 * granule)
            assert ([segment.handle for segment in some], start) == ([every[1].handle], 5)
            some, start = region.segments(2 * granule - 1, 2 * granule + 1)
            assert ([s.handle for s in some], start) == ([every[1].handle, every[2].handle], granule - 1)
            assert region.segments(7, 7) == ((), 0)
            with pytest.raises(RangeError):
                region.segments(0, 3 * granule + 1)
            region.shrink(0)
            assert every[2].export() >= 0  # they have claims of their own

    def test_an_imported_region_shows_the_same_memory(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(
            location, driver=driver, capacity=8 * granule, chunk=granule, nbytes=2 * granule + 7
        ) as region:
            store(driver, region.address + 2 * granule, b"shared!")
            imported = self.imported(driver, region, nbytes=region.nbytes)
            with imported:
                assert imported.is_imported
                assert (imported.nbytes, imported.mapped, imported.access) == (2 * granule + 7, 3 * granule, READ)
                assert load(driver, imported.address + 2 * granule, 7) == b"shared!"
                store(driver, region.address, b"seen")
                assert load(driver, imported.address, 4) == b"seen"
                assert driver.mem_get_access(imported.address, location) == READ
                for call in (imported.grow, imported.resize):
                    with pytest.raises(UsageError, match="owner"):
                        call(3 * granule)
                imported.shrink(granule)
                assert imported.chunks == (granule,)
                assert [*region.chunks] == [granule] * 3

    def test_an_imported_region_outlives_who_gave_it(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=granule, nbytes=granule) as region:
            store(driver, region.address, b"inherited")
            imported = self.imported(driver, region, access=RW)
        with imported:
            assert load(driver, imported.address, 9) == b"inherited"
            store(driver, imported.address, b"I")

    def test_an_imported_region_is_extended_when_its_owner_grew(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        released: list[int] = []
        mappings = driver.live().mappings
        lease = own("lease", lambda: released.append(driver.live().mappings))
        with Region.create(location, driver=driver, capacity=4 * granule, nbytes=granule) as region:
            imported = self.imported(driver, region, capacity=3 * granule, nbytes=1, depends=[lease.handle])
            with imported:
                lease.release()
                imported.extend([], granule)
                region.grow(3 * granule)
                more = region.segments(granule, 3 * granule)[0]
                store(driver, region.address + 3 * granule - 4, b"more")
                with pytest.raises(RangeError):
                    imported.extend(more, 3 * granule + 1)
                imported.extend(more, 3 * granule)
                assert imported.chunks == (granule, 2 * granule)
                assert load(driver, imported.address + 3 * granule - 4, 4) == b"more"
                with pytest.raises(CapacityError, match="attach again"):
                    imported.extend(more, 4 * granule)
                with pytest.raises(UsageError, match="shrink"):
                    imported.extend([], 1)
                region.close()
                assert not released
            assert released == [mappings]

    def test_an_empty_region_can_be_imported(self, driver: Driver, location: Location, granule: int) -> None:
        released: list[bool] = []
        lease = own("lease", lambda: released.append(True))
        with Region.from_allocations(driver, [], location=location, depends=[lease.handle]) as region:
            lease.release()
            assert (region.nbytes, region.capacity, region.location) == (0, granule, location)
            assert not released
        assert released

    def test_what_does_not_fit_together_is_not_imported_i4(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        with PhysicalAllocation.create(driver, granule, location) as allocation:
            before = driver.live()
            with pytest.raises(RangeError, match=str(granule)):
                Region.from_allocations(driver, [allocation], nbytes=granule + 1)
            with pytest.raises(CapacityError):
                Region.from_allocations(driver, [allocation], capacity=granule - 1)
            with pytest.raises(UsageError):
                Region.from_allocations(driver, [allocation.driver_handle])
            with Region.from_allocations(driver, [allocation, allocation], access=RW) as twice:
                store(driver, twice.address, b"twice")
                assert load(driver, twice.address + granule, 5) == b"twice"
            assert driver.live() == before
        with pytest.raises(ClosedError):
            Region.from_allocations(driver, [allocation])

    def imported(self, driver: Driver, region: Region, **options: object) -> Region:
        """Return what another process would make of a region's descriptors."""
        there = []
        try:
            for segment in region.segments(0, region.nbytes)[0]:
                there.append(PhysicalAllocation.import_(driver, segment.export(), segment.nbytes))
            return Region.from_allocations(driver, there, **options)
        finally:
            for allocation in there:
                allocation.close()

    # -- read-only and private ----------------------------------------------------------------------------------
    def test_a_frozen_region_is_read_only_for_everybody_s8(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        with Region.create(location, driver=driver, capacity=8 * granule, chunk=granule, nbytes=2 * granule) as region:
            store(driver, region.address + granule, b"ice")
            if "HostMemory" not in self.offers:  # then it is read-only here
                region.freeze()
                region.freeze()
                assert (region.access, region.is_frozen) == (READ, True)
                assert load(driver, region.address + granule, 3) == b"ice"
                with pytest.raises(UsageError):
                    store(driver, region.address, b"x")
                with pytest.raises(UsageError, match="frozen"):
                    region.grow(3 * granule)
                return
            with self.imported(driver, region) as imported, self.imported(driver, region, access=RW) as writable:
                assert (region.is_frozen, imported.is_frozen, region.access) == (False, False, RW)
                region.freeze()
                region.freeze()
                assert (region.is_frozen, imported.is_frozen, region.access) == (True, True, READ)
                assert load(driver, region.address + granule, 3) == b"ice"
                for one in (region, imported, writable):  # this process's mappings, all of them
                    with pytest.raises((AccessDeniedError, UsageError)):
                        store(driver, one.address, b"x")
                    with pytest.raises(AccessDeniedError):
                        driver.mem_set_access(one.address, 2 * granule, RW, [location])
            with pytest.raises(AccessDeniedError):
                self.imported(driver, region, access=RW)
            for call in (region.grow, region.resize):
                with pytest.raises(UsageError, match="frozen"):
                    call(3 * granule)
            region.shrink(granule)

    def test_an_empty_region_can_be_frozen(self, driver: Driver, location: Location, granule: int) -> None:
        if "HostMemory" not in self.offers:
            pytest.skip("the driver does not offer Sealing")
        with Region.create(location, driver=driver, capacity=granule) as region:
            before = region.is_frozen
            region.freeze()
            assert (before, region.is_frozen) == (False, True)
            with pytest.raises(UsageError, match="frozen"):
                region.grow(1)

    def test_memory_sealed_elsewhere_does_not_grow(self, driver: Driver, location: Location, granule: int) -> None:
        if "HostMemory" not in self.offers:
            pytest.skip("the driver does not offer Sealing")
        with Region.create(location, driver=driver, capacity=2 * granule, nbytes=1) as region:
            with PhysicalAllocation.import_(driver, region.segments(0, 1)[0][0].export(), granule) as there:
                there.seal()
            assert region.is_frozen
            with pytest.raises(UsageError, match="frozen"):
                region.grow(2 * granule)

    def test_a_private_region_changes_for_itself_alone(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=2 * granule, nbytes=granule) as region:
            store(driver, region.address, b"original")
            if "HostMemory" not in self.offers:
                with pytest.raises(UnsupportedError):
                    self.imported(driver, region, private=True)
                return
            if "HostMemory" in self.offers:
                region.freeze()
            with self.imported(driver, region, access=RW, private=True, nbytes=100) as private:
                assert private.is_private
                store(driver, private.address, b"mine own")
                assert load(driver, region.address, 8) == b"original"
                assert load(driver, private.address, 8) == b"mine own"
                with pytest.raises(UsageError, match="private copy"):
                    private.segments(0, 100)
                with pytest.raises(UsageError, match="private copy"):
                    private.freeze()
