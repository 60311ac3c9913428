"""What runs in the other processes of the hand-over tests: a servant that does what it is told, and echoes."""

from __future__ import annotations

import gc
import os
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from tests.support.connections import close_clients

import vram
from vram.handover import pickling

_held: dict[str, Any] = {}


def serve(pipe: Connection) -> None:
    """Do what comes through the pipe, (function, arguments...), until it is None; send back what came of it."""
    while (order := pipe.recv()) is not None:
        name, *arguments = order
        try:
            answer = globals()[name](*arguments)
        except BaseException as error:
            answer = error
        pipe.send(answer)
        del order, arguments, answer
    pickling.shut_down()


def keep(key: str, array: vram.Array) -> tuple[int, tuple[int, ...], bool]:
    """Hold on to an array; say where it is, its shape, and whether it can be written."""
    _held[key] = array
    return array.address, array.shape, not array.readonly


def give(key: str) -> vram.Array:
    """Return what is held."""
    found: vram.Array = _held[key]
    return found


def add(key: str, number: int) -> int:
    """Add to every element, and return the sum."""
    view = _held[key].numpy()
    view += number
    return int(view.sum())


def total(key: str) -> int:
    """Return the sum of what is held."""
    return int(_held[key].numpy().sum())


def drop(*keys: str) -> None:
    """Let go of some, or of all."""
    for key in keys or tuple(_held):
        del _held[key]
    gc.collect()
    close_clients()


def make(key: str, number: int, rows: int = 10) -> vram.Array:
    """Make an array of this process's own, and return it."""
    array = _held[key] = vram.zeros((rows, 4), "int64", device="host", capacity=10_000_000)
    array.fill(number)
    return array


def grow(key: str, rows: int) -> vram.Array:
    """Resize it, and return it."""
    array: vram.Array = _held[key]
    array.resize(rows)
    return array


def write_down(key: str) -> bytes:
    """Return what would go through a queue."""
    return bytes(ForkingPickler.dumps(_held[key]))


def read(key: str, pickled: bytes) -> tuple[int, tuple[int, ...], bool]:
    """Take out of a pickle what was written down by somebody."""
    return keep(key, ForkingPickler.loads(pickled))


def mapped() -> int:
    """Return how many mappings of shared memory there are here."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:vram (")


def fail(array: vram.Array) -> None:
    """Take an array and fail."""
    raise ValueError(f"{array.shape}")


# -- as the target of a process, or the function of a pool ----------------------------------------------------------
def from_queue(incoming: Any, outgoing: Any) -> None:
    """Take arrays out of a queue, add one, and put them into another; None ends it."""
    while (array := incoming.get()) is not None:
        array.numpy()[...] += 1
        outgoing.put(array)
    outgoing.close()
    outgoing.join_thread()
    incoming.get()  # until what was put has been taken
    pickling.shut_down()


def take(incoming: Any, count: int) -> None:
    """Take so many arrays out of a queue as fast as possible, and end at once."""
    for _ in range(count):
        incoming.get()


def as_argument(array: vram.Array, pipe: Connection) -> None:
    """Add one to an array that came as an argument."""
    array.numpy()[...] += 1
    pipe.send(os.getpid())


def second_row(array: vram.Array) -> vram.Array:
    """Return a part of it."""
    array.numpy()[1] += 1
    return array[1:2]


# -- array channels -------------------------------------------------------------------------------------------------
def echo(end: str | vram.ArrayChannel) -> None:
    """Send back what comes through an array channel: arrays with one added where that is possible, words as facts."""
    with vram.ArrayChannel.connect(end, 120) if isinstance(end, str) else end as channel:
        last: Any = None
        while (value := channel.recv()) is not None:
            if isinstance(value, vram.Array):
                last = value
                if not value.readonly:
                    value.numpy()[...] += 1
                channel.send(value)
            elif value == "where":
                channel.send([last.address, list(last.shape), last.readonly])
            elif value == "drop":
                last = None
                channel.send(mapped())
            else:
                channel.send(value)
            del value
        last = None
