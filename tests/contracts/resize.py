"""What growth of many must do on every driver: the behaviour of :mod:`vram.memory.resize` as tests (I4, I5, I6)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.contracts.region import MemorySuite, load, store
from tests.support.deadlines import SOON
from tests.support.threads import race

from vram.driver.protocol import Driver
from vram.errors import AsleepError, BusyError, CapacityError, ClosedError, OutOfMemoryError, UsageError, VramError
from vram.memory import PhysicalAllocation, Received, Region
from vram.memory.ahead import Prepared, keep_ready
from vram.memory.chunks import Kind
from vram.memory.pinned import trim
from vram.memory.resize import resize_regions
from vram.memory.sleep import sleep_regions, wake_regions
from vram.spec import Access, AllocationFlags, HandleKind, Location

FD = HandleKind.POSIX_FD
Regions = tuple[Region, Region, Region]


class ResizeContract(MemorySuite):
    """Many regions in one call: larger and smaller, all of them or none."""

    @pytest.fixture
    def regions(self, driver: Driver, location: Location, granule: int) -> Iterator[Regions]:
        """Three regions of two chunks each, with bytes at the beginning of each chunk, and room for eight."""

        def make() -> Region:
            return Region.create(location, driver=driver, capacity=8 * granule, chunk=granule, nbytes=2 * granule)

        with make() as one, make() as two, make() as three:
            for number, region in enumerate((one, two, three), 1):
                store(driver, region.address, bytes([number]) * 9)
                store(driver, region.address + granule, bytes([16 * number]) * 9)
            yield one, two, three

    def state(self, driver: Driver, regions: Regions) -> object:
        """What a call that fails must leave as it was."""
        return (
            driver.live(),
            [(region.nbytes, region.layout, region.remains, region.address) for region in regions],
            [load(driver, region.address + at, 9) for region in regions for at in (0, region.nbytes - 9)],
        )

    def test_all_change_in_one_call_i5(self, driver: Driver, regions: Regions, granule: int) -> None:
        one, two, three = regions
        addresses = [region.address for region in regions]
        resize_regions({one: 5 * granule, two: granule + 3, three: 8 * granule})
        assert [region.nbytes for region in regions] == [5 * granule, granule + 3, 8 * granule]
        assert [region.mapped for region in regions] == [5 * granule, 2 * granule, 8 * granule]
        resize_regions({one: granule, two: 0, three: 8 * granule})
        assert [region.nbytes for region in regions] == [granule, 0, 8 * granule]
        assert [len(region.chunks) for region in regions] == [1, 0, 8]
        assert [region.address for region in regions] == addresses
        assert load(driver, one.address, 10) == b"\1" * 9 + b"\0"
        assert load(driver, three.address, 10) == b"\3" * 9 + b"\0"

    def test_what_is_new_is_zero_and_what_was_kept_comes_back(
        self, driver: Driver, regions: Regions, granule: int
    ) -> None:
        one, two, three = regions
        resize_regions({one: granule + 1, two: granule, three: granule + 5})
        assert [region.remains for region in regions] == [
            (granule + 1, 2 * granule), (granule, granule), (granule + 5, 2 * granule),
        ]  # fmt: skip
        assert three.clear()
        resize_regions(dict.fromkeys(regions, 3 * granule))
        assert load(driver, one.address + granule, 10) == b"\x10" * 9 + b"\0"
        assert load(driver, two.address + granule, 10) == bytes(10)
        assert load(driver, three.address + granule, 10) == b"\x30" * 5 + bytes(5)
        for region in regions:
            assert load(driver, region.address + 2 * granule, granule) == bytes(granule)
        resize_regions({one: granule + 1, three: granule + 5})
        assert [region.remains[1] for region in (one, three)] == [2 * granule] * 2

    def test_nothing_and_what_is_so_already_change_nothing(
        self, driver: Driver, regions: Regions, granule: int
    ) -> None:
        before = self.state(driver, regions)
        resize_regions({})
        resize_regions(dict.fromkeys(regions, 2 * granule))
        assert self.state(driver, regions) == before

    def test_not_enough_memory_for_the_last_leaves_all_as_it_was_i4(
        self, driver: Driver, location: Location, regions: Regions, granule: int
    ) -> None:
        one, two, three = regions
        available, _ = driver.mem_info(location)
        with Region.create(location, driver=driver, capacity=available + 1024 * granule) as vast:
            before = self.state(driver, regions)
            with pytest.raises(OutOfMemoryError):
                resize_regions({one: 8 * granule, two: 1, three: 3 * granule, vast: vast.capacity})
            assert self.state(driver, regions) == before
            assert vast.mapped == 0
            resize_regions({one: 8 * granule, two: 1, three: 3 * granule, vast: 1})

    def test_what_is_refused_changes_nothing_i4(
        self, driver: Driver, location: Location, regions: Regions, granule: int
    ) -> None:
        one, two, three = regions
        closed = Region.create(location, driver=driver, capacity=granule)
        closed.close()
        with (
            PhysicalAllocation.create(driver, granule, location) as memory,
            Region.from_allocations(driver, [memory], capacity=2 * granule) as imported,
            Region.create(location, driver=driver, capacity=2 * granule, nbytes=1) as frozen,
            Region.create(location, driver=driver, capacity=2 * granule, nbytes=1) as asleep,
        ):
            frozen.freeze()
            sleep_regions({asleep: None})
            before = self.state(driver, regions)
            refused: list[tuple[Region, int, type[VramError]]] = [
                (three, 8 * granule + 1, CapacityError),
                (closed, 1, ClosedError),
                (imported, 2 * granule, UsageError),
                (frozen, 2 * granule, UsageError),
                (asleep, 2 * granule, AsleepError),
                (asleep, 0, AsleepError),
            ]
            for region, nbytes, error in refused:
                for order in (1, -1):
                    sizes = [(one, 4 * granule), (region, nbytes), (two, granule)][::order]
                    with pytest.raises(error):
                        resize_regions(dict(sizes))
                    assert self.state(driver, regions) == before
            wake_regions([asleep])

    def test_shrinking_below_pins_names_all_of_them_and_changes_nothing_i6(
        self, driver: Driver, regions: Regions, granule: int
    ) -> None:
        one, two, three = regions
        for grown in (2 * granule, 5 * granule):  # without anything that grows, and with
            before = self.state(driver, regions)
            with one.pin(0, granule + 1, "first"), two.pin(granule, 2 * granule, "second"):
                with pytest.raises(BusyError, match=f"at least {granule + 1} bytes") as caught:
                    resize_regions({one: granule, two: granule, three: grown})
                assert caught.value.holders == (f"first [0:{granule + 1}]", f"second [{granule}:{2 * granule}]")
                assert self.state(driver, regions) == before
                resize_regions({one: granule + 1, three: grown})
            resize_regions({one: 2 * granule, two: granule})
            resize_regions({two: 2 * granule})
            assert three.nbytes == grown

    def test_threads_over_the_same_regions_do_not_wait_for_one_another_in_a_ring(
        self, regions: Regions, granule: int
    ) -> None:
        def work(order: Callable[[Any], Any], size: int) -> None:
            for step in range(20):
                resize_regions(dict.fromkeys(order(regions), (size + step) % 8 * granule))

        orders = ((list, 1), (lambda given: list(reversed(given)), 4), (lambda given: given[1:], 6))
        race(*(partial(work, *one) for one in orders))
        assert one_size(regions[1:])
        resize_regions(dict.fromkeys(regions, granule))

    # -- memory that was made ahead -----------------------------------------------------------------------------
    @pytest.fixture
    def prepared(self, driver: Driver, location: Location, granule: int) -> Iterator[Prepared]:
        """Four chunks that are ready."""
        made = keep_ready(Kind(driver, location, FD, AllocationFlags.NONE, granule), 4)
        assert made.wait(SOON)
        yield made
        made.close()
        assert (made.ready, made.nbytes, made.wait(SOON)) == (0, 0, False)

    @pytest.fixture
    def room(
        self, driver: Driver, location: Location, granule: int, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Prepared]:
        """Room for eight chunks, before the thread has made one."""
        monkeypatch.setattr(Prepared, "_refill", lambda self: None)
        made = keep_ready(Kind(driver, location, FD, AllocationFlags.NONE, granule), 8)
        yield made
        made.close()

    def test_growing_takes_what_is_ready_and_a_thread_makes_more(
        self, driver: Driver, regions: Regions, granule: int, prepared: Prepared
    ) -> None:
        before = driver.live().nbytes
        assert (prepared.ready, prepared.nbytes) == (4 * granule, 4 * granule)
        resize_regions({regions[0]: 5 * granule, regions[1]: 5 * granule})
        assert load(driver, regions[0].address + 2 * granule, 3 * granule) == bytes(3 * granule)
        for number, region in enumerate(regions[:2]):
            for chunk in range(2, 5):  # each is a memory of its own
                store(driver, region.address + chunk * granule, bytes([8 * number + chunk]))
        for number, region in enumerate(regions[:2]):
            found = [load(driver, region.address + chunk * granule, 1) for chunk in range(2, 5)]
            assert found == [bytes([8 * number + chunk]) for chunk in range(2, 5)]
        assert prepared.wait(SOON)
        assert prepared.ready == 4 * granule
        assert driver.live().nbytes == before + 6 * granule
        assert prepared.error is None

    def test_what_shrinking_gives_back_is_kept_and_zero(
        self, driver: Driver, regions: Regions, granule: int, room: Prepared
    ) -> None:
        one, two, three = regions
        resize_regions({one: 5 * granule})
        for chunk in range(5):
            store(driver, one.address + chunk * granule, b"secret" * 99)
            store(driver, one.address + (chunk + 1) * granule - 6, b"secret")
        held = driver.live().nbytes
        resize_regions({one: granule, three: granule})
        assert room.ready == 5 * granule
        assert driver.live().nbytes == held
        resize_regions({two: 7 * granule})
        assert (room.ready, driver.live().nbytes) == (0, held)
        assert load(driver, two.address + 2 * granule, 5 * granule) == bytes(5 * granule)
        assert load(driver, two.address, 9) == b"\2" * 9
        store(driver, two.address + 2 * granule, b"secret" * 99)
        resize_regions({two: 0})  # what was taken is kept again
        assert room.ready == 7 * granule
        resize_regions({one: 0, three: 0})  # two more, and no more than was said
        assert (room.ready, driver.live().nbytes) == (8 * granule, held - granule)
        resize_regions({two: 8 * granule})
        assert load(driver, two.address, 8 * granule) == bytes(8 * granule)

    @pytest.mark.parametrize("how", ["exported", "held"])
    def test_what_somebody_else_may_have_is_never_kept(
        self, driver: Driver, regions: Regions, granule: int, room: Prepared, how: str
    ) -> None:
        one = regions[0]
        one.grow(3 * granule)
        store(driver, one.address + 2 * granule, b"secret")
        (theirs,), _ = one.segments(granule, 2 * granule)
        if how == "exported":
            fd = os.dup(theirs.export())
            theirs.close()
        resize_regions({one: 0})
        assert room.ready == 2 * granule
        resize_regions(dict.fromkeys(regions, 8 * granule))
        if how == "exported":
            theirs = PhysicalAllocation.import_(driver, fd, granule)
            os.close(fd)
        with Region.from_allocations(driver, [theirs], access=Access.READ_WRITE) as alias:
            store(driver, alias.address, b"theirs")
        theirs.close()
        for chunk in range(8):
            assert load(driver, one.address + chunk * granule, 6) == bytes(6)

    def test_memory_of_others_is_never_kept(
        self, driver: Driver, location: Location, regions: Regions, granule: int, room: Prepared
    ) -> None:
        one = regions[0]
        unsaid = keep_ready(room._kind._replace(kinds=HandleKind.NONE), 8)  # how it can leave, nobody says of it
        with PhysicalAllocation.create(driver, granule, location) as theirs:
            with Region.from_allocations(
                driver, [Received(theirs.export(), granule)], access=Access.READ_WRITE
            ) as ours:
                ours.shrink(0)
            assert room.ready == unsaid.ready == 0
            unsaid.close()
            resize_regions(dict.fromkeys(regions, 8 * granule))
            with Region.from_allocations(driver, [theirs], access=Access.READ_WRITE) as alias:
                store(driver, alias.address, b"theirs")
            assert load(driver, one.address + 2 * granule, 6 * granule) == bytes(6 * granule)

    def test_read_only_memory_is_not_kept(self, driver: Driver, regions: Regions, granule: int, room: Prepared) -> None:
        one, two, _ = regions
        one.freeze()
        one.shrink(0)
        assert room.ready == 0
        two.grow(8 * granule)
        store(driver, two.address, b"1" * 8 * granule)

    def test_what_cannot_be_zeroed_is_not_kept(
        self, driver: Driver, regions: Regions, granule: int, room: Prepared, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise UsageError("no zeros today")

        with monkeypatch.context() as patch:
            patch.setattr("vram.memory.ahead._zero", fail)
            regions[0].shrink(0)
        assert room.ready == 0
        assert str(room.error) == "no zeros today"
        assert driver.live().nbytes == 4 * granule
        regions[0].grow(2 * granule)
        assert load(driver, regions[0].address, 2 * granule) == bytes(2 * granule)

    def test_what_was_taken_for_a_call_that_fails_is_ready_again_i4(
        self, driver: Driver, location: Location, regions: Regions, granule: int, prepared: Prepared
    ) -> None:
        one, _, three = regions
        before = self.state(driver, regions)
        with three.pin(granule, 2 * granule), pytest.raises(BusyError):
            resize_regions({one: 5 * granule, three: granule})
        assert self.state(driver, regions) == before
        available, _ = driver.mem_info(location)
        with Region.create(location, driver=driver, capacity=available + 1024 * granule) as vast:
            with pytest.raises(OutOfMemoryError):  # for which what is ready gives way
                resize_regions({one: 4 * granule, vast: vast.capacity})
            assert [region.nbytes for region in regions] == [2 * granule] * 3
        resize_regions({one: 5 * granule})
        assert load(driver, one.address + 2 * granule, 3 * granule) == bytes(3 * granule)
        assert prepared.wait(SOON)

    def test_waking_and_making_take_what_is_ready_too(
        self, driver: Driver, location: Location, regions: Regions, granule: int, prepared: Prepared
    ) -> None:
        sleep_regions({regions[0]: None})
        wake_regions(regions)
        with Region.create(location, driver=driver, capacity=4 * granule, chunk=granule, nbytes=3 * granule) as made:
            assert load(driver, made.address, 3 * granule) == bytes(3 * granule)
            assert prepared.wait(SOON)
            before = driver.live().nbytes
            prepared.close()
            assert driver.live().nbytes == before - 4 * granule
            store(driver, made.address, b"still there")
            made.shrink(0)  # nothing is kept any more
            assert driver.live().nbytes == before - 7 * granule

    def test_not_enough_memory_ahead_is_said_and_harms_nobody(
        self, driver: Driver, location: Location, regions: Regions, granule: int
    ) -> None:
        available, _ = driver.mem_info(location)
        vast = (available // granule + 1024) * granule
        made = keep_ready(Kind(driver, location, FD, AllocationFlags.NONE, vast), 1)
        with pytest.raises(OutOfMemoryError):
            made.wait(SOON)
        assert isinstance(made.error, OutOfMemoryError)
        assert made.ready == 0
        regions[0].grow(4 * granule)
        made.close()

    def test_trimming_gives_all_of_it_back(
        self, driver: Driver, regions: Regions, granule: int, prepared: Prepared
    ) -> None:
        before = driver.live().nbytes
        trim()
        assert driver.live().nbytes == before - 4 * granule
        assert prepared.ready == 0
        regions[0].grow(4 * granule)
        regions[0].shrink(0)
        assert driver.live().nbytes == before - 6 * granule


def one_size(regions: tuple[Region, ...]) -> bool:
    """Whether all have the same size, and memory for it."""
    return len({region.nbytes for region in regions}) == 1 and all(region.mapped == region.nbytes for region in regions)
