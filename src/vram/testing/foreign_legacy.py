"""The rules of 64-byte handles of memory: a part of :class:`~vram.testing.foreign.ForeignContract`."""

from __future__ import annotations

from typing import Any

import pytest

from ..driver.foreign import HANDLE_BYTES, LegacyIpc
from ..errors import OutOfMemoryError, ProtocolError, UsageError
from ..spec import Location
from .foreign_scene import KIB, ForeignSuite, refused_there
from .other_process import OtherProcess
from .scene import FD, Scene

__all__ = ["LegacyRules"]

SIZE = 5 * 1024 * KIB


class LegacyRules(ForeignSuite):
    """Tests of :class:`~vram.driver.foreign.LegacyIpc`."""

    def test_memory_opened_in_another_process(self, scene: Scene, stranger: Any, other: OtherProcess) -> None:
        able = self.capability(scene.driver, LegacyIpc)
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
        with refused_there(other, UsageError):  # no window any more
            other.read(there, 1)

    def test_memory_that_is_made_here_leaves_as_any_other_and_is_freed_once(
        self, scene: Scene, other: OtherProcess
    ) -> None:
        able: Any = self.capability(scene.driver, LegacyIpc)
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
        self, scene: Scene, stranger: Any, other: OtherProcess
    ) -> None:
        able = self.capability(scene.driver, LegacyIpc)
        for nbytes in (SIZE, 1_000_003):
            there = other.call("ipc_open", able.ipc_export(stranger.legacy(nbytes)), None, scene.location)
            assert other.call("pointer_info", there).nbytes == nbytes
            other.write(there + nbytes - 3, b"end")
            assert other.read(there + nbytes - 3, 3) == b"end"
            with refused_there(other, UsageError):
                other.read(there + nbytes - 3, 4)
            other.call("ipc_close", there)

    def test_opened_twice_it_is_closed_as_often(self, scene: Scene, stranger: Any, other: OtherProcess) -> None:
        able = self.capability(scene.driver, LegacyIpc)
        handle = able.ipc_export(stranger.legacy(SIZE))
        first, second, third = (other.call("ipc_open", handle, SIZE, scene.location) for _ in range(3))
        assert first == second == third
        other.call("ipc_close", first)
        other.write(second, b"still there")
        other.call("ipc_close", first)
        assert other.read(second, 11) == b"still there"
        other.call("ipc_close", first)
        for address in (first, first + 1, 0):
            with refused_there(other, UsageError):
                other.call("ipc_close", address)

    def test_bytes_of_what_was_opened_end_where_it_ends(self, scene: Scene, stranger: Any, other: OtherProcess) -> None:
        able = self.capability(scene.driver, LegacyIpc)
        there = other.call("ipc_open", able.ipc_export(stranger.legacy(SIZE)), SIZE, scene.location)
        for start, nbytes in ((there - 1, 2), (there + SIZE, 1), (there, SIZE + 1)):
            with refused_there(other, UsageError):
                other.read(start, nbytes)
        other.call("ipc_close", there)

    def test_a_size_that_is_not_there_is_refused(self, scene: Scene, stranger: Any, other: OtherProcess) -> None:
        """Nothing a peer says is believed, and what was opened for the question is closed again (S8, I4)."""
        able = self.capability(scene.driver, LegacyIpc)
        handle = able.ipc_export(stranger.legacy(SIZE))
        for nbytes in (SIZE + 1, 1 << 40, 0, -1):
            with refused_there(other, ProtocolError):
                other.call("ipc_open", handle, nbytes, scene.location)
        there = other.call("ipc_open", handle, SIZE, scene.location)
        with refused_there(other, ProtocolError):
            other.call("ipc_open", handle, 2 * SIZE, scene.location)
        other.write(there, b"undisturbed")
        other.call("ipc_close", there)

    def test_bytes_that_are_no_handle_of_memory(self, scene: Scene, stranger: Any, other: OtherProcess) -> None:
        able = self.capability(scene.driver, LegacyIpc)
        handle = able.ipc_export(stranger.legacy(SIZE))
        lengths = (b"", handle[:-1], handle + b"\0")
        for data in (*lengths, bytes(HANDLE_BYTES), b"\xa5" * HANDLE_BYTES, bytes(range(HANDLE_BYTES))):
            with refused_there(other, ProtocolError):
                other.call("ipc_open", data, SIZE, scene.location)
        with refused_there(other, UsageError):
            other.call("ipc_open", handle, SIZE, Location("elsewhere"))

    def test_memory_that_its_maker_freed(self, scene: Scene, stranger: Any, other: OtherProcess) -> None:
        able = self.capability(scene.driver, LegacyIpc)
        base = stranger.legacy(SIZE)
        handle = able.ipc_export(base)
        stranger.free(base)
        with refused_there(other, ProtocolError):
            other.call("ipc_open", handle, SIZE, scene.location)

    def test_not_in_the_process_that_made_the_memory(self, scene: Scene, stranger: Any) -> None:
        able = self.capability(scene.driver, LegacyIpc)
        handle = able.ipc_export(stranger.legacy(SIZE))
        with scene.refused(UsageError):
            able.ipc_open(handle, SIZE, scene.location)

    def test_only_the_base_of_such_memory_has_a_handle(self, scene: Scene, stranger: Any, other: OtherProcess) -> None:
        """The driver itself gives one for an address inside, and opening that leads to the base."""
        able = self.capability(scene.driver, LegacyIpc)
        base = stranger.legacy(SIZE)
        pooled = stranger.pooled(64 * KIB, shareable=True)[1]
        wrong = (base + 1, base + SIZE // 2, pooled, stranger.pinned(64 * KIB), stranger.mapped((scene.g,), FD), 0)
        for address in (*wrong, scene.memory()[0]):
            with scene.refused(UsageError):
                able.ipc_export(address)
        there = other.call("ipc_open", able.ipc_export(base), SIZE, scene.location)
        with refused_there(other, UsageError):  # only its maker hands it on
            other.call("ipc_export", there)
        with refused_there(other, UsageError):
            other.call("mem_adopt", there)
        other.call("ipc_close", there)
