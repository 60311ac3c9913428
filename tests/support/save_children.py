"""What runs in the other process of the tests of saving: it is killed at a step."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import vram

STEPS = ("open", "posix_fallocate", "write", "pwrite", "fsync", "rename", "unlink", "makedirs")


def save_and_die(pipe: Connection, path: str, shard: int | str, stop_at: int) -> None:
    """Save the entry, and be killed right before a step; say that there are no more of them."""
    left = stop_at

    def dying(name: str) -> None:
        call = getattr(os, name)

        def step(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return call(*arguments, **options)

        setattr(os, name, step)

    with vram.attach("w"):  # what is loaded on first use is loaded
        for name in STEPS:
            dying(name)
        vram.save("w", path, shard=shard)
    pipe.send("saved")
    pipe.recv()
