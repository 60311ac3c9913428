"""What runs in the other processes of the tests of updates in place: publishers and readers that stop where told."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import vram
from vram.driver import words
from vram.keeper.client import KeeperClient

ROWS = 4096  # 32 KiB an array: more than one page, so that half an update would be seen


def publish(
    name: str = "w", value: int = 1, count: int = 3, device: str = "host", *, swap: bool = False
) -> dict[str, vram.Array]:
    """Publish some arrays that are full of one number, to be updated in place."""
    arrays = {f"a{number}": vram.empty((ROWS,), "int64", device=device) for number in range(count)}
    for array in arrays.values():
        array.fill(value)
    vram.publish(name, arrays, updatable=True, swap=swap)
    return arrays


def seen(lease: vram.Lease, timeout: float = 20.0) -> tuple[int, list[int]]:
    """Return the version of a section, and which numbers stand in its arrays."""
    with lease.reading(timeout=timeout) as version:
        views = [array.numpy() if str(array.device) == "host" else array.to_host() for array in lease.values()]
        return version, sorted({int(number) for view in views for number in np.unique(view)})


def seen_here(lease: vram.Lease) -> list[int]:
    """Return which numbers stand in the arrays, inside of a section."""
    return sorted({int(number) for array in lease.values() for number in np.unique(array.to_host())})


def read_until_told(path: str, pipe: Connection, versions: int) -> None:
    """Read until told to stop; say when so many versions were seen, or what was seen that is of no one version."""
    os.environ["VRAM_KEEPER"] = path
    with vram.attach("w", timeout=20.0) as lease:
        pipe.send("ready")
        before, left = 0, versions
        while not pipe.poll():
            version, found = seen(lease)
            if found != [version] or version < before:
                pipe.send(f"a section of version {version} after {before} has {found}")
                return
            if version > before and not (left := left - 1):
                pipe.send(versions)
            before = version
    pipe.send("told")


def _stopping(pipe: Connection, stop_at: int) -> Callable[[str, Any], Any]:
    count = 0

    def wrap(what: str, call: Any) -> Any:
        def stop(*given: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == stop_at:
                pipe.send(what)
                pipe.recv()
            return call(*given, **named)

        return stop

    return wrap


def write_stopping(path: str, pipe: Connection, stop_at: int, device: str = "host", swap: bool = False) -> None:
    """Publish, and when told begin an update, which stops before its n-th step."""
    os.environ["VRAM_KEEPER"] = path
    arrays = publish(device=device, swap=swap)
    pipe.send("published")
    pipe.recv()
    wrap = _stopping(pipe, stop_at)
    for name in ("begin_update", "pages", "end_update"):
        setattr(KeeperClient, name, wrap(name, getattr(KeeperClient, name)))
    words.barrier = wrap("barrier", words.barrier)
    with vram.update("w", timeout=20.0) as found:
        assert set(found) == set(arrays)
        for number, array in enumerate(found.values()):
            wrap(f"array {number}", array.fill)(2)
    pipe.send("done")
    pipe.recv()


def read_stopping(path: str, pipe: Connection, stop_at: int) -> None:
    """Attach, and stop before the n-th step of a section, or inside it."""
    os.environ["VRAM_KEEPER"] = path
    lease = vram.attach("w", timeout=20.0)
    wrap = _stopping(pipe, stop_at)
    words.make = wrap("make", words.make)
    KeeperClient.give_page = wrap("give_page", KeeperClient.give_page)  # type: ignore[method-assign]
    with lease.reading():
        wrap("inside", len)(lease)
    pipe.send("outside")
    pipe.recv()


def hold(path: str, pipe: Connection) -> None:
    """Be in a section until told to leave it."""
    os.environ["VRAM_KEEPER"] = path
    with vram.attach("w", timeout=20.0) as lease:
        with lease.reading() as version:
            pipe.send((os.getpid(), version))
            pipe.recv()
        pipe.send("left")
        pipe.recv()
