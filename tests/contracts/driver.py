"""The whole contract of drivers: the public part, the rest of the rules, and the capabilities."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.deadlines import SOON

from vram.driver.protocol import (
    DeviceMemory,
    Driver,
    HostMemory,
    LiveObjects,
)
from vram.errors import (
    AccessDeniedError,
    AlignmentError,
    ProtocolError,
    RangeError,
    UnsupportedError,
    UsageError,
    VramError,
)
from vram.spec import AllocationFlags, HandleKind, Location
from vram.testing.driver import FD, NONE, READ, RW, DriverContract, DriverSuite, Scene


def together(calls: list[Callable[[], object]]) -> list[object]:
    """Run calls in threads that start at once; return what each returned or raised."""
    barrier = threading.Barrier(len(calls))
    results: list[object] = ["did not end"] * len(calls)

    def run(index: int) -> None:
        barrier.wait(SOON)
        try:
            results[index] = calls[index]()
        except Exception as error:  # the test looks at it
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # or each would be done before the next has begun
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
    finally:
        sys.setswitchinterval(interval)
    return results


FABRIC = HandleKind.FABRIC


def capability(suite: DriverSuite, driver: Driver, kind: type) -> Any:
    """Return the driver, or skip the test, saying so, if the suite says that it does not offer a capability."""
    if kind.__name__ not in suite.offers:
        pytest.skip(f"{driver.name} does not offer {kind.__name__}")
    return driver


def remedied(error: UnsupportedError) -> None:
    """Insist that a refusal says what it takes, what there is instead, and what to do."""
    assert error.needs
    assert error.have
    assert error.remedy


class FabricContract(DriverSuite):
    """Memory that another machine opens by 64 bytes: how it works, or what is said where it does not."""

    def fabric(self, driver: Driver, location: Location) -> Any:
        """Return the driver, or skip the test where its memory does not leave by the fabric."""
        able = capability(self, driver, DeviceMemory)
        try:
            driver.mem_release(driver.mem_create(driver.mem_granularity(location, FABRIC).minimum, location, FABRIC))
        except UnsupportedError:
            pytest.skip("memory does not leave by the fabric here")
        return able

    def test_the_fabric_works_or_says_what_it_takes(self, scene: Scene, driver: Driver) -> None:
        able = capability(self, driver, DeviceMemory)
        try:
            handle = scene.create(1, FABRIC)
        except UnsupportedError as error:
            remedied(error)
            scene.refuses(UnsupportedError, driver.mem_create, scene.g, scene.location, FABRIC | FD)
            scene.refuses(VramError, able.mem_import_fabric, bytes(64), scene.g, scene.location)
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
        assert scene.read(scene.map(scene.reserve(1), last, READ), 6) == b"onward"
        scene.refuses(UsageError, driver.mem_export, there, FD)

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
            scene.refuses(ProtocolError, able.mem_import_fabric, wrong, 2 * scene.g, location)
        scene.refuses(AlignmentError, able.mem_import_fabric, data, scene.g - 1, location)
        scene.refuses(UsageError, able.mem_import_fabric, data, 2 * scene.g, Location(driver.name, 9999))
        address = scene.reserve(3)
        there = scene.keep(able.mem_import_fabric(data, 3 * scene.g, location), 3)
        scene.refuses(ProtocolError, driver.mem_map, address, 3 * scene.g, 0, there)

    def test_only_memory_made_for_the_fabric_leaves_by_it(
        self, scene: Scene, driver: Driver, location: Location
    ) -> None:
        able = capability(self, driver, DeviceMemory)
        for kinds in (HandleKind.NONE, FD):
            handle = scene.create(1, kinds)
            scene.refuses(UsageError, able.mem_export_fabric, handle)


class FullDriverContract(FabricContract, DriverContract):
    """The public contract and all the rest."""

    def test_support_is_what_works(self, scene: Scene, driver: Driver, location: Location) -> None:
        """A reason or nothing, for each capability; and what it says works does."""
        found = driver.support(location)
        missing = found.missing()
        for flag in AllocationFlags:
            if not getattr(found, str(flag.name).lower()):
                handle = scene.keep(driver.mem_create(scene.g, location, FD, flag))
                assert flag in driver.mem_properties(handle).flags
        for name in ("fabric", "multicast", "pools", "legacy_ipc"):
            assert name in missing or isinstance(driver, DeviceMemory)
        if not found.fabric:
            scene.create(1, FABRIC)
        scene.refuses(UsageError, driver.support, Location("elsewhere"))

    def test_nothing_is_copied_where_nothing_was_asked(self, scene: Scene) -> None:
        address, _ = scene.memory()
        scene.write(address, b"")
        assert scene.read(address, 0) == b""
        scene.driver.copy(address, address + 1, 0)
        scene.driver.fill(address, 1, 0)
        scene.refuses(UsageError, scene.driver.fill, address, 1, -1)
        scene.refuses(UsageError, scene.driver.copy, address, address + 9, -1)

    def test_bad_buffers_and_values_are_refused(self, scene: Scene) -> None:
        address, _ = scene.memory()
        scene.refuses(UsageError, scene.driver.copy_in, address, memoryview(bytearray(100))[::2])
        scene.refuses(UsageError, scene.driver.copy_out, memoryview(bytearray(100))[::2], address)
        scene.refuses(UsageError, scene.driver.copy_out, memoryview(b"read only"), address)
        for value in (-1, 256):
            scene.refuses(UsageError, scene.driver.fill, address, value, 1)
        scene.refuses(UsageError, scene.driver.copy, address, address + 10, 11)  # overlapping

    def test_buffers_of_any_item_size(self, scene: Scene) -> None:
        address, _ = scene.memory()
        words = memoryview(bytearray(range(64))).cast("Q")
        scene.driver.copy_in(address, words)
        found = memoryview(bytearray(64)).cast("H", (8, 4))
        scene.driver.copy_out(found, address)
        assert found.tobytes() == bytes(range(64))

    def test_reserve_at_an_address_is_a_wish(self, scene: Scene) -> None:
        wish = scene.reserve(4)
        scene.free(wish)
        got = scene.driver.address_reserve(4 * scene.g, address=wish)
        other = scene.driver.address_reserve(4 * scene.g, address=wish)  # taken by now: anywhere else
        assert got != other
        for address in (got, other):
            scene.driver.address_free(address, 4 * scene.g)

    def test_native_handles(self, scene: Scene, driver: Driver) -> None:
        """They are lent: nothing changes hands."""
        able = capability(self, driver, DeviceMemory)
        address, handle = scene.memory()
        other = scene.create()
        native = able.mem_native_handle(handle)
        assert native == able.mem_native_handle(handle) != able.mem_native_handle(other)
        before = driver.live()
        again = scene.keep(driver.mem_retain(address))
        assert able.mem_native_handle(again)
        scene.release(again)
        assert driver.live() == before
        scene.release(other)
        scene.refuses(UsageError, able.mem_native_handle, other)

    @pytest.mark.parametrize("flag", list(AllocationFlags), ids=lambda flag: flag.name.lower())
    def test_flags_are_granted_or_refused(self, scene: Scene, flag: AllocationFlags) -> None:
        """By every call that is asked with them; what was granted is in the properties. Some are wishes."""
        driver, place = scene.driver, scene.location
        try:
            least = driver.mem_granularity(place, FD, flag).minimum
        except UnsupportedError as error:
            remedied(error)
            scene.refuses(UnsupportedError, driver.mem_create, scene.g, place, FD, flag)
            return
        assert least & (least - 1) == 0
        try:
            handle = scene.keep(driver.mem_create(scene.g, place, FD, flag))
        except UnsupportedError as error:  # attributes lie: it was announced
            remedied(error)
            return
        granted = driver.mem_properties(handle).flags
        assert flag in granted or flag is AllocationFlags.COMPRESSIBLE
        with scene.exported(handle) as fd:
            there = scene.keep(driver.mem_import(fd, FD, scene.g))
        assert driver.mem_properties(there).handle_kinds == FD

    def test_unmap_of_some(self, scene: Scene) -> None:
        address = scene.reserve(6)
        for at in (0, 2, 4):
            scene.write(scene.map(address + at * scene.g, scene.create(2)), b"%d" % at)
        scene.unmap(address + 2 * scene.g)
        assert scene.read(address, 1) == b"0"
        assert scene.read(address + 4 * scene.g, 1) == b"4"
        for nowhere in (address + 2 * scene.g, address + 3 * scene.g, address + 4 * scene.g - 1):
            scene.refuses(UsageError, scene.read, nowhere, 1)

    # -- capabilities -------------------------------------------------------------------------------------------
    def test_buffer(self, scene: Scene, driver: Driver) -> None:
        host = capability(self, driver, HostMemory)
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
        driver.mem_set_access(address, 2 * scene.g, READ, (scene.location,))
        with scene.refused(UsageError):
            host.buffer(address, 1, readonly=False)

    def test_populate(self, scene: Scene, driver: Driver) -> None:
        host = capability(self, driver, HostMemory)
        address = scene.reserve(5)
        for at, access in ((0, RW), (1, READ), (2, NONE), (4, RW)):
            scene.map(address + at * scene.g, scene.create(1), access)
        scene.write(address + 11, b"kept")
        host.populate(address, 2 * scene.g)
        host.populate(address + 5, 1)
        host.populate(address, 0)
        assert scene.read(address + 11, 4) == b"kept"
        for at, size in ((1, 2), (2, 1), (3, 1), (4, 2)):
            scene.refuses(UsageError, host.populate, address + at * scene.g, size * scene.g)

    def test_copy_on_write(self, scene: Scene, driver: Driver) -> None:
        cow = capability(self, driver, HostMemory)
        address, handle = scene.memory()
        scene.write(address, b"original")
        private = scene.map(scene.reserve(1), handle, private=True)
        assert scene.read(private, 8) == b"original"
        scene.write(private, b"changed!")
        assert scene.read(address, 8) == b"original"
        assert scene.read(private, 8) == b"changed!"
        for offset, nbytes in ((0, 2), (1, 1)):
            scene.refuses(UsageError, cow.mem_map_private, private, nbytes * scene.g, offset * scene.g, handle)

    def test_copy_on_write_of_sealed_memory(self, scene: Scene, driver: Driver) -> None:
        cow, sealing = capability(self, driver, HostMemory), capability(self, driver, HostMemory)
        address, handle = scene.memory()
        scene.write(address, b"original")
        before = scene.map(scene.reserve(1), handle, private=True)
        scene.write(before, b"mine")
        sealing.mem_seal(handle)
        after = scene.map(scene.reserve(1), handle, private=True)
        scene.write(after, b"changed!")
        assert scene.read(address, 8) == b"original"
        assert scene.read(before, 8) == b"mineinal"  # sealing leaves private mappings alone
        assert cow is driver

    def test_seal(self, scene: Scene, driver: Driver) -> None:
        """Read-only for good: mappings from before and after, and in every other process (S8)."""
        sealing = capability(self, driver, HostMemory)
        address, handle = scene.memory()
        scene.write(address, b"sealed")
        silent = scene.map(scene.reserve(1), handle, NONE)
        with scene.exported(handle) as fd:
            imported = scene.keep(driver.mem_import(fd, FD, scene.g))
        cousin = scene.map(scene.reserve(1), imported)
        assert not sealing.mem_is_sealed(handle)
        sealing.mem_seal(handle)
        sealing.mem_seal(imported)  # again, elsewhere: fine
        assert sealing.mem_is_sealed(handle)
        assert sealing.mem_is_sealed(imported)
        late = scene.map(scene.reserve(1), imported, READ)
        assert driver.mem_get_access(silent, scene.location) == NONE
        for mapped in (address, cousin, late):
            assert driver.mem_get_access(mapped, scene.location) == READ
        for mapped in (address, silent, cousin, late):
            access = driver.mem_get_access(mapped, scene.location)
            scene.refuses(AccessDeniedError, driver.mem_set_access, mapped, scene.g, RW, (scene.location,))
            assert driver.mem_get_access(mapped, scene.location) == access
            driver.mem_set_access(mapped, scene.g, READ, (scene.location,))
            assert scene.read(mapped, 6) == b"sealed"
            scene.refuses(UsageError, scene.write, mapped, b"x")

    def test_a_refused_right_changes_nothing_else(self, scene: Scene, driver: Driver) -> None:
        """One call over two mappings, of which the second is sealed (I4)."""
        sealing = capability(self, driver, HostMemory)
        address, sealed = scene.reserve(2), scene.create()
        scene.map(address, scene.create(), READ)
        scene.map(address + scene.g, sealed, READ)
        sealing.mem_seal(sealed)
        scene.refuses(AccessDeniedError, driver.mem_set_access, address, 2 * scene.g, RW, (scene.location,))
        assert driver.mem_get_access(address, scene.location) == READ
        scene.refuses(UsageError, scene.write, address, b"x")

    def test_identity(self, scene: Scene, driver: Driver) -> None:
        identity = capability(self, driver, HostMemory)
        first, second = scene.create(), scene.create()
        with scene.exported(first) as a, scene.exported(first) as b, scene.exported(second) as c:
            assert identity.mem_identity(a) == identity.mem_identity(b) != identity.mem_identity(c)
            with scene.exported(scene.keep(driver.mem_import(a, FD, scene.g))) as d:
                assert identity.mem_identity(d) == identity.mem_identity(a)
        scene.refuses(UsageError, identity.mem_identity, -1)

    # -- memory that is mapped in the call that makes or opens it ------------------------------------------------
    def test_new_memory_in_one_call(self, scene: Scene, driver: Driver) -> None:
        """Zeroed, accessible as asked, and held by the mapping alone."""
        before = driver.live()
        address = scene.reserve(4)
        for at, access in enumerate((NONE, READ, RW)):
            driver.mem_map_new(scene.put(address + at * scene.g), scene.g, scene.location, FD, access)
            assert driver.mem_get_access(address + at * scene.g, scene.location) == access
        now = driver.live()
        assert (now.handles, now.mappings, now.nbytes) == (before.handles, before.mappings + 3, 3 * scene.g)
        assert scene.read(address + scene.g, 9) == bytes(9)
        scene.write(address + 2 * scene.g, b"written")
        for at in (0, 1):
            scene.refuses(UsageError, scene.write, address + at * scene.g, b"x")
        driver.mem_set_access(address, 3 * scene.g, RW, (scene.location,))
        scene.write(address + scene.g - 3, b"across")
        scene.unmap(address, 3)
        assert driver.live().nbytes == 0

    def test_a_handle_to_it_on_demand(self, scene: Scene, driver: Driver) -> None:
        address = scene.reserve(2)
        driver.mem_map_new(scene.put(address), scene.g, scene.location, FD, RW)
        scene.write(address, b"found again")
        handle = scene.keep(driver.mem_retain(address))
        assert driver.mem_properties(handle).location == scene.location
        assert driver.mem_properties(handle).handle_kinds == FD
        again = scene.map(address + scene.g, handle)
        scene.unmap(address)
        assert scene.read(again, 11) == b"found again"
        with scene.exported(handle) as fd:
            driver.mem_map_import(scene.put(address), scene.g, fd, FD, READ, private=False)
        assert scene.read(address, 11) == b"found again"

    def test_an_import_in_one_call(self, scene: Scene, driver: Driver) -> None:
        """The descriptor stays the caller's (I9)."""
        there, handle = scene.memory(2)
        scene.write(there, b"sent")
        address = scene.reserve(6)
        with scene.exported(handle) as fd:
            for at, (access, nbytes) in enumerate(((READ, 2), (RW, 2))):
                here = scene.put(address + 2 * at * scene.g, nbytes)
                driver.mem_map_import(here, nbytes * scene.g, fd, FD, access, private=False)
                assert driver.mem_get_access(here, scene.location) == access
            last = scene.put(address + 4 * scene.g, 2)
            driver.mem_map_import(last, 2 * scene.g, fd, FD, NONE, private=False)
            assert driver.mem_get_access(address + 4 * scene.g, scene.location) == NONE
        scene.write(address + 2 * scene.g, b"back")
        assert scene.read(there, 4) == scene.read(address, 4) == b"back"
        scene.refuses(UsageError, scene.write, address, b"x")

    def test_a_private_import(self, scene: Scene, driver: Driver) -> None:
        capability(self, driver, HostMemory)
        there, handle = scene.memory()
        scene.write(there, b"original")
        address = scene.put(scene.reserve(1))
        with scene.exported(handle) as fd:
            driver.mem_map_import(address, scene.g, fd, FD, RW, private=True)
        scene.write(address, b"changed!")
        assert (scene.read(there, 8), scene.read(address, 8)) == (b"original", b"changed!")

    def test_what_is_refused_leaves_nothing(self, scene: Scene, driver: Driver, location: Location) -> None:
        """I4, S7: no memory, no descriptor, nothing at the address."""
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
                    scene.refuses(error, driver.mem_map_new, at, nbytes, location, FD, RW)
                    with scene.refused(error):
                        driver.mem_map_import(at, nbytes, fd, FD, RW, private=False)
                wrong: list[tuple[type[Exception], int, int]] = [
                    (ProtocolError, 3 * g, fd),
                    (ProtocolError, g, reader),
                    (UsageError, g, 1 << 20),
                ]
                for error, nbytes, given in wrong:
                    with scene.refused(error):
                        driver.mem_map_import(wide, nbytes, given, FD, RW, private=False)
                scene.refuses(UsageError, driver.mem_map_new, address, g, Location("elsewhere"), FD, RW)
                scene.refuses(UsageError, driver.mem_map_new, address, g, location, FD, 7)
                with scene.refused(UnsupportedError):
                    driver.mem_map_import(address, g, fd, HandleKind.WIN32, RW, private=False)
        finally:
            os.close(reader)
            os.close(writer)
        driver.mem_map_new(scene.put(address, 2), 2 * g, location, FD, RW)  # the place is as good as before
        scene.unmap(address)
        scene.unmap(taken)
        assert len(os.listdir("/proc/self/fd")) <= fds + 2  # the two that were created above

    def test_sealed_memory_is_mapped_for_reading_only(self, scene: Scene, driver: Driver) -> None:
        """S8: and an import from before the seal becomes read-only with it."""
        sealing = capability(self, driver, HostMemory)
        _, handle = scene.memory()
        address = scene.reserve(3)
        with scene.exported(handle) as fd:
            driver.mem_map_import(scene.put(address), scene.g, fd, FD, RW, private=False)
            sealing.mem_seal(handle)
            assert driver.mem_get_access(address, scene.location) == READ
            with scene.refused(AccessDeniedError):
                driver.mem_map_import(address + scene.g, scene.g, fd, FD, RW, private=False)
            driver.mem_map_import(scene.put(address + scene.g), scene.g, fd, FD, READ, private=False)
            driver.mem_map_import(scene.put(address + 2 * scene.g), scene.g, fd, FD, RW, private=True)
        scene.write(address + 2 * scene.g, b"mine")
        for at in (0, 1):
            with scene.refused(AccessDeniedError):
                driver.mem_set_access(address + at * scene.g, scene.g, RW, (scene.location,))

    def test_of_two_that_map_at_one_place_one_does(self, scene: Scene, driver: Driver) -> None:
        address = scene.reserve(1)
        for _ in range(50):
            outcomes = together(
                [lambda: driver.mem_map_new(address, scene.g, scene.location, FD, RW) for _ in range(3)]
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

        assert together([lambda n=n: work(n) for n in range(4)]) == [None] * 4

    def test_threads_on_the_same_object_leave_the_books_right(self, scene: Scene) -> None:
        """A mistake of the caller, of which one thread wins and the others are told."""
        driver, g = scene.driver, scene.g
        for _ in range(20):
            address, handle = driver.address_reserve(2 * g), driver.mem_create(2 * g, scene.location, FD)
            steps: tuple[Callable[[], None], ...] = (
                lambda a=address, h=handle: driver.mem_map(a, 2 * g, 0, h),
                lambda a=address: driver.mem_unmap(a, 2 * g),
                lambda h=handle: driver.mem_release(h),
                lambda a=address: driver.address_free(a, 2 * g),
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
