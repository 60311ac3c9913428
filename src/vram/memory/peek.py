"""A look at a few bytes, for those who print an object: it raises nothing, and never touches what is asleep."""

from __future__ import annotations

from ..driver.protocol import HostMemory
from ..errors import VramError
from ..spec import Access
from .region import Region


def peek(region: Region, start: int, stop: int) -> bytes | None:
    """Return a copy of a few bytes of a region; None if the CPU cannot, or may not, look.
    The size lock is held meanwhile: a touch while another thread puts the memory to sleep would end the process."""
    driver = region.driver
    if not isinstance(driver, HostMemory):
        return None
    copy = bytearray(stop - start)
    try:
        with region.pin(start, stop, "repr"), region._size_lock:
            if region.asleep is not None or region.access is Access.NONE:
                return None
            driver.copy_out(memoryview(copy), region.address + start)
    except VramError:  # closed, asleep, or smaller meanwhile
        return None
    return bytes(copy)
