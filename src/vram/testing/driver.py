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

import contextlib
import gc
import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

from ..driver.protocol import CopyOnWrite, Driver, HostAddressable, Identity, LiveObjects, Sealing
from ..errors import (
    AccessDeniedError,
    AddressSpaceError,
    AlignmentError,
    OutOfMemoryError,
    ProtocolError,
    UnsupportedError,
    UsageError,
)
from ..spec import Access, HandleKind, Location, round_up

if TYPE_CHECKING:
    from typing import Self

__all__ = ["DriverContract", "Scene"]

CAPABILITIES: dict[str, type] = {p.__name__: p for p in (HostAddressable, CopyOnWrite, Sealing, Identity)}
FD = HandleKind.POSIX_FD


class Scene:
    """A driver at work: makes things, knows what is still out, and takes that back in the end.

    Sizes are in granules (`g` bytes each), so that the tests read alike whatever a driver's granularity is.
    """

    def __init__(self, driver: Driver, location: Location) -> None:
        self.driver = driver
        self.location = location
        self.g = driver.mem_granularity(location, FD).recommended
        self._reserved: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._mapped: dict[int, int] = {}

    def reserve(self, granules: int) -> int:
        address = self.driver.address_reserve(granules * self.g)
        self._reserved[address] = granules * self.g
        return address

    def free(self, address: int) -> None:
        self.driver.address_free(address, self._reserved[address])
        del self._reserved[address]

    def create(self, granules: int = 1, kinds: HandleKind = FD) -> int:
        return self.keep(self.driver.mem_create(granules * self.g, self.location, kinds), granules)

    def keep(self, handle: int, granules: int = 1) -> int:
        self._handles[handle] = granules * self.g
        return handle

    def release(self, handle: int) -> None:
        self.driver.mem_release(handle)
        del self._handles[handle]

    def map(self, address: int, handle: int, access: Access = Access.READ_WRITE) -> int:
        nbytes = self._handles[handle]
        self.driver.mem_map(address, nbytes, 0, handle)
        self._mapped[address] = nbytes
        self.allow(address, nbytes, access)
        return address

    def map_private(self, address: int, handle: int, access: Access = Access.READ_WRITE) -> int:
        driver = self.driver
        assert isinstance(driver, CopyOnWrite)
        nbytes = self._handles[handle]
        driver.mem_map_private(address, nbytes, 0, handle)
        self._mapped[address] = nbytes
        self.allow(address, nbytes, access)
        return address

    def allow(self, address: int, nbytes: int, access: Access) -> None:
        if access is not Access.NONE:
            self.driver.mem_set_access(address, nbytes, access, (self.location,))

    def unmap(self, address: int, nbytes: int | None = None) -> None:
        nbytes = nbytes or self._mapped[address]
        self.driver.mem_unmap(address, nbytes)
        for start in [start for start in self._mapped if address <= start < address + nbytes]:
            del self._mapped[start]

    def memory(self, granules: int = 1, access: Access = Access.READ_WRITE) -> tuple[int, int]:
        """Return (address, handle) of new memory, mapped in a reservation of its own."""
        handle = self.create(granules)
        return self.map(self.reserve(granules), handle, access), handle

    def write(self, address: int, data: bytes) -> None:
        self.driver.copy_in(address, memoryview(data))

    def read(self, address: int, nbytes: int) -> bytes:
        found = bytearray(nbytes)
        self.driver.copy_out(memoryview(found), address)
        return bytes(found)

    @contextlib.contextmanager
    def refused(self, error: type[Exception]) -> Iterator[None]:
        """Expect an error that says something, and that nothing has changed (I4)."""
        before = self.driver.live()
        with pytest.raises(error) as caught:
            yield
        assert str(caught.value)
        assert self.driver.live() == before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for address, nbytes in self._mapped.items():
            self.driver.mem_unmap(address, nbytes)
        for handle in self._handles:
            self.driver.mem_release(handle)
        for address, nbytes in self._reserved.items():
            self.driver.address_free(address, nbytes)


