"""The bindings' calls, as the tests of the stand-in write them."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from cuda.bindings import driver
from tests import standin

MIB = 1 << 20
GRANULE = 2 * MIB
FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
DEVICE, HOST, HOST_NUMA, HOST_NUMA_CURRENT = 1, 2, 3, 4
NONE, READ, READ_WRITE = 0, 1, 3

INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
UNKNOWN = 999
NO_DEVICE, INVALID_DEVICE, INVALID_CONTEXT, MAP_FAILED, PEER_UNSUPPORTED = 100, 101, 201, 205, 217
INVALID_HANDLE, NOT_FOUND, NOT_READY, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT = 400, 500, 600, 700, 702
PEER_ALREADY, PEER_NOT, CONTEXT_DESTROYED, ALREADY_REGISTERED, NOT_REGISTERED = 704, 705, 709, 712, 713
NOT_PERMITTED, NOT_SUPPORTED = 800, 801


def code(name: str, *arguments: Any) -> int:
    """Call and return the code only."""
    return int(getattr(driver, name)(*arguments)[0])


def ok(name: str, *arguments: Any) -> Any:
    """Call, insist on success, return the output or the tuple of outputs."""
    status, *outputs = getattr(driver, name)(*arguments)
    assert int(status) == 0, f"{name} -> {status!r}"
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def location(kind: int = DEVICE, number: int = 0) -> Any:
    """Return a CUmemLocation."""
    made = driver.CUmemLocation()
    made.type = driver.CUmemLocationType(kind)
    made.id = number
    return made


def prop(kind: int = DEVICE, number: int = 0, types: int = 1) -> Any:
    """Return a CUmemAllocationProp."""
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location = location(kind, number)
    made.requestedHandleTypes = driver.CUmemAllocationHandleType(types)
    return made


def access(flags: int, number: int = 0, kind: int = DEVICE) -> Any:
    """Return a CUmemAccessDesc."""
    made = driver.CUmemAccessDesc()
    made.location = location(kind, number)
    made.flags = driver.CUmemAccess_flags(flags)
    return made


def create(nbytes: int = GRANULE, **options: int) -> int:
    """Return the handle of new physical memory."""
    return int(ok("cuMemCreate", nbytes, prop(**options), 0))


def reserve(nbytes: int = GRANULE, alignment: int = 0, hint: int = 0) -> int:
    """Return the address of a new reservation."""
    return int(ok("cuMemAddressReserve", nbytes, alignment, hint, 0))


def mapped(nbytes: int = GRANULE, flags: int = READ_WRITE, **options: int) -> tuple[int, int]:
    """Return address and handle of new memory that is reserved, created, mapped and accessible to device 0."""
    address, handle = reserve(nbytes), create(nbytes, **options)
    ok("cuMemMap", address, nbytes, 0, handle, 0)
    ok("cuMemSetAccess", address, nbytes, [access(flags)], 1)
    return address, handle


def undo(address: int, handle: int | None = None, nbytes: int = GRANULE) -> None:
    """Take back what ``mapped`` made."""
    ok("cuMemUnmap", address, nbytes)
    if handle is not None:
        ok("cuMemRelease", handle)
    ok("cuMemAddressFree", address, nbytes)


def export(handle: int) -> int:
    """Return a new descriptor of the memory."""
    return int(ok("cuMemExportToShareableHandle", handle, FD, 0))


def import_(fd: int) -> int:
    """Return a handle of the memory behind a descriptor."""
    return int(ok("cuMemImportFromShareableHandle", fd, FD))


def read(address: int, nbytes: int = 16) -> bytes:
    """Copy from a device."""
    out = bytearray(nbytes)
    ok("cuMemcpyDtoH", out, address, nbytes)
    return bytes(out)


def shareable_pool(types: int = 1) -> Any:
    """Return the handle of a new pool."""
    made = driver.CUmemPoolProps()
    made.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.handleTypes = driver.CUmemAllocationHandleType(types)
    made.location = location()
    return ok("cuMemPoolCreate", made)


def attributes(address: int, *names: str) -> list[int]:
    """Return pointer attributes, by the ends of their names: as the driver says them, since bindings differ in that."""
    ask, found = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute, []
    for name in names:
        number, room = getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"), ctypes.c_int64()
        status = ask(ctypes.byref(room), int(number), ctypes.c_uint64(address))
        assert status == 0, f"{name} -> {status}"
        found.append(room.value)
    return found


def multicast_prop(devices: int = 2, nbytes: int = GRANULE, types: int = 1) -> Any:
    """Return a CUmulticastObjectProp."""
    made = driver.CUmulticastObjectProp()
    made.numDevices, made.size, made.handleTypes, made.flags = devices, nbytes, types, 0
    return made


def preloaded() -> standin.Standin:
    """Return the stand-in, which this process calls from now on; skip the test where it has another driver."""
    try:
        control = standin.preload()
    except standin.StandinError as error:
        if "another libcuda" not in str(error):
            raise
        pytest.skip("another libcuda is in this process")
    ok("cuInit", 0)
    return control
