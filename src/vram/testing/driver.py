"""The rules of :mod:`vram.driver.protocol` as tests: what code proven on one driver relies on with every other.

Inherit, and supply two fixtures::

    class TestMyDriver(DriverContract):
        offers = frozenset({"HostMemory"})

        @pytest.fixture
        def driver(self):
            return MyDriver()

        @pytest.fixture
        def location(self):
            return Location("mine")

Bytes go through ``copy_in``, ``copy_out`` and ``fill``, so that memory the CPU cannot reach passes too. Every test
ends with the driver's own books where they were before. `offers` names what else the driver is, out of
``CAPABILITIES``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..driver.protocol import DeviceMemory, Driver, HostMemory
from ..errors import AddressSpaceError, AlignmentError, OutOfMemoryError, ProtocolError, UnsupportedError, UsageError
from ..spec import Access, HandleKind, Location, round_up

CAPABILITIES: dict[str, type] = {"HostMemory": HostMemory, "DeviceMemory": DeviceMemory}
FD = HandleKind.POSIX_FD
NONE, READ, RW = Access.NONE, Access.READ, Access.READ_WRITE


class Scene:
    """A driver at work: makes things, knows what is still out, and takes that back in the end.

    Sizes are in granules (`g` bytes each), so that the tests read alike whatever a driver's granularity is.
    """

    def __init__(self, driver: Driver, location: Location) -> None:
        self.driver = driver
        self.location = location
        self.g = driver.mem_granularity(location, FD).recommended
        self._reserved: dict[int, int] = {}  # each: granules, by the address or the handle
        self._handles: dict[int, int] = {}
        self._mapped: dict[int, int] = {}

    def reserve(self, granules: int) -> int:
        """Return the base of a new range of addresses."""
        address = self.driver.address_reserve(granules * self.g)
        self._reserved[address] = granules
        return address

    def free(self, address: int) -> None:
        """Give a whole range back."""
        self.driver.address_free(address, self._reserved[address] * self.g)
        del self._reserved[address]

    def create(self, granules: int = 1, kinds: HandleKind = FD) -> int:
        """Return a handle to new memory."""
        return self.keep(self.driver.mem_create(granules * self.g, self.location, kinds), granules)

    def keep(self, handle: int, granules: int = 1) -> int:
        """Take over a handle that came about otherwise; return it."""
        self._handles[handle] = granules
        return handle

    def release(self, handle: int) -> None:
        """Give a handle back."""
        self.driver.mem_release(handle)
        del self._handles[handle]

    def map(self, address: int, handle: int, access: Access = RW, *, private: bool = False) -> int:
        """Map memory and allow access to it; return `address`."""
        granules = self._handles[handle]
        call = getattr(self.driver, "mem_map_private" if private else "mem_map")
        call(address, granules * self.g, 0, handle)
        return self.put(address, granules, access)

    def put(self, address: int, granules: int = 1, access: Access = NONE) -> int:
        """Take over what was mapped otherwise, and allow access to it; return `address`."""
        self._mapped[address] = granules
        if access is not NONE:
            self.driver.mem_set_access(address, granules * self.g, access, (self.location,))
        return address

    def unmap(self, address: int, granules: int | None = None) -> None:
        """Unmap the mapping at `address`, or all in a span."""
        nbytes = (granules or self._mapped[address]) * self.g
        self.driver.mem_unmap(address, nbytes)
        self._mapped = {at: size for at, size in self._mapped.items() if not address <= at < address + nbytes}

    def memory(self, granules: int = 1, access: Access = RW) -> tuple[int, int]:
        """Return (address, handle) of new memory, mapped in a reservation of its own."""
        handle = self.create(granules)
        return self.map(self.reserve(granules), handle, access), handle

    def write(self, address: int, data: bytes) -> None:
        """Put bytes at an address."""
        self.driver.copy_in(address, memoryview(data))

    def read(self, address: int, nbytes: int) -> bytes:
        """Return the bytes at an address."""
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

    def refuses(self, error: type[Exception], call: Callable[..., object], *arguments: object) -> None:
        """Expect that of a call."""
        with self.refused(error):
            call(*arguments)

    def exported(self, handle: int) -> contextlib.AbstractContextManager[int]:
        """Lend a new descriptor of the memory for the length of a block."""
        return lent(self.driver.mem_export(handle, FD))

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_: object) -> None:
        for address, granules in self._mapped.items():
            self.driver.mem_unmap(address, granules * self.g)
        for handle in self._handles:
            self.driver.mem_release(handle)
        for address, granules in self._reserved.items():
            self.driver.address_free(address, granules * self.g)


@contextlib.contextmanager
def lent(fd: int) -> Iterator[int]:
    """Lend a descriptor for the length of a block, and close it: that fails if the borrower has closed it (I9)."""
    try:
        yield fd
    finally:
        os.close(fd)


class DriverSuite:
    """The fixtures of suites for drivers."""

    offers: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if unknown := set(cls.offers) - set(CAPABILITIES):
            raise UsageError(f"{cls.__name__} offers {sorted(unknown)}; the capabilities are {sorted(CAPABILITIES)}")

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
        """The driver at work. All that a test leaves in it is taken back, and the driver's books must agree."""
        before = driver.live()
        with Scene(driver, location) as scene:
            yield scene
        assert driver.live() == before


