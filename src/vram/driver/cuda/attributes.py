"""Attributes of a pointer, read into memory of our own, since some releases of the bindings return wrong values.

The driver writes as many bytes as an attribute has (1, 4 or 8) into 8 that are zero, so one kind of number fits all but
the ordinal, which is negative where there is no GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from ...errors import UsageError
from .bindings import Bindings

# CU_POINTER_ATTRIBUTE_*
CONTEXT, MEMORY_TYPE, BUFFER_ID, IS_MANAGED, DEVICE_ORDINAL = 1, 2, 7, 8, 9
IS_LEGACY_IPC_CAPABLE, ALLOWED_HANDLE_TYPES, MEMPOOL = 10, 14, 17
INFO = DEVICE_ORDINAL, MEMORY_TYPE, BUFFER_ID, IS_LEGACY_IPC_CAPABLE, ALLOWED_HANDLE_TYPES, MEMPOOL, CONTEXT, IS_MANAGED


def attributes(bindings: Bindings, numbers: Sequence[int], address: int) -> list[int]:
    """Return some attributes, by their numbers in cuda.h; of an address that the driver does not know 0, and -2 as the
    ordinal. Raises UsageError for what is no address at all."""
    _check(address)
    count = len(numbers)
    which = (ctypes.c_int * count)(*numbers)
    room = (ctypes.c_uint64 * (2 * count))()  # the answers, and behind them where each goes
    start = ctypes.addressof(room)
    room[count:] = [start + 8 * at for at in range(count)]
    bindings.past("cuPointerGetAttributes", count, ctypes.addressof(which), start + 8 * count, address)
    found = room[:count]
    for at, number in enumerate(numbers):
        if number == DEVICE_ORDINAL:
            found[at] = ctypes.c_int32(found[at]).value
    return found


def attribute(bindings: Bindings, number: int, address: int) -> int:
    """Return one attribute; unlike with several, an address that the driver does not know raises DriverError
    (INVALID_VALUE). Raises UsageError for what is no address at all."""
    _check(address)
    room = ctypes.c_uint64()
    bindings.past("cuPointerGetAttribute", ctypes.addressof(room), number, address)
    return ctypes.c_int32(room.value).value if number == DEVICE_ORDINAL else room.value


def misread(bindings: Bindings) -> str:
    """Return which attribute the bindings do not pass on as the driver says it; empty if they do.
    Asked of an address of the host, whose GPU the driver says is -2; some releases give that without its sign."""
    page = ctypes.c_uint64()
    asked = [bindings.api.CUpointer_attribute(DEVICE_ORDINAL)]
    (found,) = bindings("cuPointerGetAttributes", 1, asked, ctypes.addressof(page))
    told = ctypes.c_int32(int(found) & 0xFFFFFFFF).value
    says = attributes(bindings, [DEVICE_ORDINAL], ctypes.addressof(page))[0]
    return "" if told == says else f"for the GPU of a pointer they say {told} where the driver says {says}"


def _check(address: int) -> None:
    if not 0 < address < 1 << 64:  # ctypes would cut it to 64 bits, and another address is asked for
        raise UsageError(f"{address:#x} is no address")
