"""Multicast switched off in processes of benchmarks: its objects can put a host out of service that others share.

Libraries read these variables when they are imported or initialised, so a parent sets them before it starts a child,
and the child looks before it imports anything.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Final

from ..errors import UsageError

__all__ = ["NO_MULTICAST", "check_no_multicast", "no_multicast"]

NO_MULTICAST: Final = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "VRAM_MULTICAST": "off",
}  # fmt: skip


@contextlib.contextmanager
def no_multicast() -> Iterator[None]:
    """Switch it off in the environment of this process, and so of children that are started in the block."""
    before = {name: os.environ.get(name) for name in NO_MULTICAST}
    os.environ.update(NO_MULTICAST)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_no_multicast() -> None:
    """Refuse to go on unless it is switched off, and nothing has been imported that would not have seen it.

    Raises
    ------
    UsageError
        Naming what is missing, or what was imported before.
    """
    wrong = [f"{name}={value}" for name, value in NO_MULTICAST.items() if os.environ.get(name) != value]
    if wrong:
        raise UsageError(
            f"this process would start libraries that make multicast objects, which may put its host out of service: "
            f"{', '.join(wrong)} has to be set before"
        )
    early = [name for name in ("torch", "cupy", "nccl") if name in sys.modules]
    if early:
        raise UsageError(f"{early[0]} was imported before it was certain that multicast is off")
