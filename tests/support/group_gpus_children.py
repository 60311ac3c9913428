"""What ranks on GPUs of their own do in processes of their own: each is told the path, its rank and the size."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from tests.support.deadlines import SOON

import vram
from vram import driver as drivers
from vram.errors import VramError


def read(array: vram.Array) -> np.ndarray[Any, Any]:
    """Return what is in memory of a GPU."""
    found = np.empty(array.shape, np.float32)
    drivers.get(array.region.location).copy_out(memoryview(found).cast("B"), array.address)
    return found


def write(array: vram.Array, data: np.ndarray[Any, Any]) -> None:
    """Put something into memory of a GPU."""
    drivers.get(array.region.location).copy_in(array.address, memoryview(data).cast("B"))


def meet(at: str, pipe: Connection, rank: int, size: int) -> None:
    """Make a symmetric buffer of GPUs, and say how that ended, and whether this rank and the group work on."""
    with vram.Group(rank=rank, size=size, at=at, timeout=SOON) as group:
        said = ("", "")
        try:
            group.symmetric(8, "float32", device=f"cuda:{rank}")
        except VramError as error:
            said = type(error).__name__, str(error)
        with (
            group.symmetric(4, "float32", device="host") as host,
            vram.zeros(4, "float32", device=f"cuda:{rank}") as on,
        ):
            group.all_reduce(host)
            pipe.send((*said, read(on).tolist()))
        group.barrier()


class Foreign:
    """Memory that this process made with cuMemAlloc (or a part of an array of ours), as an array of any library."""

    def __init__(self, address: int, count: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "version": 3, "data": (address, False), "shape": (count,), "typestr": "<f4", "stream": None,
        }  # fmt: skip


def met_in_capture(at: str, pipe: Connection, rank: int, size: int, kind: str) -> None:
    """Capture calls with arrays of some kind, register them, and say what is in the table and where that leads.

    The stand-in runs no kernels: what would be launched is noted instead.
    """
    from cuda.bindings import driver as api

    import standin
    from vram.collectives.device import Workspace
    from vram.collectives.routes import SHARES, Routes, Step

    launched: list[tuple[str, tuple[int, ...]]] = []

    def launch(_: Any, _dtype: str, _op: str, name: str, _blocks: int, arguments: Any, _stream: int) -> None:
        launched.append((name, tuple(arguments)))

    Workspace.prepare = lambda *_: None  # type: ignore[method-assign, assignment]
    Workspace._launch = launch  # type: ignore[method-assign, assignment]
    gpu, count = vram.spec.Location("cuda", rank), 3000
    driver: Any = drivers.get(gpu)
    driver.mem_info(gpu)
    api.cuCtxSetCurrent(driver.devices.device(gpu).context)
    stream = driver.stream_create(gpu)
    freed: list[int] = []
    held: list[vram.Array] = []

    def array(number: int) -> Any:
        if kind == "ours" or (kind == "one of a pool" and (number, rank) != (1, 1)):
            held.append(vram.zeros(count, "float32", device=str(gpu)))
            made: Any = held[-1]
        elif kind == "one of a pool":
            status, address = api.cuMemAllocAsync(count * 4, stream)
            assert not int(status)
            freed.append(int(address))
            made = Foreign(int(address), count)
        else:
            status, address = api.cuMemAlloc(count * 4 + 256)
            assert not int(status)
            freed.append(int(address))
            made = Foreign(int(address) + (4 if kind == "odd" else 256), count)
        where = made.__cuda_array_interface__["data"][0]
        data = np.full(count, 10 * rank + number, np.float32)
        assert not int(api.cuMemcpyHtoD(where, data.ctypes.data, data.nbytes)[0])
        return made

    routes = Routes({(size, "float32", "sum"): (Step(None, SHARES),)}, "of the test")
    with vram.Group(rank=rank, size=size, at=at, timeout=SOON, routes=routes) as group:
        arrays = [array(number) for number in range(4)]
        group.all_reduce(arrays[0], stream=stream)
        assert [name for name, _ in launched] == ["all_reduce_packets"], "nothing is captured"
        launched.clear()
        control = standin.Standin()
        control.capture(stream)
        group.all_reduce(arrays[0], out=arrays[1], stream=stream)
        group.all_reduce(arrays[2], out=arrays[3], stream=stream)
        control.capture(0)
        said = group.register_captured()
        assert group.register_captured() == (), "nothing is new"
        pipe.send((said, group.statistics().get("registered", 0), [name for name, _ in launched]))
        group.barrier()
        for _, (entry, *_) in launched:
            words = np.empty(1 + 2 * size, np.uint64)
            driver.copy_out(memoryview(words).cast("B"), entry)
            seen = []
            for address in words[1:].tolist() if words[0] else []:
                found = np.empty(count, np.float32)
                assert not int(api.cuMemcpyDtoH(found.ctypes.data, address, found.nbytes)[0])
                seen.append(set(found.tolist()))
            pipe.send(seen)
        group.barrier()
    for one in held:
        one.close()
    for address in freed:
        assert not int((api.cuMemFreeAsync(address, stream) if kind == "one of a pool" else api.cuMemFree(address))[0])
    driver.stream_destroy(stream)
    pipe.send("done")
