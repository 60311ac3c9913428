"""NVIDIA's driver, cuda-bindings and each GPU, asked in a process of their own.

A driver that is sick hangs or ends the process that asks it, and one that is well keeps a context there: neither is
the asker's affair. So ``python -m vram.doctor`` asks, and prints what it found as JSON.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .. import driver as drivers
from ..errors import DriverError, UnsupportedError, VramError
from ..programs import python
from ..spec import Location, format_count, format_size
from .finding import Finding, failed

if TYPE_CHECKING:
    from ..driver.cuda import CudaDriver

_CHANNELS = "dev/nvidia-caps-imex-channels"
_CONTROL = "dev/nvidiactl"  # the kernel's half of the driver
# What a GPU of this machine need not have, and what to do where somebody wants it.
_REMEDIES = {
    "vmm": "nothing of this library works on this GPU without it; a virtual GPU needs unified memory switched on",
    "posix_fd": "other processes can open memory of this GPU only by handles of cudaMalloc",
    "fabric": "not needed within one machine. Between machines with NVLink: run nvidia-imex, and give this user a "
    "channel (/dev/nvidia-caps-imex-channels; NVreg_CreateImexChannel0=1 makes the first)",
    "multicast": "not needed but for reductions in NVSwitch: NVLink switches, driver 530 or newer, Fabric Manager",
    "legacy_ipc": "share memory by descriptor instead (vram.publish does)",
    "pools": "share memory by descriptor instead (vram.publish does)",
}
_USED_BY_ALL = ("vmm", "posix_fd")


def ask(timeout: float) -> list[Finding]:
    """Ask in another process, for so many seconds."""
    command = [python(), "-P", "-m", __package__ or "vram.doctor"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return [
            Finding(
                area="gpu", check="driver", verdict="broken", said=f"the driver did not answer within {timeout:g} s",
                remedy="nvidia-smi hangs as well? Then look for Xid errors in the kernel's log (dmesg), and at "
                "nvidia-fabricmanager where there are NVLink switches",
            )
        ]  # fmt: skip
    try:
        return msgspec.json.decode(done.stdout, type=list[Finding])
    except msgspec.DecodeError:
        how = f"signal {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"status {done.returncode}"
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return [
            Finding(
                area="gpu", check="driver", verdict="broken",
                said=": ".join((f"the process that asked the driver ended with {how}", *words)),
                remedy="try nvidia-smi, and look for Xid errors in the kernel's log (dmesg)",
            )
        ]  # fmt: skip


def examine(root: Path = Path("/")) -> list[Finding]:
    """Ask the driver, in this process."""
    try:
        driver: CudaDriver = drivers.get(Location("cuda", 0))  # type: ignore[assignment]
    except UnsupportedError as error:
        return [_no_driver(error, root)]
    except (VramError, OSError) as error:
        return [failed("gpu", "driver", error)]
    try:
        return list(_all(driver, root))
    except (VramError, OSError) as error:
        return [failed("gpu", "driver", error)]


def _no_driver(error: UnsupportedError, root: Path) -> Finding:
    """Without the kernel's half there is no GPU to be used, and nothing is wrong; with it, something is."""
    present = (root / _CONTROL).exists()
    return Finding(
        area="gpu", check="driver", verdict="broken" if present else "absent", said=str(error),
        remedy=error.remedy if present else 'device="host" works without one',
    )  # fmt: skip


def _all(driver: CudaDriver, root: Path) -> Iterator[Finding]:
    supported, bindings = driver.versions
    yield Finding(
        area="gpu", check="driver", verdict="ok",
        said=f"NVIDIA driver {driver.release() or '(release unknown)'} for CUDA {supported}, "
        + format_count(driver.device_count(), "GPU"),
    )  # fmt: skip
    wrong = driver.misread_attributes()
    yield Finding(
        area="gpu", check="cuda-bindings", verdict="limited" if wrong else "ok",
        said=f"cuda-bindings {bindings}" + (f": {wrong}; this library asks the driver itself" if wrong else ""),
        remedy="pip install -U cuda-bindings, if you ask for pointer attributes yourself" if wrong else "",
    )  # fmt: skip
    if (seen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        yield Finding(
            area="gpu", check="CUDA_VISIBLE_DEVICES", verdict="limited",
            said=f"this process sees {seen or 'no GPU'} only",
            remedy="entries name GPUs by UUID: a reader needs the GPU of its publisher among these, or a peer of it",
        )  # fmt: skip
    channels = sorted(path.name for path in (root / _CHANNELS).glob("channel*"))
    for ordinal in range(driver.device_count()):
        yield from _gpu(driver, Location("cuda", ordinal), channels)
    yield from _peers(driver)


def _gpu(driver: CudaDriver, location: Location, channels: list[str]) -> Iterator[Finding]:
    info = driver.device_info(location)
    exclusive = driver.compute_mode_refusal(location)
    yield Finding(
        area="gpu", check=str(location), verdict="broken" if exclusive else "ok",
        said=f"{info.name}, {format_size(info.total_bytes)}, {info.uuid}" + (f": {exclusive}" if exclusive else ""),
        remedy="an administrator sets it to DEFAULT (nvidia-smi -c 0)" if exclusive else "",
    )  # fmt: skip
    try:
        support = driver.support(location)
    except DriverError as error:  # no memory left for one granule, or the GPU is lost
        yield failed("gpu", f"{location} memory", error)
        return
    for field in fields(support):
        why = getattr(support, field.name)
        said = why or "works"
        if field.name == "fabric" and why:
            said += f" (IMEX channels here: {', '.join(channels) or 'none'})"
        if field.name == "multicast" and not why:
            said = "the attribute says so; it was not tried"
        yield Finding(
            area="gpu",
            check=f"{location} {field.name}",
            verdict="ok" if not why else "broken" if field.name in _USED_BY_ALL else "absent",
            said=said,
            code=_code(why),
            remedy=_REMEDIES.get(field.name, "") if why else "",
        )


def _peers(driver: CudaDriver) -> Iterator[Finding]:
    """One line for all pairs: eight GPUs have 56."""
    count = driver.device_count()
    if count < 2:
        return
    refused = [why for a in range(count) for b in range(count) if a != b and (why := driver.peer_refusal(a, b))]
    yield Finding(
        area="gpu", check="peers", verdict="absent" if refused else "ok",
        said=f"{count * (count - 1) - len(refused)} of {count * (count - 1)} pairs reach each other's memory"
        + (f"; {refused[0]}" if refused else ""),
        remedy="copies between the others go through the host: see `vram route cuda:0 cuda:1`" if refused else "",
    )  # fmt: skip


def _code(why: str) -> str:
    """The name of a status among the words of an error."""
    return next((word.strip("(),:;.") for word in why.split() if word.startswith(("CUDA_ERROR_", "(CUDA_ERROR_"))), "")
