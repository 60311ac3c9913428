"""The stand-in between processes, after a fork, and as its environment configures it."""

from __future__ import annotations

import ctypes
import os
import socket
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
    MAP_FAILED,
    MIB,
    NO_DEVICE,
    NOT_INITIALIZED,
    NOT_READY,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PEER_UNSUPPORTED,
    UNKNOWN,
    access,
    code,
    create,
    export,
    import_,
    mapped,
    multicast_prop,
    ok,
    read,
    reserve,
    shareable_pool,
    undo,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def loaded() -> standin.Standin:
    try:
        control = standin.preload()
    except standin.StandinError as error:
        if "another libcuda" not in str(error):
            raise
        pytest.skip("another libcuda is in this process")
    ok("cuInit", 0)
    return control


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
    child = os.fork()
    if child == 0:  # no pytest in there
        fine = (
            code("cuInit", 0)
            == code("cuDeviceGetCount")
            == code("cuMemAddressReserve", GRANULE, 0, 0, 0)
            == NOT_INITIALIZED
        )
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
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


def test_memory_outlives_its_killed_maker(control: standin.Standin) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs, start("maker", theirs.fileno(), fds=[theirs.fileno()]) as child:
        mine.settimeout(30)
        _, fds, _, _ = socket.recv_fds(mine, 16, 1)
        child.kill()
        child.wait(30)
        child.communicate()
    said = ask("importer", fds[0], fds=fds)
    assert said == ["0", "from", "the", "maker"]
    handle = import_(fds[0])
    os.close(fds[0])
    address = reserve()
    ok("cuMemMap", address, GRANULE, 0, handle, 0)
    ok("cuMemSetAccess", address, GRANULE, [access(1)], 1)
    assert read(address, 17) == b"from the importer"
    undo(address, handle)


def test_devices_are_the_same_whatever_a_process_calls_them(control: standin.Standin) -> None:
    address, handle = mapped(number=1)
    ok("cuMemcpyHtoD", address, b"abcdefghijklmn", 14)
    fd = export(handle)
    assert ask("importer", fd, fds=[fd], visible_devices="1,0")[0] == "0"
    assert numbers("hidden_importer", fd, fds=[fd], visible_devices="0") == [INVALID_DEVICE]
    os.close(fd)
    undo(address, handle)


def test_legacy_handles(control: standin.Standin) -> None:
    address = int(ok("cuMemAlloc", 3 * MIB))
    ok("cuMemcpyHtoD", address, b"legacy", 6)
    said = ask("legacy", hexed(ok("cuIpcGetMemHandle", address)))
    assert said == ["True", str(3 * MIB), "legacy", "False", str(INVALID_VALUE)]
    assert read(address, 6) == b"!egacy"
    ok("cuMemFree", address)
    assert numbers("stale", ask("legacy_maker")[0]) == [INVALID_HANDLE]


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


def test_pools(control: standin.Standin) -> None:
    pool = shareable_pool()
    ok("cuMemAllocFromPoolAsync", 100, pool, 0)
    address = int(ok("cuMemAllocFromPoolAsync", 100, pool, 0))
    ok("cuMemcpyHtoD", address, b"pooled", 6)
    fd = int(ok("cuMemPoolExportToShareableHandle", pool, FD, 0))
    assert ask("pool", fd, hexed(ok("cuMemPoolExportPointer", address)), fds=[fd]) == ["pooled"]
    os.close(fd)
    for one in (address - 4096, address):
        ok("cuMemFreeAsync", one, 0)
    ok("cuMemPoolDestroy", pool)


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


def test_interprocess_events(control: standin.Standin) -> None:
    event, stream, address = ok("cuEventCreate", 6), ok("cuStreamCreate", 1), int(ok("cuMemAlloc", 64))
    control.defer()
    ok("cuMemsetD8Async", address, 1, 64, stream)
    ok("cuEventRecord", event, stream)
    with start("event", hexed(ok("cuIpcGetEventHandle", event))) as child:
        assert child.stdout is not None
        assert int(child.stdout.readline()) == NOT_READY
        ok("cuStreamSynchronize", stream)
        assert child.communicate(timeout=30)[0].split() == ["0"]
    ok("cuStreamDestroy", stream)
    ok("cuEventDestroy", event)
    ok("cuMemFree", address)


def test_event_handles(control: standin.Standin) -> None:
    event = ok("cuEventCreate", 6)
    token = hexed(ok("cuIpcGetEventHandle", event))
    assert ask("event_handles", token) == ["True", str(INVALID_HANDLE), str(MAP_FAILED)]
    with start("event_kept", token) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "opened\n"
        ok("cuEventDestroy", event)
        assert child.communicate("destroyed\n", timeout=30)[0].split() == ["0", str(MAP_FAILED)]


@pytest.mark.skipif(not hasattr(driver, "cuMulticastBindMem_v2"), reason="bindings older than CUDA 13.1")
def test_the_second_multicast_bind_takes_a_device() -> None:
    assert ask("second_bind", driver_version=13010) == ["bytes", "0", str(INVALID_VALUE)]
    assert ask("second_bind", driver_version=13000) == ["bytes", "missing"]


def test_multicast_between_processes(control: standin.Standin) -> None:
    both, memory = int(ok("cuMulticastCreate", multicast_prop())), create()
    ok("cuMulticastAddDevice", both, 0)
    fd, address = export(both), reserve()
    with start("multicast", fd, fds=[fd]) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "bound\n"
        ok("cuMulticastBindMem", both, 0, memory, 0, GRANULE, 0)
        ok("cuMemMap", address, GRANULE, 0, both, 0)
        ok("cuMemSetAccess", address, GRANULE, [access(3)], 1)
        ok("cuMemcpyHtoD", address, b"both", 4)
        assert child.communicate("read\n", timeout=30)[0].split() == ["both"]
    os.close(fd)
    undo(address, both)
    ok("cuMemRelease", memory)
