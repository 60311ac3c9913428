"""Which processes have memory mapped because they were forked from this one: the kernel says it, and nobody else knows.

A forked child shares the host memory that is mapped at the time, and keeps it mapped until it ends or becomes another
program, whatever happens here. Nobody tells that it does, or that it has ended: that is looked up in ``/proc``, where
something was forked at all.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from ..driver.protocol import HostAddressable
from ..lifetime import last_fork
from .chunks import Chunk

__all__ = ["Children", "is_inherited"]

_File = tuple[bytes, bytes]  # a device and an inode, as the kernel writes them


def is_inherited(chunk: Chunk) -> bool:
    """Whether a child was forked since a chunk was mapped that may share its memory; nothing of a GPU works in one."""
    return chunk.mapping.forked_at is not None and isinstance(chunk.undo.where.driver, HostAddressable)


class Children:
    """Who was forked from this process, or from its children, and has memory of it mapped: as of the first question."""

    __slots__ = ("_fork", "_here", "_others")

    def __init__(self) -> None:
        self._fork = last_fork()
        self._here: dict[int, _File] | None = None  # by the first address
        self._others: dict[str, set[_File] | None] = {}  # None: nobody may look what it has

    @property
    def is_old(self) -> bool:
        """Whether something was forked since this was made."""
        return self._fork != last_fork()

    def of(self, chunk: Chunk) -> tuple[str, ...]:
        """Return who has a chunk's memory mapped, or may."""
        when = chunk.mapping.forked_at
        if when is None or not is_inherited(chunk):
            return ()
        if self._here is None:
            self._look()
        file = (self._here or {}).get(chunk.undo.where.address + chunk.start)
        if file is None:
            at = time.strftime("%H:%M:%S", time.localtime(when))
            return (f"a forked child, of {at}, which may have it mapped (there is no /proc to see whether it has)",)
        found = [pid for pid, files in self._others.items() if files is None or file in files]
        return tuple([f"a forked child, process {pid}" for pid in found])

    def _look(self) -> None:
        self._here = {}
        me = str(os.getpid())
        with suppress(OSError):
            self._here = _files(me)
            for pid in filter(str.isdigit, os.listdir("/proc")):
                if pid == me:
                    continue
                try:
                    self._others[pid] = set(_files(pid).values())
                except PermissionError:  # another user's, which a child may have become
                    if _is_descendant(pid, me):
                        self._others[pid] = None
                except OSError:  # it has ended
                    continue


def _files(pid: str) -> dict[int, _File]:
    """Return which memory without a name a process has mapped, by the first address of each mapping."""
    found: dict[int, _File] = {}
    with open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            if b"/memfd:" not in line:
                continue
            span, _, _, device, inode, _ = line.split(maxsplit=5)
            found[int(span.partition(b"-")[0], 16)] = (device, inode)
    return found


def _is_descendant(pid: str, of: str) -> bool:
    """Whether a process is a child of another, or of its children."""
    with suppress(OSError):
        while pid not in ("0", of):
            with open(f"/proc/{pid}/stat") as stat:
                pid = stat.read().rpartition(")")[2].split()[1]
    return pid == of
