"""What memory that sleeps must do on every driver: the behaviour of :mod:`vram.memory.sleep` as tests (I13)."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.region import MemorySuite, load, store
from tests.support.limits import limited

from vram.driver.protocol import DeviceMemory, Driver
from vram.errors import AsleepError, BackupError, BusyError, CapacityError, UsageError
from vram.memory import PhysicalAllocation, Region
from vram.memory.pinned import store_of, trim
from vram.memory.sleep import Place, Remapped, SleepReport, on_remap, sleep_regions, wake_regions
from vram.spec import Access, Location

RW, READ = Access.READ_WRITE, Access.READ


class SleepContract(MemorySuite):
    """Sleep and wake: the same addresses and bytes, all or nothing, and nothing made anew behind others' backs."""

    @pytest.fixture(autouse=True)
    def _trimmed(self, _books: None) -> Iterator[None]:
        yield
        gc.collect()
        trim()

    @pytest.fixture(params=["file", "pinned"])
    def place(self, request: pytest.FixtureRequest, driver: Driver, tmp_path: Path) -> Place:
        """Where bytes can go."""
        if request.param == "file":
            return tmp_path
        if not isinstance(driver, DeviceMemory):
            pytest.skip(f"{driver.name} memory is no better off in pinned memory")
        return "host"

    @pytest.fixture
    def regions(self, driver: Driver, location: Location, granule: int) -> Iterator[tuple[Region, Region]]:
        """Two regions with bytes in them: one of three chunks, one of a part of a chunk."""
        with (
            Region.create(location, driver=driver, capacity=8 * granule, chunk=granule, nbytes=3 * granule - 5) as one,
            Region.create(location, driver=driver, capacity=granule, nbytes=100) as other,
        ):
            for number in range(3):
                store(driver, one.address + number * granule, bytes([number + 1]) * 1000)
            store(driver, one.address + one.nbytes - 3, b"end")
            store(driver, other.address, b"other" * 20)
            yield one, other

    def check(self, driver: Driver, one: Region, other: Region, granule: int) -> None:
        """See that every byte is there."""
        for number in range(3):
            assert load(driver, one.address + number * granule, 1001) == bytes([number + 1]) * 1000 + b"\0"
        assert load(driver, one.address + one.nbytes - 3, 3) == b"end"
        assert load(driver, other.address, 100) == b"other" * 20

    def test_memory_sleeps_and_wakes_at_its_addresses_i13(
        self, driver: Driver, regions: tuple[Region, Region], granule: int, place: Place
    ) -> None:
        one, other = regions
        before = driver.live()
        addresses, layout = (one.address, other.address), one.chunks
        with one.pin(5, 10, "a view"):  # keeps the address, not the bytes
            for _ in range(2):
                slept = put(regions, place)
                assert (slept.nbytes, slept.freed) == (3 * granule - 5 + 100, 4 * granule)
                assert slept.seconds > 0
                assert slept.rate == slept.nbytes / slept.seconds
                assert (one.mapped, one.nbytes) == (0, 3 * granule - 5)
                assert "asleep" in repr(one)
                assert driver.live().reservations - before.reservations == self.slabs(driver)
                woke = wake_regions(regions)
                assert (woke.nbytes, woke.discarded) == (slept.nbytes, 0)
                assert (one.address, other.address) == addresses
                assert one.chunks == layout
                self.check(driver, one, other, granule)
        one.grow(8 * granule)
        assert load(driver, one.address + 8 * granule - 4, 4) == b"\0" * 4
        one.shrink(granule)

    def slabs(self, driver: Driver) -> int:
        """How many reservations of this driver the pinned memory takes: on the host's alone it is its own."""
        return 0

    def test_pinned_memory_is_kept_for_the_next_time(self, driver: Driver, regions: tuple[Region, Region]) -> None:
        if not isinstance(driver, DeviceMemory):
            with pytest.raises(UsageError, match="directory"):
                put(regions, "host")
            assert regions[0].asleep is None
            return
        kept = store_of(driver)
        assert kept.nbytes == 0
        for _ in range(3):
            put(regions, "host")
            pinned = kept.nbytes
            assert pinned >= sum(region.nbytes for region in regions)
            assert trim() == 0  # the bytes are in there
            wake_regions(regions)
            assert kept.nbytes == pinned
        assert trim() == pinned

    def test_the_setting_bounds_what_is_pinned(
        self, driver: Driver, regions: tuple[Region, Region], granule: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not isinstance(driver, DeviceMemory):
            pytest.skip(f"{driver.name} memory is no better off in pinned memory")
        monkeypatch.setenv("VRAM_PINNED_LIMIT", "1MiB")
        with pytest.raises(CapacityError, match="VRAM_PINNED_LIMIT"):
            put(regions, "host")
        self.check(driver, *regions, granule)

    def test_what_is_discarded_is_zero_and_said_so(self, driver: Driver, regions: tuple[Region, Region]) -> None:
        one, other = regions
        slept = put(regions, None)
        assert slept.nbytes == 0
        woke = wake_regions(regions)
        assert (woke.nbytes, woke.discarded) == (0, one.nbytes + other.nbytes)
        assert load(driver, one.address, 1000) == bytes(1000)
        assert load(driver, other.address, 100) == bytes(100)

    def test_asleep_it_is_of_no_use_i13(self, driver: Driver, regions: tuple[Region, Region], granule: int) -> None:
        one, other = regions
        put([one], None)
        calls: list[Any] = [
            lambda: one.pin(0, 1),
            lambda: one.segments(0, 1),
            lambda: one.grow(8 * granule),
            lambda: one.grow(one.nbytes),
            lambda: one.shrink(1),
            lambda: one.resize(one.nbytes),
            one.clear,
            one.freeze,
            lambda: put([other, one], None),
        ]
        for call in calls:
            with pytest.raises(AsleepError, match=r"asleep|wake"):
                call()
        assert other.asleep is None
        with pytest.raises((AsleepError, UsageError)):
            one.extend([], one.nbytes)
        assert one.get_access() is Access.NONE
        wake_regions([one])
        one.grow(8 * granule)

    def test_waking_what_is_awake_does_nothing(
        self, driver: Driver, regions: tuple[Region, Region], place: Place
    ) -> None:
        woke = wake_regions(regions)
        assert (woke.nbytes, woke.discarded) == (0, 0)
        put(regions[:1], place)
        wake_regions(regions)
        assert wake_regions(regions).nbytes == 0
        assert load(driver, regions[0].address, 3) == b"\1\1\1"

    def test_closed_asleep_it_leaves_nothing(
        self, driver: Driver, location: Location, granule: int, place: Place, tmp_path: Path
    ) -> None:
        for given in (place, None):
            region = Region.create(location, driver=driver, capacity=granule, nbytes=5)
            put([region], given)
            region.close()
            trim()  # all of it: nothing is lent
            assert _files(tmp_path) == []
        if isinstance(driver, DeviceMemory):
            assert store_of(driver).nbytes == 0

    # -- what others hold ---------------------------------------------------------------------------------------
    def test_what_others_hold_does_not_sleep_behind_their_backs(
        self, driver: Driver, regions: tuple[Region, Region], granule: int, place: Place
    ) -> None:
        one, other = regions
        before = driver.live()
        for is_exported in (False, True):
            (held,), _ = one.segments(0, granule)
            if is_exported:
                held.export()
            for given in (place, None):
                with pytest.raises(BusyError, match="unmap") as caught:
                    put([other, one], given)
                assert len(caught.value.holders) >= 1
                self.check(driver, one, other, granule)
                assert (one.asleep, other.asleep) == (None, None)
            held.close()
        assert driver.live().mappings == before.mappings

    def test_shared_memory_is_unmapped_here_alone(
        self, driver: Driver, regions: tuple[Region, Region], granule: int, place: Place
    ) -> None:
        one, other = regions
        held, _ = one.segments(0, one.nbytes)
        with Region.from_allocations(driver, held, access=RW) as alias:
            slept = put([one, other], place, unmap_shared=True)
            assert (slept.freed, slept.nbytes) == (granule, 100)
            store(driver, alias.address, b"meanwhile")
            wake_regions([one, other])
            assert load(driver, one.address, 9) == b"meanwhile"
            store(driver, alias.address, b"\1" * 9)
            with pytest.raises(BusyError):
                put([alias], None)
            slept = put([alias], None, unmap_shared=True)
            assert slept.freed == 0
            assert alias.mapped == 0
            wake_regions([alias])
            assert load(driver, alias.address, 9) == b"\1" * 9
        del held
        self.check(driver, one, other, granule)
        put([one], place)
        wake_regions([one])
        self.check(driver, one, other, granule)

    def test_a_private_copy_does_not_sleep(self, driver: Driver, location: Location, granule: int) -> None:
        if "HostMemory" not in self.offers:
            pytest.skip(f"{driver.name} has no private copies")
        with PhysicalAllocation.create(driver, granule, location) as made:
            with Region.from_allocations(driver, [made], access=RW, private=True) as region:
                with pytest.raises(UsageError, match="private"):
                    put([region], None)

    def test_read_only_memory_is_read_only_again(
        self, driver: Driver, regions: tuple[Region, Region], granule: int, place: Place
    ) -> None:
        one, other = regions
        one.freeze()
        put(regions, place)
        assert one.is_frozen
        wake_regions(regions)
        self.check(driver, one, other, granule)
        assert one.is_frozen
        assert one.access is READ
        assert one.get_access() is READ
        with pytest.raises(UsageError, match="frozen"):
            one.grow(8 * granule)

    # -- files --------------------------------------------------------------------------------------------------
    def test_a_file_that_was_changed_is_refused(
        self, driver: Driver, regions: tuple[Region, Region], granule: int, tmp_path: Path
    ) -> None:
        one, other = regions
        put(regions, tmp_path)
        assert os.listdir(tmp_path) == []
        (fd,) = _files(tmp_path)
        os.pwrite(fd, b"!", 7)
        for _ in range(2):
            with pytest.raises(BackupError, match="discard=True"):
                wake_regions(regions)
            assert (one.mapped, other.mapped) == (0, 0)
        os.pwrite(fd, b"\1", 7)
        wake_regions([other])
        wake_regions([one])
        self.check(driver, one, other, granule)
        put(regions, tmp_path)
        os.ftruncate(fd, 10)
        with pytest.raises(BackupError):
            wake_regions(regions)
        assert wake_regions(regions, discard=True).discarded == one.nbytes + other.nbytes
        assert load(driver, one.address, 10) == bytes(10)

    def test_a_file_without_room_changes_nothing(
        self, driver: Driver, regions: tuple[Region, Region], granule: int, tmp_path: Path
    ) -> None:
        with limited(resource.RLIMIT_FSIZE, granule):  # Python ignores the signal
            with pytest.raises(BackupError, match="EFBIG"):
                put(regions, tmp_path)
        self.check(driver, *regions, granule)
        with pytest.raises(UsageError, match="no directory"):
            put(regions, tmp_path / "nowhere")
        self.check(driver, *regions, granule)

    # -- who wants to know --------------------------------------------------------------------------------------
    def test_who_remembers_addresses_is_told(
        self, driver: Driver, regions: tuple[Region, Region], granule: int, place: Place
    ) -> None:
        told: list[Remapped] = []
        end = on_remap(told.append)
        try:
            put(regions, place)
            wake_regions(regions)
        finally:
            end()
        end()
        put(regions, place)
        wake_regions(regions)
        spans = tuple((region.location, region.address, sum(region.chunks)) for region in regions)
        assert told == [
            ("sleep", "before", False, spans),
            ("sleep", "after", True, spans),
            ("wake", "before", False, spans),
            ("wake", "after", True, spans),
        ]

    def test_who_objects_keeps_it_as_it_is(
        self, driver: Driver, regions: tuple[Region, Region], granule: int, place: Place
    ) -> None:
        told: list[Remapped] = []

        def object_to(event: Remapped) -> None:
            told.append(event)
            if event.when == "before":
                raise RuntimeError("not now")

        end = on_remap(object_to)
        try:
            with pytest.raises(RuntimeError, match="not now"):
                put(regions, place)
            self.check(driver, *regions, granule)
            end()
            put(regions, place)
            end = on_remap(object_to)
            with pytest.raises(RuntimeError, match="not now"):
                wake_regions(regions)
            assert regions[0].mapped == 0
        finally:
            end()
        assert [(event.verb, event.when, event.changed) for event in told] == [
            ("sleep", "before", False),
            ("sleep", "after", False),
            ("wake", "before", False),
            ("wake", "after", False),
        ]
        wake_regions(regions)
        self.check(driver, *regions, granule)

    def test_what_is_refused_at_once_is_told_nobody(
        self, driver: Driver, regions: tuple[Region, Region], tmp_path: Path
    ) -> None:
        told: list[Remapped] = []
        end = on_remap(told.append)
        try:
            held, _ = regions[0].segments(0, 1)
            with pytest.raises(BusyError):
                put(regions, tmp_path)
            del held
        finally:
            end()
        assert told == []

    def test_nothing_and_empty_regions_sleep(
        self, driver: Driver, location: Location, granule: int, place: Place
    ) -> None:
        assert put([], place).freed == 0
        assert wake_regions([]).nbytes == 0
        with Region.create(location, driver=driver, capacity=granule) as region:
            assert put([region], place).freed == 0
            with pytest.raises(AsleepError):
                region.grow(1)
            wake_regions([region])
            region.grow(1)

    def test_it_stays_open_while_it_is_under_way(
        self, driver: Driver, regions: tuple[Region, Region], place: Place
    ) -> None:
        def close(event: Remapped) -> None:
            if event == ("sleep", "before", False, event.spans):
                regions[0].close()

        end = on_remap(close)
        try:
            put(regions, place)
        finally:
            end()
        assert regions[0].is_closed
        assert regions[1].mapped == 0
        wake_regions(regions[1:])
        assert load(driver, regions[1].address, 5) == b"other"


def _files(directory: Path) -> list[int]:
    """Return the descriptors of files in a directory."""
    return [int(link.name) for link in Path("/proc/self/fd").iterdir() if str(directory) in _target(link)]


def _target(link: Path) -> str:
    """Return what a link points to; nothing if it is gone, as the one that a listing itself used."""
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def put(regions: Iterable[Region], place: Place, *, unmap_shared: bool = False) -> SleepReport:
    """Put regions to sleep, all in one place."""
    return sleep_regions(dict.fromkeys(regions, place), unmap_shared=unmap_shared)
