"""What a driver must do whose memory another machine can open, by 64 bytes; a part of the contract."""

from __future__ import annotations

from typing import Any

import pytest

from ..driver.protocol import Driver, Fabric
from ..errors import AlignmentError, ProtocolError, UnsupportedError, UsageError, VramError
from ..spec import Access, HandleKind, Location
from .scene import FD, DriverSuite, Scene, remedied

__all__ = ["FabricRules"]

FABRIC = HandleKind.FABRIC


class FabricRules(DriverSuite):
    """Tests of :class:`~vram.driver.protocol.Fabric`: how it works, or what is said where it does not."""

    def fabric(self, driver: Driver, location: Location) -> Any:
        """Return the driver, or skip the test where its memory does not leave by the fabric."""
        able = self.capability(driver, Fabric)
        try:
            driver.mem_release(driver.mem_create(driver.mem_granularity(location, FABRIC).minimum, location, FABRIC))
        except UnsupportedError:
            pytest.skip("memory does not leave by the fabric here")
        return able

    def test_the_fabric_works_or_says_what_it_takes(self, scene: Scene, driver: Driver) -> None:
        able = self.capability(driver, Fabric)
        try:
            handle = scene.create(1, FABRIC)
        except UnsupportedError as error:
            remedied(error)
            with scene.refused(UnsupportedError):
                driver.mem_create(scene.g, scene.location, FABRIC | FD)
            with scene.refused(VramError):
                able.mem_import_fabric(bytes(64), scene.g, scene.location)
            return
        assert len(able.mem_export_fabric(handle)) == 64

    def test_fabric_export_and_import(self, scene: Scene, driver: Driver, location: Location) -> None:
        able = self.fabric(driver, location)
        for kinds in (FABRIC, FABRIC | FD):
            handle = scene.create(2, kinds)
            address = scene.map(scene.reserve(2), handle)
            scene.write(address, b"shared")
            there = scene.keep(able.mem_import_fabric(able.mem_export_fabric(handle), 2 * scene.g, location), 2)
            assert there != handle
            found = driver.mem_properties(there)
            assert (found.location, found.handle_kinds) == (scene.location, FABRIC)
            twin = scene.map(scene.reserve(2), there)
            assert scene.read(twin, 6) == b"shared"
            scene.write(twin, b"both ways")
            assert scene.read(address, 9) == b"both ways"

    def test_memory_that_came_by_the_fabric_goes_on(self, scene: Scene, driver: Driver, location: Location) -> None:
        able = self.fabric(driver, location)
        handle = scene.create(1, FABRIC)
        scene.write(scene.map(scene.reserve(1), handle), b"onward")
        there = scene.keep(able.mem_import_fabric(able.mem_export_fabric(handle), scene.g, location))
        last = scene.keep(able.mem_import_fabric(able.mem_export_fabric(there), scene.g, location))
        assert scene.read(scene.map(scene.reserve(1), last, Access.READ), 6) == b"onward"
        with scene.refused(UsageError):
            driver.mem_export(there, FD)

    def test_memory_opened_by_the_fabric_outlives_its_maker(
        self, scene: Scene, driver: Driver, location: Location
    ) -> None:
        able = self.fabric(driver, location)
        handle = scene.create(1, FABRIC)
        address = scene.map(scene.reserve(1), handle)
        scene.write(address, b"kept")
        there = scene.keep(able.mem_import_fabric(able.mem_export_fabric(handle), scene.g, location))
        scene.unmap(address)
        scene.release(handle)
        assert scene.read(scene.map(address, there), 4) == b"kept"

    def test_a_fabric_handle_is_not_believed(self, scene: Scene, driver: Driver, location: Location) -> None:
        """S7: neither bytes that name nothing, nor a size that is none."""
        able = self.fabric(driver, location)
        data = able.mem_export_fabric(scene.create(2, FABRIC))
        for wrong in (b"", data[:-1], data + b"\0", bytes(64), bytes([data[0] ^ 0xFF]) + data[1:]):
            with scene.refused(ProtocolError):
                able.mem_import_fabric(wrong, 2 * scene.g, location)
        with scene.refused(AlignmentError):
            able.mem_import_fabric(data, scene.g - 1, location)
        with scene.refused(UsageError):
            able.mem_import_fabric(data, 2 * scene.g, Location(driver.name, 9999))
        address = scene.reserve(3)
        there = scene.keep(able.mem_import_fabric(data, 3 * scene.g, location), 3)
        with scene.refused(ProtocolError):
            driver.mem_map(address, 3 * scene.g, 0, there)

    def test_only_memory_made_for_the_fabric_leaves_by_it(
        self, scene: Scene, driver: Driver, location: Location
    ) -> None:
        able = self.capability(driver, Fabric)
        for kinds in (HandleKind.NONE, FD):
            handle = scene.create(1, kinds)
            with scene.refused(UsageError):
                able.mem_export_fabric(handle)
