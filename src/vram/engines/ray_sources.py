"""Names of Ray's objects, and the process that each is from."""

from __future__ import annotations

import os
from dataclasses import dataclass

TRANSPORT = "VRAM"
SOURCE = "ray.source"  # the note of an entry that says which process published it


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine, told from a later process with the same number. `machine` stands for this run of the
    machine and the PID namespace; `started` is in ticks since the machine began."""

    machine: str
    pid: int
    started: int

    @classmethod
    def this(cls) -> Process:
        """Return the calling process."""
        pid = os.getpid()
        return cls(_machine(), pid, _started(pid) or 0)  # who runs is listed

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """Return what :meth:`__str__` wrote; None if it is nothing of that kind."""
        machine, _, rest = text.partition("/")
        pid, _, started = rest.partition("/")
        if not (machine and pid.isdecimal() and started.isdecimal() and len(rest) < 40):
            return None
        return cls(machine, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.machine}/{self.pid}/{self.started}"

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, a process that this one would see."""
        return self.machine == _machine()

    @property
    def has_ended(self) -> bool:
        """Whether it certainly has: False of what this process cannot see."""
        return self.is_here and _started(self.pid) != self.started


def prefix() -> str:
    """Return what the names of this user's objects begin with: only this user may publish there."""
    return f"~{os.geteuid()}/ray/"


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}-{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> int | None:
    """Return when a process began; None if there is none, or it has ended and waits for its parent to hear of it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
