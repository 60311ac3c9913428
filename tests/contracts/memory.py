"""What memory with owners must do on every driver: the behaviour of :mod:`vram.memory` as tests.

A subclass supplies the fixtures ``driver`` and ``location``, and names the driver's capabilities in `offers`: where one
is missing, its refusal is tested instead. After every test the driver's books and the handles of :mod:`vram.lifetime`
are where they were before.
"""

from __future__ import annotations

import gc
import itertools
import os

import pytest
from tests.contracts.driver import remedied
from tests.contracts.region import RegionContract, load, store
from tests.contracts.zeros import ZeroContract

from vram.driver.protocol import Driver
from vram.errors import (
    AccessDeniedError,
    AlignmentError,
    BusyError,
    ClosedError,
    LeakWarning,
    ProtocolError,
    RangeError,
    UnsupportedError,
    UsageError,
)
from vram.lifetime import Claim, own
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation, Region
from vram.spec import Access, AllocationFlags, AllocationSpec, HandleKind, Location

FD = HandleKind.POSIX_FD
RW, READ = Access.READ_WRITE, Access.READ


class MemoryContract(RegionContract, ZeroContract):
    """Physical allocations, address reservations and mappings, and all that is said of regions in the other parts."""

    # -- physical allocations -----------------------------------------------------------------------------------
    def test_an_allocation_is_zeroed_counted_and_given_back(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        before = driver.live()
        with PhysicalAllocation.create(driver, 2 * granule, location) as allocation:
            assert (allocation.nbytes, allocation.location, allocation.driver) == (2 * granule, location, driver)
            assert allocation.handle_kinds == FD
            assert driver.mem_properties(allocation.driver_handle).handle_kinds == FD
            assert driver.live().nbytes == before.nbytes + 2 * granule
            with AddressReservation.reserve(driver, 2 * granule) as reservation:
                with MemoryMapping.map(reservation, 0, allocation) as mapping:
                    assert load(driver, mapping.address, granule).count(0) == granule
        assert driver.live() == before

    def test_sizes_may_be_written_out(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, f"{granule / 1024:.0f}KiB", str(location)) as allocation:
            assert allocation.nbytes == granule

    @pytest.mark.parametrize("size", ["many", -1, 0, 1.5, None, True, 1 << 63])
    def test_a_size_that_is_none_is_refused(self, driver: Driver, location: Location, size: object) -> None:
        with pytest.raises(UsageError, match="nbytes"):
            PhysicalAllocation.create(driver, size, location)
        with pytest.raises(UsageError, match="nbytes"):
            AddressReservation.reserve(driver, size)

    def test_a_size_off_the_granularity_names_the_nearest(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        """I10."""
        with pytest.raises(AlignmentError, match=f"{granule} or {2 * granule}"):
            PhysicalAllocation.create(driver, granule + 1, location)
        with pytest.raises(AlignmentError, match=f"nearest: {granule}$"):
            AddressReservation.reserve(driver, 1)

    def test_a_place_of_another_driver_is_refused(self, driver: Driver, granule: int) -> None:
        for place in (Location("elsewhere"), "nowhere", 7):
            with pytest.raises(UsageError):
                PhysicalAllocation.create(driver, granule, place)

    def test_wrong_kinds_of_argument_are_usage_errors(self, driver: Driver, location: Location, granule: int) -> None:
        with pytest.raises(UsageError, match="HandleKind"):
            PhysicalAllocation.create(driver, granule, location, handle_kinds=1)
        with pytest.raises(UsageError, match="AllocationFlags"):
            PhysicalAllocation.create(driver, granule, location, flags=1)
        for fd in (-1, "3", None):
            with pytest.raises(UsageError, match="descriptor"):
                PhysicalAllocation.import_(driver, fd, granule)
        for alignment in (-1, 3, granule + 1):
            with pytest.raises(UsageError, match="alignment"):
                AddressReservation.reserve(driver, granule, alignment=alignment)
        with pytest.raises(UsageError, match="address"):
            AddressReservation.reserve(driver, granule, address=-granule)

    def test_close_is_idempotent_and_use_afterwards_says_so_i2(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        allocation = PhysicalAllocation.create(driver, granule, location)
        allocation.close()
        allocation.close()
        allocation.close(strict=True)
        assert allocation.is_closed
        for use in (lambda: allocation.export(), lambda: allocation.driver_handle, lambda: allocation.identity()):
            with pytest.raises(ClosedError):
                use()

    def test_a_strict_close_names_who_holds_on_and_changes_nothing_i2(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        with PhysicalAllocation.create(driver, granule, location) as allocation:
            with AddressReservation.reserve(driver, granule) as reservation:
                with MemoryMapping.map(reservation, 0, allocation):
                    for held in (allocation, reservation):
                        with pytest.raises(BusyError, match="mapping of") as caught:
                            held.close(strict=True)
                        assert len(caught.value.holders) == 1
                        assert not held.is_closed
                reservation.close(strict=True)

    def test_what_is_forgotten_is_given_back_and_reported_i2(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        before = driver.live()
        things = [AddressReservation.reserve(driver, granule), PhysicalAllocation.create(driver, granule, location)]
        things.append(MemoryMapping.map(things[0], 0, things[1]))
        with pytest.warns(LeakWarning) as caught:
            things.clear()
        assert len(caught) == 3
        assert driver.live() == before

    # -- other processes ----------------------------------------------------------------------------------------
    def test_export_lends_one_descriptor_i9(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, granule, location) as allocation:
            fd = allocation.export()
            assert allocation.export(FD) == fd
            assert not os.get_inheritable(fd)
            with AddressReservation.reserve(driver, granule) as reservation:
                with MemoryMapping.map(reservation, 0, allocation):
                    allocation.close()
                    os.fstat(fd)  # the mapping keeps the allocation, and that its descriptor
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)

    def test_memory_not_made_for_it_cannot_be_exported(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, granule, location, handle_kinds=HandleKind.NONE) as allocation:
            with pytest.raises(UsageError, match="created"):
                allocation.export()
            assert allocation.identity() is None
        with PhysicalAllocation.create(driver, granule, location) as allocation:
            for kind in (HandleKind.NONE, HandleKind.FABRIC):
                with pytest.raises(UsageError):
                    allocation.export(kind)

    def test_imported_memory_is_the_same_memory(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, granule, location) as here:
            there = PhysicalAllocation.import_(driver, here.export(), granule)
            os.fstat(here.export())  # it was lent
            with there, AddressReservation.reserve(driver, 2 * granule) as reservation:
                with MemoryMapping.map(reservation, 0, here) as a, MemoryMapping.map(reservation, granule, there) as b:
                    store(driver, a.address, b"from here")
                    assert load(driver, b.address, 9) == b"from here"
                    store(driver, b.address + granule - 5, b"there")
                    assert load(driver, a.address + granule - 5, 5) == b"there"
                assert there.location == location
                assert there.nbytes == granule

    def test_imported_memory_outlives_who_made_it(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, granule, location) as here:
            with AddressReservation.reserve(driver, granule) as r, MemoryMapping.map(r, 0, here) as mapping:
                store(driver, mapping.address, b"left behind")
            fd = os.dup(here.export())
        try:
            with PhysicalAllocation.import_(driver, fd, granule) as there:
                with AddressReservation.reserve(driver, granule) as r, MemoryMapping.map(r, 0, there) as mapping:
                    assert load(driver, mapping.address, 11) == b"left behind"
        finally:
            os.close(fd)

    def test_a_descriptor_of_something_else_is_refused(self, driver: Driver, location: Location, granule: int) -> None:
        """I4, I10: and nothing is left of it."""
        before = driver.live()
        ends = os.pipe()
        try:
            with pytest.raises(ProtocolError):
                PhysicalAllocation.import_(driver, ends[0], granule)
        finally:
            for end in ends:
                os.close(end)
        with PhysicalAllocation.create(driver, granule, location) as allocation:
            with pytest.raises(ProtocolError):  # at once, or by drivers that cannot tell when it is mapped
                with PhysicalAllocation.import_(driver, allocation.export(), 2 * granule) as larger:
                    Region.from_allocations(driver, [larger])
            with pytest.raises(AlignmentError):
                PhysicalAllocation.import_(driver, allocation.export(), granule + 1)
        assert driver.live() == before

    def test_identity_tells_the_same_memory(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, granule, location) as one:
            with PhysicalAllocation.create(driver, granule, location) as other:
                with PhysicalAllocation.import_(driver, one.export(), granule) as again:
                    if "HostMemory" not in self.offers:
                        assert one.identity() is None
                        return
                    assert again.identity() == one.identity() != other.identity()

    # -- read-only for good -------------------------------------------------------------------------------------
    def test_sealed_memory_is_read_only_for_everybody_s8(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        with PhysicalAllocation.create(driver, granule, location) as here:
            if "HostMemory" not in self.offers:
                with pytest.raises(UnsupportedError):
                    here.seal()
                return
            with AddressReservation.reserve(driver, 2 * granule) as reservation:
                with MemoryMapping.map(reservation, 0, here) as mapping:
                    store(driver, mapping.address, b"for good")
                    with PhysicalAllocation.import_(driver, here.export(), granule) as there:
                        assert not here.is_sealed
                        there.seal()
                        there.seal()
                        assert all(one.is_sealed for one in (here, there))
                        with pytest.raises(AccessDeniedError):
                            MemoryMapping.map(reservation, granule, there)
                    with pytest.raises(AccessDeniedError):
                        mapping.set_access(RW)
                    assert load(driver, mapping.address, 8) == b"for good"
                with MemoryMapping.map(reservation, granule, here, access=READ) as mapping:
                    assert load(driver, mapping.address, 8) == b"for good"

    # -- reservations and mappings ------------------------------------------------------------------------------
    def test_a_reservation_is_aligned_and_given_back(self, driver: Driver, granule: int) -> None:
        before = driver.live()
        with AddressReservation.reserve(driver, granule, alignment=8 * granule) as reservation:
            assert reservation.address % (8 * granule) == 0
            assert reservation.nbytes == granule
            assert driver.live().reservations == before.reservations + 1
            with AddressReservation.reserve(driver, granule, address=reservation.address) as elsewhere:
                assert elsewhere.address != reservation.address  # a wish, not a demand
            with pytest.raises(AlignmentError):
                AddressReservation.reserve(driver, granule, address=reservation.address + 4096)
        assert driver.live() == before

    def test_what_does_not_fit_is_not_mapped(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, 2 * granule, location) as allocation:
            with AddressReservation.reserve(driver, 4 * granule) as reservation:
                before = driver.live()
                with pytest.raises(RangeError, match=f"of which {granule} are left there"):
                    MemoryMapping.map(reservation, 3 * granule, allocation)
                with pytest.raises(AlignmentError, match="is not a multiple of the granularity"):
                    MemoryMapping.map(reservation, 17, allocation)
                with pytest.raises(UsageError):
                    MemoryMapping.map(reservation, -granule, allocation)
                with pytest.raises(UsageError, match="Access"):
                    MemoryMapping.map(reservation, 0, allocation, access=3)
                assert driver.live() == before
                with MemoryMapping.map(reservation, granule, allocation):
                    for offset in (0, granule, 2 * granule):
                        with pytest.raises(RangeError, match="unmap"):
                            MemoryMapping.map(reservation, offset, allocation)
                assert driver.live() == before
            with AddressReservation.reserve(driver, granule) as small, pytest.raises(RangeError, match="do not fit"):
                MemoryMapping.map(small, 0, allocation)

    def test_one_allocation_may_be_mapped_twice(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, granule, location) as allocation:
            with AddressReservation.reserve(driver, 2 * granule) as reservation:
                with MemoryMapping.map(reservation, 0, allocation) as a:
                    with MemoryMapping.map(reservation, granule, allocation) as b:
                        store(driver, a.address + 3, b"alias")
                        assert load(driver, b.address + 3, 5) == b"alias"

    @pytest.mark.parametrize(
        "order", list(itertools.permutations(range(4))), ids=lambda order: "".join(map(str, order))
    )
    def test_every_order_of_closing_undoes_in_the_right_one_i1(
        self, driver: Driver, location: Location, granule: int, order: tuple[int, ...]
    ) -> None:
        """The driver refuses to free addresses in use, and a refusal would be a warning; the lease comes last."""
        before = driver.live()
        acknowledged: list[int] = []
        lease = own("lease", lambda: acknowledged.append(driver.live().mappings))
        allocation = PhysicalAllocation.create(driver, granule, location)
        reservation = AddressReservation.reserve(driver, granule)
        mapping = MemoryMapping.map(reservation, 0, allocation, depends=[lease.handle])
        store(driver, mapping.address, b"kept")
        things = (allocation, reservation, mapping, lease)
        for number in order:
            if not mapping.is_closed:
                assert load(driver, mapping.address, 4) == b"kept"
                assert not acknowledged
            thing = things[number]
            thing.release() if isinstance(thing, Claim) else thing.close()
        assert acknowledged == [before.mappings]
        assert driver.live() == before

    def test_the_garbage_collector_undoes_in_the_right_order_i1(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        before = driver.live()
        for order in itertools.permutations(range(3)):
            allocation = PhysicalAllocation.create(driver, granule, location)
            reservation = AddressReservation.reserve(driver, granule)
            things: list[object] = [allocation, reservation, MemoryMapping.map(reservation, 0, allocation)]
            cycle: list[object] = [things[number] for number in order]
            cycle.append(cycle)
            gc.disable()  # or it might not wait for the line that expects the warnings
            try:
                del allocation, reservation, things, cycle
                with pytest.warns(LeakWarning):
                    gc.collect()
            finally:
                gc.enable()
            assert driver.live() == before

    def test_access_is_what_was_set(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, granule, location) as allocation:
            with AddressReservation.reserve(driver, granule) as reservation:
                with MemoryMapping.map(reservation, 0, allocation, access=READ) as mapping:
                    assert mapping.access is mapping.get_access() is mapping.get_access(location) is READ
                    for access in (RW, Access.NONE, READ):
                        mapping.set_access(access, [location])
                        assert mapping.access is access
                        assert driver.mem_get_access(mapping.address, location) == access
                    for access in (Access.NONE, RW, READ):  # set by somebody else, who knows the address
                        driver.mem_set_access(mapping.address, granule, access, [location])
                        assert mapping.access is mapping.get_access() is access
                        assert repr(mapping).endswith(f", {access.letters}>")
                    for wrong in ((3, None), (RW, []), (RW, [Location("elsewhere")])):
                        with pytest.raises(UsageError):
                            mapping.set_access(*wrong)
                    for elsewhere in (Location("elsewhere"), Location(driver.name, 9999)):
                        with pytest.raises(UsageError):
                            mapping.get_access(elsewhere)
                    assert mapping.access is READ
                assert mapping.access is READ, "what it was at last"
                for call in (mapping.get_access, lambda: mapping.set_access(RW)):
                    with pytest.raises(ClosedError):
                        call()

    def test_a_mapping_names_its_allocation_also_after_that_was_closed(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        allocation = PhysicalAllocation.create(driver, granule, location)
        with AddressReservation.reserve(driver, granule) as reservation:
            with MemoryMapping.map(reservation, 0, allocation) as mapping:
                handle = allocation.handle
                allocation.close()
                assert mapping.allocation.handle is handle
                assert mapping.allocation.nbytes == granule

    def test_a_private_mapping_shows_its_writes_to_nobody(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        with PhysicalAllocation.create(driver, granule, location) as allocation:
            with AddressReservation.reserve(driver, 2 * granule) as reservation:
                before = driver.live()
                if "HostMemory" not in self.offers:
                    with pytest.raises(UnsupportedError):
                        MemoryMapping.map(reservation, 0, allocation, private=True)
                    assert driver.live() == before
                    return
                with MemoryMapping.map(reservation, 0, allocation) as shared:
                    store(driver, shared.address, b"original")
                    with MemoryMapping.map(reservation, granule, allocation, private=True) as private:
                        store(driver, private.address, b"changed!")
                        assert load(driver, private.address, 8) == b"changed!"
                        assert load(driver, shared.address, 8) == b"original"
                assert driver.live() == before

    def test_closed_parts_cannot_be_mapped(self, driver: Driver, location: Location, granule: int) -> None:
        allocation = PhysicalAllocation.create(driver, granule, location)
        with AddressReservation.reserve(driver, granule) as reservation:
            allocation.close()
            with pytest.raises(ClosedError, match="allocation"):
                MemoryMapping.map(reservation, 0, allocation)
        with PhysicalAllocation.create(driver, granule, location) as allocation:
            with pytest.raises(ClosedError, match="reservation"):
                MemoryMapping.map(reservation, 0, allocation)

    # -- what memory is asked to be, and what the driver says of it -----------------------------------------------
    def test_a_specification_says_all_that_is_asked_for(self, driver: Driver, location: Location, granule: int) -> None:
        """And the driver says what came of it."""
        for kinds in (HandleKind.NONE, FD):
            spec = AllocationSpec(2 * granule, location, kinds)
            with PhysicalAllocation.create(driver, spec) as allocation:
                found = allocation.properties()
                assert (found.location, found.handle_kinds) == (spec.location, spec.handle_kinds)
                assert found.nbytes in (None, spec.nbytes)
                assert allocation.nbytes == spec.nbytes
                assert allocation.flags == found.flags & spec.flags
        for others in ({"location": location}, {"handle_kinds": FD}, {"flags": AllocationFlags.NONE}):
            with pytest.raises(UsageError, match="leave the other arguments out"):
                PhysicalAllocation.create(driver, spec, **others)
        with pytest.raises(UsageError, match="AllocationSpec"):
            PhysicalAllocation.create(driver, granule)
        with pytest.raises(AlignmentError):
            PhysicalAllocation.create(driver, AllocationSpec(granule - 1, location))

    def test_the_drivers_own_handle_is_lent(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, granule, location) as one:
            if "DeviceMemory" not in self.offers:
                with pytest.raises(UnsupportedError, match="export"):
                    one.native_handle
                return
            assert not repr(one).endswith("exported>")
            with PhysicalAllocation.create(driver, granule, location) as other:
                assert one.native_handle == one.native_handle != other.native_handle
            assert repr(one).endswith("exported>"), "whoever has it can export it"
        with pytest.raises(ClosedError):
            one.native_handle

    def test_the_rights_to_a_region_are_the_least_of_its_chunks(
        self, driver: Driver, location: Location, granule: int
    ) -> None:
        with Region.create(location, driver=driver, capacity=3 * granule, chunk=granule) as region:
            assert region.get_access() is Access.NONE, "nothing is mapped"
            region.grow(3 * granule)
            assert region.get_access() == region.get_access(location) == Access.READ_WRITE
            driver.mem_set_access(region.address + granule, granule, Access.READ, [location])
            assert region.get_access() is Access.READ
            driver.mem_set_access(region.address + 2 * granule, granule, Access.NONE, [location])
            assert region.get_access() is Access.NONE
            with pytest.raises(UsageError):
                region.get_access("nowhere")
        with pytest.raises(ClosedError):
            region.get_access()

    @pytest.mark.parametrize("flag", list(AllocationFlags), ids=lambda flag: flag.name.lower())
    def test_flags_are_granted_or_leave_nothing_i4(
        self, driver: Driver, location: Location, granule: int, flag: AllocationFlags
    ) -> None:
        before = driver.live()
        try:
            allocation = PhysicalAllocation.create(driver, AllocationSpec(granule, location, FD, flag))
        except UnsupportedError as error:
            remedied(error)
            with pytest.raises(UnsupportedError):
                Region.create(location, driver=driver, capacity=2 * granule, nbytes=granule, flags=flag)
            assert driver.live() == before
            return
        with allocation:
            assert allocation.flags in (flag, AllocationFlags.NONE)
            assert allocation.flags == allocation.properties().flags & flag
            with PhysicalAllocation.import_(driver, allocation.export(), granule) as there:
                assert there.location == location
        assert driver.live() == before
