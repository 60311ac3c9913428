"""Another library's hand: NVIDIA's driver called directly, past ours and its books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vram import driver as drivers
from vram.spec import Access, HandleKind, Location

_MADE = ("legacy", "mapped", "pool", "allocate", "pooled", "pinned", "free")


class CudaStranger:
    """Makes memory on one GPU, and frees what is left of it in the end."""

    def __init__(self, ordinal: int = 0) -> None:
        from cuda.bindings import driver as api

        self.api = api
        self.ordinal = ordinal
        self._frees: dict[int, list[Callable[[], Any]]] = {}
        self.ok("cuInit", 0)
        self.ok("cuCtxPushCurrent", self.ok("cuDevicePrimaryCtxRetain", ordinal))

    def ok(self, name: str, *arguments: Any) -> Any:
        status, *found = getattr(self.api, name)(*arguments)
        assert int(status) == 0, f"{name}: {status!r}"
        return found[0] if len(found) == 1 else found

    def legacy(self, nbytes: int) -> int:
        address = int(self.ok("cuMemAlloc", nbytes))
        self._frees[address] = [lambda: self.ok("cuMemFree", address)]
        return address

    def mapped(self, sizes: tuple[int, ...], kinds: HandleKind, access: Access = Access.READ_WRITE) -> int:
        prop, where = self.api.CUmemAllocationProp(), self.api.CUmemLocation()
        where.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        where.id = self.ordinal
        prop.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = where
        prop.requestedHandleTypes = self.api.CUmemAllocationHandleType(int(kinds))
        total = sum(sizes)
        base = int(self.ok("cuMemAddressReserve", total, 0, 0, 0))
        at = base
        for nbytes in sizes:
            handle = self.ok("cuMemCreate", nbytes, prop, 0)
            self.ok("cuMemMap", at, nbytes, 0, handle, 0)
            self.ok("cuMemRelease", handle)
            at += nbytes
        if access is not Access.NONE:
            right = self.api.CUmemAccessDesc()
            right.location = where
            right.flags = self.api.CUmemAccess_flags(int(access))
            self.ok("cuMemSetAccess", base, total, [right], 1)
        self._frees[base] = [
            lambda: self.ok("cuMemUnmap", base, total),
            lambda: self.ok("cuMemAddressFree", base, total),
        ]
        return base

    def pooled(self, nbytes: int, *, shareable: bool) -> tuple[int, int]:
        pool = self.pool(shareable=shareable)
        return pool, self.allocate(pool, nbytes)

    def pool(self, *, shareable: bool = True) -> int:
        prop, where = self.api.CUmemPoolProps(), self.api.CUmemLocation()
        where.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        where.id = self.ordinal
        prop.allocType = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = where
        prop.handleTypes = self.api.CUmemAllocationHandleType(int(shareable))
        pool = int(self.ok("cuMemPoolCreate", prop))
        self._frees[pool] = [lambda: self.ok("cuMemPoolDestroy", self.api.CUmemoryPool(pool))]
        return pool

    def allocate(self, pool: int, nbytes: int) -> int:
        address = int(self.ok("cuMemAllocFromPoolAsync", nbytes, self.api.CUmemoryPool(pool), 0))
        self._frees[address] = [
            lambda: self.ok("cuMemFreeAsync", address, 0),
            lambda: self.ok("cuStreamSynchronize", 0),
        ]
        return address

    def pinned(self, nbytes: int) -> int:
        address = int(self.ok("cuMemHostAlloc", nbytes, 0))
        self._frees[address] = [lambda: self.ok("cuMemFreeHost", address)]
        return address

    def free(self, address: int) -> None:
        for call in self._frees.pop(address):
            call()

    def __enter__(self) -> CudaStranger:
        return self

    def __exit__(self, *_: object) -> None:
        for address in reversed(tuple(self._frees)):
            self.free(address)
        self.ok("cuCtxPopCurrent")
        self.ok("cuDevicePrimaryCtxRelease", self.ordinal)


class Maker:
    """In another process: a driver of ours, and a stranger that makes memory for it to share."""

    def __init__(self) -> None:
        self._driver = drivers.get(Location("cuda", 0))
        self._stranger = CudaStranger()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stranger if name in _MADE else self._driver, name)
