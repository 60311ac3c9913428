"""Programs of containers that are run here: what keeps them apart, and why they may be impossible."""

from __future__ import annotations

import shutil
import subprocess

from tests.support.deadlines import SOON

NEEDS = ("unshare", "setpriv", "mount")


APART = ("--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--mount", "--ipc")


def impossible() -> str:
    """Why there can be no containers here, or nothing."""
    for program in NEEDS:
        if shutil.which(program) is None:
            return f"there is no {program}"
    tried = subprocess.run(
        ["unshare", *APART, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, timeout=SOON
    )
    return "user namespaces are forbidden here" if tried.returncode else ""
