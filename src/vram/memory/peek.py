"""A look at a few bytes, for those who print an object: it raises nothing, and never touches what is asleep."""

from __future__ import annotations

from ..driver.protocol import HostAddressable
from ..errors import VramError
from ..spec import Access
from .region import Region


def peek(region: Region, start: int, stop: int) -> bytes | None:
    """Return a copy of a few bytes of a region, from `start` up to `stop`; None if the CPU cannot, or may not, look.

    Whoever logs an object does not know what other threads do to it. A view would keep the address only, and to touch
    it while another thread puts the memory to sleep ends the process. Here the size lock is held meanwhile: who
    puts memory to sleep, or shrinks it, marks it first, under that lock.
    """
    driver = region.driver
    if not isinstance(driver, HostAddressable):
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
