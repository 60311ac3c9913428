"""The ledger: what a process holds, before and after. A test that leaves anything behind fails.

Counted: handles that are not undone, undos that failed, objects of the loaded drivers, file descriptors, mappings of
shared memory, child processes and threads.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Collection
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Self

from .. import driver, lifetime
from ..driver import forks


@dataclass(frozen=True, slots=True)
class Ledger:
    """All that this process holds at one moment; each field a set of labels, so that a difference can be named."""

    handles: frozenset[str]
    stuck: frozenset[str]
    objects: frozenset[str]
    fds: frozenset[str]
    mappings: frozenset[str]
    children: frozenset[str]
    threads: frozenset[str]

    @classmethod
    def take(cls) -> Self:
        """Collect garbage, then count."""
        gc.collect()
        forks.forget_ended()
        return cls(
            handles=frozenset(f"{handle.label} #{handle._id}" for handle in lifetime.live()),
            stuck=frozenset(f"{handle.label} #{handle._id}" for handle in lifetime.stuck()),
            objects=frozenset(f"{name}: {n}" for name, d in driver._drivers.items() if any(astuple(n := d.live()))),
            fds=frozenset(_fds()),
            mappings=frozenset(_mappings()),
            children=frozenset(_children()),
            # One without a number was never started: an interrupt came in the middle of Thread.start().
            threads=frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate() if t.ident is not None),
        )

    def left_behind(self, *, grace: float = 30.0, kinds: Collection[str] | None = None) -> list[str]:
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
            extra = self.take().more_than(self, kinds=kinds)
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
