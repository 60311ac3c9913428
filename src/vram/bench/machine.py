"""The machine of a benchmark in one line, and how much fits there."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import driver as drivers
from ..errors import CapacityError
from ..memory.kinds import OWN
from ..spec import Location, format_size


def describe(location: Location) -> str:
    """Name the GPU (if it is one), the machine, and the versions of everything that figures depend on."""
    words = [f"{len(os.sched_getaffinity(0))} cores", f"{platform.system()} {platform.release()}"]
    words += [f"Python {platform.python_version()}"]
    if location.kind == "cuda":
        driver: Any = drivers.get(location)
        supported, bindings = driver.versions
        words.insert(0, f"{driver.device_info(location).name} ({location})")
        words += [f"NVIDIA driver {driver.release()} (CUDA {supported})", f"cuda-bindings {bindings}"]
    words += [_package(name) for name in ("numpy", "torch")]
    return ", ".join(words)


def fitting(location: Location, wanted: int, parts: int, times: float, notes: list[str]) -> int:
    """Return the bytes of each of so many equal parts: what was wanted, or halves of it until there is room.

    All parts together have to fit `times` into what is free now, some spare memory included.
    """
    driver = drivers.get(location)
    free, _ = driver.mem_info(location)
    least = driver.mem_granularity(location, OWN.kind).minimum
    nbytes = max(wanted, least)
    while nbytes * parts * times > free and nbytes > least:
        nbytes = max(nbytes // 2 // least * least, least)
    if nbytes * parts * times > free:
        raise CapacityError(
            f"this benchmark takes {format_size(int(nbytes * parts * times))} on {location} at the least; "
            f"{format_size(free)} are free"
        )
    if nbytes < wanted:
        notes.append(
            f"scaled down from {format_size(wanted * parts)} to {format_size(nbytes * parts)}: "
            f"{format_size(free)} are free on {location}"
        )
    return nbytes


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"
