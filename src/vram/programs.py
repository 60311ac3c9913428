"""Programs of this library in processes of their own: which Python runs them, and which descriptors they inherit."""

from __future__ import annotations

import os
import re
import sys

from .errors import UsageError


def python() -> str:
    """Return the path of the Python that runs this library's programs: VRAM_PYTHON, else ``sys.executable``.
    Raises UsageError in a frozen or embedding application, which would start itself again and again."""
    chosen = os.environ.get("VRAM_PYTHON")
    if chosen:
        if not os.path.isfile(chosen) or not os.access(chosen, os.X_OK):
            raise UsageError(f"VRAM_PYTHON is {chosen!r}, which is no program: give the path of a Python with vram")
        return os.path.abspath(chosen)  # a keeper in the background is started in another directory
    here = sys.executable or ""
    if not getattr(sys, "frozen", False) and re.search("python|pypy", os.path.basename(here), re.IGNORECASE):
        return here
    raise UsageError(
        f"sys.executable is {here!r}, which is this application and no Python interpreter, so that it cannot run a "
        f"program of vram: set VRAM_PYTHON to the path of a Python with vram, or use a keeper that somebody else "
        f"started (vram keep; VRAM_KEEPER is its socket)"
    )


def above_standard(fd: int) -> int:
    """Move a descriptor that a child inherits to a number above 2, close the old number, and return the new one.
    A process without standard files gets numbers 0 to 2, where the child has its own standard files."""
    if fd > 2:
        return fd
    import fcntl  # what stands on this module is imported on other systems, too

    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved
