"""The ledger: what a process holds, before and after. A test that leaves anything behind fails.

Counted: handles that are not undone, undos that failed, objects of the loaded drivers, file descriptors, mappings of
shared memory, addresses that the host driver took since this module was imported, child processes and threads.
"""

# Addresses are counted where the host driver takes them from the kernel. In /proc/self/maps they look like the guards
# of threads and the spare room of malloc, which come, go and merge with ours.

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Collection
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from .. import driver, lifetime
from ..driver import libc
from .deadlines import SOON

_PAGE = 4096  # bytes; of this size is what a host driver keeps for good, to have a mapping that it can give up
_IN_PLACE = libc.MAP_FIXED | libc.MAP_FIXED_NOREPLACE  # takes no addresses: they are ours already
_taken: dict[int, int] = {}  # base and bytes of each range that was taken and not given back
_mmap, _munmap = libc.mmap, libc.munmap


@dataclass(frozen=True, slots=True)
class Ledger:
    """All that this process holds at one moment; each field a set of labels, so that a difference can be named."""

    handles: frozenset[str]
    stuck: frozenset[str]
    objects: frozenset[str]
    fds: frozenset[str]
    mappings: frozenset[str]
    addresses: frozenset[str]
    children: frozenset[str]
    threads: frozenset[str]

    @classmethod
    def take(cls) -> Ledger:
        """Collect garbage, then count."""
        gc.collect()
        return cls(
            handles=frozenset(f"{handle.label} #{handle._id}" for handle in lifetime.live()),
            stuck=frozenset(f"{handle.label} #{handle._id}" for handle in lifetime.stuck()),
            objects=frozenset(f"{name}: {n}" for name, d in driver._drivers.items() if any(astuple(n := d.live()))),
            fds=frozenset(_fds()),
            mappings=frozenset(_mappings()),
            addresses=frozenset(f"{n} bytes at {base:#x}" for base, n in _taken.copy().items() if n != _PAGE),
            children=frozenset(_children()),
            # One without a number was never started: an interrupt came in the middle of Thread.start().
            threads=frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate() if t.ident is not None),
        )

    def left_behind(self, *, grace: float = SOON / 4, kinds: Collection[str] | None = None) -> list[str]:
        """Return what this process holds now that it did not hold when this ledger was taken.

        Parameters
        ----------
        grace : float
            Seconds to wait for what ends on its own, such as a thread that was told to stop, if the books disagree.
        kinds : collection of str, optional
            Names of the fields to look at. By default all.
        """
        deadline = time.monotonic() + grace
        while True:
            extra = Ledger.take().more_than(self, kinds=kinds)
            if not extra or time.monotonic() > deadline:
                return extra
            time.sleep(0.01)

    def more_than(self, before: Ledger, *, kinds: Collection[str] | None = None) -> list[str]:
        """Return the entries of this ledger that an earlier one lacks, of the fields `kinds` or of all."""
        # A child is known by its pid: between fork and exec it has the name of its parent.
        known = {child.partition(" (")[0] for child in before.children}
        return [
            f"{field.name}: {label}"
            for field in fields(self)
            if kinds is None or field.name in kinds
            for label in sorted(getattr(self, field.name) - getattr(before, field.name))
            if field.name != "children" or label.partition(" (")[0] not in known
        ]


def _fds() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
            found.append(f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def _mappings() -> list[str]:
    """Mappings of memory that can be shared: memfds and what the kernel calls anonymous shared memory."""
    maps = Path("/proc/self/maps").read_bytes().splitlines()
    return [line.decode() for line in maps if b"/memfd:" in line or b"/dev/zero" in line]


def _mmap_noted(address: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    base: int = _mmap(address, nbytes, protection, flags, fd, offset)
    if base != -1 and not flags & _IN_PLACE:
        _taken[base] = nbytes
    return base


def _munmap_noted(address: int, nbytes: int) -> int:
    # Out before the call: after it another thread may be given these very addresses. Without a lock, since finalizers
    # come here (I3): a range that is cut is known to nobody but who cuts it.
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


libc.mmap = _mmap_noted  # type: ignore[assignment]
libc.munmap = _munmap_noted  # type: ignore[assignment]


def _children() -> list[str]:
    pids: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            pids += (task / "children").read_text().split()
    return [f"pid {pid} ({name})" for pid in pids if "resource_tracker" not in (name := _name(pid))]


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120].strip()
    except OSError:
        return "gone"
