"""The rules of sharing and of the capabilities: a part of :class:`~vram.testing.driver.DriverContract`."""

from __future__ import annotations

import os

import pytest

from ..driver.protocol import CopyOnWrite, Driver, HostAddressable, Identity, Sealing
from ..errors import (
    AccessDeniedError,
    AlignmentError,
    ProtocolError,
    UnsupportedError,
    UsageError,
)
from ..spec import Access, HandleKind
from .scene import FD, DriverSuite, Scene, is_open

__all__ = ["SharingRules"]


class SharingRules(DriverSuite):
    """What may leave the process and come in, and what a driver does that offers more."""

    # -- other processes ----------------------------------------------------------------------------------------
    def test_export_and_import(self, scene: Scene) -> None:
        address, handle = scene.memory(2)
        scene.write(address, b"shared")
        with scene.exported(handle) as fd, scene.exported(handle) as other:
            assert fd != other  # a new one each time, the caller's
            assert not os.get_inheritable(fd)
            imported = scene.keep(scene.driver.mem_import(fd, FD, 2 * scene.g), 2)
            assert is_open(fd), "a descriptor stays the caller's"
        assert imported != handle
        assert scene.driver.mem_properties(imported).handle_kinds == FD
        twin = scene.map(scene.reserve(2), imported)
        assert scene.read(twin, 6) == b"shared"
        scene.write(twin, b"both ways")
        assert scene.read(address, 9) == b"both ways"

    def test_imported_memory_can_be_exported_again(self, scene: Scene) -> None:
        address, handle = scene.memory()
        scene.write(address, b"onward")
        with scene.exported(handle) as fd:
            imported = scene.keep(scene.driver.mem_import(fd, FD, scene.g))
        with scene.exported(imported) as fd:
            last = scene.keep(scene.driver.mem_import(fd, FD, scene.g))
        assert scene.read(scene.map(scene.reserve(1), last), 6) == b"onward"

    def test_an_exported_descriptor_keeps_the_memory(self, scene: Scene) -> None:
        address, handle = scene.memory()
        scene.write(address, b"pinned")
        with scene.exported(handle) as fd:
            scene.unmap(address)
            scene.release(handle)
            assert scene.driver.live().nbytes == 0
            again = scene.keep(scene.driver.mem_import(fd, FD, scene.g))
        assert scene.read(scene.map(address, again), 6) == b"pinned"

    def test_only_memory_made_for_it_is_exported(self, scene: Scene) -> None:
        for kinds, asked in ((HandleKind.NONE, FD), (FD, HandleKind.FABRIC), (FD, HandleKind.NONE)):
            handle = scene.create(1, kinds)
            with scene.refused(UsageError):
                scene.driver.mem_export(handle, asked)

    def test_import_believes_nothing(self, scene: Scene) -> None:
        """What is no memory, could be truncated, or is smaller than stated (S7, S8)."""
        reader, writer = os.pipe()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(unsealed, scene.g)
            for fd in (reader, writer, null, unsealed):
                with scene.refused(ProtocolError):
                    scene.driver.mem_import(fd, FD, scene.g)
        finally:
            for fd in (reader, writer, null, unsealed):
                os.close(fd)
        # A false size: by a driver that can tell at once, by the others when it is mapped.
        address = scene.reserve(3)

        def open_as_three(fd: int) -> None:
            handle = scene.keep(scene.driver.mem_import(fd, FD, 3 * scene.g), 3)
            scene.driver.mem_map(address, 3 * scene.g, 0, handle)

        with scene.exported(scene.create(2)) as fd, pytest.raises(ProtocolError):
            open_as_three(fd)
        with scene.refused(UsageError):
            scene.driver.mem_unmap(address, 3 * scene.g)

    def test_import_of_no_descriptor(self, scene: Scene) -> None:
        for number in (-1, 1 << 20, 1 << 40):
            with scene.refused(UsageError):
                scene.driver.mem_import(number, FD, scene.g)
        with scene.exported(scene.create()) as fd:
            with scene.refused(UnsupportedError):
                scene.driver.mem_import(fd, HandleKind.WIN32, scene.g)
            with scene.refused(AlignmentError):
                scene.driver.mem_import(fd, FD, scene.g - 1)

    # -- capabilities -------------------------------------------------------------------------------------------
    def test_buffer(self, scene: Scene, driver: Driver) -> None:
        host = self.capability(driver, HostAddressable)
        address, _ = scene.memory(2)
        with host.buffer(address + 3, scene.g, readonly=False) as view:
            assert (view.nbytes, view.itemsize, view.ndim, view.readonly) == (scene.g, 1, 1, False)
            view[:5] = b"hello"
        assert scene.read(address + 3, 5) == b"hello"
        scene.write(address + 3, b"jello")
        with host.buffer(address + 3, 5, readonly=True) as view:
            assert view.readonly
            assert bytes(view) == b"jello"
            with pytest.raises(TypeError):
                view[0] = 1
        with scene.refused(UsageError):
            host.buffer(address, 2 * scene.g + 1, readonly=True)
        driver.mem_set_access(address, 2 * scene.g, Access.READ, (scene.location,))
        with scene.refused(UsageError):
            host.buffer(address, 1, readonly=False)

    def test_populate(self, scene: Scene, driver: Driver) -> None:
        host = self.capability(driver, HostAddressable)
        address = scene.reserve(5)
        for at, access in ((0, Access.READ_WRITE), (1, Access.READ), (2, Access.NONE), (4, Access.READ_WRITE)):
            scene.map(address + at * scene.g, scene.create(1), access)
        scene.write(address + 11, b"kept")
        host.populate(address, 2 * scene.g)
        host.populate(address + 5, 1)
        host.populate(address, 0)
        assert scene.read(address + 11, 4) == b"kept"
        for at, size in ((1, 2), (2, 1), (3, 1), (4, 2)):
            with scene.refused(UsageError):
                host.populate(address + at * scene.g, size * scene.g)

    def test_copy_on_write(self, scene: Scene, driver: Driver) -> None:
        cow = self.capability(driver, CopyOnWrite)
        address, handle = scene.memory()
        scene.write(address, b"original")
        private = scene.map_private(scene.reserve(1), handle)
        assert scene.read(private, 8) == b"original"
        scene.write(private, b"changed!")
        assert scene.read(address, 8) == b"original"
        assert scene.read(private, 8) == b"changed!"
        for offset, nbytes in ((0, 2), (1, 1)):
            with scene.refused(UsageError):
                cow.mem_map_private(private, nbytes * scene.g, offset * scene.g, handle)

    def test_copy_on_write_of_sealed_memory(self, scene: Scene, driver: Driver) -> None:
        cow, sealing = self.capability(driver, CopyOnWrite), self.capability(driver, Sealing)
        address, handle = scene.memory()
        scene.write(address, b"original")
        before = scene.map_private(scene.reserve(1), handle)
        scene.write(before, b"mine")
        sealing.mem_seal(handle)
        after = scene.map_private(scene.reserve(1), handle)
        scene.write(after, b"changed!")
        assert scene.read(address, 8) == b"original"
        assert scene.read(before, 8) == b"mineinal"  # sealing leaves private mappings alone
        assert cow is driver

    def test_seal(self, scene: Scene, driver: Driver) -> None:
        """Read-only for good: mappings from before and after, and in every other process (S8)."""
        sealing = self.capability(driver, Sealing)
        address, handle = scene.memory()
        scene.write(address, b"sealed")
        silent = scene.map(scene.reserve(1), handle, Access.NONE)
        with scene.exported(handle) as fd:
            imported = scene.keep(driver.mem_import(fd, FD, scene.g))
        cousin = scene.map(scene.reserve(1), imported)
        assert not sealing.mem_is_sealed(handle)
        sealing.mem_seal(handle)
        sealing.mem_seal(imported)  # again, elsewhere: fine
        assert sealing.mem_is_sealed(handle)
        assert sealing.mem_is_sealed(imported)
        late = scene.map(scene.reserve(1), imported, Access.READ)
        assert driver.mem_get_access(silent, scene.location) == Access.NONE
        for mapped in (address, cousin, late):
            assert driver.mem_get_access(mapped, scene.location) == Access.READ
        for mapped in (address, silent, cousin, late):
            access = driver.mem_get_access(mapped, scene.location)
            with scene.refused(AccessDeniedError):
                driver.mem_set_access(mapped, scene.g, Access.READ_WRITE, (scene.location,))
            assert driver.mem_get_access(mapped, scene.location) == access
            driver.mem_set_access(mapped, scene.g, Access.READ, (scene.location,))
            assert scene.read(mapped, 6) == b"sealed"
            with scene.refused(UsageError):
                scene.write(mapped, b"x")

    def test_a_refused_right_changes_nothing_else(self, scene: Scene, driver: Driver) -> None:
        """One call over two mappings, of which the second is sealed (I4)."""
        sealing = self.capability(driver, Sealing)
        address, sealed = scene.reserve(2), scene.create()
        scene.map(address, scene.create(), Access.READ)
        scene.map(address + scene.g, sealed, Access.READ)
        sealing.mem_seal(sealed)
        with scene.refused(AccessDeniedError):
            driver.mem_set_access(address, 2 * scene.g, Access.READ_WRITE, (scene.location,))
        assert driver.mem_get_access(address, scene.location) == Access.READ
        with scene.refused(UsageError):
            scene.write(address, b"x")

    def test_identity(self, scene: Scene, driver: Driver) -> None:
        identity = self.capability(driver, Identity)
        first, second = scene.create(), scene.create()
        with scene.exported(first) as a, scene.exported(first) as b, scene.exported(second) as c:
            assert identity.mem_identity(a) == identity.mem_identity(b) != identity.mem_identity(c)
            with scene.exported(scene.keep(driver.mem_import(a, FD, scene.g))) as d:
                assert identity.mem_identity(d) == identity.mem_identity(a)
        with scene.refused(UsageError):
            identity.mem_identity(-1)
