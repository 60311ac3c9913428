"""Groups of processes: their sizes and ranks, multicast switched off in them, and what those on GPUs are held against.

Multicast objects can put a host out of service that others share. Libraries read the variables that switch it off when
they are imported or initialised, so a parent sets them before it starts a child, and the child looks before it imports
anything. The rivals are NCCL, plain and with registered windows, and torch's symmetric memory, all of them by torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from vram.bench.children import DEADLINE, Child
from vram.errors import UsageError

NO_MULTICAST: Final = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "VRAM_MULTICAST": "off",
}  # fmt: skip
NCCL = "NCCL (multicast off)"
WINDOWS = "NCCL, registered windows (multicast off)"
ONE_SHOT = "torch symmetric memory, one-shot (multicast off)"
TWO_SHOT = "torch symmetric memory, two-shot (multicast off)"
_ONE_SHOT_AT_MOST = 4 << 20  # bytes: above it is slower than all others


@contextlib.contextmanager
def no_multicast() -> Iterator[None]:
    """Switch it off in the environment of this process, and so of children that are started in the block."""
    before = {name: os.environ.get(name) for name in NO_MULTICAST}
    os.environ.update(NO_MULTICAST)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_no_multicast() -> None:
    """Refuse to go on unless it is switched off, and nothing has been imported that would not have seen it."""
    wrong = [f"{name}={value}" for name, value in NO_MULTICAST.items() if os.environ.get(name) != value]
    if wrong:
        raise UsageError(
            f"this process would start libraries that make multicast objects, which may put its host out of service: "
            f"{', '.join(wrong)} has to be set before"
        )
    early = [name for name in ("torch", "cupy", "nccl") if name in sys.modules]
    if early:
        raise UsageError(f"{early[0]} was imported before it was certain that multicast is off")


def group_sizes(devices: int, gpus: int | None) -> list[int]:
    """Return the sizes of groups to measure: 2, 4 and 8 up to `devices`, or only the one that was asked for."""
    if gpus is None:
        return [size for size in (2, 4, 8) if size <= devices]
    if not 2 <= gpus <= devices:
        raise UsageError(
            f"groups of {gpus} GPUs cannot be measured here: a group has 2 or more, and the number of GPUs is {devices}"
        )
    return [gpus]


def slowest(ranks: Sequence[Child], *what: object) -> float:
    """Have all ranks do something at once; return what the slowest one took."""
    for one in ranks:
        one.tell(*what)
    most: float = max(one.hear() for one in ranks)
    return most


def replayed(torch: Any, graph: Any, stream: Any) -> float:
    """Return the seconds that a graph of torch's takes the second time, on its way while the first one runs."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class Rivals:
    """One rank of torch's groups on its GPU. `lacking` says what torch cannot do here, and why."""

    def __init__(self, stage: contextlib.ExitStack, place: str, rank: int, size: int) -> None:
        self.lacking: list[str] = []
        self._makers: dict[str, Callable[[int], Any]] = {}
        self._kept: tuple[tuple[str, int], Any] | None = None
        if importlib.util.find_spec("torch") is None:
            self.lacking.append("torch is not installed: no rivals")
            return
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            self.lacking.append(
                f"a torch that finds GPUs and has NCCL is not installed, but {torch.__version__}: no rivals"
            )
            return
        torch.cuda.set_device(rank)
        self._device = torch.device("cuda", rank)
        store: Any = dist.FileStore(str(Path(place) / "store"), size)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=DEADLINE), device_id=self._device
        )
        stage.callback(dist.destroy_process_group)
        stage.callback(self._forget)
        dist.all_reduce(torch.zeros(8, device=self._device))
        torch.cuda.synchronize()
        self._makers[NCCL] = self._tensor
        self._try(WINDOWS, self._registered)
        self._try(ONE_SHOT, self._symmetric)
        if ONE_SHOT in self._makers:
            self._makers[TWO_SHOT] = self._symmetric

    def _try(self, name: str, maker: Callable[[int], Any]) -> None:
        """Have a rival run if it can make memory here. All ranks come to the same, as their software is the same."""
        try:
            maker(1 << 10)
        except Exception as error:  # noqa: BLE001  (whatever it was, it is left out, and said)
            self.lacking.append(f"{name} did not run: {type(error).__name__}: {error}"[:300])
        else:
            self._makers[name] = maker

    def names(self, nbytes: int) -> list[str]:
        """Return which of them run with so many bytes."""
        return [name for name in self._makers if name != ONE_SHOT or nbytes <= _ONE_SHOT_AT_MOST]

    def set_up(self, nbytes: int) -> float:
        """Return the seconds that it takes to make a buffer of so many bytes that all ranks know."""
        begin = time.perf_counter()
        self._symmetric(nbytes)
        self._torch.cuda.synchronize()
        return time.perf_counter() - begin

    def call(self, name: str, tensor: Any) -> Any:
        """Put an all-reduce on the current stream, and return what it went to."""
        if name in (NCCL, WINDOWS):
            self._dist.all_reduce(tensor)
            return tensor
        group = self._dist.group.WORLD.group_name
        if name == ONE_SHOT:
            return self._torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", group)
        return self._torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", group)

    def make(self, name: str, nbytes: int) -> Any:
        """Return a tensor of bfloat16 that a rival reduces."""
        return self._makers[name](nbytes)

    def time(self, name: str, nbytes: int, calls: int, buffers: int) -> float:
        """Return microseconds a call on this rank, of calls in a graph."""
        torch = self._torch
        if self._kept is None or self._kept[0] != (name, nbytes):
            self._forget()
            tensors = [self.make(name, nbytes) for _ in range(buffers)]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for one in tensors:
                    self.call(name, one)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                for number in range(calls):
                    self.call(name, tensors[number % buffers])
            self._kept = ((name, nbytes), (graph, tensors, side))
        graph, _, side = self._kept[1]
        return replayed(torch, graph, side) * 1e6 / calls

    def _forget(self) -> None:
        self._kept = None
        if self._makers:
            self._torch.cuda.synchronize()

    def _tensor(self, nbytes: int) -> Any:
        return self._torch.zeros(nbytes // 2, dtype=self._torch.bfloat16, device=self._device)

    def _registered(self, nbytes: int) -> Any:
        backend = self._dist.group.WORLD._get_backend(self._device)
        pool = self._torch.cuda.MemPool(backend.mem_allocator)
        with self._torch.cuda.use_mem_pool(pool):
            tensor = self._tensor(nbytes)
        backend.register_mem_pool(pool, symm=True)
        tensor.pool = pool  # for as long as the tensor
        return tensor

    def _symmetric(self, nbytes: int) -> Any:
        import torch.distributed._symmetric_memory as symmetric

        tensor = symmetric.empty(nbytes // 2, dtype=self._torch.bfloat16, device=self._device)
        symmetric.rendezvous(tensor, self._dist.group.WORLD.group_name)
        return tensor.zero_()
