"""The stand-in driver keeps the rules that were measured on hardware: one test a rule, through the real bindings."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator

import pytest
from tests import standin

if (lacking := standin.missing()) is not None:
    pytest.skip(lacking, allow_module_level=True)

from cuda.bindings import driver
from tests.standin.calls import (
    ALREADY_REGISTERED,
    CONTEXT_DESTROYED,
    GRANULE,
    HOST_NUMA,
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_VALUE,
    MIB,
    NONE,
    NOT_FOUND,
    NOT_READY,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PEER_ALREADY,
    PEER_NOT,
    READ,
    READ_WRITE,
    access,
    attributes,
    code,
    create,
    export,
    import_,
    mapped,
    ok,
    preloaded,
    prop,
    read,
    reserve,
    undo,
)


@pytest.fixture(scope="module")
def loaded() -> standin.Standin:
    return preloaded()


@pytest.fixture(autouse=True)
def control(loaded: standin.Standin) -> Iterator[standin.Standin]:
    """The stand-in without faults; what a test leaves behind fails it."""
    loaded.clear()
    before = loaded.live()
    yield loaded
    loaded.clear()
    loaded.defer(False)
    assert loaded.live() == before


@pytest.fixture
def context() -> Iterator[None]:
    """The primary context of device 0, current in this thread."""
    ok("cuCtxPushCurrent", ok("cuDevicePrimaryCtxRetain", 0))
    yield
    ok("cuCtxPopCurrent")
    ok("cuDevicePrimaryCtxRelease", 0)


# ---- addresses and physical memory


def with_flags(flags: int) -> object:
    """A prop whose allocFlags begin with these four bytes, whatever the bindings call their fields."""
    made = prop()
    ctypes.c_uint32.from_address(int(made.getPtr()) + 24).value = flags
    return made


def flags_of(handle: int) -> int:
    """What the properties of memory tell of it."""
    found = ok("cuMemGetAllocationPropertiesFromHandle", handle)
    return ctypes.c_uint32.from_address(int(found.getPtr()) + 24).value


def test_allocation_flags_come_back_and_nonsense_is_refused() -> None:
    for attribute, there in ((107, 1), (110, 1), (112, 1), (136, 0)):  # as on a Hopper: no decompression engine
        assert ok("cuDeviceGetAttribute", driver.CUdevice_attribute(attribute), 0) == there
    for flags in (1, 0x100, 0x10000, 0x10101):
        handle = int(ok("cuMemCreate", GRANULE, with_flags(flags), 0))
        fd = export(handle)
        there = import_(fd)
        assert flags_of(handle) == flags
        assert flags_of(there) == flags & ~0x100, "measured: not of memory that was imported"
        os.close(fd)
        ok("cuMemRelease", there)
        ok("cuMemRelease", handle)
    granularity = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    for flags in (2, 0x200, 0x20000, 0x40000):
        assert code("cuMemCreate", GRANULE, with_flags(flags), 0) == INVALID_VALUE
        assert code("cuMemGetAllocationGranularity", with_flags(flags), granularity) == INVALID_VALUE


def test_memory_of_the_host_is_on_one_of_its_nodes() -> None:
    node = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
    assert [ok("cuDeviceGetAttribute", node, device) for device in (0, 1)] == [0, 1]
    for number in (0, 1):
        address, handle = mapped(kind=HOST_NUMA, number=number)
        where = ok("cuMemGetAllocationPropertiesFromHandle", handle).location
        assert (int(where.type), where.id) == (HOST_NUMA, number)
        ok("cuMemSetAccess", address, GRANULE, [access(READ_WRITE, number, HOST_NUMA)], 1)
        assert code("cuMemSetAccess", address, GRANULE, [access(READ_WRITE, 2, HOST_NUMA)], 1) == INVALID_VALUE
        undo(address, handle)
    for number in (2, -1):
        assert code("cuMemCreate", GRANULE, prop(HOST_NUMA, number), 0) == INVALID_VALUE


# ---- mappings and access


def undo_all(address: int, nbytes: int, *handles: int) -> None:
    """One unmap over everything that is mapped there."""
    ok("cuMemUnmap", address, nbytes)
    ok("cuMemAddressFree", address, nbytes)
    for handle in handles:
        ok("cuMemRelease", handle)


@pytest.mark.usefixtures("context")
def test_memory_without_access_for_the_current_device_is_out_of_reach() -> None:
    address, handle = mapped()
    ok("cuMemSetAccess", address, GRANULE, [access(NONE), access(READ_WRITE, 1)], 2)
    assert code("cuMemcpyDtoH", bytearray(4), address, 4) == INVALID_VALUE
    undo(address, handle)


def test_the_host_gets_no_access_to_device_memory() -> None:
    address, handle = mapped()
    assert code("cuMemSetAccess", address, GRANULE, [access(READ, 0, HOST_NUMA)], 1) == INVALID_VALUE
    undo(address, handle)


# ---- contexts


def test_calls_that_need_a_context_say_so() -> None:
    assert code("cuMemAlloc", 100) == INVALID_CONTEXT
    assert code("cuMemsetD8", 4096, 0, 1) == INVALID_CONTEXT
    assert code("cuStreamCreate", 0) == INVALID_CONTEXT
    assert code("cuEventCreate", 0) == INVALID_CONTEXT
    assert code("cuMemGetInfo") == INVALID_CONTEXT
    assert code("cuCtxSynchronize") == INVALID_CONTEXT
    assert code("cuCtxPopCurrent") == INVALID_CONTEXT
    assert int(ok("cuCtxGetCurrent")) == 0


def test_contexts_are_stacked_for_each_thread() -> None:
    first, second = ok("cuDevicePrimaryCtxRetain", 0), ok("cuDevicePrimaryCtxRetain", 1)
    ok("cuCtxPushCurrent", first)
    ok("cuCtxPushCurrent", second)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(int(ok("cuCtxGetCurrent"))))
    thread.start()
    thread.join()
    assert seen == [0]
    assert int(ok("cuCtxGetDevice")) == 1
    assert int(ok("cuCtxPopCurrent")) == int(second)
    assert int(ok("cuCtxGetDevice")) == 0
    ok("cuDevicePrimaryCtxRelease", 0)
    assert code("cuCtxSynchronize") == CONTEXT_DESTROYED
    ok("cuCtxPopCurrent")
    ok("cuDevicePrimaryCtxRelease", 1)
    assert code("cuDevicePrimaryCtxRelease", 1) == INVALID_CONTEXT


@pytest.mark.usefixtures("context")
def test_peers_are_enabled_once() -> None:
    peer = ok("cuDevicePrimaryCtxRetain", 1)
    assert ok("cuDeviceCanAccessPeer", 0, 1) == 1
    assert code("cuCtxDisablePeerAccess", peer) == PEER_NOT
    ok("cuCtxEnablePeerAccess", peer, 0)
    assert code("cuCtxEnablePeerAccess", peer, 0) == PEER_ALREADY
    ok("cuCtxDisablePeerAccess", peer)
    ok("cuDevicePrimaryCtxRelease", 1)


# ---- other memory


@pytest.mark.usefixtures("context")
def test_the_address_range_of_virtual_memory_is_one_mapping_that_is_accessible() -> None:
    address, handles = reserve(4 * GRANULE), [create(), create(2 * GRANULE)]
    ok("cuMemMap", address, GRANULE, 0, handles[0], 0)
    ok("cuMemMap", address + GRANULE, 2 * GRANULE, 0, handles[1], 0)
    pointer = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    assert code("cuMemGetAddressRange", address) == NOT_FOUND
    assert code("cuPointerGetAttribute", pointer, address) == INVALID_VALUE
    ok("cuMemSetAccess", address, 3 * GRANULE, [access(READ)], 1)
    inner = address + 2 * GRANULE + 5
    assert tuple(map(int, ok("cuMemGetAddressRange", inner))) == (address + GRANULE, 2 * GRANULE)
    assert int(ok("cuPointerGetAttribute", pointer, inner)) == inner
    for known in (address, inner):  # here it is the reservation, however little of it is mapped
        assert [int(n) for n in attributes(known, "RANGE_START_ADDR", "RANGE_SIZE")] == [address, 4 * GRANULE]
    assert code("cuMemGetAddressRange", address + 3 * GRANULE) == NOT_FOUND
    undo_all(address, 4 * GRANULE, *handles)
    small = int(ok("cuMemAlloc", 1000))
    assert [code("cuMemGetAddressRange", a) for a in (small + 999, small + 1000, 4096)] == [0, NOT_FOUND, NOT_FOUND]
    ok("cuMemFree", small)


@pytest.mark.usefixtures("context")
def test_small_allocations_share_a_block_and_leave_no_bytes_in_it() -> None:
    block, second = int(ok("cuMemAlloc", 1000)), int(ok("cuMemAlloc", 8192))
    assert (block % GRANULE, second - block) == (0, 1024)  # as CuPy's came to lie
    large = int(ok("cuMemAlloc", 5 * MIB))
    assert large % GRANULE == 0
    for address, offset in ((block, 0), (second, 1024), (large, 0)):
        handle = ok("cuIpcGetMemHandle", address)
        assert int.from_bytes(ctypes.string_at(handle.getPtr(), 64)[28:32], "little") == offset
    ok("cuMemsetD8", second, 7, 8192)
    ok("cuMemFree", second)
    rest = [int(ok("cuMemAlloc", 4096)) for _ in range(511)]  # the whole block, once around
    assert second in rest
    assert all(read(a, 4096) == bytes(4096) for a in rest)
    for address in (block, large, *rest):
        ok("cuMemFree", address)


@pytest.mark.usefixtures("context")
def test_host_memory_is_registered_once() -> None:
    block = bytearray(10_000)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    ok("cuMemHostRegister", address, 10_000, 0)
    assert code("cuMemHostRegister", address, 10_000, 0) == ALREADY_REGISTERED
    assert int(ok("cuMemHostGetDevicePointer", address, 0)) == address
    ok("cuMemHostUnregister", address)
    assert code("cuMemHostUnregister", address) == NOT_REGISTERED
    pinned = ok("cuMemHostAlloc", 100, 0)
    ok("cuMemFreeHost", pinned)


@pytest.mark.usefixtures("context")
def test_bytes_go_round_and_no_further_than_the_allocation() -> None:
    first, second = int(ok("cuMemAlloc", 64)), int(ok("cuMemAlloc", 64))
    ok("cuMemcpyHtoD", first, bytes(range(64)), 64)
    ok("cuMemcpyDtoD", second, first, 64)
    assert read(second, 64) == bytes(range(64))
    assert code("cuMemsetD8", first, 0, 65) == INVALID_VALUE
    assert code("cuMemsetD16", first + 1, 0, 1) == INVALID_VALUE
    assert code("cuMemcpyDtoH", bytearray(8), 4096, 8) == INVALID_VALUE
    ok("cuMemFree", first)
    assert code("cuMemcpyDtoH", bytearray(8), first, 8) == INVALID_VALUE
    ok("cuMemFree", second)


@pytest.mark.usefixtures("context")
def test_an_interrupt_in_a_call_lets_it_take_effect(control: standin.Standin) -> None:
    before = control.live().get("handles", 0)
    first, second = create(), create()
    control.interrupt("cuMemRelease", nth=2)
    ok("cuMemRelease", first)
    with pytest.raises(KeyboardInterrupt):
        ok("cuMemRelease", second)
    assert control.live().get("handles", 0) == before
    control.clear()


# ---- streams and events


@pytest.mark.usefixtures("context")
def test_interprocess_events_are_few() -> None:
    events = [ok("cuEventCreate", 6) for _ in range(4096)]
    assert code("cuEventCreate", 6) == OUT_OF_MEMORY
    ok("cuEventDestroy", events.pop())
    events += [ok("cuEventCreate", flags) for flags in (6, *[2] * 100)]
    assert code("cuEventCreate", 6) == OUT_OF_MEMORY
    for event in events:
        ok("cuEventDestroy", event)


@pytest.mark.usefixtures("context")
def test_deferred_work_waits_for_whoever_waits(control: standin.Standin) -> None:
    address = int(ok("cuMemAlloc", 64))
    ok("cuMemsetD8", address, 0, 64)
    first, second = ok("cuStreamCreate", 1), ok("cuStreamCreate", 1)
    event = ok("cuEventCreate", 2)
    control.defer()
    ok("cuMemsetD8Async", address, 1, 64, first)
    assert code("cuStreamQuery", first) == NOT_READY
    assert ctypes.string_at(address, 1) == b"\0"
    ok("cuEventRecord", event, first)
    assert code("cuEventQuery", event) == NOT_READY
    ok("cuStreamWaitEvent", second, event, 0)
    ok("cuStreamSynchronize", second)
    assert ctypes.string_at(address, 1) == b"\1"
    assert code("cuEventQuery", event) == 0
    ok("cuMemsetD8Async", address, 2, 64, first)
    ok("cuStreamDestroy", first)
    ok("cuStreamDestroy", second)
    ok("cuEventDestroy", event)
    assert read(address, 1) == b"\2"
    ok("cuMemFree", address)


def test_memory_that_goes_under_deferred_work_ends_the_context(control: standin.Standin) -> None:
    ok("cuCtxPushCurrent", ok("cuDevicePrimaryCtxRetain", 0))
    address, handle = mapped()
    stream = ok("cuStreamCreate", 1)
    control.defer()
    ok("cuMemsetD8Async", address, 1, 64, stream)
    undo(address, handle)
    assert code("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    assert code("cuMemAlloc", 64) == ILLEGAL_ADDRESS
    assert control.illegal() == 1
    ok("cuDevicePrimaryCtxRelease", 0)
    ok("cuCtxPopCurrent")


@pytest.mark.usefixtures("context")
def test_a_peer_copy_is_deferred_too(control: standin.Standin) -> None:
    """In the order of its stream, each end looked at under its own device."""
    contexts = ok("cuCtxGetCurrent"), ok("cuDevicePrimaryCtxRetain", 1)
    here = int(ok("cuMemAlloc", 64))
    ok("cuMemsetD8", here, 0, 64)
    there, handle = mapped(number=1, flags=0)
    ok("cuMemSetAccess", there, GRANULE, [access(READ_WRITE, 1)], 1)
    assert code("cuMemsetD8", there, 0, 64) == INVALID_VALUE  # no device but its own may reach it
    stream = ok("cuStreamCreate", 1)
    control.defer()
    ok("cuMemsetD8Async", here, 7, 64, stream)
    ok("cuMemcpyPeerAsync", there, contexts[1], here, contexts[0], 64, stream)
    assert code("cuStreamQuery", stream) == NOT_READY
    assert (ctypes.string_at(here, 1), ctypes.string_at(there, 1)) == (b"\0", b"\0")
    ok("cuStreamSynchronize", stream)
    assert (ctypes.string_at(here, 1), ctypes.string_at(there, 1)) == (b"\7", b"\7")
    ok("cuMemsetD8Async", here, 8, 64, stream)
    ok("cuMemcpyPeer", there, contexts[1], here, contexts[0], 64)  # done when it returns, behind no other stream
    assert (ctypes.string_at(here, 1), ctypes.string_at(there, 1)) == (b"\7", b"\7")
    ok("cuStreamDestroy", stream)
    undo(there, handle)
    ok("cuMemFree", here)
    ok("cuDevicePrimaryCtxRelease", 1)


def test_memory_that_goes_under_a_deferred_peer_copy_ends_the_context(control: standin.Standin) -> None:
    contexts = [ok("cuDevicePrimaryCtxRetain", number) for number in (0, 1)]
    ok("cuCtxPushCurrent", contexts[0])
    address, handle = mapped()
    there = mapped(number=1)
    ok("cuMemSetAccess", there[0], GRANULE, [access(READ_WRITE, 1)], 1)
    stream = ok("cuStreamCreate", 1)
    control.defer()
    ok("cuMemcpyPeerAsync", address, contexts[0], there[0], contexts[1], 64, stream)
    undo(*there)
    assert code("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
    assert control.illegal() == 1
    undo(address, handle)
    for number in (0, 1):
        ok("cuDevicePrimaryCtxRelease", number)
    ok("cuCtxPopCurrent")


# ---- faults and limits


def test_faults_count_from_now_and_leave_no_trace(control: standin.Standin) -> None:
    control.fail("cuMemCreate", 2, OUT_OF_MEMORY)
    ok("cuMemRelease", create())
    assert code("cuMemCreate", GRANULE, prop(), 0) == OUT_OF_MEMORY
    ok("cuMemRelease", create())
    assert (control.calls("cuMemCreate"), control.faults_played()) == (3, 1)
    assert control.called() == {"cuMemCreate": 3, "cuMemRelease": 2}
    with control.failing("*", code=999, forever=True):
        assert [code("cuDeviceGetCount") for _ in range(3)] == [999] * 3
        assert ok("cuGetErrorName", driver.CUresult.CUDA_ERROR_UNKNOWN) == b"CUDA_ERROR_UNKNOWN"
    assert ok("cuDeviceGetCount") == 2


def test_unknown_functions_are_there_and_not_supported() -> None:
    assert code("cuGraphCreate", 0) == NOT_SUPPORTED


def test_tables_grow(control: standin.Standin) -> None:
    control.set_free(0, 8192 * GRANULE)  # what is promised beyond twice the device's memory is not there
    handles = [create(types=0) for _ in range(8192)]
    addresses = [reserve() for _ in range(20_000)]
    assert control.live()["allocations"] == 8192
    for address in addresses:
        ok("cuMemAddressFree", address, GRANULE)
    for handle in handles:
        ok("cuMemRelease", handle)
    control.set_free(0, ok("cuDeviceTotalMem", 0))
