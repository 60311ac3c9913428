"""The kernels of groups, run on a processor by ``emulated_gpu.h``: several ranks, in an order that a seed says."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from vram.collectives import kernels
from vram.collectives.kernels import Layout, Variant

_ARGUMENTS = 40
_STEPS = 3_000_000  # turns of fibers after which a run is taken for a hang
_HEADER = Path(__file__).with_name("emulated_gpu.h")


class HangError(Exception):
    """Nobody came to an end in the steps that there were."""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("rank", ctypes.c_int), ("kernel", ctypes.c_int), ("blocks", ctypes.c_int), ("threads", ctypes.c_int),
        ("arguments", ctypes.c_uint64 * _ARGUMENTS),
    )  # fmt: skip


def missing() -> str | None:
    """Say why kernels cannot be run here; None if they can."""
    if shutil.which("g++") is None:
        return "no C++ compiler (g++): kernels are not run on the processor"
    return None if " f16c" in Path("/proc/cpuinfo").read_text() else "this processor has no F16C"


@cache
def _library(size: int, dtype: str, op: str) -> ctypes.CDLL:
    """Compile the kernels of all ranks into one library."""
    variants = [Variant(size, rank, dtype, op, (9, 0)) for rank in range(size)]
    names = variants[0].names()
    program = ['#include "emulated_gpu.h"']
    for rank, variant in enumerate(variants):
        constants = variant.source().split(kernels.instructions())[0]
        text = kernels._program().replace('extern "C"', "")
        program += [f"namespace rank{rank} {{", constants, text, "}"]
        defined = re.findall(r"^#define (\w+)", constants + text, re.M)
        program += [f"#undef {name}" for name in defined]
    table = ", ".join(f"Called<rank{rank}::{name}>::run" for rank in range(size) for name in names)
    program.append(
        f"static const Work kernels[] = {{{table}}};\n"
        'extern "C" int run(const Launch *launches, int count, u64 seed, int slow, u64 steps) '
        f"{{ return run_all(kernels, {size}, launches, count, seed, slow, steps); }}\n"
    )
    with tempfile.TemporaryDirectory() as place:
        source, library = Path(place) / "kernels.cpp", Path(place) / "kernels.so"
        source.write_text("\n".join(program))
        options = ["-std=c++20", "-O0", "-mf16c", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
        command = ["g++", *options, f"-I{_HEADER.parent}", "-o", library, source]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[:4000]
        return ctypes.CDLL(library)


class Emulated:
    """Some ranks of an element type and operation, and what they launch."""

    def __init__(self, size: int, dtype: str, op: str, *, patience: float = 1e9) -> None:
        self.size, self.dtype, self.op = size, dtype, op
        self.layout = Layout(size)
        self._names = Variant(size, 0, dtype, op, (9, 0)).names()
        self._library = _library(size, dtype, op)
        self._patience = round(patience * 1e9)
        self.workspaces = [_zeros(self.layout.nbytes) for _ in range(size)]
        self.states = [_zeros(128) for _ in range(size)]
        self.pages = [_zeros(256) for _ in range(size)]
        self._launches: list[_Launch] = []

    def launch(self, rank: int, name: str, blocks: int, threads: int, *arguments: int) -> None:
        """Put a kernel of a rank behind what it has launched before."""
        page = self.pages[rank].ctypes.data
        common = [*(one.ctypes.data for one in self.workspaces), self.states[rank].ctypes.data, page, page + 128]
        given = [*common, self._patience, *arguments]
        kernel = rank * len(self._names) + self._names.index(name)
        room = (ctypes.c_uint64 * _ARGUMENTS)(*given)
        self._launches.append(_Launch(rank, kernel, blocks, threads, room))

    def run(self, seed: int, *, slow: int = -1) -> None:
        """Run all that was launched."""
        count = len(self._launches)
        given = (_Launch * count)(*self._launches)
        self._launches.clear()
        if self._library.run(given, count, ctypes.c_uint64(seed), slow, ctypes.c_uint64(_STEPS)):
            raise HangError(f"calls {[int(one[:4].view(np.uint32)[0]) for one in self.states]}")

    def fault(self, rank: int) -> tuple[int, ...]:
        """Return what a rank's kernels said of what went wrong: whether there is something, the rank, why, the call."""
        return tuple(int(one) for one in self.pages[rank][128:144].view(np.uint32))


def _zeros(nbytes: int) -> np.ndarray[Any, Any]:
    """Return zeros at a multiple of 128 bytes; pages that nobody touches take no memory."""
    room = np.zeros(nbytes + 128, np.uint8)
    start = -room.ctypes.data % 128
    return room[start : start + nbytes]
