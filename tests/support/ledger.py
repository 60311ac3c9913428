"""The ledger of our own tests: also the addresses that the host driver took since this module was imported.

They are counted where the host driver takes them from the kernel. In /proc/self/maps they look like the guards of
threads and the spare room of malloc, which come, go and merge with ours.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import vram.testing
from vram.driver import libc

_PAGE = 4096  # bytes; of this size is what a host driver keeps for good, to have a mapping that it can give up
_IN_PLACE = libc.MAP_FIXED | libc.MAP_FIXED_NOREPLACE  # takes no addresses: they are ours already
_taken: dict[int, int] = {}  # base and bytes of each range that was taken and not given back
_mmap, _munmap = libc.mmap, libc.munmap


@dataclass(frozen=True, slots=True)
class Ledger(vram.testing.Ledger):
    """All that this process holds at one moment."""

    addresses: frozenset[str]

    @classmethod
    def take(cls) -> Self:
        """Collect garbage, then count."""
        found = vram.testing.Ledger.take()
        addresses = frozenset(f"{n} bytes at {base:#x}" for base, n in _taken.copy().items() if n != _PAGE)
        return cls(*(getattr(found, field.name) for field in fields(found)), addresses)


def _mmap_noted(address: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    base: int = _mmap(address, nbytes, protection, flags, fd, offset)
    if base != -1 and not flags & _IN_PLACE:
        _taken[base] = nbytes
    return base


def _munmap_noted(address: int, nbytes: int) -> int:
    # Out before the call: after it another thread may be given these very addresses. Without a lock, since finalizers
    # come here (I3): a range is known to nobody but the thread that cuts it.
    end = address + nbytes
    cut = [(base, n) for base, n in _taken.copy().items() if base < end and address < base + n]
    for base, _ in cut:
        _taken.pop(base, None)
    done: int = _munmap(address, nbytes)
    for base, n in cut:
        if done:
            _taken[base] = n
            continue
        if base < address:
            _taken[base] = address - base
        if end < base + n:
            _taken[end] = base + n - end
    return done


libc.mmap = _mmap_noted
libc.munmap = _munmap_noted
