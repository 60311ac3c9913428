"""What a region with ``backing="zero"`` must do on every driver; a part of the memory contract.

Reads go by addresses, as a kernel's do: the driver copies from there, and refuses what would fault.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contracts.region import MemorySuite, load, store
from tests.support.deadlines import SOON

from vram.driver.protocol import Driver
from vram.errors import BusyError, CapacityError, UsageError, VramError
from vram.memory import Region
from vram.memory.ahead import keep_ready
from vram.memory.chunks import Kind
from vram.memory.pinned import trim
from vram.memory.resize import resize_regions
from vram.memory.sleep import sleep_regions, wake_regions
from vram.spec import Access, AllocationFlags, HandleKind, Location


def reads_zero(driver: Driver, region: Region, start: int) -> bool:
    """Whether all is zero from an offset of a region up to its capacity: read at its ends and in every granule."""
    granule = driver.mem_granularity(region.location, HandleKind.NONE).minimum
    steps = {start, *range(-(-start // granule) * granule, region.capacity, granule)} - {region.capacity}
    places = {place for step in steps for place in (step, min(step + granule, region.capacity) - 64)}
    return all(load(driver, region.address + place, 64) == bytes(64) for place in places if place >= start)


class ZeroContract(MemorySuite):
    """Addresses without memory read as zeros, up to the capacity, whatever becomes of the size."""

    @pytest.fixture
    def zeros(self, driver: Driver, location: Location, granule: int) -> Iterator[Region]:
        """A region of two chunks and room for sixteen."""
        with Region.create(
            location, driver=driver, capacity=16 * granule, chunk=granule, nbytes=2 * granule, backing="zero"
        ) as region:
            store(driver, region.address, b"\1" * 9)
            store(driver, region.address + 2 * granule - 9, b"\2" * 9)
            yield region

    def test_what_has_no_memory_reads_as_zeros_and_is_not_written(
        self, driver: Driver, zeros: Region, granule: int
    ) -> None:
        assert reads_zero(driver, zeros, 2 * granule)
        assert load(driver, zeros.address + 2 * granule - 9, 18) == b"\2" * 9 + bytes(9)  # across the end
        for at in (2 * granule, 7 * granule + 5, 16 * granule - 8):
            with pytest.raises(VramError):
                driver.fill(zeros.address + at, 1, 8)
            with pytest.raises(VramError):
                store(driver, zeros.address + at, b"x")
        with pytest.raises(VramError):
            load(driver, zeros.address + 16 * granule - 4, 8)
        assert reads_zero(driver, zeros, 2 * granule)

    def test_a_region_without_rows_reads_as_zeros(self, driver: Driver, location: Location, granule: int) -> None:
        before = driver.live()
        with Region.create(location, driver=driver, capacity=5 * granule, backing="zero") as region:
            assert (region.nbytes, region.mapped, region.chunks) == (0, 0, ())
            assert reads_zero(driver, region, 0)
        assert driver.live() == before

    def test_growing_takes_their_place_and_shrinking_brings_them_back_i5(
        self, driver: Driver, zeros: Region, granule: int
    ) -> None:
        address = zeros.address
        for size in (5 * granule, 5 * granule + 1, granule, 16 * granule, 0, 3 * granule + 7, 3 * granule, 2 * granule):
            before = min(zeros.nbytes, size)
            zeros.resize(size)
            assert (zeros.address, zeros.nbytes) == (address, size)
            if size > before:
                start = max(before, size - 9)
                assert load(driver, address + start, size - start) == bytes(size - start)
                store(driver, address + size - 9, b"\3" * 9)
            assert reads_zero(driver, zeros, zeros.mapped)
        with pytest.raises(CapacityError):
            zeros.grow(16 * granule + 1)

    def test_large_capacities_take_large_pieces_and_are_whole(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        before = driver.live()
        with Region.create(location, driver=driver, capacity=1021 * granule, chunk=granule, backing="zero") as region:
            after = driver.live()
            assert after.nbytes - before.nbytes <= 8 * granule  # of zeros, once
            assert after.mappings - before.mappings < 1021 / 2
            for size in (0, 3, 17, 18, 800, 1021, 1020, 40, 41, 0):
                region.resize(size * granule)
                assert reads_zero(driver, region, size * granule)
                assert region.mapped == size * granule
        assert driver.live() == before

    def test_regions_share_one_chunk_of_zeros(self, driver: Driver, location: Location, granule: int) -> None:
        def make() -> Region:
            return Region.create(location, driver=driver, capacity=4 * granule, backing="zero")

        with make() as one:
            alone = driver.live().nbytes
            with make() as two, make() as three:
                assert driver.live().nbytes == alone
                for region in (one, two, three):
                    assert reads_zero(driver, region, 0)
                one.grow(granule)
                one.close()
                assert reads_zero(driver, two, 0)
        with make() as again:  # after the last of them went
            assert reads_zero(driver, again, 0)

    def test_many_of_them_change_together_or_not_at_all_i4(
        self, driver: Driver, location: Location, zeros: Region, granule: int
    ) -> None:
        available, _ = driver.mem_info(location)
        with (
            Region.create(location, driver=driver, capacity=available + 1024 * granule) as vast,
            Region.create(location, driver=driver, capacity=8 * granule, nbytes=8 * granule, backing="zero") as other,
        ):
            before = driver.live(), zeros.layout, other.layout
            with pytest.raises(VramError):
                resize_regions({zeros: 9 * granule, other: 0, vast: vast.capacity})
            assert (driver.live(), zeros.layout, other.layout) == before
            assert reads_zero(driver, zeros, 2 * granule)
            with zeros.pin(granule, 2 * granule), pytest.raises(BusyError):
                resize_regions({zeros: granule, other: 0})
            assert (driver.live(), zeros.layout, other.layout) == before
            resize_regions({zeros: 9 * granule, other: 0})
            assert reads_zero(driver, zeros, 9 * granule)
            assert reads_zero(driver, other, 0)
            assert load(driver, zeros.address, 9) == b"\1" * 9

    def test_asleep_and_awake_they_stay_behind_the_end_i13(self, driver: Driver, zeros: Region, granule: int) -> None:
        for size in (5 * granule, 0, 5 * granule):
            zeros.resize(size)
            mapped = driver.live().mappings
            sleep_regions({zeros: None})
            assert reads_zero(driver, zeros, size)
            wake_regions([zeros])
            assert driver.live().mappings == mapped
            assert reads_zero(driver, zeros, 0)  # its bytes were let go
            if size:
                store(driver, zeros.address + size - 9, b"awake")
        zeros.grow(7 * granule)
        assert load(driver, zeros.address + 5 * granule - 9, 5) == b"awake"
        assert reads_zero(driver, zeros, 5 * granule)

    def test_memory_that_is_ready_takes_their_place(
        self, driver: Driver, location: Location, zeros: Region, granule: int
    ) -> None:
        kind = Kind(driver, location, HandleKind.POSIX_FD, AllocationFlags.NONE, granule)
        prepared = keep_ready(kind, 3)
        assert prepared.wait(SOON)
        zeros.grow(4 * granule)
        store(driver, zeros.address + 4 * granule - 9, b"\7" * 9)
        zeros.shrink(granule)
        assert prepared.wait(SOON)
        assert reads_zero(driver, zeros, granule)
        zeros.grow(6 * granule)
        assert reads_zero(driver, zeros, granule)
        store(driver, zeros.address + 6 * granule - 9, b"\7" * 9)
        trim()

    def test_what_leaves_the_process_has_memory_only(
        self, driver: Driver, location: Location, zeros: Region, granule: int
    ) -> None:
        zeros.grow(3 * granule)
        allocations, inside = zeros.segments(0, 3 * granule)
        assert ([one.nbytes for one in allocations], inside) == ([granule] * 3, 0)
        with Region.from_allocations(driver, allocations, access=Access.READ_WRITE, capacity=8 * granule) as other:
            assert load(driver, other.address, 9) == b"\1" * 9
            with pytest.raises(VramError):
                load(driver, other.address + 3 * granule, 8)
            zeros.shrink(granule)
            store(driver, other.address + 2 * granule, b"theirs")
            assert reads_zero(driver, zeros, granule)
        for one in allocations:
            one.close()

    def test_read_only_rows_keep_them_too(self, driver: Driver, zeros: Region, granule: int) -> None:
        zeros.freeze()
        assert reads_zero(driver, zeros, 2 * granule)
        with pytest.raises(UsageError):
            zeros.grow(3 * granule)
        zeros.shrink(granule)
        assert reads_zero(driver, zeros, granule)

    def test_anything_else_is_no_backing(self, driver: Driver, location: Location, granule: int) -> None:
        before = driver.live()
        for backing in ("ones", True, b"zero", 0):
            with pytest.raises(UsageError, match="backing"):
                Region.create(location, driver=driver, capacity=granule, backing=backing)
        assert driver.live() == before

    def test_without_it_what_has_no_memory_is_not_read(self, driver: Driver, location: Location, granule: int) -> None:
        with Region.create(location, driver=driver, capacity=2 * granule, nbytes=granule) as region:
            with pytest.raises(VramError):
                load(driver, region.address + granule, 8)
