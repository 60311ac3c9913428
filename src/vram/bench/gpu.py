"""The means to measure GPU memory: NVIDIA's driver called bare, through cuda-bindings alone, and PyTorch."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from .. import driver as drivers
from ..errors import InternalError
from ..spec import Location


class Bare:
    """The bindings (`api`), and what their calls are given: memory that can leave the process, and access to it."""

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver as api

        self.api: Any = api
        self.fd_kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        place = api.CUmemLocation()
        place.type, place.id = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, ordinal
        self.prop = api.CUmemAllocationProp()
        self.prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.prop.location, self.prop.requestedHandleTypes = place, self.fd_kind
        grant = api.CUmemAccessDesc()
        grant.location, grant.flags = place, api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.grants = [grant]

    @staticmethod
    def ok(outcome: tuple[Any, ...]) -> Any:
        """Look at the status, as any caller has to, and return the value."""
        if outcome[0]:
            raise InternalError(f"a bare driver call failed: {outcome[0]!r}")
        return outcome[1] if len(outcome) > 1 else None

    def free_bytes(self) -> int:
        """Return what ``cuMemGetInfo`` calls free."""
        outcome = self.api.cuMemGetInfo()
        self.ok(outcome)
        return int(outcome[1])


@contextlib.contextmanager
def bare_calls(location: Location) -> Iterator[Bare]:
    """Make the GPU's primary context the current one of this thread for the length of a block."""
    ordinal = ordinal_of(location)
    drivers.get(location).mem_info(location)  # cuInit, and a context that stays: not what is measured
    bare = Bare(ordinal)
    api, ok = bare.api, bare.ok
    device = ok(api.cuDeviceGet(ordinal))
    context = ok(api.cuDevicePrimaryCtxRetain(device))
    try:
        ok(api.cuCtxPushCurrent(context))
        try:
            yield bare
        finally:
            api.cuCtxPopCurrent()
    finally:
        api.cuDevicePrimaryCtxRelease(device)


def ordinal_of(location: Location) -> int:
    """Return the number that the driver gives a GPU in this process, whichever way it was named."""
    driver: Any = drivers.get(location)
    return int(driver.canonical(location).id)


def torch_on(location: Location, notes: list[str]) -> Any:
    """Return torch, or None and a note why it is not measured."""
    if importlib.util.find_spec("torch") is None:
        notes.append("torch did not run: it is not installed")
        return None
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        notes.append(f"torch did not run: torch {torch.__version__} sees no GPU")
        return None
    if ordinal_of(location) >= torch.cuda.device_count():
        notes.append(f"torch did not run: it does not see {location}")
        return None
    torch.cuda.init()
    return torch
