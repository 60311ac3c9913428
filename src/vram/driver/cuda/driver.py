"""The CUDA driver: one class out of its parts."""

from __future__ import annotations

from ...spec import Location
from .bindings import Bindings, version_text
from .devices import Devices
from .multicast import MulticastCalls
from .support import Support, probe

__all__ = ["CudaDriver"]


class CudaDriver(MulticastCalls):
    """The :class:`~vram.driver.protocol.Driver` of GPU memory, and of the host memory that GPUs work on.

    Also :class:`~vram.driver.protocol.StreamOrdered`, :class:`~vram.driver.protocol.Multicast`,
    :class:`~vram.driver.protocol.Fabric` and :class:`~vram.driver.protocol.NativeHandles`. After a fork
    everything of it is inert and use raises :class:`~vram.errors.ForkedError`: NVIDIA's driver does not survive a fork.

    A lost GPU takes the whole process with it, the other GPUs included, as the driver does: from then on every call
    that needs the driver raises :class:`~vram.errors.DeviceLostError` at once, naming the call that found out, and
    what takes something back does nothing and says nothing.

    Raises
    ------
    UnsupportedError
        If there is no cuda-bindings, no NVIDIA driver or no GPU; the three read differently.
    """

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

    def support(self, location: Location) -> Support:
        """Find out what a device really can, by doing it: once in a process, some milliseconds.

        Whoever wants to know again makes another driver.
        """
        found = self._support.get(location)
        if found is None:
            found = self._support[location] = probe(self, location, self._devices.device(location))
        return found

    def canonical(self, location: Location) -> Location:
        """Return what a place is called here: a GPU's UUID becomes its ordinal in this process."""
        return self._devices.location(*self._devices.place(location))
