"""What a driver must do that maps memory in the call that makes or opens it; a part of the contract."""

from __future__ import annotations

import os

import pytest

from ..driver.protocol import CopyOnWrite, DirectMapping, Driver, Sealing
from ..errors import AccessDeniedError, AlignmentError, ProtocolError, RangeError, UnsupportedError, UsageError
from ..spec import Access, HandleKind, Location
from .scene import FD, DriverSuite, Scene, is_open, together

__all__ = ["DirectRules"]

NONE, READ, RW = Access.NONE, Access.READ, Access.READ_WRITE


class DirectRules(DriverSuite):
    """Tests of :class:`~vram.driver.protocol.DirectMapping`."""

    def test_new_memory_in_one_call(self, scene: Scene, driver: Driver) -> None:
        """Zeroed, accessible as asked, and held by the mapping alone."""
        direct = self.capability(driver, DirectMapping)
        before = driver.live()
        address = scene.reserve(4)
        for at, access in enumerate((NONE, READ, RW)):
            direct.mem_map_new(scene.put(address + at * scene.g), scene.g, scene.location, FD, access)
            assert driver.mem_get_access(address + at * scene.g, scene.location) == access
        now = driver.live()
        assert (now.handles, now.mappings, now.nbytes) == (before.handles, before.mappings + 3, 3 * scene.g)
        assert scene.read(address + scene.g, 9) == bytes(9)
        scene.write(address + 2 * scene.g, b"written")
        for at in (0, 1):
            with scene.refused(UsageError):
                scene.write(address + at * scene.g, b"x")
        driver.mem_set_access(address, 3 * scene.g, RW, (scene.location,))
        scene.write(address + scene.g - 3, b"across")
        scene.unmap(address, 3 * scene.g)
        assert driver.live().nbytes == 0

    def test_a_handle_to_it_on_demand(self, scene: Scene, driver: Driver) -> None:
        direct = self.capability(driver, DirectMapping)
        address = scene.reserve(2)
        direct.mem_map_new(scene.put(address), scene.g, scene.location, FD, RW)
        scene.write(address, b"found again")
        handle = scene.keep(driver.mem_retain(address))
        assert driver.mem_properties(handle).location == scene.location
        assert driver.mem_properties(handle).handle_kinds == FD
        again = scene.map(address + scene.g, handle)
        scene.unmap(address)
        assert scene.read(again, 11) == b"found again"
        with scene.exported(handle) as fd:
            direct.mem_map_import(scene.put(address), scene.g, fd, FD, READ, private=False)
        assert scene.read(address, 11) == b"found again"

    def test_an_import_in_one_call(self, scene: Scene, driver: Driver) -> None:
        """The descriptor stays the caller's (I9)."""
        direct = self.capability(driver, DirectMapping)
        there, handle = scene.memory(2)
        scene.write(there, b"sent")
        address = scene.reserve(6)
        with scene.exported(handle) as fd:
            for at, (access, nbytes) in enumerate(((READ, 2), (RW, 2))):
                here = scene.put(address + 2 * at * scene.g, nbytes)
                direct.mem_map_import(here, nbytes * scene.g, fd, FD, access, private=False)
                assert driver.mem_get_access(here, scene.location) == access
            last = scene.put(address + 4 * scene.g, 2)
            direct.mem_map_import(last, 2 * scene.g, fd, FD, NONE, private=False)
            assert driver.mem_get_access(address + 4 * scene.g, scene.location) == NONE
            assert is_open(fd), "a descriptor stays the caller's"
        scene.write(address + 2 * scene.g, b"back")
        assert scene.read(there, 4) == scene.read(address, 4) == b"back"
        with scene.refused(UsageError):
            scene.write(address, b"x")

    def test_a_private_import(self, scene: Scene, driver: Driver) -> None:
        direct = self.capability(driver, DirectMapping)
        self.capability(driver, CopyOnWrite)
        there, handle = scene.memory()
        scene.write(there, b"original")
        address = scene.put(scene.reserve(1))
        with scene.exported(handle) as fd:
            direct.mem_map_import(address, scene.g, fd, FD, RW, private=True)
        scene.write(address, b"changed!")
        assert (scene.read(there, 8), scene.read(address, 8)) == (b"original", b"changed!")

    def test_what_is_refused_leaves_nothing(self, scene: Scene, driver: Driver, location: Location) -> None:
        """I4, S7: no memory, no descriptor, nothing at the address."""
        direct = self.capability(driver, DirectMapping)
        address, wide, g = scene.reserve(2), scene.reserve(3), scene.g
        fds = len(os.listdir("/proc/self/fd"))
        taken = scene.map(scene.reserve(1), scene.create())
        reader, writer = os.pipe()
        try:
            with scene.exported(scene.create(2)) as fd:
                wrong_places: list[tuple[type[Exception], int, int]] = [
                    (AlignmentError, address + 1, g),
                    (AlignmentError, address, g - 1),
                    (RangeError, address + g, 2 * g),
                    (RangeError, taken, g),
                    (RangeError, 0, g),
                ]
                for error, at, nbytes in wrong_places:
                    with scene.refused(error):
                        direct.mem_map_new(at, nbytes, location, FD, RW)
                    with scene.refused(error):
                        direct.mem_map_import(at, nbytes, fd, FD, RW, private=False)
                wrong: list[tuple[type[Exception], int, int]] = [
                    (ProtocolError, 3 * g, fd),
                    (ProtocolError, g, reader),
                    (UsageError, g, 1 << 20),
                ]
                for error, nbytes, given in wrong:
                    with scene.refused(error):
                        direct.mem_map_import(wide, nbytes, given, FD, RW, private=False)
                with scene.refused(UsageError):
                    direct.mem_map_new(address, g, Location("elsewhere"), FD, RW)
                with scene.refused(UsageError):
                    direct.mem_map_new(address, g, location, FD, 7)
                with scene.refused(UnsupportedError):
                    direct.mem_map_import(address, g, fd, HandleKind.WIN32, RW, private=False)
        finally:
            os.close(reader)
            os.close(writer)
        direct.mem_map_new(scene.put(address, 2), 2 * g, location, FD, RW)  # the place is as good as before
        scene.unmap(address)
        scene.unmap(taken)
        assert len(os.listdir("/proc/self/fd")) <= fds + 2  # the two that were created above

    def test_sealed_memory_is_mapped_for_reading_only(self, scene: Scene, driver: Driver) -> None:
        """S8: and an import from before the seal becomes read-only with it."""
        direct = self.capability(driver, DirectMapping)
        sealing = self.capability(driver, Sealing)
        _, handle = scene.memory()
        address = scene.reserve(3)
        with scene.exported(handle) as fd:
            direct.mem_map_import(scene.put(address), scene.g, fd, FD, RW, private=False)
            sealing.mem_seal(handle)
            assert driver.mem_get_access(address, scene.location) == READ
            with scene.refused(AccessDeniedError):
                direct.mem_map_import(address + scene.g, scene.g, fd, FD, RW, private=False)
            direct.mem_map_import(scene.put(address + scene.g), scene.g, fd, FD, READ, private=False)
            direct.mem_map_import(scene.put(address + 2 * scene.g), scene.g, fd, FD, RW, private=True)
        scene.write(address + 2 * scene.g, b"mine")
        for at in (0, 1):
            with scene.refused(AccessDeniedError):
                driver.mem_set_access(address + at * scene.g, scene.g, RW, (scene.location,))

    def test_of_two_that_map_at_one_place_one_does(self, scene: Scene, driver: Driver) -> None:
        direct = self.capability(driver, DirectMapping)
        address = scene.reserve(1)
        for _ in range(50):
            outcomes = together(
                [lambda: direct.mem_map_new(address, scene.g, scene.location, FD, RW) for _ in range(3)]
            )
            failed = [one for one in outcomes if one is not None]
            assert len(failed) in (2, 3)  # they may all step back
            assert all(isinstance(one, RangeError) for one in failed)
            assert driver.live().mappings == 3 - len(failed)
            if len(failed) == 2:
                scene.unmap(scene.put(address))
        assert driver.live().nbytes == 0
        with pytest.raises(RangeError):
            driver.mem_retain(address)
