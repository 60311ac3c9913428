"""What runs in the other processes of the tests of rings: producers and consumers that stop where told."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import vram
from vram.errors import VramError

SHAPE = (64, 1000)  # 64,000 bytes a frame: more than one page, so that half a frame would be seen


def create(name: str = "camera", **options: Any) -> vram.Ring:
    """Make a ring of small frames."""
    return vram.Ring.create(name, shape=SHAPE, dtype="uint8", **{"slots": 4, **options})


def put(ring: vram.Ring, *numbers: int, timeout: float | None = 20.0) -> None:
    """Put frames that are full of a number each."""
    for number in numbers:
        with ring.next(timeout=timeout) as frame:
            frame.array[...] = number


def value(frame: vram.Frame) -> int:
    """Return the number that a frame is full of."""
    found = np.unique(frame.array)
    assert len(found) == 1, found
    return int(found[0])


def consume(path: str, pipe: Connection) -> None:
    """Read a ring to its end; say which frames came, and what the end was."""
    os.environ["VRAM_KEEPER"] = path
    came: list[tuple[int, int]] = []
    with vram.Ring.attach("camera", timeout=60.0) as frames:
        pipe.send("ready")
        try:
            for frame in frames:
                came.append((frame.sequence, value(frame)))
                assert frame.is_whole()
        except VramError as error:
            pipe.send((came, type(error).__name__))
        else:
            pipe.send((came, ""))


def hold(path: str, pipe: Connection) -> None:
    """Attach a ring, take a frame each time that it is told to, and say which; or the error that came."""
    os.environ["VRAM_KEEPER"] = path
    with vram.Ring.attach("camera", timeout=60.0) as frames:
        pipe.send("ready")
        while True:
            pipe.recv()
            try:
                frame = frames.next(timeout=20.0)
                pipe.send((frame.sequence, value(frame)))
            except VramError as error:
                pipe.send((type(error).__name__, str(error)))


def produce_and_stop(path: str, pipe: Connection, whole: int) -> None:
    """Put some frames, then begin another one and write half of it."""
    os.environ["VRAM_KEEPER"] = path
    ring = create()
    pipe.send("created")
    pipe.recv()
    put(ring, *range(1, whole + 1))
    with ring.next(timeout=20.0) as frame:
        frame.array[: SHAPE[0] // 2] = 99
        pipe.send("halfway")
        pipe.recv()


def produce_on(path: str, pipe: Connection) -> None:
    """Create a ring, and put a frame each time that it is told to; say its number, or the error that came."""
    os.environ["VRAM_KEEPER"] = path
    with create() as ring:
        pipe.send("created")
        while True:
            pipe.recv()
            try:
                put(ring, ring.sequence + 1)
                pipe.send(ring.sequence)
            except VramError as error:
                pipe.send(type(error).__name__)
