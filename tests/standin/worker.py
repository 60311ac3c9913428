"""What the other process does in the tests of sharing: told on its command line, it answers on its standard output."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from cuda.bindings import driver
from tests.standin.calls import (
    FD,
    GRANULE,
    access,
    code,
    create,
    import_,
    location,
    mapped,
    multicast_prop,
    ok,
    read,
    reserve,
)


def _context() -> None:
    ok("cuInit", 0)
    ok("cuCtxPushCurrent", ok("cuDevicePrimaryCtxRetain", 0))


def _token(kind: Any, text: str) -> Any:
    made = kind()
    ctypes.memmove(made.getPtr(), bytes.fromhex(text), 64)
    return made


def _say(*words: object) -> None:
    print(*words, flush=True)


def _map(handle: int) -> int:
    address = reserve()
    ok("cuMemMap", address, GRANULE, 0, handle, 0)
    ok("cuMemSetAccess", address, GRANULE, [access(3)], 1)
    return address


def devices() -> None:
    """Say the code of cuInit, then a line for each device."""
    _say(code("cuInit", 0))
    if code("cuInit", 0) == 0:
        for number in range(ok("cuDeviceGetCount")):
            _say(ok("cuDeviceGetUuid", number).bytes[15])


def codes(*calls: str) -> None:
    """Say the code of each call without arguments; ``missing`` where the bindings found no function."""
    for call in calls:
        try:
            _say(code(call, *_ARGUMENTS.get(call, ())))
        except RuntimeError as error:
            _say("missing" if "not found" in str(error).lower() else f"{error!r}")


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (0,),
    "cuMemCreate": (GRANULE, driver.CUmemAllocationProp(), 0),
    "cuMemAddressReserve": (GRANULE, 0, 0, 0),
    "cuMulticastCreate": (multicast_prop(),),
    "cuMemAllocAsync": (100, 0),
    "cuDeviceCanAccessPeer": (0, 1),
}


def peers() -> None:
    """Say whether device 0 reaches device 1, and what happens to one who tries anyway."""
    _context()
    address = reserve()
    ok("cuMemMap", address, GRANULE, 0, create(number=1), 0)
    other = ok("cuDevicePrimaryCtxRetain", 1)
    _say(ok("cuDeviceCanAccessPeer", 0, 1), code("cuMemSetAccess", address, GRANULE, [access(1)], 1))
    _say(code("cuCtxEnablePeerAccess", other, 0))


def importer(passed: str) -> None:
    """Import a descriptor, read what it holds, write an answer into it."""
    _context()
    handle = import_(int(passed))
    device = ok("cuMemGetAllocationPropertiesFromHandle", handle).location.id
    address = _map(handle)
    _say(device, read(address, 14).decode())
    ok("cuMemcpyHtoD", address, b"from the importer", 17)


def hidden_importer(passed: str) -> None:
    """Import a descriptor of memory on a device that is hidden here: say the code."""
    _context()
    _say(code("cuMemImportFromShareableHandle", int(passed), FD))


def stale(token: str) -> None:
    """Open a legacy handle of a process that is gone: say the code."""
    _context()
    _say(code("cuIpcOpenMemHandle", _token(driver.CUipcMemHandle, token), 1))


def changed_handles(token: str) -> None:
    """Open a legacy handle with each byte changed in turn: say the code, negative, or the address in its granule."""
    _context()
    for index in range(64):
        changed = bytearray.fromhex(token)
        changed[index] ^= 0xFF
        handle = _token(driver.CUipcMemHandle, changed.hex())
        status, address = driver.cuIpcOpenMemHandle(handle, 1)
        _say(f"-{int(status)}" if int(status) else int(address) % GRANULE)
        if not int(status):
            ok("cuIpcCloseMemHandle", address)


def at_offset(token: str, offset: str) -> None:
    """Open a legacy handle with another offset in it: say the code of a copy from there and what was there."""
    _context()
    changed = bytearray.fromhex(token)
    changed[28:32] = int(offset).to_bytes(4, "little")
    address = int(ok("cuIpcOpenMemHandle", _token(driver.CUipcMemHandle, changed.hex()), 1))
    out = bytearray(5)
    status = code("cuMemcpyDtoH", out, address, 5)
    _say(status, "" if status else out.decode())
    ok("cuIpcCloseMemHandle", address)


def large_pool(passed: str, token: str) -> None:
    """Import a pool and a pointer; say the code, and how often it would have crashed."""
    _context()
    imported = ok("cuMemPoolImportFromShareableHandle", int(passed), FD, 0)
    _say(code("cuMemPoolImportPointer", imported, _token(driver.CUmemPoolPtrExportData, token)))
    _say(ctypes.CDLL("libcuda.so.1").vram_standin_would_crash())


def second_bind() -> None:
    """Bind with the version that names the device: the right one, and a wrong one."""
    _context()
    both, (address, memory) = int(ok("cuMulticastCreate", multicast_prop(1))), mapped()
    ok("cuMulticastAddDevice", both, 0)
    ok("cuMulticastBindMem", both, 0, memory, 0, GRANULE, 0)
    target = reserve()
    ok("cuMemMap", target, GRANULE, 0, both, 0)
    ok("cuMemSetAccess", target, GRANULE, [access(3)], 1)
    ok("cuMemcpyHtoD", target, b"bytes", 5)
    _say(read(address, 5).decode())
    ok("cuMulticastUnbind", both, 0, 0, GRANULE)
    try:
        _say(code("cuMulticastBindMem_v2", both, 0, 0, memory, 0, GRANULE, 0))
        _say(code("cuMulticastBindMem_v2", both, 1, 0, memory, 0, GRANULE, 0))
    except RuntimeError:
        _say("missing")


def fabric(token: str = "") -> None:
    """Make a fabric handle, or import one and read what it holds."""
    _context()
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    if token:
        handle = int(ok("cuMemImportFromShareableHandle", bytes.fromhex(token), kind))
        found = ok("cuMemGetAllocationPropertiesFromHandle", handle)
        where = int(found.getPtr()) + 8  # past the bindings, of which older ones do not know the type
        _say(*(ctypes.c_int.from_address(where + at).value for at in (0, 4)))
        _say(read(_map(handle), 6).decode())
        return
    address, handle = mapped(types=8)
    ok("cuMemcpyHtoD", address, b"fabric", 6)
    _say(bytes(ok("cuMemExportToShareableHandle", handle, kind, 0).data).hex())
    sys.stdin.readline()


def defaults() -> None:
    """Say the codes of a few calls with faults from the environment."""
    _context()
    for _ in range(3):
        status, handle = driver.cuMemCreate(GRANULE, _prop(), 0)
        _say(int(status))
        if handle is not None:
            ok("cuMemRelease", handle)
    _say(int(ok("cuDeviceTotalMem", 0)))


def _prop() -> Any:
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location = location()
    return made


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