class DriverContract:
    """The suite. See the module."""

    offers: frozenset[str] = frozenset()

    @pytest.fixture
    def driver(self) -> Driver:
        """Supply a driver of the kind under test."""
        raise NotImplementedError("supply a fixture `driver`")

    @pytest.fixture
    def location(self) -> Location:
        """Supply a location that it serves."""
        raise NotImplementedError("supply a fixture `location`")

    @pytest.fixture
    def scene(self, driver: Driver, location: Location) -> Iterator[Scene]:
        before = driver.live()
        with Scene(driver, location) as scene:
            yield scene
        assert driver.live() == before

    def _capability(self, driver: Driver, capability: type) -> Any:
        if capability.__name__ not in self.offers:
            pytest.skip(f"{driver.name} does not offer {capability.__name__}")
        return driver

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
            assert scene.read(address, 2 * scene.g) == bytes(2 * scene.g)
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

    # -- other processes ----------------------------------------------------------------------------------------
    def test_export_and_import(self, scene: Scene) -> None:
        address, handle = scene.memory(2)
        scene.write(address, b"shared")
        with _exported(scene, handle) as fd, _exported(scene, handle) as other:
            assert fd != other  # a new one each time, the caller's
            assert not os.get_inheritable(fd)
            imported = scene.keep(scene.driver.mem_import(fd, FD, 2 * scene.g), 2)
            os.fstat(fd)  # still the caller's
        assert imported != handle
        assert scene.driver.mem_properties(imported).handle_kinds == FD
        twin = scene.map(scene.reserve(2), imported)
        assert scene.read(twin, 6) == b"shared"
        scene.write(twin, b"both ways")
        assert scene.read(address, 9) == b"both ways"

    def test_imported_memory_can_be_exported_again(self, scene: Scene) -> None:
        address, handle = scene.memory()
        scene.write(address, b"onward")
        with _exported(scene, handle) as fd:
            imported = scene.keep(scene.driver.mem_import(fd, FD, scene.g))
        with _exported(scene, imported) as fd:
            last = scene.keep(scene.driver.mem_import(fd, FD, scene.g))
        assert scene.read(scene.map(scene.reserve(1), last), 6) == b"onward"

    def test_an_exported_descriptor_keeps_the_memory(self, scene: Scene) -> None:
        address, handle = scene.memory()
        scene.write(address, b"pinned")
        with _exported(scene, handle) as fd:
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
        with _exported(scene, scene.create(2)) as fd, scene.refused(ProtocolError):
            scene.driver.mem_import(fd, FD, 3 * scene.g)

    def test_import_of_no_descriptor(self, scene: Scene) -> None:
        for number in (-1, 1 << 20, 1 << 40):
            with scene.refused(UsageError):
                scene.driver.mem_import(number, FD, scene.g)
        with _exported(scene, scene.create()) as fd:
            with scene.refused(UnsupportedError):
                scene.driver.mem_import(fd, HandleKind.WIN32, scene.g)
            with scene.refused(AlignmentError):
                scene.driver.mem_import(fd, FD, scene.g - 1)

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

        assert _together([lambda n=n: work(n) for n in range(4)]) == [None] * 4  # type: ignore[misc]

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
                results = _together([step] * 3)
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
            assert _together([litter, litter]) == [None, None]
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
        assert driver.live() == LiveObjects(0, 0, 0, 0)

    # -- capabilities -------------------------------------------------------------------------------------------
    def test_buffer(self, scene: Scene, driver: Driver) -> None:
        host = self._capability(driver, HostAddressable)
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
        host = self._capability(driver, HostAddressable)
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
        cow = self._capability(driver, CopyOnWrite)
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
        cow, sealing = self._capability(driver, CopyOnWrite), self._capability(driver, Sealing)
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
        sealing = self._capability(driver, Sealing)
        address, handle = scene.memory()
        scene.write(address, b"sealed")
        silent = scene.map(scene.reserve(1), handle, Access.NONE)
        with _exported(scene, handle) as fd:
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
        sealing = self._capability(driver, Sealing)
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
        identity = self._capability(driver, Identity)
        first, second = scene.create(), scene.create()
        with _exported(scene, first) as a, _exported(scene, first) as b, _exported(scene, second) as c:
            assert identity.mem_identity(a) == identity.mem_identity(b) != identity.mem_identity(c)
            with _exported(scene, scene.keep(driver.mem_import(a, FD, scene.g))) as d:
                assert identity.mem_identity(d) == identity.mem_identity(a)
        with scene.refused(UsageError):
            identity.mem_identity(-1)


@contextlib.contextmanager
def _exported(scene: Scene, handle: int) -> Iterator[int]:
    fd = scene.driver.mem_export(handle, FD)
    try:
        yield fd
    finally:
        os.close(fd)


def _together(calls: list[Callable[[], object]]) -> list[object]:
    """Run calls in threads that start at once; return what each returned or raised."""
    barrier = threading.Barrier(len(calls))
    results: list[object] = ["did not end"] * len(calls)

    def run(index: int) -> None:
        barrier.wait(10)
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001  (whatever it is, the test looks at it)
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # or each would be done before the next has begun
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    return results
