"""The rules of addresses, memory and mappings: a part of :class:`~vram.testing.driver.DriverContract`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from ..driver.protocol import Driver, NativeHandles
from ..errors import (
    AddressSpaceError,
    AlignmentError,
    OutOfMemoryError,
    UnsupportedError,
    UsageError,
)
from ..spec import Access, AllocationFlags, HandleKind, round_up
from .scene import FD, DriverSuite, Scene, remedied

__all__ = ["MappingRules"]


class MappingRules(DriverSuite):
    """What may be reserved, created and mapped, and what an access right means."""

    # -- addresses ----------------------------------------------------------------------------------------------
    def test_reserved_ranges_are_aligned_and_apart(self, scene: Scene) -> None:
        sizes = (1, 3, 2, 64)
        starts = {scene.reserve(size): size for size in sizes}
        assert all(start % scene.g == 0 for start in starts)
        ordered = sorted(starts)
        assert all(a + starts[a] * scene.g <= b for a, b in itertools.pairwise(ordered))
        assert scene.driver.live().reservations == len(sizes)

    def test_reserve_honours_alignment(self, scene: Scene) -> None:
        for factor in (1, 2, 16):
            address = scene.driver.address_reserve(scene.g, alignment=factor * scene.g)
            assert address % (factor * scene.g) == 0
            scene.driver.address_free(address, scene.g)

    def test_reserve_at_an_address_is_a_wish(self, scene: Scene) -> None:
        wish = scene.reserve(4)
        scene.free(wish)
        got = scene.driver.address_reserve(4 * scene.g, address=wish)
        other = scene.driver.address_reserve(4 * scene.g, address=wish)  # taken by now: anywhere else
        assert got != other
        for address in (got, other):
            scene.driver.address_free(address, 4 * scene.g)

    @pytest.mark.parametrize("nbytes", [0, 1, -1, "g+1", "g-1", "-g"])
    def test_sizes_off_the_granularity_are_refused(self, scene: Scene, nbytes: int | str) -> None:
        size = nbytes if isinstance(nbytes, int) else {"g+1": scene.g + 1, "g-1": scene.g - 1, "-g": -scene.g}[nbytes]
        with scene.refused(AlignmentError):
            scene.driver.address_reserve(size)
        with scene.refused(AlignmentError):
            scene.driver.mem_create(size, scene.location, FD)

    def test_bad_alignments_and_addresses_are_refused(self, scene: Scene) -> None:
        for alignment in (1, 3 * scene.g, -scene.g):
            with scene.refused(AlignmentError):
                scene.driver.address_reserve(scene.g, alignment=alignment)
        with scene.refused(AlignmentError):
            scene.driver.address_reserve(scene.g, address=scene.g + 1)

    def test_more_addresses_than_there_are(self, scene: Scene) -> None:
        with scene.refused(AddressSpaceError):
            scene.driver.address_reserve(round_up(1 << 60, scene.g))

    def test_free_names_exactly_what_was_reserved(self, scene: Scene) -> None:
        driver, address = scene.driver, scene.reserve(4)
        for start, nbytes in ((address, 2), (address, 8), (address + scene.g, 3), (address + 4 * scene.g, 4)):
            with scene.refused(UsageError):
                driver.address_free(start, nbytes * scene.g)
        scene.free(address)
        with scene.refused(UsageError):
            driver.address_free(address, 4 * scene.g)

    def test_free_while_mapped_is_refused(self, scene: Scene) -> None:
        address, _ = scene.memory(2)
        scene.write(address, b"still here")
        with scene.refused(UsageError):
            scene.driver.address_free(address, 2 * scene.g)
        assert scene.read(address, 10) == b"still here"

    # -- physical memory ----------------------------------------------------------------------------------------
    def test_new_memory_is_zeroed(self, scene: Scene) -> None:
        for _ in range(2):  # also when it is given out again
            address, handle = scene.memory(2)
            zeros = scene.read(address, 2 * scene.g).count(0)  # a report of 4 MiB that differ takes minutes
            assert zeros == 2 * scene.g
            scene.driver.fill(address, 0xFF, 2 * scene.g)
            scene.unmap(address)
            scene.release(handle)

    def test_more_memory_than_there_is(self, scene: Scene) -> None:
        total = scene.driver.mem_info(scene.location)[1]
        with scene.refused(OutOfMemoryError):
            scene.driver.mem_create(round_up(2 * total, scene.g), scene.location, FD)

    def test_kinds_of_another_world_are_refused(self, scene: Scene) -> None:
        with scene.refused(UnsupportedError):
            scene.driver.mem_create(scene.g, scene.location, HandleKind.WIN32)

    def test_a_handle_is_released_once(self, scene: Scene) -> None:
        handle = scene.create()
        scene.release(handle)
        calls: tuple[Callable[[], object], ...] = (
            lambda: scene.driver.mem_release(handle),
            lambda: scene.driver.mem_properties(handle),
            lambda: scene.driver.mem_export(handle, FD),
        )
        for call in calls:
            with scene.refused(UsageError):
                call()
        address = scene.reserve(1)
        with scene.refused(UsageError):
            scene.driver.mem_map(address, scene.g, 0, handle)

    def test_release_while_mapped(self, scene: Scene) -> None:
        address, handle = scene.memory()
        scene.write(address, b"alive")
        scene.release(handle)
        assert scene.read(address, 5) == b"alive"
        assert scene.driver.live().nbytes == scene.g
        scene.unmap(address)
        assert scene.driver.live().nbytes == 0

    def test_retain(self, scene: Scene) -> None:
        address, handle = scene.memory(2)
        scene.write(address, b"retained")
        scene.release(handle)
        for where in (address, address + scene.g + 5):
            again = scene.keep(scene.driver.mem_retain(where), 2)
            assert scene.driver.mem_properties(again).nbytes in (None, 2 * scene.g)
            other = scene.map(scene.reserve(2), again)
            assert scene.read(other, 8) == b"retained"
            scene.unmap(other)
        scene.unmap(address)
        with scene.refused(UsageError):
            scene.driver.mem_retain(address)

    def test_properties(self, scene: Scene) -> None:
        for kinds in (HandleKind.NONE, FD):
            properties = scene.driver.mem_properties(scene.create(3, kinds))
            assert properties.location == scene.location
            assert properties.handle_kinds == kinds
            assert properties.nbytes in (None, 3 * scene.g)

    def test_native_handles(self, scene: Scene, driver: Driver) -> None:
        """They are lent: nothing changes hands."""
        able = self.capability(driver, NativeHandles)
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
        with scene.refused(UsageError):
            able.mem_native_handle(other)

    @pytest.mark.parametrize("flag", list(AllocationFlags), ids=lambda flag: flag.name.lower())
    def test_flags_are_granted_or_refused(self, scene: Scene, flag: AllocationFlags) -> None:
        """By every call that is asked with them; what was granted is in the properties. Some are wishes."""
        driver, place = scene.driver, scene.location
        try:
            least = driver.mem_granularity(place, FD, flag).minimum
        except UnsupportedError as error:
            remedied(error)
            with scene.refused(UnsupportedError):
                driver.mem_create(scene.g, place, FD, flag)
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

    # -- mappings -----------------------------------------------------------------------------------------------
    def test_a_new_mapping_has_no_access(self, scene: Scene) -> None:
        driver = scene.driver
        address, _ = scene.memory(access=Access.NONE)
        assert driver.mem_get_access(address, scene.location) == Access.NONE
        self._cannot_read(scene, address)
        self._cannot_write(scene, address)

    def test_read_only_is_real(self, scene: Scene) -> None:
        driver = scene.driver
        address, _ = scene.memory()
        scene.write(address, b"one")
        driver.mem_set_access(address, scene.g, Access.READ, (scene.location,))
        assert driver.mem_get_access(address + scene.g - 1, scene.location) == Access.READ
        assert scene.read(address, 3) == b"one"
        self._cannot_write(scene, address)
        driver.mem_set_access(address, scene.g, Access.NONE, (scene.location,))
        self._cannot_read(scene, address)
        driver.mem_set_access(address, scene.g, Access.READ_WRITE, (scene.location,))
        assert scene.read(address, 3) == b"one"

    def _cannot_read(self, scene: Scene, address: int) -> None:
        elsewhere = scene.memory()[0]
        with scene.refused(UsageError):
            scene.read(address, 1)
        with scene.refused(UsageError):
            scene.driver.copy(elsewhere, address, 1)

    def _cannot_write(self, scene: Scene, address: int) -> None:
        elsewhere = scene.memory()[0]
        with scene.refused(UsageError):
            scene.write(address, b"x")
        with scene.refused(UsageError):
            scene.driver.fill(address, 1, 1)
        with scene.refused(UsageError):
            scene.driver.copy(address, elsewhere, 1)

    def test_an_allocation_is_mapped_whole(self, scene: Scene) -> None:
        handle, address = scene.create(4), scene.reserve(8)
        for offset, nbytes in ((0, 2), (2, 2), (1, 4), (0, 5), (0, 0), (-1, 4)):
            with scene.refused(UsageError):
                scene.driver.mem_map(address, nbytes * scene.g, offset * scene.g, handle)

    def test_mappings_lie_inside_one_reservation(self, scene: Scene) -> None:
        handle, address = scene.create(2), scene.reserve(4)
        for start in (address + 3 * scene.g, address + 4 * scene.g, address - scene.g, 0):
            with scene.refused(UsageError):
                scene.driver.mem_map(start, 2 * scene.g, 0, handle)
        with scene.refused(AlignmentError):
            scene.driver.mem_map(address + 1, 2 * scene.g, 0, handle)

    def test_mappings_do_not_overlap(self, scene: Scene) -> None:
        address = scene.reserve(8)
        scene.map(address + 2 * scene.g, scene.create(3))
        scene.write(address + 2 * scene.g, b"first")
        for at, size in ((2, 3), (2, 1), (4, 1), (4, 2), (1, 2), (0, 8), (1, 3), (3, 1)):
            handle = scene.create(size)
            with scene.refused(UsageError):
                scene.driver.mem_map(address + at * scene.g, size * scene.g, 0, handle)
        for at, size in ((0, 2), (5, 3)):  # right before and right behind
            scene.map(address + at * scene.g, scene.create(size))
        assert scene.read(address + 2 * scene.g, 5) == b"first"

    def test_one_allocation_mapped_twice_is_coherent(self, scene: Scene) -> None:
        address, handle = scene.memory()
        twin = scene.map(scene.reserve(1), handle)
        scene.write(address + 7, b"from one")
        assert scene.read(twin + 7, 8) == b"from one"
        scene.write(twin, b"other")
        assert scene.read(address, 5) == b"other"

    def test_unmap_takes_whole_mappings(self, scene: Scene) -> None:
        address = scene.reserve(8)
        for at in (0, 2, 5):
            scene.map(address + at * scene.g, scene.create(2))
        for at, size in ((0, 1), (1, 1), (1, 2), (0, 3), (3, 4), (4, 1), (7, 1), (5, 4), (0, 9)):
            with scene.refused(UsageError):
                scene.driver.mem_unmap(address + at * scene.g, size * scene.g)
        scene.unmap(address, 8 * scene.g)  # several, and the gap between them
        with scene.refused(UsageError):
            scene.driver.mem_unmap(address, 8 * scene.g)

    def test_unmap_of_some(self, scene: Scene) -> None:
        address = scene.reserve(6)
        for at in (0, 2, 4):
            scene.write(scene.map(address + at * scene.g, scene.create(2)), b"%d" % at)
        scene.unmap(address + 2 * scene.g)
        assert scene.read(address, 1) == b"0"
        assert scene.read(address + 4 * scene.g, 1) == b"4"
        for nowhere in (address + 2 * scene.g, address + 3 * scene.g, address + 4 * scene.g - 1):
            with scene.refused(UsageError):
                scene.read(nowhere, 1)

    def test_an_address_can_be_mapped_again(self, scene: Scene) -> None:
        address, first = scene.memory()
        scene.write(address, b"first")
        scene.unmap(address)
        second = scene.create()
        scene.map(address, second)
        assert scene.read(address, 5) == bytes(5)
        scene.unmap(address)
        scene.map(address, first)
        assert scene.read(address, 5) == b"first"

    def test_set_access_takes_whole_mappings_without_a_gap(self, scene: Scene) -> None:
        driver, address = scene.driver, scene.reserve(8)
        for at in (0, 2, 5):
            scene.map(address + at * scene.g, scene.create(2), Access.NONE)
        spans = ((0, 1), (1, 2), (0, 3), (0, 7), (4, 3), (4, 1), (5, 3), (0, 9), (7, 1))
        for at, size in spans:
            with scene.refused(UsageError):
                driver.mem_set_access(address + at * scene.g, size * scene.g, Access.READ_WRITE, (scene.location,))
        assert all(driver.mem_get_access(address + at * scene.g, scene.location) == 0 for at in (0, 2, 5))
        scene.allow(address, 4 * scene.g, Access.READ_WRITE)  # two adjacent ones in one call
        scene.write(address + 2 * scene.g - 3, b"across")
        assert driver.mem_get_access(address + 5 * scene.g, scene.location) == Access.NONE

    def test_set_access_wants_a_known_right_and_a_location(self, scene: Scene) -> None:
        address, _ = scene.memory()
        with scene.refused(UsageError):
            scene.driver.mem_set_access(address, scene.g, 2, (scene.location,))  # type: ignore[arg-type]
        with scene.refused(UsageError):
            scene.driver.mem_set_access(address, scene.g, Access.READ, ())
        assert scene.driver.mem_get_access(address, scene.location) == Access.READ_WRITE

    def test_access_of_nothing(self, scene: Scene) -> None:
        address = scene.reserve(1)
        with scene.refused(UsageError):
            scene.driver.mem_get_access(address, scene.location)
        with scene.refused(UsageError):
            scene.driver.mem_set_access(address, scene.g, Access.READ, (scene.location,))
