"""The CUDA driver: one class out of its parts."""

from __future__ import annotations

import re
from pathlib import Path

from ...spec import Location
from ..protocol import Support
from .attributes import misread
from .bindings import Bindings, version_text
from .devices import Devices
from .kernels import KernelCalls
from .support import probe

_RELEASE = Path("/proc/driver/nvidia/version")
_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, and of CUcomputemode what is not the default
_REFUSING_MODES = {
    2: "its compute mode is PROHIBITED: nobody may use it",
    3: "its compute mode is EXCLUSIVE_PROCESS: one process at a time may use it, so none can share its memory",
}


class CudaDriver(KernelCalls):
    """The :class:`~vram.driver.protocol.Driver` of GPU memory and of host memory for GPUs. Inert after a fork.
    A lost GPU takes the process's other GPUs along: calls raise DeviceLostError, and undo calls do nothing."""

    name = "cuda"

    def __init__(self) -> None:
        bindings = Bindings()
        super().__init__(bindings, Devices(bindings))
        self._support: dict[Location, Support] = {}

    @property
    def driver_version(self) -> int:
        """As ``cuDriverGetVersion`` says it: 12010 is 12.1."""
        return self._call.driver_version

    @property
    def versions(self) -> tuple[str, str]:
        """What the driver and cuda-bindings call themselves, such as ``("13.0", "13.3.1")``."""
        return version_text(self._call.driver_version), self._call.bindings_version

    @property
    def release(self) -> str:
        """What NVIDIA calls its driver, such as 580.82.07; empty where the kernel does not say."""
        try:
            found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _RELEASE.read_text())
        except OSError:
            return ""
        return found[0] if found else ""

    def misread_attributes(self) -> str:
        """Return which pointer attribute the bindings do not pass on as the driver says it; empty if they do."""
        return misread(self._call)

    def compute_mode_refusal(self, location: Location) -> str:
        """Return why several processes cannot use a GPU at once; empty if they can."""
        mode = self._devices.device(location).attribute(_COMPUTE_MODE)
        return _REFUSING_MODES.get(mode, "")

    def support(self, location: Location) -> Support:
        """Find out what a device really can, by doing it, once for each driver object: some milliseconds."""
        found = self._support.get(location)
        if found is None:
            found = self._support[location] = probe(self, location, self._devices.device(location))
        return found

    def canonical(self, location: Location) -> Location:
        """Return what a place is called here: a GPU's UUID becomes its ordinal in this process."""
        return self._devices.location(*self._devices.place(location))
