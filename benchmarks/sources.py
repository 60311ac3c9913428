"""Every source of memory against every way to another process, by doing it: the table of docs/sharing.md.

``python -m benchmarks.sources cuda:0`` prints it, for any GPU of the machine. Each cell was tried: the bytes
were compared in the other process, or the reason is the error's own. A source that needs a setting of its own is tried
in a process that has it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import vram
from vram import driver as drivers
from vram.bench.children import DEADLINE, Child, child
from vram.errors import InternalError, VramError
from vram.spec import Location

from .share import pooled

_COUNT = 1000
ELSEWHERE = "borrow on another GPU"
WAYS = ("lend and borrow", ELSEWHERE, "channel", "publish", "queue", "64-byte handle")
_Maker = Callable[[str, contextlib.ExitStack], Any]


def _expected(dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.arange(_COUNT, dtype=dtype)


# -- the sources ------------------------------------------------------------------------------------------------
def _vram(device: str, stage: contextlib.ExitStack) -> Any:
    return stage.enter_context(vram.asarray(_expected(), device=device))


def _host(device: str, stage: contextlib.ExitStack) -> Any:
    return stage.enter_context(vram.asarray(_expected(), device="host"))


def _numa(device: str, stage: contextlib.ExitStack) -> Any:
    array = stage.enter_context(vram.empty(_COUNT, "float32", device="cuda:numa:0"))
    array[...] = _expected()
    return array


def _pool(device: str, stage: contextlib.ExitStack) -> Any:
    from cuda.bindings import driver as api

    _, address = stage.enter_context(pooled(Location.parse(device), 4 * _COUNT))
    data = _expected().tobytes()
    if int(api.cuMemcpyHtoD(address, data, len(data))[0]):
        raise InternalError("the driver copies nothing into memory of a pool")
    return address, 4 * _COUNT, device


def _torch(device: str, stage: contextlib.ExitStack) -> Any:
    import torch

    return torch.arange(_COUNT, dtype=torch.float32, device=device)


def _cupy(device: str, stage: contextlib.ExitStack) -> Any:
    import cupy

    stage.enter_context(cupy.cuda.Device(int(device.rpartition(":")[2])))
    return cupy.arange(_COUNT, dtype="float32")


def _cupy_async(device: str, stage: contextlib.ExitStack) -> Any:
    import cupy

    stage.enter_context(cupy.cuda.using_allocator(cupy.cuda.MemoryAsyncPool().malloc))
    return _cupy(device, stage)


def _jax(device: str, stage: contextlib.ExitStack) -> Any:
    import jax

    return jax.device_put(_expected(), jax.devices("gpu")[int(device.rpartition(":")[2])])


def _numba(device: str, stage: contextlib.ExitStack) -> Any:
    from numba import cuda

    stage.enter_context(cuda.gpus[int(device.rpartition(":")[2])])
    return cuda.to_device(_expected())


def _rmm(device: str, stage: contextlib.ExitStack) -> Any:
    import rmm
    from cuda.bindings import runtime

    runtime.cudaSetDevice(int(device.rpartition(":")[2]))
    rmm.reinitialize(devices=int(device.rpartition(":")[2]))
    return rmm.DeviceBuffer.to_device(_expected().tobytes())


def _shared_memory(device: str, stage: contextlib.ExitStack) -> Any:
    from multiprocessing import shared_memory

    memory = shared_memory.SharedMemory(create=True, size=4 * _COUNT)
    stage.callback(memory.unlink)
    stage.callback(memory.close)
    array: np.ndarray[Any, Any] = np.ndarray(_COUNT, "float32", memory.buf)
    array[:] = _expected()
    return array


class Source(NamedTuple):
    """A kind of memory: its name, its maker, the package that it takes, and the environment that it needs."""

    name: str
    make: _Maker
    package: str
    environment: dict[str, str]


SOURCES = (
    Source("vram array on a GPU", _vram, "", {}),
    Source("a pool with a handle type", _pool, "", {}),
    Source("PyTorch, default allocator", _torch, "torch", {}),
    Source("PyTorch, expandable segments", _torch, "torch", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    Source(
        "PyTorch, expandable segments without IPC", _torch, "torch",
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0"},
    ),
    Source("PyTorch, cudaMallocAsync", _torch, "torch", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    Source("CuPy, default pool", _cupy, "cupy", {}),
    Source("CuPy, MemoryAsyncPool", _cupy_async, "cupy", {}),
    Source("JAX, default allocator", _jax, "jax", {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
    Source("JAX, platform allocator", _jax, "jax", {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
    Source("Numba device array", _numba, "numba", {}),
    Source("RMM buffer", _rmm, "rmm", {}),
    Source("vram array on cuda:numa:0", _numa, "", {}),
    Source("vram array on the host", _host, "", {}),
    Source("numpy view of a vram array", lambda device, stage: _host(device, stage).numpy()[10:], "", {}),
    Source("numpy array", lambda device, stage: _expected(), "", {}),
    Source("multiprocessing.shared_memory", _shared_memory, "", {}),
    Source("PyTorch on the CPU", lambda device, stage: _torch("cpu", stage), "torch", {}),
    Source(
        "PyTorch on the CPU, share_memory_()", lambda device, stage: _torch("cpu", stage).share_memory_(), "torch", {}
    ),
    Source("PyTorch on the CPU, pinned", lambda device, stage: _torch("cpu", stage).pin_memory(), "torch", {}),
)  # fmt: skip


# -- the ways ---------------------------------------------------------------------------------------------------
def _try(way: str, source: Any, folder: Path, other: Child, channel: vram.ArrayChannel, queue: Any) -> str:
    """Do it, and say in a few words what came of it."""
    wanted = _bytes_of(source)
    try:
        if way in ("lend and borrow", ELSEWHERE):
            elsewhere = "" if way != ELSEWHERE else _another_gpu(vram.share(source))
            if elsewhere is None:
                return "did not run: it takes two GPUs"
            path = str(folder / "lent")
            with vram.lend(source, at=path, writable=_is_ours(source)):
                found = other.ask("lend and borrow", path, elsewhere)
        elif way == "channel":
            channel.send(vram.share(source))
            found = other.ask(way)
        elif way == "publish":
            done = vram.publish("source", {"a": _shared_or_not(source)}, writable=_is_ours(source), whole=True)
            found = other.ask(way)
            vram.remove("source")
            if done.copied and found == wanted:
                return "copied: " + done.copied["a"]
        elif way == "queue":
            queue.put(vram.share(source))
            found = other.ask(way)
        else:
            found = _by_handle(source, other)
    except VramError as error:
        return f"no: {_short(error)}"
    except Exception as error:  # noqa: BLE001  (a cell of a table, whatever it is)
        return f"no: {type(error).__name__}: {_cell((str(error).splitlines() or [''])[0])}"
    if isinstance(found, VramError):
        return f"no: {_short(found)}"
    return "works" if found == wanted else f"WRONG BYTES ({found[:16]!r})"


def _another_gpu(array: vram.Array) -> str | None:
    """Return a GPU that the memory is not on, if there is one; with what the copies of a GPU are tried."""
    count = drivers.get(Location("cuda")).device_count()
    return next((f"cuda:{number}" for number in range(count) if str(array.device) != f"cuda:{number}"), None)


def _by_handle(source: Any, other: Child) -> Any:
    array = vram.share(source)
    handle = vram.sharing.IpcMemHandle.of(array.address)
    array.region.synchronize()
    found: Any = other.ask("64-byte handle", handle.to_bytes(), handle.offset, array.nbytes, str(array.device))
    return found


def _is_ours(source: Any) -> bool:
    """Whether lending it read-only would freeze it, for the ways that come after."""
    return isinstance(source, (vram.Array, np.ndarray))


def _shared_or_not(source: Any) -> Any:
    try:
        return vram.share(source)
    except VramError:
        return source


def _bytes_of(source: Any) -> bytes:
    if isinstance(source, vram.Array):
        return source.to_host().tobytes()
    if isinstance(source, tuple):
        return vram.share(source).to_host().tobytes()
    with vram.copy(source) as copy:
        return copy.to_host().tobytes()


def _short(error: VramError) -> str:
    have = getattr(error, "have", "") or str(error)
    return _cell(str(have))


def _cell(text: str) -> str:
    """The words as a cell of the table, whole words only."""
    return textwrap.shorten(text.replace("|", "/"), 160, placeholder=" ...")


def _receiver(pipe: Connection, channel: vram.ArrayChannel, queue: Any, keeper: str) -> None:
    """The other process: opens what came, and returns its bytes, or why it cannot."""
    found: Any
    pipe.send("ready")
    while True:
        what, *rest = pipe.recv()
        try:
            if what == "lend and borrow":
                path, gpu = rest
                with vram.borrow(path, device=gpu or None) as lease:
                    if not gpu:
                        found = lease.array.to_host().tobytes()
                    else:  # that GPU reads it
                        with vram.copy(lease.array, device=gpu) as copy:
                            found = copy.to_host().tobytes()
            elif what == "channel":
                found = channel.recv(timeout=DEADLINE).to_host().tobytes()
            elif what == "publish":
                with vram.attach("source", keeper=keeper) as attached:
                    found = attached["a"].to_host().tobytes()
            elif what == "queue":
                found = queue.get().to_host().tobytes()
            else:
                data, offset, nbytes, device = rest
                with vram.sharing.IpcMemHandle.from_bytes(data, offset=offset).open(nbytes, device=device) as memory:
                    out = bytearray(nbytes)
                    drivers.get(Location.parse(device)).copy_out(memoryview(out), memory.address)
                    found = bytes(out)
        except VramError as error:
            found = error
        gc.collect()
        pipe.send(found)


# -- the table --------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _stage() -> Iterator[tuple[Path, Child, vram.ArrayChannel, Any]]:
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stage:
        folder = Path(stage.enter_context(tempfile.TemporaryDirectory(prefix="vram-", dir="/tmp")))
        keeper = stage.enter_context(vram.private_keeper())
        near, far = vram.ArrayChannel.pair()
        queue = context.SimpleQueue()
        other = stage.enter_context(child(_receiver, far, queue, keeper.path))
        far.close()
        stage.enter_context(near)
        other.hear()
        yield folder, other, near, queue


def _row(name: str, device: str) -> dict[str, str]:
    make = next(source.make for source in SOURCES if source.name == name)
    with contextlib.ExitStack() as stage, _stage() as (folder, other, channel, queue):
        source = make(device, stage)
        row = {"source": name, "route": str(vram.explain(source)).partition(": ")[2]}
        for way in WAYS:
            row[way] = _try(way, source, folder, other, channel, queue)
        del source
    return row


def main(arguments: list[str]) -> None:
    """Print the table for a device, or (with a source's name as well) one row of it as JSON.

    Raises
    ------
    InternalError
        If wrong bytes arrived anywhere.
    """
    device = arguments[0] if arguments else "cuda:0"
    if len(arguments) > 1:
        print(json.dumps(_row(arguments[1], device)))
        return
    rows: list[dict[str, str]] = []
    for name, _, package, environment in SOURCES:
        if package and importlib.util.find_spec(package) is None:
            rows.append({"source": name, "route": f"did not run: {package} is not installed here"})
            continue
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.sources", device, name],
            capture_output=True,
            text=True,
            timeout=2 * DEADLINE,
            env={**os.environ, **environment},
            check=False,
        )
        try:
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        except (IndexError, ValueError):
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            rows.append({"source": name, "route": f"did not run: {_cell(last)}"})
    print("| source | route | " + " | ".join(WAYS) + " |")
    print("|---" * (2 + len(WAYS)) + "|")
    for row in rows:
        print("| " + " | ".join(row.get(column, "") for column in ("source", "route", *WAYS)) + " |")
    wrong = [row["source"] for row in rows if any("WRONG" in cell for cell in row.values())]
    if wrong:
        raise InternalError(f"wrong bytes arrived from {wrong}")


if __name__ == "__main__":
    main(sys.argv[1:])
