"""What memory is asked to be when it is made, and what the driver says of it then; a part of the memory contract."""

from __future__ import annotations

import pytest

from ..driver.protocol import Driver
from ..errors import AlignmentError, ClosedError, UnsupportedError, UsageError
from ..memory import AddressReservation, MemoryMapping, PhysicalAllocation, Region
from ..spec import Access, AllocationFlags, AllocationSpec, HandleKind, Location
from .region import RegionContract
from .scene import FD, remedied

__all__ = ["MemoryKindsContract"]


class MemoryKindsContract(RegionContract):
    """Specifications, flags and properties, handles of the driver, and rights as it tells them."""

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
            if "NativeHandles" not in self.offers:
                with pytest.raises(UnsupportedError, match="export"):
                    one.native_handle  # noqa: B018
                return
            assert not repr(one).endswith("exported>")
            with PhysicalAllocation.create(driver, granule, location) as other:
                assert one.native_handle == one.native_handle != other.native_handle
            assert repr(one).endswith("exported>"), "whoever has it can export it"
        with pytest.raises(ClosedError):
            one.native_handle  # noqa: B018

    def test_rights_are_asked_of_the_driver(self, driver: Driver, location: Location, granule: int) -> None:
        with PhysicalAllocation.create(driver, granule, location) as memory:
            with AddressReservation.reserve(driver, granule) as where:
                with MemoryMapping.map(where, 0, memory, access=Access.READ) as mapping:
                    assert mapping.get_access() == mapping.get_access(location) == Access.READ
                    for access in (Access.READ_WRITE, Access.NONE):
                        driver.mem_set_access(mapping.address, granule, access, [location])
                        assert mapping.get_access() is access
                    for elsewhere in (Location("elsewhere"), Location(driver.name, 9999)):
                        with pytest.raises(UsageError):
                            mapping.get_access(elsewhere)
                with pytest.raises(ClosedError):
                    mapping.get_access()

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
