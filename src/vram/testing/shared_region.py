"""What a region must do on every driver when its memory is shared, sealed or private; the second part of it."""

from __future__ import annotations

import pytest

from ..driver.protocol import Driver
from ..errors import AccessDeniedError, CapacityError, ClosedError, RangeError, UnsupportedError, UsageError
from ..lifetime import own
from ..memory import PhysicalAllocation, Region
from ..spec import Access, Location
from .region import RegionContract, load, sizes, store

__all__ = ["SharedRegionContract"]

RW, READ = Access.READ_WRITE, Access.READ


class SharedRegionContract(RegionContract):
    """Regions whose memory other processes have: segments, importing, extending, freezing, copying on write."""

    # -- sharing ------------------------------------------------------------------------------------------------
    def test_segments_cover_a_span(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(driver, location, capacity=8 * granule, chunk=granule, nbytes=3 * granule) as region:
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
        with Region.create(driver, location, capacity=8 * granule, chunk=granule, nbytes=2 * granule + 7) as region:
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
                assert sizes(region) == [granule] * 3

    def test_an_imported_region_outlives_who_gave_it(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(driver, location, capacity=granule, nbytes=granule) as region:
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
        with Region.create(driver, location, capacity=4 * granule, nbytes=granule) as region:
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
                Region.from_allocations(driver, [allocation.driver_handle])  # type: ignore[list-item]
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
            return Region.from_allocations(driver, there, **options)  # type: ignore[arg-type]
        finally:
            for allocation in there:
                allocation.close()

    # -- read-only and private ----------------------------------------------------------------------------------
    def test_a_frozen_region_is_read_only_for_everybody_s8(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        with Region.create(driver, location, capacity=8 * granule, chunk=granule, nbytes=2 * granule) as region:
            store(driver, region.address + granule, b"ice")
            if "Sealing" not in self.offers:  # then it is read-only here
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
        if "Sealing" not in self.offers:
            pytest.skip("the driver does not offer Sealing")
        with Region.create(driver, location, capacity=granule) as region:
            before = region.is_frozen
            region.freeze()
            assert (before, region.is_frozen) == (False, True)
            with pytest.raises(UsageError, match="frozen"):
                region.grow(1)

    def test_memory_sealed_elsewhere_does_not_grow(self, driver: Driver, location: Location, granule: int) -> None:
        if "Sealing" not in self.offers:
            pytest.skip("the driver does not offer Sealing")
        with Region.create(driver, location, capacity=2 * granule, nbytes=1) as region:
            with PhysicalAllocation.import_(driver, region.segments(0, 1)[0][0].export(), granule) as there:
                there.seal()
            assert region.is_frozen
            with pytest.raises(UsageError, match="frozen"):
                region.grow(2 * granule)

    def test_a_private_region_changes_for_itself_alone(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(driver, location, capacity=2 * granule, nbytes=granule) as region:
            store(driver, region.address, b"original")
            if "CopyOnWrite" not in self.offers:
                with pytest.raises(UnsupportedError):
                    self.imported(driver, region, private=True)
                return
            if "Sealing" in self.offers:
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
