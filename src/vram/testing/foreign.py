"""What a driver must do about memory that others made: the rules of :mod:`vram.driver.foreign` as tests.

Inherit, and supply four fixtures::

    class TestMyDriver(ForeignContract):
        offers = frozenset({"Foreign", "LegacyIpc"})

        @pytest.fixture
        def driver(self):
            return MyDriver()

        @pytest.fixture
        def location(self):
            return Location("mine")

        @pytest.fixture(scope="class")
        @classmethod
        def elsewhere(cls):
            return MyDriver  # called in another process

        @pytest.fixture
        def stranger(self, driver):
            with MyStranger() as stranger:
                yield stranger

Every test ends with the driver's own books where they were before, in both processes. Tests of a capability that is not
in `offers` are reported as skipped, with its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest

from ..driver.foreign import Foreign, PointerInfo
from ..driver.protocol import Driver
from ..errors import UsageError
from ..spec import Access, HandleKind, Location
from .foreign_events import EventRules
from .foreign_legacy import LegacyRules
from .foreign_pools import PoolRules
from .foreign_scene import KIB, ForeignSuite
from .scene import FD, Scene

__all__ = ["ForeignContract", "Stranger"]

NONE, READ, RW = Access.NONE, Access.READ, Access.READ_WRITE


class Stranger(ABC):
    """Another library in this process, which makes memory past the driver under test. It frees what is left."""

    @abstractmethod
    def legacy(self, nbytes: int) -> int:
        """Return the base of new memory of ``cuMemAlloc``'s family."""

    @abstractmethod
    def mapped(self, sizes: tuple[int, ...], kinds: HandleKind, access: Access = RW) -> int:
        """Return where allocations of virtual memory management begin that are mapped one behind the other."""

    @abstractmethod
    def pooled(self, nbytes: int, *, shareable: bool) -> tuple[int, int]:
        """Return the driver's number of a new pool, and the base of new memory of it."""

    @abstractmethod
    def pinned(self, nbytes: int) -> int:
        """Return the base of new memory of the host that the driver knows."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Free what the address is the base of; all that lies behind one another there."""


