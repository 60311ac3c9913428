"""What the contract suite cannot say for every driver: words, chunk arithmetic, races, interrupts, forks."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forked import end_of, refused
from tests.support.threads import race

from vram import driver as drivers
from vram import lifetime
from vram.driver.host import HostDriver
from vram.errors import BusyError, ClosedError, RangeError, UnsupportedError, UsageError
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation, Received, Region
from vram.memory.chunks import plan
from vram.spec import HOST, Access, HandleKind, Location, round_up

G = 2 << 20
MiB = 1 << 20


class HookedDriver(HostDriver):
    """The host driver, with something that happens just before a call: what a signal, a finalizer or a thread does."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: dict[str, Callable[[], object]] = {}

    def _happen(self, call: str) -> None:
        self.hooks.pop(call, lambda: None)()

    def mem_create(self, *args: Any) -> int:
        self._happen("mem_create")
        return super().mem_create(*args)

    def mem_map(self, *args: Any) -> None:
        self._happen("mem_map")
        super().mem_map(*args)

    def mem_map_new(self, *args: Any, **named: Any) -> None:
        self._happen("mem_map_new")
        super().mem_map_new(*args, **named)

    def mem_map_import(self, *args: Any, **named: Any) -> None:
        self._happen("mem_map_import")
        super().mem_map_import(*args, **named)

    def mem_set_access(self, *args: Any) -> None:
        self._happen("mem_set_access")
        super().mem_set_access(*args)

    def populate(self, *args: Any) -> None:
        self._happen("populate")
        super().populate(*args)


@pytest.fixture
def driver() -> HookedDriver:
    return HookedDriver()


@pytest.fixture
def region(driver: HookedDriver) -> Iterator[Region]:
    region = Region.create(HOST, driver=driver, capacity=32 * G, chunk=G, nbytes=3 * G)
    yield region
    region.close()


# -- words ------------------------------------------------------------------------------------------------------
def test_a_region_is_summed_up_in_its_repr(driver: HookedDriver) -> None:
    region = Region.create("host", driver=driver, capacity="64MiB", nbytes="6MiB")
    where = f"{region.address:#x}"
    assert repr(region) == f"<Region host {where} 6/64 MiB, 1 chunk, rw>"
    region.grow("8MiB")
    segment = region.segments(0, 1)[0][0]
    assert repr(segment) == "<PhysicalAllocation host 6 MiB, posix_fd>"
    segment.export()
    assert repr(segment) == "<PhysicalAllocation host 6 MiB, posix_fd, exported>"
    assert repr(region) == f"<Region host {where} 8/64 MiB, 2 chunks, rw, shared>"
    region.shrink(1)
    region.freeze()
    assert repr(region) == f"<Region host {where} 1 B/64 MiB, 1 chunk, r, frozen, shared>"
    with Region.from_allocations(driver, [segment], access=Access.READ_WRITE, private=True, nbytes=384) as private:
        assert (
            repr(private) == f"<Region host {private.address:#x} 384 B/6 MiB, 1 chunk, rw, private, imported, shared>"
        )
    segment.close()
    assert repr(segment) == "<PhysicalAllocation host 6 MiB, posix_fd, closed>"
    region.close()
    assert repr(region) == f"<Region host {where} 1 B/64 MiB, closed>"


def test_the_parts_are_summed_up_in_their_reprs(driver: HookedDriver) -> None:
    with AddressReservation.reserve(driver, 2 * G) as reservation:
        where = f"{reservation.address:#x}"
        assert repr(reservation) == f"<AddressReservation host {where} 4 MiB, 0 mappings>"
        with PhysicalAllocation.create(driver, G, HOST, handle_kinds=HandleKind.NONE) as allocation:
            assert repr(allocation) == "<PhysicalAllocation host 2 MiB, none>"
            with MemoryMapping.map(reservation, 0, allocation, access=Access.NONE) as mapping:
                assert repr(mapping) == f"<MemoryMapping host {where} 2 MiB, ->"
                assert repr(reservation) == f"<AddressReservation host {where} 4 MiB, 1 mapping>"
            assert repr(mapping) == f"<MemoryMapping host {where} 2 MiB, closed>"
    assert repr(reservation) == f"<AddressReservation host {where} 4 MiB, closed>"


def test_parts_of_different_drivers_do_not_mix(driver: HookedDriver) -> None:
    with PhysicalAllocation.create(HostDriver(), G, HOST) as foreign, AddressReservation.reserve(driver, G) as here:
        with pytest.raises(UsageError, match="different drivers"):
            MemoryMapping.map(here, 0, foreign)
        with pytest.raises(UsageError, match="another driver"):
            Region.from_allocations(driver, [foreign])


