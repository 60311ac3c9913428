"""The stand-in between processes, after a fork, and as its environment configures it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests import standin

if (lacking := standin.missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)

from cuda.bindings import driver
from tests.standin.calls import (
    FD,
    GRANULE,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    MIB,
    NO_DEVICE,
    NOT_INITIALIZED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PEER_UNSUPPORTED,
    UNKNOWN,
    code,
    export,
    mapped,
    ok,
    preloaded,
    shareable_pool,
    undo,
)
from tests.support.forked import end_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def loaded() -> standin.Standin:
    return preloaded()


@pytest.fixture
def control(loaded: standin.Standin) -> Iterator[standin.Standin]:
    """The stand-in under the primary context of device 0; what a test leaves behind fails it."""
    loaded.clear()
    before = loaded.live()
    ok("cuCtxPushCurrent", ok("cuDevicePrimaryCtxRetain", 0))
    yield loaded
    loaded.defer(False)
    ok("cuCtxPopCurrent")
    ok("cuDevicePrimaryCtxRelease", 0)
    assert loaded.live() == before


def start(what: str, *arguments: object, fds: Sequence[int] = (), **settings: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.standin.worker", what, *map(str, arguments)],
        cwd=ROOT,
        env=standin.child_environment(**settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    )


def ask(what: str, *arguments: object, fds: Sequence[int] = (), **settings: object) -> list[str]:
    """Run a child to its end, return what it said."""
    with start(what, *arguments, fds=fds, **settings) as child:
        said, _ = child.communicate(timeout=30)
    assert child.returncode == 0
    return said.split()


def numbers(what: str, *arguments: object, fds: Sequence[int] = (), **settings: object) -> list[int]:
    return [int(word) for word in ask(what, *arguments, fds=fds, **settings)]


def hexed(token: object) -> str:
    return ctypes.string_at(token.getPtr(), 64).hex()  # type: ignore[attr-defined]


# ---- configuration


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("1,7,0", [1]),
        ("0,x,1", [0]),
        ("GPU-7672616d-2d73-7461-6e64-696e2d677001", [1]),
        ("GPU-7672616d-2d73-7461-6e64-696e2d677002,0", [2, 0]),
        ("GPU-76", []),  # three devices are called that
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices(visible: str | None, seen: list[int]) -> None:
    assert numbers("devices", devices=3, visible_devices=visible) == [0 if seen else NO_DEVICE, *seen]


def test_old_drivers_lack_what_came_later() -> None:
    calls = ("cuInit", "cuMulticastCreate", "cuMemAllocAsync", "cuMemAddressReserve")
    assert ask("codes", *calls, driver_version=12000) == ["0", "missing", str(INVALID_CONTEXT), "0"]
    assert ask("codes", *calls, driver_version=11010) == ["0", "missing", "missing", "0"]
    assert ask("codes", *calls, no_symbols="cuMemAllocAsync,cuMulticastCreate") == ["0", "missing", "missing", "0"]
    assert ask("codes", "cuInit", "cuMemAddressReserve", no_vmm=True) == ["0", str(NOT_SUPPORTED)]


def test_faults_and_memory_from_the_environment() -> None:
    said = numbers("defaults", fail="cuMemCreate:2:2:forever,cuCtxSynchronize", memory=16 * MIB)
    assert said == [0, OUT_OF_MEMORY, OUT_OF_MEMORY, 16 * MIB]


def test_without_peers() -> None:
    assert numbers("peers", no_peer=True) == [0, INVALID_DEVICE, PEER_UNSUPPORTED]
    assert numbers("peers") == [1, 0, 0]


def test_a_forked_child_is_refused_everything(control: standin.Standin) -> None:
    calls = (("cuInit", 0), ("cuDeviceGetCount",), ("cuMemAddressReserve", GRANULE, 0, 0, 0))
    assert end_of(lambda: sum(code(*one) == NOT_INITIALIZED for one in calls)) == 3
    assert ok("cuDeviceGetCount") == 2


# ---- sharing


def test_fabric_works_only_where_it_was_asked_for() -> None:
    with start("fabric", fabric=True) as child:
        assert child.stdout is not None
        token = child.stdout.readline().strip()
        assert ask("fabric", token, fabric=True) == ["1", "0", "fabric"]
        # Of a device that is hidden, as of one of another machine: at no place here, and reached all the same.
        assert ask("fabric", token, fabric=True, visible_devices="1") == ["5", "-2", "fabric"]
        child.communicate("done\n", timeout=30)
    assert child.returncode == 0


def test_devices_are_the_same_whatever_a_process_calls_them(control: standin.Standin) -> None:
    address, handle = mapped(number=1)
    ok("cuMemcpyHtoD", address, b"abcdefghijklmn", 14)
    fd = export(handle)
    assert ask("importer", fd, fds=[fd], visible_devices="1,0")[0] == "0"
    assert numbers("hidden_importer", fd, fds=[fd], visible_devices="0") == [INVALID_DEVICE]
    os.close(fd)
    undo(address, handle)


def test_a_legacy_handle_of_what_was_freed(control: standin.Standin) -> None:
    for nbytes in (100, 3 * MIB):
        address, keeps_the_block = int(ok("cuMemAlloc", nbytes)), int(ok("cuMemAlloc", 100))
        token = hexed(ok("cuIpcGetMemHandle", address))
        ok("cuMemFree", address)
        again = int(ok("cuMemAlloc", nbytes))
        ok("cuIpcGetMemHandle", again)
        assert numbers("stale", token) == [INVALID_VALUE]
        ok("cuMemFree", again)
        ok("cuMemFree", keeps_the_block)


def test_which_bytes_of_a_legacy_handle_are_checked(control: standin.Standin) -> None:
    address = int(ok("cuMemAlloc", 5 * MIB))
    expected = dict.fromkeys(range(64), "0")
    expected |= dict.fromkeys([25, 26, 27, 32, 33, 34, 35, 36, 52, 53, 54, 55], f"-{INVALID_VALUE}")
    expected |= dict.fromkeys([48, 49, 50, 51], f"-{INVALID_HANDLE}")
    expected |= {28 + i: str((0xFF << 8 * i) % GRANULE) for i in range(4)}  # opens at the base and that offset
    assert ask("changed_handles", hexed(ok("cuIpcGetMemHandle", address))) == list(expected.values())
    ok("cuMemFree", address)


def test_nobody_checks_the_offset_in_a_legacy_handle(control: standin.Standin) -> None:
    first, second = int(ok("cuMemAlloc", 100)), int(ok("cuMemAlloc", 100))
    ok("cuMemcpyHtoD", first, b"first", 5)
    ok("cuMemcpyHtoD", second, b"other", 5)
    token = hexed(ok("cuIpcGetMemHandle", first))
    assert ask("at_offset", token, second - first) == ["0", "other"]
    assert ask("at_offset", token, 2 * GRANULE) == [str(INVALID_VALUE)]  # on hardware: whatever is there
    assert ask("at_offset", hexed(ok("cuIpcGetMemHandle", second)), second % GRANULE) == ["0", "other"]
    for address in (first, second):
        ok("cuMemFree", address)


def test_an_allocation_of_a_pool_that_ends_who_opens_it(control: standin.Standin) -> None:
    """Of 5 GiB it is opened; a larger one would be a crash inside the driver, counted instead."""
    pool = shareable_pool()
    fd = int(ok("cuMemPoolExportToShareableHandle", pool, FD, 0))
    for nbytes, said in ((5 << 30, ["0", "0"]), ((5 << 30) + 1, [str(UNKNOWN), "1"])):
        address = int(ok("cuMemAllocFromPoolAsync", nbytes, pool, 0))
        assert ask("large_pool", fd, hexed(ok("cuMemPoolExportPointer", address)), fds=[fd]) == said
        ok("cuMemFreeAsync", address, 0)
    os.close(fd)
    ok("cuMemPoolDestroy", pool)


@pytest.mark.skipif(not hasattr(driver, "cuMulticastBindMem_v2"), reason="bindings older than CUDA 13.1")
def test_the_second_multicast_bind_takes_a_device() -> None:
    assert ask("second_bind", driver_version=13010) == ["bytes", "0", str(INVALID_VALUE)]
    assert ask("second_bind", driver_version=13000) == ["bytes", "missing"]
