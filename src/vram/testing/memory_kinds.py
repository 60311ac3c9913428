"""What memory is asked to be when it is made, and what the driver says of it then; a part of the memory contract."""

from __future__ import annotations

import pytest

from ..driver.protocol import Driver
from ..errors import AlignmentError, UnsupportedError, UsageError
from ..memory import PhysicalAllocation, Region
from ..spec import AllocationFlags, AllocationSpec, HandleKind, Location
from .scene import FD, remedied
from .shared_region import SharedRegionContract

__all__ = ["MemoryKindsContract"]


class MemoryKindsContract(SharedRegionContract):
    """Specifications, flags and properties."""

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
                Region.create(driver, location, capacity=2 * granule, nbytes=granule, flags=flag)
            assert driver.live() == before
            return
        with allocation:
            assert allocation.flags in (flag, AllocationFlags.NONE)
            assert allocation.flags == allocation.properties().flags & flag
            with PhysicalAllocation.import_(driver, allocation.export(), granule) as there:
                assert there.location == location
        assert driver.live() == before
