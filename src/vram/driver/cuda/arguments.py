"""Arguments that NVIDIA's driver would refuse without saying why."""

from __future__ import annotations

import os
import stat

from ...errors import ProtocolError, UnsupportedError, UsageError
from ...open_files import is_memory
from ...spec import AllocationFlags, HandleKind
from ..protocol import HANDLE_BYTES
from .bindings import version_text
from .devices import Device
from .functions import Handle

_FABRIC_SINCE = 12030  # of the driver: before it, it knows no such kind (INVALID_VALUE)
_SHAREABLE = HandleKind.POSIX_FD | HandleKind.FABRIC


def check_kinds(call: str, kinds: HandleKind, driver_version: int) -> None:
    """Refuse handle kinds that memory made here can never have, and those that this driver has not heard of."""
    if kinds & (HandleKind.WIN32 | HandleKind.WIN32_KMT):
        raise UnsupportedError(
            f"{call}: handle kind {kinds.name}", "Windows", "Linux, where memory is shared by file descriptors",
            "Ask for HandleKind.POSIX_FD",
        )  # fmt: skip
    if kinds & ~_SHAREABLE:
        raise UnsupportedError(
            f"{call}: handle kind {kinds.name}", "memory made by another API (cudaMalloc or a pool)",
            "memory made with cuMemCreate", "Ask for HandleKind.POSIX_FD",
        )  # fmt: skip
    if HandleKind.FABRIC in kinds and driver_version < _FABRIC_SINCE:
        raise UnsupportedError(
            f"{call}: handle kind {kinds.name}", f"a driver of CUDA {version_text(_FABRIC_SINCE)}",
            version_text(driver_version),
            "Upgrade the NVIDIA driver, or ask for HandleKind.POSIX_FD, which works within one machine",
        )  # fmt: skip


def check_fabric(call: str, data: bytes, driver_version: int) -> Handle:
    """Return the 64 bytes of a CUmemFabricHandle as the driver takes them."""
    check_kinds(call, HandleKind.FABRIC, driver_version)
    if len(data) != HANDLE_BYTES:
        raise ProtocolError(f"{call}: a fabric handle has {HANDLE_BYTES} bytes, not {len(data)}")
    return Handle.from_buffer_copy(data)


def no_channel(what: str, said: str) -> UnsupportedError:
    """Return the error for what takes an IMEX channel (CUDA Driver API, cuMemCreate). `said`: the driver's answer."""
    return UnsupportedError(
        what, "an IMEX channel that this process may use (a device of nvidia-caps-imex-channels)",
        f"the driver's answer {said}", "Ask for POSIX_FD, which works within one machine",
    )  # fmt: skip


# For each flag the attribute of a device that has it (CU_DEVICE_ATTRIBUTE_*), the first driver of CUDA that knows it,
# and what it takes. Flags without a version are known to the oldest supported driver.
_FLAGS = {
    AllocationFlags.COMPRESSIBLE: (107, 0, "a GPU with compute data compression"),
    AllocationFlags.GPU_DIRECT_RDMA: (110, 0, "a GPU and a system with GPUDirect RDMA"),
    AllocationFlags.TILE_POOL: (112, 0, "a GPU with sparse CUDA arrays"),
    AllocationFlags.HW_DECOMPRESS: (136, 12080, "a GPU with a decompression engine"),
}


def check_flags(what: str, flags: AllocationFlags, device: Device | None, driver_version: int) -> None:
    """Refuse flags that this driver or a device lacks. `device` is None for memory of the host, which takes none."""
    if not flags:
        return
    if device is None:
        raise UnsupportedError(
            f"{what}: {flags!r}", "memory of a GPU", "memory of the host", 'Leave flags out, or name a GPU: "cuda:0"'
        )
    for flag, (attribute, since, needs) in _FLAGS.items():
        if flag not in flags:
            continue
        if driver_version < since:
            raise UnsupportedError(
                f"{what}: {flag!r}", f"a driver of CUDA {version_text(since)}", version_text(driver_version),
                "Upgrade the NVIDIA driver, or leave the flag out",
            )  # fmt: skip
        if not device.attribute(attribute):
            raise UnsupportedError(
                f"{what}: {flag!r}", needs, f"{device.name}, which says that it has not", "Leave the flag out"
            )


def check_descriptor(call: str, fd: int) -> None:
    """Refuse descriptors that the driver cannot have exported."""
    try:
        found = os.fstat(fd)
    except (OSError, OverflowError, ValueError, TypeError):  # the driver's word for it would be that of other mistakes
        raise UsageError(f"{call}({fd}): this is no open file descriptor") from None
    is_file = stat.S_ISREG(found.st_mode) and not is_memory(fd)
    if is_file or stat.S_ISDIR(found.st_mode) or stat.S_ISFIFO(found.st_mode):
        raise ProtocolError(f"{call}({fd}): this is nothing that the driver exported (a file, a directory or a pipe)")