# -- chunks -----------------------------------------------------------------------------------------------------
@given(
    granules=st.integers(1, 1 << 15),
    mapped=st.integers(0, 1 << 15),
    more=st.integers(1, 1 << 36),
    least=st.integers(1, 1 << 8),
    exact=st.booleans(),
)
def test_a_plan_covers_what_was_asked_for_within_the_ceiling(
    granules: int, mapped: int, more: int, least: int, exact: bool
) -> None:
    capacity, present = granules * G, min(mapped, granules - 1) * G
    wanted = min(present + more, capacity)
    sizes = plan(wanted, present, capacity, G, least * G, exact)
    assert wanted <= present + sum(sizes) <= capacity
    assert all(size > 0 and size % G == 0 for size in sizes)
    if exact:
        assert set(sizes[:-1]) <= {least * G}
        assert sizes[-1] == min(least * G, capacity - present - sum(sizes[:-1]))
    else:
        (size,) = sizes
        assert size == min(max(round_up(wanted - present, G), least * G), capacity - present)


@pytest.mark.parametrize("capacity", [1, G, 100 * G, 256 * G, 257 * G, 1000 * G + 1, 64 << 30, 1 << 40])
def test_no_way_of_growing_needs_many_more_than_256_chunks(capacity: int) -> None:
    ceiling = round_up(capacity, G)
    least = round_up(-(-ceiling // 256), G)
    mapped = count = 0
    while mapped < ceiling:
        mapped += sum(plan(mapped + 1, mapped, ceiling, G, least, False))
        count += 1
    assert count <= 256


def test_a_huge_ceiling_makes_large_chunks(driver: HookedDriver) -> None:
    with Region.create(HOST, driver=driver, capacity="64GiB", nbytes=1) as region:
        assert region.chunks == (256 * MiB,)
    with Region.create(HOST, driver=driver, capacity="64GiB", nbytes=1, chunk=1) as region:
        assert region.chunks == (G,)


# -- code in the middle of a call -------------------------------------------------------------------------------
def test_code_in_the_middle_of_a_growth_cannot_change_the_region(driver: HookedDriver, region: Region) -> None:
    """A signal handler, say: it gets an error, not a deadlock."""
    seen: list[object] = []

    def handler() -> None:
        for change in (lambda: region.grow(4 * G), lambda: region.shrink(1), region.freeze):
            with pytest.raises(BusyError, match="by the very call that"):
                change()
        with region.pin(0, 3 * G, "taken in the middle"):
            seen.append(region.nbytes)

    driver.hooks["mem_map_new"] = handler
    region.grow(5 * G)
    assert seen == [3 * G]
    assert region.chunks == (G,) * 5


@pytest.mark.parametrize("call", ["mem_map_new"])
def test_a_region_closed_while_it_grows_leaves_nothing_i4(call: str) -> None:
    driver = HookedDriver()
    region = Region.create(HOST, driver=driver, capacity=8 * G, nbytes=G)
    driver.hooks[call] = region.close
    with pytest.raises(ClosedError, match=r"of 16 MiB on host at .* was closed"):
        region.grow(2 * G)
    assert driver.live() == HostDriver().live()
    with pytest.raises(ClosedError):
        region.grow(2 * G)


def test_a_region_closed_while_it_is_extended_leaves_nothing_i4() -> None:
    driver = HookedDriver()
    with PhysicalAllocation.create(driver, G, HOST) as memory:
        alone = driver.live()
        received = Received(memory.export(), G)
        region = Region.from_allocations(driver, [received], capacity=2 * G)
        driver.hooks["mem_map_import"] = region.close
        with pytest.raises(ClosedError, match=r"of 4 MiB on host at .* was closed"):
            region.extend([received], 2 * G)
        assert driver.live() == alone


def test_a_region_closed_while_it_is_populated_goes_afterwards(driver: HookedDriver, region: Region) -> None:
    driver.hooks["populate"] = region.close
    region.populate()
    assert driver.live() == HostDriver().live()


def test_a_collection_in_the_middle_of_a_growth_does_not_hang(driver: HookedDriver, region: Region) -> None:
    """I3: the finalizers of another region, of this one's pins and of its segments run while its lock is held."""
    other = Region.create(HOST, driver=driver, capacity=G, nbytes=G, managed=True)
    loop: list[object] = [other, region.pin(0, 1), region.segments(0, G)]
    loop.append(loop)
    del other, loop
    driver.hooks["mem_map_new"] = gc.collect
    region.grow(4 * G)
    region.shrink(0)
    assert driver.live().nbytes == 0


# -- threads ----------------------------------------------------------------------------------------------------


def test_what_a_pin_was_given_for_stays_mapped_while_others_shrink(driver: HookedDriver, region: Region) -> None:
    """I6: a pin comes before the shrink, which is then refused, or after it, and is then refused itself."""
    taken = refused = 0

    def look() -> None:
        nonlocal taken, refused
        byte = bytearray(1)
        for _ in range(600):
            try:
                pin = region.pin(2 * G, 3 * G, "looker")
            except RangeError:
                refused += 1
                continue
            taken += 1
            driver.copy_out(memoryview(byte), region.address + 3 * G - 1)  # refuses what is not mapped
            del pin

    def resize() -> None:
        for _ in range(300):
            with contextlib.suppress(BusyError):
                region.shrink(G)
            region.resize(3 * G)

    race(look, resize, look)
    assert taken + refused == 1200
    assert region.chunks == (G,) * 3


def test_a_facade_is_made_of_another_and_of_nothing_else() -> None:
    with PhysicalAllocation.create(HostDriver(), 1 << 21, HOST) as memory:
        with PhysicalAllocation.of(memory) as other:
            assert other.identity() == memory.identity()
        assert not memory.is_closed
        with pytest.raises(UsageError, match="must be a PhysicalAllocation, not int"):
            PhysicalAllocation.of(7)  # type: ignore[arg-type]


def test_shrink_unmaps_before_it_returns(driver: HookedDriver, region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another thread works off the queue of released claims, and is slow at it."""
    settle = lifetime._settle

    def slowly() -> None:
        time.sleep(0.02)
        settle()

    with ThreadPoolExecutor(1) as other, monkeypatch.context() as patched:
        patched.setattr(lifetime, "_settle", lambda *_, **__: other.submit(slowly))
        region.shrink(2 * G)
        assert driver.live().mappings == 2
        pin = region.pin(0, G)
        del pin
        region.shrink(0)  # a pin that is gone is no reason to refuse, queue or no queue
        assert driver.live().mappings == 0


def test_a_mapping_of_memory_that_was_sealed_says_that_it_is_read_only() -> None:
    driver = HostDriver()
    with (
        PhysicalAllocation.create(driver, 1 << 21, HOST) as memory,
        AddressReservation.reserve(driver, 1 << 21) as there,
    ):
        with MemoryMapping.map(there, 0, memory) as mapping:
            assert mapping.access is Access.READ_WRITE
            memory.seal()
            assert mapping.access is Access.READ


@pytest.mark.parametrize("created", [HandleKind.NONE, HandleKind.POSIX_FD])
@pytest.mark.parametrize("kind", [kind for kind in HandleKind if kind != HandleKind.POSIX_FD])
def test_what_cannot_be_exported_so_is_advised_what_can(created: HandleKind, kind: HandleKind) -> None:
    """Not to ask at creation for what create refuses as well: POSIX_FD is what there is."""
    with PhysicalAllocation.create(HostDriver(), 1 << 21, HOST, handle_kinds=created) as memory:
        with pytest.raises(
            UsageError, match=f"cannot leave the process as {kind.name}: it was created for {created.name}"
        ) as no:
            memory.export(kind)
        assert "handle_kinds=HandleKind." in str(no.value)
        assert str(kind.name) not in str(no.value).partition(created.name or "")[2], "advised what was just refused"
        assert "POSIX_FD" in str(no.value)


def test_threads_that_export_at_once_get_one_descriptor(driver: HookedDriver) -> None:
    with PhysicalAllocation.create(driver, G, HOST) as allocation:
        found: list[int] = []
        race(*(lambda: found.append(allocation.export()) for _ in range(4)))
        assert len(set(found)) == 1


# -- forks ------------------------------------------------------------------------------------------------------
def test_in_a_forked_child_memory_is_readable_and_handles_are_inert_i7(driver: HookedDriver, region: Region) -> None:
    alone, pin = PhysicalAllocation.create(driver, G, HOST), region.pin(0, G)
    driver.copy_in(region.address, memoryview(b"inherited"))

    def work() -> int:
        seen = bytearray(9)
        driver.copy_out(memoryview(seen), region.address)
        count = refused(
            lambda: region.grow(4 * G), lambda: region.shrink(1), lambda: region.pin(0, 1), region.populate,
            lambda: region.segments(0, 1), region.freeze, alone.export, lambda: alone.is_sealed,
        )  # fmt: skip
        repr(region), region.nbytes, region.chunks
        region.close()
        pin.release()
        alone.close()
        gc.collect()
        return count * (seen == b"inherited")

    assert end_of(work) == 8
    driver.copy_in(region.address, memoryview(b"still here"))
    region.grow(4 * G)
    pin.release()
    alone.close()


@pytest.mark.parametrize("odd", [None, 3, "ab", [None], [3], [3.5], {"a": 1}], ids=repr)
def test_what_is_no_list_of_memory_is_refused_by_name(odd: Any) -> None:
    driver = HostDriver()
    with PhysicalAllocation.create(driver, G, HOST) as allocation:
        with pytest.raises(UsageError, match="allocations must be a list of PhysicalAllocation or Received"):
            Region.from_allocations(driver, odd)
        with pytest.raises(UsageError, match="depends must be a list of Handle"):
            Region.from_allocations(driver, [allocation], depends=odd)


def test_a_region_is_made_at_a_place_without_a_word_of_drivers() -> None:
    with Region.create("host", capacity="4MiB", nbytes=10) as region:
        assert (region.location, region.driver, region.nbytes) == (HOST, drivers.get(HOST), 10)
    with pytest.raises(UnsupportedError, match="a driver for it"):
        Region.create(Location("mine", 0), capacity=1)
    for wrong in ("here", None, 5):
        with pytest.raises(UsageError):
            Region.create(wrong, capacity=1)  # type: ignore[arg-type]
