"""What runs in the other process of the tests of saving: it is killed at a step."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import vram
from vram.entries.persist import Folder
from vram.keeper.client import client
from vram.keeper.disk import Order, Wanted

STEPS = ("open", "posix_fallocate", "write", "pwrite", "fsync", "rename", "unlink", "makedirs")


def save_and_die(pipe: Connection, path: str, shard: int | str, stop_at: int) -> None:
    """Save the entry, and be killed right before a step; say that there are no more of them."""
    with vram.attach("w"):  # what is loaded on first use is loaded
        _die_before(stop_at)
        vram.save("w", path, shard=shard)
    pipe.send("saved")
    pipe.recv()


def persist_and_die(pipe: Connection, folder: str, version: int, stop_at: int) -> None:
    """Save a version into the folder of a keeper, as that has it done; otherwise the same."""
    order = Order(folder, os.environ["VRAM_KEEPER"], "of this test", "", False, [Wanted("w", version, 0)])
    with vram.attach("w"):
        _die_before(stop_at)
        Folder(order, client(order.socket)).agree()
    pipe.send("saved")
    pipe.recv()


def _die_before(stop_at: int) -> None:
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

    for name in STEPS:
        dying(name)
