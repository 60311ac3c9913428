"""How much memory the host can still give, as well as that can be known.

Memory of a memfd is taken page by page when it is first touched, long after it was created, and past the limit of a
control group the kernel does not refuse: it kills. So we look before we create. That is best effort: others take
memory between our look and the touch.

A look reads MemAvailable and the usage of every limited control group on the way to the root (10 us each). It is
repeated when the last one is old or when what was asked for since is no longer small beside it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from pathlib import Path

from ..errors import OutOfMemoryError
from ..spec import format_size

_LOOK_SECONDS = 0.5


class AvailableMemory:
    """The memory that the host can still give; the last look is remembered.
    `root` is where the control groups are mounted; `membership` is the file that lists this process's groups."""

    __slots__ = ("_groups", "_left", "_membership", "_root", "_stale_at")

    def __init__(self, root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> None:
        self._root = Path(root)
        self._membership = Path(membership)
        self._groups: list[_Group] | None = None
        self._left = 0.0
        self._stale_at = 0.0

    def check(self, call: str, nbytes: int) -> None:
        """Raise :class:`~vram.errors.OutOfMemoryError` if `nbytes` are clearly not to be had.
        Without a lock: threads that race spoil at most the estimate of when to look again."""
        now = time.monotonic()
        if now < self._stale_at and nbytes * 8 <= self._left:
            self._left -= nbytes
            return
        available, _, limit = self._look(nbytes)
        self._left, self._stale_at = available - nbytes, now + _LOOK_SECONDS
        if nbytes > available:
            self._stale_at = 0.0
            raise OutOfMemoryError(
                call,
                errno.ENOMEM,
                "ENOMEM",
                f"{format_size(nbytes)} asked for, {format_size(max(available, 0))} available ({limit}). Free some "
                f"memory or ask for less. This look ahead is best effort: pages are taken when first touched, and past "
                f"the limit the kernel ends processes instead of refusing",
            )

    def info(self) -> tuple[int, int]:
        """Return (available, total) bytes, control groups respected."""
        available, total, _ = self._look(math.inf)
        return max(available, 0), total

    def _look(self, wanted: float) -> tuple[int, int, str]:
        available, total = _meminfo()
        limit = "MemAvailable"
        if self._groups is None:
            self._groups = _groups(self._root, self._membership)
        for group in self._groups:
            room = group.room(wanted)
            if room is None:
                continue
            total = min(total, room[1])
            if room[0] < available:
                available, limit = room[0], f"limit of the control group {group.folder}"
        return available, total, limit


class _Group:
    """One memory control group on the way from this process to the root."""

    __slots__ = ("_limit", "_reclaimable", "_usage", "folder")

    def __init__(self, folder: Path, limit: str, usage: str, reclaimable: bytes) -> None:
        self.folder = folder
        self._limit = f"{folder}/{limit}"
        self._usage = f"{folder}/{usage}"
        self._reclaimable = reclaimable

    def room(self, wanted: float) -> tuple[int, int] | None:
        """Return (bytes left, limit), or None where there is no limit or it cannot be read."""
        try:
            limit = int(_read(self._limit))  # ValueError for v2's "max"
            if limit >= 1 << 60:  # how v1 says that there is none
                return None
            left = limit - int(_read(self._usage))
        except (OSError, ValueError):
            return None
        if left < wanted:  # only now is it worth knowing how much of the usage is page cache
            with contextlib.suppress(OSError, ValueError):
                left += _field(_read(f"{self.folder}/memory.stat", 16384), self._reclaimable, b" ")
        return min(left, limit), limit


def _groups(mounted: Path, membership: Path) -> list[_Group]:
    """Find the control groups that limit this process, innermost first."""
    found = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        if controllers:  # v1
            root = mounted / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file")
        else:
            root = mounted
            names = ("memory.max", "memory.current", b"inactive_file")
        # In a container the path may be the host's and not exist here: then only its root can be read.
        folder = root / path.lstrip("/") if ".." not in path else root
        while True:
            if (folder / names[0]).exists():
                found.append(_Group(folder, *names))
            if folder == root:
                break
            folder = folder.parent
    return found


def _meminfo() -> tuple[int, int]:
    try:
        text = _read("/proc/meminfo", 512)
        return _field(text, b"MemAvailable", b":") * 1024, _field(text, b"MemTotal", b":") * 1024
    except (OSError, ValueError):  # no /proc: what can be reclaimed is then not counted, so only the total is known
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total


def _field(text: bytes, name: bytes, separator: bytes) -> int:
    """Return the number behind `name` in lines of ``name<separator> number``; ValueError if there is none."""
    for line in text.splitlines():
        key, _, rest = line.partition(separator)
        if key == name:
            return int(rest.split()[0])
    raise ValueError(name)


def _read(path: str, nbytes: int = 128) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, nbytes)
    finally:
        os.close(fd)
