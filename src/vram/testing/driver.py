"""What every driver must do: the rules of :mod:`vram.driver.protocol` as tests.

Inherit, and supply two fixtures::

    class TestMyDriver(DriverContract):
        offers = frozenset({"Identity"})

        @pytest.fixture
        def driver(self):
            return MyDriver()

        @pytest.fixture
        def location(self):
            return Location("mine")

Bytes go through ``copy_in``, ``copy_out`` and ``fill``, so that memory the CPU cannot reach passes too. Every test
ends with the driver's own books where they were before. Tests of a capability that is not in `offers` are reported as
skipped, with its name, and the capability must then really be absent.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from ..driver.foreign import Pools
from ..driver.protocol import Driver, Fabric, LiveObjects, Multicast
from ..errors import (
    UsageError,
)
from ..spec import Access, AllocationFlags, HandleKind, Location
from .driver_direct import DirectRules
from .driver_fabric import FabricRules
from .driver_mappings import MappingRules
from .driver_sharing import SharingRules
from .scene import CAPABILITIES, FD, Scene, together

__all__ = ["DriverContract", "Scene"]


class DriverContract(MappingRules, SharingRules, FabricRules, DirectRules):
    """The suite. See the module."""

    # -- devices ------------------------------------------------------------------------------------------------
    def test_offers_exactly_what_it_says(self, driver: Driver) -> None:
        assert {name for name, kind in CAPABILITIES.items() if isinstance(driver, kind)} == self.offers

    def test_describes_its_devices(self, driver: Driver, location: Location) -> None:
        assert driver.name == location.kind
        assert driver.device_count() >= 1
        info = driver.device_info(location)
        assert info == driver.device_info(location)
        assert info.uuid
        assert info.name
        available, total = driver.mem_info(location)
        assert 0 <= available <= total <= info.total_bytes
        driver.synchronize(location)
        assert driver.canonical(location) == location

    def test_support_is_what_works(self, scene: Scene, driver: Driver, location: Location) -> None:
        """A reason or nothing, for each capability; and what it says works does."""
        found = driver.support(location)
        assert found == driver.support(location)
        assert (found.vmm, found.posix_fd) == ("", "")
        missing = found.missing()
        assert all(isinstance(why, str) for why in missing.values())
        for flag in AllocationFlags:
            if not getattr(found, str(flag.name).lower()):
                handle = scene.keep(driver.mem_create(scene.g, location, FD, flag))
                assert flag in driver.mem_properties(handle).flags
        for name, capability in (("fabric", Fabric), ("multicast", Multicast), ("pools", Pools)):
            assert name in missing or isinstance(driver, capability)
        if not found.fabric:
            scene.create(1, HandleKind.FABRIC)
        with scene.refused(UsageError):
            driver.support(Location("elsewhere"))

    def test_granularity(self, driver: Driver, location: Location) -> None:
        for kinds in (HandleKind.NONE, FD):
            granularity = driver.mem_granularity(location, kinds)
            assert granularity.minimum > 0
            assert granularity.minimum & (granularity.minimum - 1) == 0
            assert granularity.recommended % granularity.minimum == 0

    def test_a_foreign_location_is_refused(self, scene: Scene) -> None:
        driver, address = scene.driver, scene.memory()[0]
        for foreign in (Location("elsewhere"), Location(driver.name, 9999)):
            with scene.refused(UsageError):
                driver.device_info(foreign)
            with scene.refused(UsageError):
                driver.mem_info(foreign)
            with scene.refused(UsageError):
                driver.mem_create(scene.g, foreign, FD)
            with scene.refused(UsageError):
                driver.mem_set_access(address, scene.g, Access.READ, (foreign,))
            with scene.refused(UsageError):
                driver.mem_get_access(address, foreign)
            with scene.refused(UsageError):
                driver.synchronize(foreign)

    # -- bytes --------------------------------------------------------------------------------------------------
    def test_bytes_at_any_offset(self, scene: Scene) -> None:
        address, _ = scene.memory(2)
        data = bytes(range(256)) * 3
        for offset in (1, scene.g - 300, 2 * scene.g - len(data), 0):
            scene.write(address + offset, data)
            assert scene.read(address + offset, len(data)) == data
        scene.driver.fill(address + 5, 0xAB, 500)
        assert scene.read(address, 768) == data[:5] + b"\xab" * 500 + data[505:]
        scene.driver.copy(address + 2001, address + 3, 500)
        assert scene.read(address + 2000, 502) == b"\0" + data[3:5] + b"\xab" * 498 + b"\0"

    def test_bytes_across_adjacent_mappings(self, scene: Scene) -> None:
        address = scene.reserve(4)
        for at in (0, 1, 3):
            scene.map(address + at * scene.g, scene.create(1))
        scene.write(address + scene.g - 3, b"across")
        assert scene.read(address + scene.g - 3, 6) == b"across"
        with scene.refused(UsageError):  # but not over a gap
            scene.driver.fill(address, 1, 4 * scene.g)
        assert scene.read(address, 1) == b"\x00"

    def test_bytes_outside_are_refused(self, scene: Scene) -> None:
        address, _ = scene.memory(2)
        end = address + 2 * scene.g
        for start, nbytes in ((end, 1), (end - 1, 2), (address, 2 * scene.g + 1), (address - 1, 2), (0, 1)):
            with scene.refused(UsageError):
                scene.read(start, nbytes)
            with scene.refused(UsageError):
                scene.driver.fill(start, 0, nbytes)

    def test_nothing_is_copied_where_nothing_was_asked(self, scene: Scene) -> None:
        address, _ = scene.memory()
        scene.write(address, b"")
        assert scene.read(address, 0) == b""
        scene.driver.copy(address, address + 1, 0)
        scene.driver.fill(address, 1, 0)
        with scene.refused(UsageError):
            scene.driver.fill(address, 1, -1)
        with scene.refused(UsageError):
            scene.driver.copy(address, address + 9, -1)

    def test_bad_buffers_and_values_are_refused(self, scene: Scene) -> None:
        address, _ = scene.memory()
        with scene.refused(UsageError):
            scene.driver.copy_in(address, memoryview(bytearray(100))[::2])
        with scene.refused(UsageError):
            scene.driver.copy_out(memoryview(bytearray(100))[::2], address)
        with scene.refused(UsageError):
            scene.driver.copy_out(memoryview(b"read only"), address)
        for value in (-1, 256):
            with scene.refused(UsageError):
                scene.driver.fill(address, value, 1)
        with scene.refused(UsageError):
            scene.driver.copy(address, address + 10, 11)  # overlapping

    def test_buffers_of_any_item_size(self, scene: Scene) -> None:
        address, _ = scene.memory()
        words = memoryview(bytearray(range(64))).cast("Q")
        scene.driver.copy_in(address, words)
        found = memoryview(bytearray(64)).cast("H", (8, 4))
        scene.driver.copy_out(found, address)
        assert found.tobytes() == bytes(range(64))

    # -- threads and finalizers ---------------------------------------------------------------------------------
    def test_threads_on_objects_of_their_own(self, scene: Scene) -> None:
        def work(number: int) -> None:
            with Scene(scene.driver, scene.location) as own:
                for round_ in range(20):
                    address, handle = own.memory(1 + round_ % 3)
                    own.write(address, b"%d" % number)
                    assert own.read(address, 1) == b"%d" % number
                    own.unmap(address)
                    own.release(handle)
                    own.free(address)

        assert together([lambda n=n: work(n) for n in range(4)]) == [None] * 4  # type: ignore[misc]

    def test_threads_on_the_same_object_leave_the_books_right(self, scene: Scene) -> None:
        """A mistake of the caller, of which one thread wins and the others are told."""
        driver, g = scene.driver, scene.g
        for _ in range(20):
            address, handle = driver.address_reserve(2 * g), driver.mem_create(2 * g, scene.location, FD)
            steps: tuple[Callable[[], None], ...] = (
                lambda a=address, h=handle: driver.mem_map(a, 2 * g, 0, h),  # type: ignore[misc]
                lambda a=address: driver.mem_unmap(a, 2 * g),  # type: ignore[misc]
                lambda h=handle: driver.mem_release(h),  # type: ignore[misc]
                lambda a=address: driver.address_free(a, 2 * g),  # type: ignore[misc]
            )
            for step in steps:
                results = together([step] * 3)
                assert results.count(None) == 1
                assert sum(isinstance(result, UsageError) for result in results) == 2

    def test_undo_calls_from_finalizers(self, scene: Scene) -> None:
        """The collector may run them in the middle of any other call of the same thread (I3)."""
        driver, g, location = scene.driver, scene.g, scene.location

        class Cycle:
            def __init__(self) -> None:
                self.me = self
                self.address = driver.address_reserve(g)
                self.handle = driver.mem_create(g, location, FD)
                driver.mem_map(self.address, g, 0, self.handle)

            def __del__(self) -> None:
                driver.mem_unmap(self.address, g)
                driver.mem_release(self.handle)
                driver.address_free(self.address, g)

        def litter() -> None:
            for _ in range(40):
                Cycle()

        threshold = gc.get_threshold()
        gc.set_threshold(7, 2, 2)
        try:
            assert together([litter, litter]) == [None, None]
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
        assert driver.live() == LiveObjects(0, 0, 0, 0)
