"""What runs in the other processes of the tests of parking: it parks or wakes, and stops at a step, to be killed."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import vram
from vram.entries import park as parking
from vram.entries.keepers import connect
from vram.keeper.client import KeeperClient
from vram.memory import PhysicalAllocation
from vram.sharing.channel import Channel

NAME = "weights"
GPU, OTHER_GPU = "cuda:0", "cuda:1"
moves = 0  # that this process has handed to the keeper


def publish(device: str, rows: int = 1024) -> vram.Array:
    """Publish numbers that tell their place; two memories of several segments."""
    array = vram.empty((rows, 1024), "int32", device=device, chunk="2MiB")
    array[:] = np.arange(rows, dtype="int32")[:, None]
    published = vram.publish(NAME, {"a": array[: rows // 2], "b": array[rows // 2 :]}, meta={"k": "v"})
    assert published.zero_copy
    return array


def publish_and_wait(pipe: Connection, device: str) -> None:
    """Publish, and keep what was published until told to go on."""
    with publish(device):
        pipe.send("published")
        pipe.recv()
    pipe.send("closed")
    pipe.recv()


def hold(pipe: Connection) -> None:
    """Attach, and hold that until told to go on."""
    with vram.attach(NAME):
        pipe.send(os.getpid())
        pipe.recv()
    pipe.send("closed")


def act(pipe: Connection, verb: str, stop_at: int, timeout: float | None = 0.0, step: str = "") -> None:
    """Park or wake, and say what came of it. Right before a step, by its number among all (or of that name), stop until
    told to go on, or killed."""
    connect(None)
    count = 0

    def stopping(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            if not step or step == name:
                if count == stop_at:
                    pipe.send(("at", count, name))
                    pipe.recv()
                count += 1
            return method(*arguments, **options)

        setattr(owner, name, wrapped)

    for owner, name in (
        (Channel, "send"), (parking, "_copy"), (PhysicalAllocation, "create"), (PhysicalAllocation, "seal"),
        (PhysicalAllocation, "export"),
    ):  # fmt: skip
        stopping(owner, name)
    _count_moves()
    try:
        if verb == "park":
            report = vram.park(NAME, timeout=timeout)
            pipe.send(("parked", report.nbytes, report.freed, report.holders))
        else:
            with vram.attach(NAME, wake=True, timeout=timeout) as lease:
                found = {name: array.to_host()[:, 0].tolist() for name, array in lease.items()}
                pipe.send(("woke", found, moves))
                pipe.recv()
    except vram.errors.VramError as error:
        pipe.send((type(error).__name__, str(error), moves))


def run_out(pipe: Connection) -> None:
    """Begin to wake on a GPU without any room, once told to go on; say what came of it."""
    import standin  # of tests/, which is on the path of children as well

    vram.zeros(1, device="cuda:0").close()
    standin.Standin().set_free(0, 1 << 20)
    act(pipe, "wake", 0, step="create")


def _count_moves() -> None:
    publish = KeeperClient.publish

    def counted(*arguments: Any, **options: Any) -> int:
        global moves
        came = publish(*arguments, **options)
        moves += 1
        return came

    KeeperClient.publish = counted  # type: ignore[method-assign]


def is_parked() -> bool:
    (entry,) = vram.list_entries(NAME)
    return entry.parked


def check(lease: vram.Lease, device: str = GPU) -> None:
    """What is there is what was published."""
    whole = np.concatenate([lease["a"].to_host(), lease["b"].to_host()])
    assert (whole == np.arange(1024, dtype="int32")[:, None]).all()
    assert (str(lease["a"].device), lease.meta, lease["a"].readonly) == (device, {"k": "v"}, True)
