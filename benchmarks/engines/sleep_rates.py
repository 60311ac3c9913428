"""Sleep and wake of one tag on a GPU, the second time: vram, torch_memory_saver (where it is installed), a plain copy.

    python benchmarks/engines/sleep_rates.py [GIB]

Each in a process of its own, one after another, in this order. Seconds are of the call, on an idle device; all bytes
are compared afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

GIB = 1 << 30


def copy(total: int) -> None:
    """Copy between the GPU and pinned memory, 4 GiB at a time."""
    import torch

    there, here = torch.ones(4 * GIB, dtype=torch.uint8, device="cuda"), torch.empty(4 * GIB, dtype=torch.uint8)
    torch.cuda.cudart().cudaHostRegister(here.data_ptr(), here.nbytes, 0)
    for name, to, source in (("to the host", here, there), ("to the GPU", there, here)):
        for _ in range(2):
            seconds = timed(lambda to=to, source=source: to.copy_(source, non_blocking=True))  # type: ignore[misc]
        print(f"plain copy of 4 GiB {name}: {4 * GIB / seconds / 1e9:.1f} GB/s", flush=True)


def pool(total: int) -> None:
    """``vram.TorchPool`` itself."""
    import vram

    made = vram.TorchPool("cuda:0")
    for tag, options in (("offloaded", {"offload": ["offloaded"]}), ("discarded", {"discard": ["discarded"]})):
        with made.use(tag):
            tensors = fill(total)
        cycles(f"vram.TorchPool, {tag}", lambda o=options: made.sleep(**o), made.wake, tensors, tag == "offloaded")  # type: ignore[misc]
        del tensors
        made.close()


def ours(total: int) -> None:
    """The adapter."""
    from vram.engines.torch_memory_saver import torch_memory_saver

    saver("vram's adapter", torch_memory_saver, total)


def theirs(total: int) -> None:
    """The package, in its mode "torch"."""
    from torch_memory_saver import torch_memory_saver

    saver("torch_memory_saver", torch_memory_saver, total)


def saver(name: str, made: Any, total: int) -> None:
    made.hook_mode = "torch"
    for tag, backup in (("discarded", False), ("offloaded", True)):
        with made.region(tag, enable_cpu_backup=backup):
            tensors = fill(total)
        pause, resume = lambda tag=tag: made.pause(tag), lambda tag=tag: made.resume(tag)
        cycles(f"{name}, {tag}", pause, resume, tensors, backup)
        if backup:
            made.retain_cpu_backup = True
            cycles(f"{name}, {tag}, retained", pause, resume, tensors, backup)
        else:
            pause()  # for the room on the GPU


def fill(total: int) -> list[Any]:
    import torch

    return [torch.full((GIB // 4,), number + 1, dtype=torch.int32, device="cuda") for number in range(total)]


def cycles(
    name: str, sleep: Callable[[], object], wake: Callable[[], object], tensors: list[Any], is_kept: bool
) -> None:
    for number in range(2):
        slept, woke = timed(sleep), timed(wake)
        print(
            f"{name}, time {number + 1}: sleep {slept:.4f} s ({len(tensors) * GIB / slept / 1e9:.1f} GB/s), "
            f"wake {woke:.4f} s ({len(tensors) * GIB / woke / 1e9:.1f} GB/s)",
            flush=True,
        )
    if is_kept:
        assert all(int(one.min()) == int(one.max()) == at + 1 for at, one in enumerate(tensors)), "other bytes"


def timed(call: Callable[[], object]) -> float:
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


ARMS = {"copy": copy, "pool": pool, "ours": ours, "theirs": theirs}

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ARMS:
        ARMS[sys.argv[1]](int(sys.argv[2]))
    else:
        for arm in ARMS:
            code = subprocess.run([sys.executable, __file__, arm, (sys.argv[1:] or ["32"])[0]], check=False).returncode
            print(f"{arm}: ended with {code}", flush=True)
