"""The rules of stream-ordered pools: those of :class:`~vram.driver.protocol.DeviceMemory` as tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tests.contracts.driver import capability
from tests.contracts.foreign import KIB, ForeignSuite, refused_there, refuses_there
from tests.support.other_process import OtherProcess
from tests.support.raw_cuda import CudaStranger as Stranger

from vram.driver.protocol import HANDLE_BYTES, MAX_POOL_ALLOCATION, DeviceMemory
from vram.errors import ProtocolError, UnsupportedError, UsageError
from vram.spec import HandleKind, Location
from vram.testing.driver import FD, Scene, lent

SIZE = 1024 * KIB


class PoolContract(ForeignSuite):
    """Tests of :class:`~vram.driver.protocol.DeviceMemory`."""

    def test_memory_of_a_pool_is_worked_on_like_any(self, scene: Scene, stranger: Stranger) -> None:
        with self._made(scene, stranger) as (pools, pool, address):
            data = bytes(range(256))
            scene.write(address + 7, data)
            scene.driver.fill(address + 7, 1, 3)
            assert scene.read(address + 7, 256) == b"\1\1\1" + data[3:]
            ours, _ = scene.memory()
            scene.driver.copy(ours, address + 7, 256)
            assert scene.read(ours + 3, 253) == data[3:]
            for start, nbytes in ((address - 1, 2), (address + SIZE, 1), (address, SIZE + 1)):
                scene.refuses(UsageError, scene.read, start, nbytes)
            info = pools.pointer_info(address + 1)
            assert (info.base, info.made_by, info.kinds, info.pool) == (address, "pool", HandleKind.POOL, pool)

    # -- other processes ----------------------------------------------------------------------------------------
    def test_a_pool_in_another_process(self, scene: Scene, stranger: Stranger, other: OtherProcess) -> None:
        with self._made(scene, stranger) as (pools, pool, address):
            scene.write(address + 3, b"from here")
            token = _token(pools, pool, address)
            assert isinstance(token, bytes)
            assert len(token) == HANDLE_BYTES
            with _there(scene, pools, pool, other) as imported:
                there = other.call("pool_open_pointer", imported, token, SIZE)
                assert other.read(there + 3, 9) == b"from here"
                other.write(there + SIZE - 5, b"there")
                assert scene.read(address + SIZE - 5, 5) == b"there"
                for start, nbytes in ((there - 1, 2), (there + SIZE, 1), (there, SIZE + 1)):
                    refuses_there(other, UsageError, other.read, start, nbytes)
                other.call("pool_close_pointer", there)
                for again in (there, there + 1, 0):
                    refuses_there(other, UsageError, other.call, "pool_close_pointer", again)
                there = other.call("pool_open_pointer", imported, token, SIZE)  # closed, it can be opened again
                assert other.read(there + 3, 9) == b"from here"
                other.call("pool_close_pointer", there)

    def test_a_pool_is_exported_as_it_was_made_to(self, scene: Scene, stranger: Stranger) -> None:
        with self._pool(scene, stranger) as (pools, pool):
            first, second = pools.pool_export(pool), pools.pool_export(pool)
            try:
                assert first != second  # a new one each time, the caller's
                assert not os.get_inheritable(first)
            finally:
                os.close(first)
                os.close(second)
        with (
            self._pool(scene, stranger, shareable=False) as (pools, pool),
            self._allocated(scene, stranger, pool) as address,
        ):
            assert pools.pointer_info(address).kinds == HandleKind.NONE
            scene.refuses(UsageError, pools.pool_export, pool)
            scene.refuses(UsageError, pools.pool_export_pointer, address)

    def test_a_pool_of_another_library(self, scene: Scene, stranger: Stranger, other: OtherProcess) -> None:
        pools = capability(self, scene.driver, DeviceMemory)
        pool, address = stranger.pooled(SIZE, shareable=True)
        with self.window(scene, address, SIZE):
            scene.write(address, b"a stranger's")
        with _there(scene, pools, pool, other) as imported:
            there = other.call("pool_open_pointer", imported, _token(pools, pool, address), SIZE)
            assert other.read(there, 12) == b"a stranger's"
            other.call("pool_close_pointer", there)
        pool, address = stranger.pooled(SIZE, shareable=False)
        for call, arguments in ((pools.pool_export, (pool,)), (pools.pool_export_pointer, (address,))):
            scene.refuses(UsageError, call, *arguments)

    def test_only_the_base_of_pool_memory_has_a_handle(self, scene: Scene, stranger: Stranger) -> None:
        with self._made(scene, stranger) as (pools, _, address):
            wrong = (address + 1, stranger.legacy(SIZE), scene.memory()[0], stranger.pinned(64 * KIB), 0, 5)
            for other in wrong:
                scene.refuses(UsageError, pools.pool_export_pointer, other)

    def test_no_pointer_leaves_before_its_pool(self, scene: Scene, stranger: Stranger) -> None:
        with self._made(scene, stranger) as (pools, pool, address):
            scene.refuses(UsageError, pools.pool_export_pointer, address)
            assert len(_token(pools, pool, address)) == HANDLE_BYTES

    def test_a_pool_imported_twice_is_one_pool_and_counted(
        self, scene: Scene, stranger: Stranger, other: OtherProcess
    ) -> None:
        with self._made(scene, stranger) as (pools, pool, address):
            token = _token(pools, pool, address)
            with _there(scene, pools, pool, other) as first:
                with _there(scene, pools, pool, other) as second:
                    assert second == first
                there = other.call("pool_open_pointer", first, token, SIZE)
                assert other.read(there, 1) == scene.read(address, 1)
                other.call("pool_close_pointer", there)

    def test_no_pointer_is_open_twice(self, scene: Scene, stranger: Stranger, other: OtherProcess) -> None:
        """The driver does not count: the first to be freed would be taken away from both."""
        with self._made(scene, stranger) as (pools, pool, address):
            token = _token(pools, pool, address)
            with _there(scene, pools, pool, other) as imported:
                there = other.call("pool_open_pointer", imported, token, SIZE)
                for nbytes, error in ((SIZE, UsageError), (SIZE // 2, UsageError), (2 * SIZE, UsageError)):
                    refuses_there(other, error, other.call, "pool_open_pointer", imported, token, nbytes)
                other.write(there, b"undisturbed")
                assert scene.read(address, 11) == b"undisturbed"
                other.call("pool_close_pointer", there)

    def test_a_size_that_pool_memory_has_not(self, scene: Scene, stranger: Stranger, other: OtherProcess) -> None:
        with self._made(scene, stranger) as (pools, pool, address):
            token = _token(pools, pool, address)
            with _there(scene, pools, pool, other) as imported:
                for nbytes in (64 * SIZE, 0, -1):
                    refuses_there(other, ProtocolError, other.call, "pool_open_pointer", imported, token, nbytes)
                for nbytes in (MAX_POOL_ALLOCATION + 1, 1 << 40):  # the driver would end the process
                    refuses_there(other, UnsupportedError, other.call, "pool_open_pointer", imported, token, nbytes)
                other.call("pool_close_pointer", other.call("pool_open_pointer", imported, token, SIZE))

    def test_what_would_crash_whoever_opens_it_does_not_leave(self, scene: Scene, stranger: Stranger) -> None:
        """I11: refused before a peer is involved (S3); the size that a peer states is checked in the test above."""
        with self._pool(scene, stranger) as (pools, pool), _exported(pools, pool):
            if scene.driver.mem_info(scene.location)[0] <= MAX_POOL_ALLOCATION:
                pytest.skip(f"at most {MAX_POOL_ALLOCATION} bytes are free")
            address = stranger.allocate(pool, MAX_POOL_ALLOCATION + 1)
            try:
                scene.refuses(UnsupportedError, pools.pool_export_pointer, address)
            finally:
                stranger.free(address)

    def test_bytes_that_are_none_of_the_pool(self, scene: Scene, stranger: Stranger, other: OtherProcess) -> None:
        with (
            self._pool(scene, stranger) as (pools, pool),
            self._allocated(scene, stranger, pool) as address,
            self._pool(scene, stranger) as (_, second),
        ):
            token = _token(pools, pool, address)
            with _there(scene, pools, pool, other) as imported:
                for data in (b"", token[:-1], token + b"\0", bytes(HANDLE_BYTES), b"\xa5" * HANDLE_BYTES):
                    refuses_there(other, ProtocolError, other.call, "pool_open_pointer", imported, data, SIZE)
            with _there(scene, pools, second, other) as imported, refused_there(other, ProtocolError):
                other.call("pool_open_pointer", imported, token, SIZE)

    def test_what_only_the_maker_of_a_pool_does(self, scene: Scene, stranger: Stranger, other: OtherProcess) -> None:
        with self._made(scene, stranger) as (pools, pool, address):
            with _there(scene, pools, pool, other) as imported:
                there = other.call("pool_open_pointer", imported, _token(pools, pool, address), SIZE)
                for method, arguments in (
                    ("pool_export", (imported,)),
                    ("pool_export_pointer", (there,)),
                    ("ipc_export", (there,)),
                    ("mem_adopt", (there,)),
                ):
                    refuses_there(other, UsageError, other.call, method, *arguments)
                info = other.call("pointer_info", there)
                assert (info.kinds, info.made_by, info.location) == (HandleKind.NONE, "pool", scene.location)
                other.call("pool_close_pointer", there)

    def test_a_descriptor_that_is_of_no_pool(self, scene: Scene, stranger: Stranger) -> None:
        pools = capability(self, scene.driver, DeviceMemory)
        with ExitStack() as end:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            end.enter_context(lent(null))
            plain = os.memfd_create("plain", os.MFD_CLOEXEC)
            end.enter_context(lent(plain))
            memory = end.enter_context(scene.exported(scene.create()))
            for fd in (null, plain, memory):
                scene.refuses(ProtocolError, pools.pool_import, fd, scene.location)
        for number in (-1, 1 << 20, 1 << 40):
            scene.refuses(UsageError, pools.pool_import, number, scene.location)
        with self._pool(scene, stranger) as (_, pool), _exported(pools, pool) as fd:
            scene.refuses(ProtocolError, scene.driver.mem_import, fd, FD, scene.g)
            scene.refuses(UsageError, pools.pool_import, fd, Location("elsewhere"))

    def test_a_pool_that_is_on_another_gpu_than_was_said(
        self, scene: Scene, stranger: Stranger, other: OtherProcess
    ) -> None:
        others = [number for number in range(scene.driver.device_count()) if number != scene.location.id]
        if not others:
            pytest.skip("it takes two GPUs")
        wrong = Location(scene.location.kind, others[0])
        with self._made(scene, stranger) as (pools, pool, address):
            with _there(scene, pools, pool, other, wrong) as imported, refused_there(other, ProtocolError):
                other.call("pool_open_pointer", imported, _token(pools, pool, address), SIZE)

    @contextmanager
    def _pool(self, scene: Scene, stranger: Stranger, *, shareable: bool = True) -> Iterator[tuple[Any, int]]:
        pools, pool = capability(self, scene.driver, DeviceMemory), stranger.pool(shareable=shareable)
        try:
            yield pools, pool
        finally:
            stranger.free(pool)

    @contextmanager
    def _made(self, scene: Scene, stranger: Stranger, *, shareable: bool = True) -> Iterator[tuple[Any, int, int]]:
        with self._pool(scene, stranger, shareable=shareable) as (pools, pool):
            with self._allocated(scene, stranger, pool) as address:
                yield pools, pool, address

    @contextmanager
    def _allocated(self, scene: Scene, stranger: Stranger, pool: int) -> Iterator[int]:
        address = stranger.allocate(pool, SIZE)
        try:
            with self.window(scene, address, SIZE):
                yield address
        finally:
            stranger.free(address)


def _token(pools: Any, pool: int, address: int) -> bytes:
    """Export a pointer: only after its pool was, which the driver wants so."""
    with _exported(pools, pool):
        pass
    token: bytes = pools.pool_export_pointer(address)
    return token


@contextmanager
def _exported(pools: Any, pool: int) -> Iterator[int]:
    fd = pools.pool_export(pool)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _there(scene: Scene, pools: Any, pool: int, other: OtherProcess, location: Location | None = None) -> Iterator[int]:
    """The pool as the other process imports it; the descriptor stays its caller's there, too."""
    with _exported(pools, pool) as fd:
        passed = other.pass_fd(fd)
    try:
        imported = other.call("pool_import", passed, location or scene.location)
    finally:
        other.close_fd(passed)
    try:
        yield imported
    finally:
        other.call("pool_destroy", imported)
