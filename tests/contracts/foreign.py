"""What a driver must do about memory that others made: the rules of :mod:`vram.driver.foreign` as tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.contracts.driver import capability
from tests.support.other_process import OtherProcess
from tests.support.raw_cuda import CudaStranger

from vram.driver.protocol import HANDLE_BYTES, DeviceMemory, LiveObjects, PointerInfo
from vram.errors import OutOfMemoryError, ProtocolError, UsageError
from vram.spec import Access, HandleKind, Location
from vram.testing.driver import FD, NONE, READ, RW, DriverSuite, Scene

KIB = 1024
SIZE = 5 * 1024 * KIB
DEFAULT = 1  # the legacy default stream


class ForeignSuite(DriverSuite):
    """The fixtures: a driver, another process with one, and another library at work in this process."""

    @pytest.fixture(scope="class")
    @classmethod
    def elsewhere(cls) -> Callable[[], Any]:
        """Supply what makes a driver of the same kind in another process: a function of a module, or a class."""
        raise NotImplementedError("supply a fixture `elsewhere`, for the class")

    @pytest.fixture(scope="class")
    @classmethod
    def neighbour(cls, elsewhere: Callable[[], Any]) -> Iterator[OtherProcess]:
        """The other process: one for all tests of a class, since its start takes longer than they do."""
        with OtherProcess(elsewhere) as other:
            yield other

    @pytest.fixture
    def other(self, neighbour: OtherProcess, scene: Scene) -> Iterator[OtherProcess]:
        """The other process. What a test leaves there fails it: the books there must agree, too."""
        before = neighbour.call("live")
        yield neighbour
        assert neighbour.call("live") == before

    @pytest.fixture
    def stranger(self) -> CudaStranger:
        """Supply another library in this process, which makes memory past the driver and frees what is left."""
        raise NotImplementedError("supply a fixture `stranger`")

    @contextlib.contextmanager
    def window(self, scene: Scene, address: int, nbytes: int, access: Access = RW) -> Iterator[int]:
        """Open a window for the length of a block."""
        driver: Any = scene.driver
        window = driver.window_open(address, nbytes, scene.location, access)
        try:
            yield window
        finally:
            driver.window_close(window)


@contextlib.contextmanager
def refused_there(other: OtherProcess, error: type[Exception]) -> Iterator[None]:
    """Expect an error that says something from the other process, and that nothing has changed there (I4)."""
    before: LiveObjects = other.call("live")
    with pytest.raises(error) as caught:
        yield
    assert str(caught.value)
    assert other.call("live") == before


def refuses_there(other: OtherProcess, error: type[Exception], call: Callable[..., Any], *arguments: Any) -> None:
    with refused_there(other, error):
        call(*arguments)


@contextlib.contextmanager
def _event(scene: Scene, *, interprocess: bool = True) -> Iterator[int]:
    driver: Any = scene.driver
    event = driver.event_create(scene.location, interprocess=interprocess)
    try:
        yield event
    finally:
        driver.event_destroy(event)


class ForeignContract(ForeignSuite):
    """Pointers, windows, handles of 64 bytes, and events; pools are in :mod:`tests.contracts.pools`."""

    # -- what is at an address ----------------------------------------------------------------------------------
    def test_memory_of_the_oldest_kind(self, scene: Scene, stranger: CudaStranger) -> None:
        asked = capability(self, scene.driver, DeviceMemory)
        base = stranger.legacy(1000)
        info = asked.pointer_info(base)
        assert (info.base, info.nbytes, info.location) == (base, 1000, scene.location)
        assert (info.kinds, info.made_by, info.access, info.pool) == (HandleKind.LEGACY_IPC, "legacy", RW, 0)
        for address in (base + 1, base + 999):
            assert asked.pointer_info(address) == info
            assert asked.pointer_identity(address) == info.identity
        self._ends_at(asked, base + 1000, info)

    def test_mapped_memory_is_one_allocation_at_a_time(self, scene: Scene, stranger: CudaStranger) -> None:
        asked, g = capability(self, scene.driver, DeviceMemory), scene.g
        base = stranger.mapped((g, 2 * g, g), FD)
        found = [asked.pointer_info(base + at) for at in (0, g - 1, g, 3 * g - 1, 3 * g)]
        assert [(info.base, info.nbytes) for info in found] == [
            (base, g), (base, g), (base + g, 2 * g), (base + g, 2 * g), (base + 3 * g, g),
        ]  # fmt: skip
        assert {(info.made_by, info.kinds, info.access, info.location) for info in found} == {
            ("vmm", FD, RW, scene.location)
        }
        assert len({info.identity for info in found}) == 3

    def test_what_cannot_leave_says_so(self, scene: Scene, stranger: CudaStranger) -> None:
        asked = capability(self, scene.driver, DeviceMemory)
        assert asked.pointer_info(stranger.mapped((scene.g,), HandleKind.NONE)).kinds == HandleKind.NONE
        assert asked.pointer_info(stranger.mapped((scene.g,), FD, READ)).access == READ

    def test_memory_of_a_pool(self, scene: Scene, stranger: CudaStranger) -> None:
        asked = capability(self, scene.driver, DeviceMemory)
        for shareable in (True, False):
            pool, base = stranger.pooled(1024 * KIB, shareable=shareable)
            info = asked.pointer_info(base + 5)
            assert (info.base, info.nbytes, info.location) == (base, 1024 * KIB, scene.location)
            assert (info.made_by, info.pool, info.access) == ("pool", pool, RW)
            assert info.kinds == (HandleKind.POOL if shareable else HandleKind.NONE)

    def test_memory_of_the_host(self, scene: Scene, stranger: CudaStranger) -> None:
        asked = capability(self, scene.driver, DeviceMemory)
        info = asked.pointer_info(stranger.pinned(64 * KIB) + 7)
        assert (info.made_by, info.kinds, info.nbytes) == ("host", HandleKind.NONE, 64 * KIB)
        assert info.location != scene.location

    def test_our_own_memory_is_known_like_any_other(self, scene: Scene) -> None:
        asked = capability(self, scene.driver, DeviceMemory)
        address, handle = scene.memory(2)
        info = asked.pointer_info(address + 3)
        assert (info.base, info.nbytes, info.made_by, info.kinds) == (address, 2 * scene.g, "vmm", FD)
        with scene.exported(handle) as fd:
            imported = scene.keep(scene.driver.mem_import(fd, FD, 2 * scene.g), 2)
        # The driver exports nothing that came from elsewhere, and says so here.
        info = asked.pointer_info(scene.map(scene.reserve(2), imported))
        assert (info.kinds, info.made_by, info.location) == (HandleKind.NONE, "vmm", scene.location)

    def test_memory_that_nobody_may_access_yet_is_refused(self, scene: Scene, stranger: CudaStranger) -> None:
        asked = capability(self, scene.driver, DeviceMemory)
        base = stranger.mapped((scene.g,), FD, NONE)
        for call in (asked.pointer_info, asked.mem_adopt):
            scene.refuses(UsageError, call, base)

    def test_unknown_addresses_are_refused(self, scene: Scene, stranger: CudaStranger) -> None:
        asked = capability(self, scene.driver, DeviceMemory)
        gone = stranger.mapped((scene.g,), FD)
        stranger.free(gone)
        of_python = id(object())
        reserved = scene.reserve(1)
        for address in (0, -1, 1, 1 << 64, of_python, reserved, gone):
            for call in (asked.pointer_info, asked.pointer_identity, asked.mem_adopt):
                scene.refuses(UsageError, call, address)

    def test_an_identity_never_comes_again(self, scene: Scene, stranger: CudaStranger) -> None:
        """Freed memory and what is at its address afterwards are two allocations."""
        asked = capability(self, scene.driver, DeviceMemory)
        seen = []
        for _ in range(5):
            for base in (stranger.legacy(64 * KIB), stranger.mapped((scene.g,), FD)):
                seen.append(asked.pointer_identity(base))
                stranger.free(base)
        assert len(set(seen)) == len(seen)

    # -- a handle of our own ------------------------------------------------------------------------------------
    def test_adopted_memory_outlives_its_owner(self, scene: Scene, stranger: CudaStranger) -> None:
        asked, g = capability(self, scene.driver, DeviceMemory), scene.g
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

    def test_adopted_memory_leaves_only_as_it_was_made_to(self, scene: Scene, stranger: CudaStranger) -> None:
        asked = capability(self, scene.driver, DeviceMemory)
        handle = scene.keep(asked.mem_adopt(stranger.mapped((scene.g,), HandleKind.NONE)))
        scene.refuses(UsageError, scene.driver.mem_export, handle, FD)

    def test_only_mapped_memory_is_adopted(self, scene: Scene, stranger: CudaStranger) -> None:
        asked = capability(self, scene.driver, DeviceMemory)
        pooled = stranger.pooled(64 * KIB, shareable=True)[1]
        for address in (stranger.legacy(1000), pooled, stranger.pinned(64 * KIB)):
            scene.refuses(UsageError, asked.mem_adopt, address)

    # -- windows ------------------------------------------------------------------------------------------------
    def test_bytes_through_a_window(self, scene: Scene, stranger: CudaStranger) -> None:
        capability(self, scene.driver, DeviceMemory)
        ours, _ = scene.memory()
        for base in (
            stranger.legacy(8 * KIB),
            stranger.mapped((scene.g,), FD),
            stranger.pooled(8 * KIB, shareable=False)[1],
        ):
            scene.refuses(UsageError, scene.read, base, 1)  # nobody has said yet that it is there
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
                scene.refuses(UsageError, scene.driver.copy, base + 10, base, 11)  # overlapping
                scene.write(base, b"")
                scene.driver.fill(base, 0, 0)
            scene.refuses(UsageError, scene.read, base, 1)

    def test_bytes_outside_a_window_are_refused(self, scene: Scene, stranger: CudaStranger) -> None:
        """Also where the owner has more: the rest was not said to be there."""
        capability(self, scene.driver, DeviceMemory)
        base, (ours, _) = stranger.legacy(16 * KIB), scene.memory()
        with self.window(scene, base + KIB, 8 * KIB):
            end = base + 9 * KIB
            for start, nbytes in ((base, 1), (base + KIB - 1, 2), (end, 1), (end - 1, 2), (base + KIB, 8 * KIB + 1)):
                scene.refuses(UsageError, scene.read, start, nbytes)
                scene.refuses(UsageError, scene.write, start, bytes(nbytes))
                scene.refuses(UsageError, scene.driver.fill, start, 0, nbytes)
                scene.refuses(UsageError, scene.driver.copy, ours, start, nbytes)
                scene.refuses(UsageError, scene.driver.copy, start, ours, nbytes)
            scene.refuses(UsageError, scene.driver.fill, base + KIB, 1, -1)

    def test_a_window_has_the_rights_that_were_said(self, scene: Scene, stranger: CudaStranger) -> None:
        capability(self, scene.driver, DeviceMemory)
        base, (ours, _) = stranger.legacy(4 * KIB), scene.memory()
        with self.window(scene, base, 4 * KIB, NONE), scene.refused(UsageError):
            scene.read(base, 1)
        with self.window(scene, base, 4 * KIB, READ):
            scene.read(base, 4 * KIB)
            scene.driver.copy(ours, base, KIB)
            scene.refuses(UsageError, scene.write, base, b"x")
            scene.refuses(UsageError, scene.driver.fill, base, 1, 1)
            scene.refuses(UsageError, scene.driver.copy, base, ours, KIB)
            with self.window(scene, base, 2 * KIB, RW):  # another, over a part of it
                scene.write(base, b"x")
                scene.refuses(UsageError, scene.write, base + 2 * KIB, b"x")
                assert scene.read(base, 1) == b"x"
            scene.refuses(UsageError, scene.write, base, b"x")

    def test_windows_are_counted_and_closed_once(self, scene: Scene, stranger: CudaStranger) -> None:
        asked, base = capability(self, scene.driver, DeviceMemory), stranger.legacy(KIB)
        before = scene.driver.live()
        windows = [asked.window_open(base, KIB, scene.location, RW) for _ in range(3)]
        assert len(set(windows)) == 3
        assert scene.driver.live().mappings == before.mappings + 3
        for window in windows:
            asked.window_close(window)
            scene.refuses(UsageError, asked.window_close, window)
        assert scene.driver.live() == before

    def test_a_window_over_nothing_is_refused(self, scene: Scene, stranger: CudaStranger) -> None:
        asked, base = capability(self, scene.driver, DeviceMemory), stranger.legacy(KIB)
        for address, nbytes in ((0, KIB), (-1, KIB), (base, 0), (base, -1)):
            scene.refuses(UsageError, asked.window_open, address, nbytes, scene.location, RW)
        for place in (Location("elsewhere"), Location(scene.driver.name, 9999)):
            scene.refuses(UsageError, asked.window_open, base, KIB, place, RW)

    def _ends_at(self, asked: DeviceMemory, address: int, info: PointerInfo) -> None:
        """What follows an allocation is nothing, or another one."""
        try:
            assert asked.pointer_identity(address) != info.identity
        except UsageError:
            with pytest.raises(UsageError):
                asked.pointer_info(address)

    # -- handles of 64 bytes --------------------------------------------------------------------------------------
    def test_memory_opened_in_another_process(self, scene: Scene, stranger: CudaStranger, other: OtherProcess) -> None:
        able = capability(self, scene.driver, DeviceMemory)
        base = stranger.legacy(SIZE)
        handle = able.ipc_export(base)
        assert isinstance(handle, bytes)
        assert len(handle) == HANDLE_BYTES
        with self.window(scene, base, SIZE):
            scene.write(base + SIZE - 4, b"here")
            there = other.call("ipc_open", handle, SIZE, scene.location)
            assert other.read(there + SIZE - 4, 4) == b"here"
            other.write(there + 3, b"from there")
            assert scene.read(base + 3, 10) == b"from there"
            info = other.call("pointer_info", there + 9)
            assert (info.base, info.nbytes, info.made_by, info.kinds) == (there, SIZE, "opened", 0)
            assert info.location == scene.location
            other.call("ipc_close", there)
        refuses_there(other, UsageError, other.read, there, 1)  # no window any more

    def test_memory_that_is_made_here_leaves_as_any_other_and_is_freed_once(
        self, scene: Scene, other: OtherProcess
    ) -> None:
        able: Any = capability(self, scene.driver, DeviceMemory)
        base = able.ipc_create(SIZE, scene.location)
        info = able.pointer_info(base)
        assert (info.base, info.nbytes, info.made_by, info.location) == (base, SIZE, "legacy", scene.location)
        scene.write(base + SIZE - 4, b"here")
        there = other.call("ipc_open", able.ipc_export(base), SIZE, scene.location)
        assert other.read(there + SIZE - 4, 4) == b"here"
        other.call("ipc_close", there)
        able.ipc_free(base)
        for address in (base, base + 1, 0):
            with pytest.raises(UsageError):
                able.ipc_free(address)
        with pytest.raises(UsageError):
            scene.read(base, 1)
        for nbytes in (0, -1):
            with pytest.raises(UsageError):
                able.ipc_create(nbytes, scene.location)
        with pytest.raises(OutOfMemoryError):
            able.ipc_create(1 << 60, scene.location)

    def test_a_size_that_nobody_stated_is_asked_of_the_driver(
        self, scene: Scene, stranger: CudaStranger, other: OtherProcess
    ) -> None:
        able = capability(self, scene.driver, DeviceMemory)
        for nbytes in (SIZE, 1_000_003):
            there = other.call("ipc_open", able.ipc_export(stranger.legacy(nbytes)), None, scene.location)
            assert other.call("pointer_info", there).nbytes == nbytes
            other.write(there + nbytes - 3, b"end")
            assert other.read(there + nbytes - 3, 3) == b"end"
            refuses_there(other, UsageError, other.read, there + nbytes - 3, 4)
            other.call("ipc_close", there)

    def test_opened_twice_it_is_closed_as_often(
        self, scene: Scene, stranger: CudaStranger, other: OtherProcess
    ) -> None:
        able = capability(self, scene.driver, DeviceMemory)
        handle = able.ipc_export(stranger.legacy(SIZE))
        first, second, third = (other.call("ipc_open", handle, SIZE, scene.location) for _ in range(3))
        assert first == second == third
        other.call("ipc_close", first)
        other.write(second, b"still there")
        other.call("ipc_close", first)
        assert other.read(second, 11) == b"still there"
        other.call("ipc_close", first)
        for address in (first, first + 1, 0):
            refuses_there(other, UsageError, other.call, "ipc_close", address)

    def test_bytes_of_what_was_opened_end_where_it_ends(
        self, scene: Scene, stranger: CudaStranger, other: OtherProcess
    ) -> None:
        able = capability(self, scene.driver, DeviceMemory)
        there = other.call("ipc_open", able.ipc_export(stranger.legacy(SIZE)), SIZE, scene.location)
        for start, nbytes in ((there - 1, 2), (there + SIZE, 1), (there, SIZE + 1)):
            refuses_there(other, UsageError, other.read, start, nbytes)
        other.call("ipc_close", there)

    def test_a_size_that_is_not_there_is_refused(
        self, scene: Scene, stranger: CudaStranger, other: OtherProcess
    ) -> None:
        """Nothing a peer says is believed, and what was opened for the question is closed again (S8, I4)."""
        able = capability(self, scene.driver, DeviceMemory)
        handle = able.ipc_export(stranger.legacy(SIZE))
        for nbytes in (SIZE + 1, 1 << 40, 0, -1):
            refuses_there(other, ProtocolError, other.call, "ipc_open", handle, nbytes, scene.location)
        there = other.call("ipc_open", handle, SIZE, scene.location)
        refuses_there(other, ProtocolError, other.call, "ipc_open", handle, 2 * SIZE, scene.location)
        other.write(there, b"undisturbed")
        other.call("ipc_close", there)

    def test_bytes_that_are_no_handle_of_memory(
        self, scene: Scene, stranger: CudaStranger, other: OtherProcess
    ) -> None:
        able = capability(self, scene.driver, DeviceMemory)
        handle = able.ipc_export(stranger.legacy(SIZE))
        lengths = (b"", handle[:-1], handle + b"\0")
        for data in (*lengths, bytes(HANDLE_BYTES), b"\xa5" * HANDLE_BYTES, bytes(range(HANDLE_BYTES))):
            refuses_there(other, ProtocolError, other.call, "ipc_open", data, SIZE, scene.location)
        refuses_there(other, UsageError, other.call, "ipc_open", handle, SIZE, Location("elsewhere"))

    def test_memory_that_its_maker_freed(self, scene: Scene, stranger: CudaStranger, other: OtherProcess) -> None:
        able = capability(self, scene.driver, DeviceMemory)
        base = stranger.legacy(SIZE)
        handle = able.ipc_export(base)
        stranger.free(base)
        refuses_there(other, ProtocolError, other.call, "ipc_open", handle, SIZE, scene.location)

    def test_not_in_the_process_that_made_the_memory(self, scene: Scene, stranger: CudaStranger) -> None:
        able = capability(self, scene.driver, DeviceMemory)
        handle = able.ipc_export(stranger.legacy(SIZE))
        scene.refuses(UsageError, able.ipc_open, handle, SIZE, scene.location)

    def test_only_the_base_of_such_memory_has_a_handle(
        self, scene: Scene, stranger: CudaStranger, other: OtherProcess
    ) -> None:
        """The driver itself gives one for an address inside, and opening that leads to the base."""
        able = capability(self, scene.driver, DeviceMemory)
        base = stranger.legacy(SIZE)
        pooled = stranger.pooled(64 * KIB, shareable=True)[1]
        wrong = (base + 1, base + SIZE // 2, pooled, stranger.pinned(64 * KIB), stranger.mapped((scene.g,), FD), 0)
        for address in (*wrong, scene.memory()[0]):
            scene.refuses(UsageError, able.ipc_export, address)
        there = other.call("ipc_open", able.ipc_export(base), SIZE, scene.location)
        refuses_there(other, UsageError, other.call, "ipc_export", there)  # only its maker hands it on
        refuses_there(other, UsageError, other.call, "mem_adopt", there)
        other.call("ipc_close", there)

    # -- events ---------------------------------------------------------------------------------------------------
    def test_an_event_in_another_process(self, scene: Scene, other: OtherProcess) -> None:
        driver = capability(self, scene.driver, DeviceMemory)
        with _event(scene) as event:
            handle = driver.event_export(event)
            assert isinstance(handle, bytes)
            assert len(handle) == HANDLE_BYTES
            there = other.call("event_import", handle, scene.location)
            assert other.call("event_is_done", there)  # nothing was recorded
            driver.event_record(event, DEFAULT)
            stream = other.call("stream_create", scene.location)
            other.call("stream_wait", stream, there, scene.location)
            other.call("stream_synchronize", stream, scene.location)
            other.call("event_synchronize", there)
            assert other.call("event_is_done", there)
            other.call("event_record", there, stream)  # the other way works as well
            driver.event_synchronize(event)
            assert driver.event_is_done(event)
            other.call("stream_destroy", stream)
            other.call("event_destroy", there)
            refuses_there(other, UsageError, other.call, "event_destroy", there)

    def test_an_event_opened_twice_is_two(self, scene: Scene, other: OtherProcess) -> None:
        driver = capability(self, scene.driver, DeviceMemory)
        with _event(scene) as event:
            driver.event_record(event, DEFAULT)
            first, second = (other.call("event_import", driver.event_export(event), scene.location) for _ in range(2))
            assert first != second
            other.call("event_destroy", first)
            other.call("event_synchronize", second)
            other.call("event_destroy", second)

    def test_only_an_event_made_for_it_is_exported(self, scene: Scene, other: OtherProcess) -> None:
        driver = capability(self, scene.driver, DeviceMemory)
        with _event(scene, interprocess=False) as event, scene.refused(UsageError):
            driver.event_export(event)
        with _event(scene) as event:
            there = other.call("event_import", driver.event_export(event), scene.location)
            refuses_there(other, UsageError, other.call, "event_export", there)  # only its maker hands it on
            other.call("event_destroy", there)

    def test_bytes_that_are_no_handle_of_an_event(self, scene: Scene, other: OtherProcess) -> None:
        driver = capability(self, scene.driver, DeviceMemory)
        with _event(scene) as event:
            handle = driver.event_export(event)
            for data in (b"", handle[:-1], handle + b"\0", bytes(HANDLE_BYTES), b"\xa5" * HANDLE_BYTES):
                refuses_there(other, ProtocolError, other.call, "event_import", data, scene.location)

    def test_not_in_the_process_that_made_the_event(self, scene: Scene) -> None:
        driver = capability(self, scene.driver, DeviceMemory)
        with _event(scene) as event, scene.refused(UsageError):
            driver.event_import(driver.event_export(event), scene.location)