class DriverContract(DriverSuite):
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
        found = driver.support(location)
        assert found == driver.support(location)
        assert (found.vmm, found.posix_fd) == ("", "")
        assert all(isinstance(why, str) for why in found.missing().values())
        for kinds in (HandleKind.NONE, FD):
            granularity = driver.mem_granularity(location, kinds)
            assert granularity.minimum > 0
            assert granularity.minimum & (granularity.minimum - 1) == 0
            assert granularity.recommended % granularity.minimum == 0

    def test_a_foreign_location_is_refused(self, scene: Scene) -> None:
        driver, (address, _) = scene.driver, scene.memory()
        for place in (Location("elsewhere"), Location(driver.name, 9999)):
            for call in (driver.device_info, driver.mem_info, driver.synchronize):
                scene.refuses(UsageError, call, place)
            scene.refuses(UsageError, driver.mem_create, scene.g, place, FD)
            scene.refuses(UsageError, driver.mem_set_access, address, scene.g, READ, (place,))
            scene.refuses(UsageError, driver.mem_get_access, address, place)

    # -- bytes --------------------------------------------------------------------------------------------------
    def test_bytes_at_any_offset_and_none_outside(self, scene: Scene) -> None:
        address, _ = scene.memory(2)
        data = bytes(range(256)) * 3
        for offset in (1, scene.g - 300, 2 * scene.g - len(data), 0):
            scene.write(address + offset, data)
            assert scene.read(address + offset, len(data)) == data
        scene.driver.fill(address + 5, 0xAB, 500)
        assert scene.read(address, 768) == data[:5] + b"\xab" * 500 + data[505:]
        scene.driver.copy(address + 2001, address + 3, 500)
        assert scene.read(address + 2000, 502) == b"\0" + data[3:5] + b"\xab" * 498 + b"\0"
        end = address + 2 * scene.g
        for start, nbytes in ((end, 1), (end - 1, 2), (address, 2 * scene.g + 1), (address - 1, 2), (0, 1)):
            scene.refuses(UsageError, scene.read, start, nbytes)
            scene.refuses(UsageError, scene.driver.fill, start, 0, nbytes)

    # -- addresses ----------------------------------------------------------------------------------------------
    def test_reserved_ranges_are_aligned_and_apart(self, scene: Scene) -> None:
        starts = {scene.reserve(size): size for size in (1, 3, 2, 64)}
        assert all(start % scene.g == 0 for start in starts)
        assert all(a + starts[a] * scene.g <= b for a, b in itertools.pairwise(sorted(starts)))
        assert scene.driver.live().reservations == len(starts)
        for alignment in (scene.g, 2 * scene.g, 16 * scene.g):
            address = scene.driver.address_reserve(scene.g, alignment=alignment)
            assert address % alignment == 0
            scene.driver.address_free(address, scene.g)

    def test_sizes_alignments_and_addresses_off_the_granularity_are_refused(self, scene: Scene) -> None:
        driver, g = scene.driver, scene.g
        for nbytes in (0, 1, -1, g + 1, g - 1, -g):
            scene.refuses(AlignmentError, driver.address_reserve, nbytes)
            scene.refuses(AlignmentError, driver.mem_create, nbytes, scene.location, FD)
        for alignment, address in ((1, 0), (3 * g, 0), (-g, 0), (0, g + 1)):
            with scene.refused(AlignmentError):
                driver.address_reserve(g, alignment=alignment, address=address)

    def test_free_names_exactly_what_was_reserved(self, scene: Scene) -> None:
        driver, address = scene.driver, scene.reserve(4)
        for start, nbytes in ((address, 2), (address, 8), (address + scene.g, 3), (address + 4 * scene.g, 4)):
            scene.refuses(UsageError, driver.address_free, start, nbytes * scene.g)
        scene.write(scene.map(address, scene.create()), b"still here")
        scene.refuses(UsageError, driver.address_free, address, 4 * scene.g)
        assert scene.read(address, 10) == b"still here"
        scene.unmap(address)
        scene.free(address)
        scene.refuses(UsageError, driver.address_free, address, 4 * scene.g)

    # -- physical memory ----------------------------------------------------------------------------------------
    def test_new_memory_is_zeroed(self, scene: Scene) -> None:
        for _ in range(2):  # also when it is given out again
            address, handle = scene.memory(2)
            zeros = scene.read(address, 2 * scene.g).count(0)  # a report of 4 MiB that differ takes minutes
            assert zeros == 2 * scene.g
            scene.driver.fill(address, 0xFF, 2 * scene.g)
            scene.unmap(address)
            scene.release(handle)

    def test_more_than_there_is(self, scene: Scene) -> None:
        total = scene.driver.mem_info(scene.location)[1]
        scene.refuses(OutOfMemoryError, scene.driver.mem_create, round_up(2 * total, scene.g), scene.location, FD)
        scene.refuses(UnsupportedError, scene.driver.mem_create, scene.g, scene.location, HandleKind.WIN32)
        scene.refuses(AddressSpaceError, scene.driver.address_reserve, round_up(1 << 60, scene.g))

    def test_a_handle_is_released_once(self, scene: Scene) -> None:
        driver, address, handle = scene.driver, scene.reserve(1), scene.create()
        scene.release(handle)
        scene.refuses(UsageError, driver.mem_release, handle)
        scene.refuses(UsageError, driver.mem_properties, handle)
        scene.refuses(UsageError, driver.mem_export, handle, FD)
        scene.refuses(UsageError, driver.mem_map, address, scene.g, 0, handle)

    def test_memory_lives_until_its_last_mapping_goes(self, scene: Scene) -> None:
        address, handle = scene.memory(2)
        scene.write(address, b"retained")
        scene.release(handle)
        for where in (address, address + scene.g + 5):
            again = scene.keep(scene.driver.mem_retain(where), 2)
            assert scene.driver.mem_properties(again).nbytes in (None, 2 * scene.g)
            other = scene.map(scene.reserve(2), again)
            assert scene.read(other, 8) == b"retained"
            scene.unmap(other)
            scene.release(again)
        assert scene.driver.live().nbytes == 2 * scene.g
        scene.unmap(address)
        assert scene.driver.live().nbytes == 0
        scene.refuses(UsageError, scene.driver.mem_retain, address)

    # -- mappings -----------------------------------------------------------------------------------------------
    def test_access_is_what_was_set(self, scene: Scene) -> None:
        driver, (address, _), (elsewhere, _) = scene.driver, scene.memory(access=NONE), scene.memory()
        reads = (lambda: scene.read(address, 1), lambda: driver.copy(elsewhere, address, 1))
        writes = (
            lambda: scene.write(address, b"x"), lambda: driver.fill(address, 7, 1),
            lambda: driver.copy(address, elsewhere, 1),
        )  # fmt: skip
        for access in (None, RW, READ, NONE, READ):  # a new mapping has none
            if access is not None:
                driver.mem_set_access(address, scene.g, access, (scene.location,))
            assert driver.mem_get_access(address + scene.g - 1, scene.location) == (access or NONE)
            for calls, least in ((reads, READ), (writes, RW)):
                for call in calls:
                    with contextlib.nullcontext() if (access or NONE) >= least else scene.refused(UsageError):
                        call()
            if access is RW:
                scene.write(address, b"kept")
        assert scene.read(address, 4) == b"kept"
        for wrong, places in ((2, (scene.location,)), (RW, ())):
            scene.refuses(UsageError, driver.mem_set_access, address, scene.g, wrong, places)
        assert driver.mem_get_access(address, scene.location) == READ

    def test_an_allocation_is_mapped_whole_and_inside_one_reservation(self, scene: Scene) -> None:
        handle, address, g = scene.create(2), scene.reserve(4), scene.g
        for offset, nbytes in ((0, 1), (1, 1), (1, 2), (0, 3), (0, 0), (-1, 2)):
            scene.refuses(UsageError, scene.driver.mem_map, address, nbytes * g, offset * g, handle)
        for start in (address + 3 * g, address + 4 * g, address - g, 0):
            scene.refuses(UsageError, scene.driver.mem_map, start, 2 * g, 0, handle)
        scene.refuses(AlignmentError, scene.driver.mem_map, address + 1, 2 * g, 0, handle)

    def test_mappings_do_not_overlap(self, scene: Scene) -> None:
        address = scene.reserve(8)
        scene.write(scene.map(address + 2 * scene.g, scene.create(3)), b"first")
        for at, size in ((2, 3), (2, 1), (4, 1), (4, 2), (1, 2), (0, 8), (1, 3), (3, 1)):
            handle = scene.create(size)
            scene.refuses(UsageError, scene.driver.mem_map, address + at * scene.g, size * scene.g, 0, handle)
        for at, size in ((0, 2), (5, 3)):  # right before and right behind
            scene.map(address + at * scene.g, scene.create(size))
        assert scene.read(address + 2 * scene.g, 5) == b"first"

    def test_memory_is_mapped_twice_and_again(self, scene: Scene) -> None:
        address, handle = scene.memory()
        twin = scene.map(scene.reserve(1), handle)
        scene.write(address + 7, b"from one")
        assert scene.read(twin + 7, 8) == b"from one"
        scene.write(twin, b"other")
        assert scene.read(address, 5) == b"other"
        for mapped, found in ((scene.create(), bytes(5)), (handle, b"other")):
            scene.unmap(address)
            assert scene.read(scene.map(address, mapped), 5) == found

    def test_unmap_and_set_access_take_whole_mappings(self, scene: Scene) -> None:
        driver, address, g = scene.driver, scene.reserve(8), scene.g
        for at in (0, 2, 5):
            scene.map(address + at * g, scene.create(2), NONE)
        halves = ((0, 1), (1, 1), (1, 2), (0, 3), (3, 4), (4, 1), (7, 1), (5, 4), (0, 9))
        for at, size in halves:
            scene.refuses(UsageError, driver.mem_unmap, address + at * g, size * g)
        for at, size in (*halves, (0, 7), (4, 3), (5, 3)):  # nor does a right go over a gap
            scene.refuses(UsageError, driver.mem_set_access, address + at * g, size * g, RW, (scene.location,))
        assert all(driver.mem_get_access(address + at * g, scene.location) == NONE for at in (0, 2, 5))
        driver.mem_set_access(address, 4 * g, RW, (scene.location,))  # of two that are adjacent, in one call
        scene.write(address + 2 * g - 3, b"across")
        assert scene.read(address + 2 * g - 3, 6) == b"across"
        assert driver.mem_get_access(address + 5 * g, scene.location) == NONE
        scene.refuses(UsageError, driver.fill, address, 1, 6 * g)
        assert scene.read(address, 1) == b"\0"
        scene.refuses(UsageError, driver.mem_get_access, address + 4 * g, scene.location)
        scene.unmap(address, 8)  # all of them, and the gap
        scene.refuses(UsageError, driver.mem_unmap, address, 8 * g)
        scene.refuses(UsageError, driver.mem_get_access, address, scene.location)
        scene.refuses(UsageError, driver.mem_set_access, address, g, READ, (scene.location,))

    # -- other processes ----------------------------------------------------------------------------------------
    def test_export_and_import(self, scene: Scene) -> None:
        address, handle = scene.memory(2)
        scene.write(address, b"shared")
        with scene.exported(handle) as fd, scene.exported(handle) as other:
            assert fd != other  # a new one each time, the caller's
            assert not os.get_inheritable(fd)
            imported = scene.keep(scene.driver.mem_import(fd, FD, 2 * scene.g), 2)
        assert imported != handle
        assert scene.driver.mem_properties(imported).handle_kinds == FD
        twin = scene.map(scene.reserve(2), imported)
        assert scene.read(twin, 6) == b"shared"
        scene.write(twin, b"both ways")
        assert scene.read(address, 9) == b"both ways"

    def test_an_exported_descriptor_keeps_the_memory(self, scene: Scene) -> None:
        address, handle = scene.memory()
        scene.write(address, b"pinned")
        with scene.exported(handle) as fd:
            scene.unmap(address)
            scene.release(handle)
            assert scene.driver.live().nbytes == 0
            again = scene.keep(scene.driver.mem_import(fd, FD, scene.g))
        with scene.exported(again) as fd:  # and leaves once more
            last = scene.keep(scene.driver.mem_import(fd, FD, scene.g))
        assert scene.read(scene.map(address, last), 6) == b"pinned"

    def test_only_memory_made_for_it_is_exported(self, scene: Scene) -> None:
        for kinds, asked in ((HandleKind.NONE, FD), (FD, HandleKind.FABRIC), (FD, HandleKind.NONE)):
            found = scene.driver.mem_properties(handle := scene.create(3, kinds))
            assert (found.location, found.handle_kinds) == (scene.location, kinds)
            assert found.nbytes in (None, 3 * scene.g)
            scene.refuses(UsageError, scene.driver.mem_export, handle, asked)

    def test_import_believes_nothing(self, scene: Scene) -> None:
        """Refused: no memory, memory that could be truncated, and memory that is smaller than stated (S7, S8)."""
        driver, g = scene.driver, scene.g
        with contextlib.ExitStack() as end:
            unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(unsealed, g)
            for fd in (*os.pipe(), os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), unsealed):
                end.enter_context(lent(fd))
                scene.refuses(ProtocolError, driver.mem_import, fd, FD, g)
        for number in (-1, 1 << 20, 1 << 40):
            scene.refuses(UsageError, driver.mem_import, number, FD, g)
        address = scene.reserve(3)
        with scene.exported(scene.create(2)) as fd:
            for kind, nbytes, error in ((HandleKind.WIN32, g, UnsupportedError), (FD, g - 1, AlignmentError)):
                scene.refuses(error, driver.mem_import, fd, kind, nbytes)
            with pytest.raises(ProtocolError):  # for a false size: at once, or when it is mapped
                driver.mem_map(address, 3 * g, 0, scene.keep(driver.mem_import(fd, FD, 3 * g), 3))
        scene.refuses(UsageError, driver.mem_unmap, address, 3 * g)