class ForeignContract(LegacyRules, EventRules, PoolRules, ForeignSuite):
    """The suite. See the module."""

    # -- what is at an address ----------------------------------------------------------------------------------
    def test_memory_of_the_oldest_kind(self, scene: Scene, stranger: Stranger) -> None:
        asked = self.capability(scene.driver, Foreign)
        base = stranger.legacy(1000)
        info = asked.pointer_info(base)
        assert (info.base, info.nbytes, info.location) == (base, 1000, scene.location)
        assert (info.kinds, info.made_by, info.access, info.pool) == (HandleKind.LEGACY_IPC, "legacy", RW, 0)
        for address in (base + 1, base + 999):
            assert asked.pointer_info(address) == info
            assert asked.pointer_identity(address) == info.identity
        self._ends_at(asked, base + 1000, info)

    def test_mapped_memory_is_one_allocation_at_a_time(self, scene: Scene, stranger: Stranger) -> None:
        asked, g = self.capability(scene.driver, Foreign), scene.g
        base = stranger.mapped((g, 2 * g, g), FD)
        found = [asked.pointer_info(base + at) for at in (0, g - 1, g, 3 * g - 1, 3 * g)]
        assert [(info.base, info.nbytes) for info in found] == [
            (base, g), (base, g), (base + g, 2 * g), (base + g, 2 * g), (base + 3 * g, g),
        ]  # fmt: skip
        assert {(info.made_by, info.kinds, info.access, info.location) for info in found} == {
            ("vmm", FD, RW, scene.location)
        }
        assert len({info.identity for info in found}) == 3

    def test_what_cannot_leave_says_so(self, scene: Scene, stranger: Stranger) -> None:
        asked = self.capability(scene.driver, Foreign)
        assert asked.pointer_info(stranger.mapped((scene.g,), HandleKind.NONE)).kinds == HandleKind.NONE
        assert asked.pointer_info(stranger.mapped((scene.g,), FD, READ)).access == READ

    def test_memory_of_a_pool(self, scene: Scene, stranger: Stranger) -> None:
        asked = self.capability(scene.driver, Foreign)
        for shareable in (True, False):
            pool, base = stranger.pooled(1024 * KIB, shareable=shareable)
            info = asked.pointer_info(base + 5)
            assert (info.base, info.nbytes, info.location) == (base, 1024 * KIB, scene.location)
            assert (info.made_by, info.pool, info.access) == ("pool", pool, RW)
            assert info.kinds == (HandleKind.POOL if shareable else HandleKind.NONE)

    def test_memory_of_the_host(self, scene: Scene, stranger: Stranger) -> None:
        asked = self.capability(scene.driver, Foreign)
        info = asked.pointer_info(stranger.pinned(64 * KIB) + 7)
        assert (info.made_by, info.kinds, info.nbytes) == ("host", HandleKind.NONE, 64 * KIB)
        assert info.location != scene.location

    def test_our_own_memory_is_known_like_any_other(self, scene: Scene) -> None:
        asked = self.capability(scene.driver, Foreign)
        address, handle = scene.memory(2)
        info = asked.pointer_info(address + 3)
        assert (info.base, info.nbytes, info.made_by, info.kinds) == (address, 2 * scene.g, "vmm", FD)
        with scene.exported(handle) as fd:
            imported = scene.keep(scene.driver.mem_import(fd, FD, 2 * scene.g), 2)
        # The driver exports nothing that came from elsewhere, and says so here.
        info = asked.pointer_info(scene.map(scene.reserve(2), imported))
        assert (info.kinds, info.made_by, info.location) == (HandleKind.NONE, "vmm", scene.location)

    def test_memory_that_nobody_may_access_yet_is_refused(self, scene: Scene, stranger: Stranger) -> None:
        asked = self.capability(scene.driver, Foreign)
        base = stranger.mapped((scene.g,), FD, NONE)
        for call in (asked.pointer_info, asked.mem_adopt):
            with scene.refused(UsageError):
                call(base)

    def test_unknown_addresses_are_refused(self, scene: Scene, stranger: Stranger) -> None:
        asked = self.capability(scene.driver, Foreign)
        gone = stranger.mapped((scene.g,), FD)
        stranger.free(gone)
        of_python = id(object())
        reserved = scene.reserve(1)
        for address in (0, -1, 1, 1 << 64, of_python, reserved, gone):
            for call in (asked.pointer_info, asked.pointer_identity, asked.mem_adopt):
                with scene.refused(UsageError):
                    call(address)

    def test_an_identity_never_comes_again(self, scene: Scene, stranger: Stranger) -> None:
        """Freed memory and what is at its address afterwards are two allocations."""
        asked = self.capability(scene.driver, Foreign)
        seen = []
        for _ in range(5):
            for base in (stranger.legacy(64 * KIB), stranger.mapped((scene.g,), FD)):
                seen.append(asked.pointer_identity(base))
                stranger.free(base)
        assert len(set(seen)) == len(seen)

    # -- a handle of our own ------------------------------------------------------------------------------------
    def test_adopted_memory_outlives_its_owner(self, scene: Scene, stranger: Stranger) -> None:
        asked, g = self.capability(scene.driver, Foreign), scene.g
        base = stranger.mapped((g, 2 * g), FD)
        with self.window(scene, base, 3 * g):
            scene.write(base + g, b"kept")
        first, second = (scene.keep(asked.mem_adopt(base + at), 2) for at in (g, 3 * g - 1))
        assert first != second  # each to be released once
        assert scene.driver.mem_properties(first).location == scene.location
        assert scene.driver.mem_properties(first).handle_kinds == FD
        stranger.free(base)
        scene.release(first)
        address = scene.map(scene.reserve(2), second)
        assert scene.read(address, 4) == b"kept"
        with scene.exported(second) as fd:
            again = scene.keep(scene.driver.mem_import(fd, FD, 2 * g), 2)
        assert scene.read(scene.map(scene.reserve(2), again), 4) == b"kept"

    def test_adopted_memory_leaves_only_as_it_was_made_to(self, scene: Scene, stranger: Stranger) -> None:
        asked = self.capability(scene.driver, Foreign)
        handle = scene.keep(asked.mem_adopt(stranger.mapped((scene.g,), HandleKind.NONE)))
        with scene.refused(UsageError):
            scene.driver.mem_export(handle, FD)

    def test_only_mapped_memory_is_adopted(self, scene: Scene, stranger: Stranger) -> None:
        asked = self.capability(scene.driver, Foreign)
        pooled = stranger.pooled(64 * KIB, shareable=True)[1]
        for address in (stranger.legacy(1000), pooled, stranger.pinned(64 * KIB)):
            with scene.refused(UsageError):
                asked.mem_adopt(address)

    # -- windows ------------------------------------------------------------------------------------------------
    def test_bytes_through_a_window(self, scene: Scene, stranger: Stranger) -> None:
        self.capability(scene.driver, Foreign)
        ours, _ = scene.memory()
        for base in (
            stranger.legacy(8 * KIB),
            stranger.mapped((scene.g,), FD),
            stranger.pooled(8 * KIB, shareable=False)[1],
        ):
            with scene.refused(UsageError):  # nobody has said yet that it is there
                scene.read(base, 1)
            with self.window(scene, base, 8 * KIB):
                data = bytes(range(256)) * 4
                scene.write(base + 3, data)
                assert scene.read(base + 3, 1024) == data
                scene.driver.fill(base + 10, 0xAB, 100)
                assert scene.read(base + 3, 1024) == data[:7] + b"\xab" * 100 + data[107:]
                scene.driver.copy(ours + 1, base + 3, 1024)
                assert scene.read(ours + 1, 1024) == data[:7] + b"\xab" * 100 + data[107:]
                scene.driver.copy(base + 2048, ours + 1, 1024)
                assert scene.read(base + 2048, 7) == data[:7]
                scene.driver.copy(base + 4096, base, 2048)
                assert scene.read(base + 4099, 7) == data[:7]
                with scene.refused(UsageError):
                    scene.driver.copy(base + 10, base, 11)  # overlapping
                scene.write(base, b"")
                scene.driver.fill(base, 0, 0)
            with scene.refused(UsageError):
                scene.read(base, 1)

    def test_bytes_outside_a_window_are_refused(self, scene: Scene, stranger: Stranger) -> None:
        """Also where the owner has more: the rest was not said to be there."""
        self.capability(scene.driver, Foreign)
        base, (ours, _) = stranger.legacy(16 * KIB), scene.memory()
        with self.window(scene, base + KIB, 8 * KIB):
            end = base + 9 * KIB
            for start, nbytes in ((base, 1), (base + KIB - 1, 2), (end, 1), (end - 1, 2), (base + KIB, 8 * KIB + 1)):
                with scene.refused(UsageError):
                    scene.read(start, nbytes)
                with scene.refused(UsageError):
                    scene.write(start, bytes(nbytes))
                with scene.refused(UsageError):
                    scene.driver.fill(start, 0, nbytes)
                with scene.refused(UsageError):
                    scene.driver.copy(ours, start, nbytes)
                with scene.refused(UsageError):
                    scene.driver.copy(start, ours, nbytes)
            with scene.refused(UsageError):
                scene.driver.fill(base + KIB, 1, -1)

    def test_a_window_has_the_rights_that_were_said(self, scene: Scene, stranger: Stranger) -> None:
        self.capability(scene.driver, Foreign)
        base, (ours, _) = stranger.legacy(4 * KIB), scene.memory()
        with self.window(scene, base, 4 * KIB, NONE), scene.refused(UsageError):
            scene.read(base, 1)
        with self.window(scene, base, 4 * KIB, READ):
            scene.read(base, 4 * KIB)
            scene.driver.copy(ours, base, KIB)
            with scene.refused(UsageError):
                scene.write(base, b"x")
            with scene.refused(UsageError):
                scene.driver.fill(base, 1, 1)
            with scene.refused(UsageError):
                scene.driver.copy(base, ours, KIB)
            with self.window(scene, base, 2 * KIB, RW):  # another, over a part of it
                scene.write(base, b"x")
                with scene.refused(UsageError):
                    scene.write(base + 2 * KIB, b"x")
                assert scene.read(base, 1) == b"x"
            with scene.refused(UsageError):
                scene.write(base, b"x")

    def test_windows_are_counted_and_closed_once(self, scene: Scene, stranger: Stranger) -> None:
        asked, base = self.capability(scene.driver, Foreign), stranger.legacy(KIB)
        before = scene.driver.live()
        windows = [asked.window_open(base, KIB, scene.location, RW) for _ in range(3)]
        assert len(set(windows)) == 3
        assert scene.driver.live().mappings == before.mappings + 3
        for window in windows:
            asked.window_close(window)
            with scene.refused(UsageError):
                asked.window_close(window)
        assert scene.driver.live() == before

    def test_a_window_over_nothing_is_refused(self, scene: Scene, stranger: Stranger) -> None:
        asked, base = self.capability(scene.driver, Foreign), stranger.legacy(KIB)
        for address, nbytes in ((0, KIB), (-1, KIB), (base, 0), (base, -1)):
            with scene.refused(UsageError):
                asked.window_open(address, nbytes, scene.location, RW)
        for place in (Location("elsewhere"), Location(scene.driver.name, 9999)):
            with scene.refused(UsageError):
                asked.window_open(base, KIB, place, RW)

    def _ends_at(self, asked: Foreign, address: int, info: PointerInfo) -> None:
        """What follows an allocation is nothing, or another one."""
        try:
            assert asked.pointer_identity(address) != info.identity
        except UsageError:
            with pytest.raises(UsageError):
                asked.pointer_info(address)

    @pytest.fixture
    def stranger(self, driver: Driver) -> Stranger:
        """Supply another library at work in this process; it frees what is left in the end."""
        raise NotImplementedError("supply a fixture `stranger`")
