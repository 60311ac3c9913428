"""The 64-byte handle as data, and what it says of memory that has none."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from tests.standin.calls import ok, shareable_pool

import vram
from vram.errors import ProtocolError, RangeError, UnsupportedError, UsageError
from vram.sharing import IpcMemHandle
from vram.sharing.legacy_ipc import open as open_handle

DATA = bytes(range(64))


@pytest.fixture
def context() -> Iterator[None]:
    ok("cuInit", 0)
    ok("cuCtxPushCurrent", ok("cuDevicePrimaryCtxRetain", 0))
    yield
    ok("cuCtxPopCurrent")
    ok("cuDevicePrimaryCtxRelease", 0)


@pytest.mark.standin
def test_memory_of_a_numa_node_says_that_it_is_of_the_host() -> None:
    """Whether a GPU may access it, so that the driver knows its bounds, or none may, as measured."""
    with vram.empty(10, "float32", device="cuda:numa:0") as array:
        with pytest.raises(UsageError, match=r"is of cuda:numa:0, memory of the host.*no GPU may access it"):
            IpcMemHandle.of(array.address)
        driver = array.region.driver
    with vram.memory.Region.create(
        "cuda:numa:0", driver=driver, capacity=4096, nbytes=4096, users=["cuda:0", "cuda:numa:0"]
    ) as both:
        with pytest.raises(UsageError, match="it is memory of the host, which has no such handle"):
            IpcMemHandle.of(both.address)


def test_what_is_no_handle_is_shown() -> None:
    with pytest.raises(UsageError, match="open takes an IpcMemHandle, not 5; see"):
        open_handle(5, 10)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is read from 64 bytes, not from 5"):
        IpcMemHandle.from_bytes(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has exactly 64 bytes; 5 came"):
        IpcMemHandle(5)  # type: ignore[arg-type]


def test_it_is_exactly_64_bytes() -> None:
    handle = IpcMemHandle.from_bytes(DATA)
    assert handle.to_bytes() == DATA
    assert (
        handle == IpcMemHandle(DATA) == IpcMemHandle.from_bytes(bytearray(DATA)) == pickle.loads(pickle.dumps(handle))
    )
    assert (handle.offset, handle.nbytes, handle.allocation_nbytes) == (0, 0, 0)
    assert IpcMemHandle.from_bytes(memoryview(DATA), offset=512).offset == 512
    assert repr(handle).startswith("<IpcMemHandle 0001020304050607..., ")
    with pytest.raises(AttributeError):
        handle.offset = 5  # type: ignore[misc]


@pytest.mark.parametrize("length", [0, 1, 63, 65, 128, 4096])
def test_another_length_is_refused_with_the_number(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"64 bytes; {length} came"):
        IpcMemHandle.from_bytes(bytes(length))
    with pytest.raises(UsageError, match=f"64 bytes; {length} bytes came"):
        IpcMemHandle(bytes(length))


def test_what_is_no_handle_is_refused() -> None:
    for odd in ("x" * 64, 64, None, [0] * 64):
        with pytest.raises(UsageError):
            IpcMemHandle.from_bytes(odd)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            IpcMemHandle(odd)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="takes an IpcMemHandle"):
            open_handle(odd, 1)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="offset"):
        IpcMemHandle.from_bytes(DATA, offset=-1)
    with pytest.raises(RangeError, match="90 to 101"):
        IpcMemHandle(DATA, 90, 11, 100)
    for nbytes in (0, -1, "much"):
        with pytest.raises(UsageError, match="nbytes"):
            IpcMemHandle(DATA).open(nbytes)
    with pytest.raises(UsageError):
        IpcMemHandle(DATA).open(10, device="nowhere")
    with pytest.raises(UnsupportedError, match="host driver"):
        IpcMemHandle(DATA).open(10, device="host")


@pytest.mark.standin
@pytest.mark.usefixtures("context")
def test_an_interior_address_gives_the_base_and_the_offset() -> None:
    address = int(ok("cuMemAlloc", 1_000_003))
    base = IpcMemHandle.of(address)
    assert (base.offset, base.nbytes, base.allocation_nbytes) == (0, 1_000_003, 1_000_003)
    inside = IpcMemHandle.of(address + 70_001)
    assert (inside.offset, inside.nbytes, inside.allocation_nbytes) == (70_001, 930_002, 1_000_003)
    assert len(inside.to_bytes()) == 64
    ok("cuMemFree", address)
    with pytest.raises(UsageError):
        IpcMemHandle.of(address)


@pytest.mark.standin
@pytest.mark.usefixtures("context")
def test_memory_that_has_none_says_which_way_it_travels() -> None:
    with vram.zeros(10, "uint8", device="cuda:0") as array:
        with pytest.raises(UsageError, match="file descriptor"):
            IpcMemHandle.of(array.address)
    pool = shareable_pool()
    address = ok("cuMemAllocFromPoolAsync", 4096, pool, 0)
    with pytest.raises(UsageError, match="pool"):
        IpcMemHandle.of(int(address))
    ok("cuMemFreeAsync", address, 0)
    ok("cuStreamSynchronize", 0)
    ok("cuMemPoolDestroy", pool)
    for nowhere in (0, 64, -5, 1 << 70):
        with pytest.raises(UsageError):
            IpcMemHandle.of(nowhere)


@pytest.mark.standin
@pytest.mark.usefixtures("context")
def test_it_is_opened_elsewhere_only_and_the_error_says_so() -> None:
    address = int(ok("cuMemAlloc", 4096))
    handle = IpcMemHandle.of(address)
    with pytest.raises(UsageError, match=r"this very process made it.*use it as it is"):
        handle.open(4096)
    ok("cuMemFree", address)


@pytest.mark.standin
def test_bytes_that_no_driver_made_are_refused() -> None:
    for data in (bytes(64), DATA, b"\xff" * 64):
        with pytest.raises(ProtocolError):
            IpcMemHandle.from_bytes(data).open(4096)
