"""1080p frames from one process to three others: a ring, against one written by hand, channels and queues.

The rival by hand is what people write: one block of ``multiprocessing.shared_memory`` with as many slots, and for each
consumer two semaphores, which count the frames that it may read and the slots that it has given back. A consumer that
dies in it stops everybody, and nobody learns the shape.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from multiprocessing.connection import Connection
from typing import Any

import vram
from vram.arrays.numpy_on_use import np
from vram.bench.children import DEADLINE, child, own_keeper
from vram.bench.measure import Figure, Result, Row, in_turns

_SHAPE = 1080, 1920, 3
_SLOTS = 8
_CONSUMERS = 3
_PAIRS = 5  # of rings: where their pages happen to lie makes up to a third of a rate
_FRAMES = 200
_FRAMES_OF_QUEUES = 20  # which are so slow


def on_host(quick: bool) -> Result:
    """Measure frames a second; each consumer looks at every byte of every frame, and the producer writes them."""
    pairs, rounds, divisor = (1, 2, 10) if quick else (_PAIRS, 5, 1)
    frames, few = _FRAMES // divisor, max(4, _FRAMES_OF_QUEUES // divisor)
    rates: dict[str, list[float]] = {"hand": [], "ring": [], "queues": []}
    rings: dict[str, Callable[[], contextlib.AbstractContextManager[Callable[[], float]]]] = {
        "hand": lambda: _by_hand(frames),
        "ring": lambda: _ring(frames),
    }
    for number in range(pairs):
        with contextlib.ExitStack() as stage:
            made = {kind: stage.enter_context(rings[kind]()) for kind in list(rings)[:: -1 if number % 2 else 1]}
            for kind, found in in_turns(made, rounds, warm=1, both_ways=True).items():
                rates[kind] += found
    with _queues(few) as queued:
        rates.update(in_turns({"queues": queued}, rounds, warm=1))
    hand = Row("shared_memory and semaphores by hand", Figure.of(rates["hand"], "frames/s"))
    queues = Row("a multiprocessing.Queue for each, pickled", Figure.of(rates["queues"], "frames/s"))
    ring = Figure.of(rates["ring"], "frames/s")
    return Result(
        "ring",
        f"Frames of 1080p (6.2 MB) to {_CONSUMERS} consumers, which read all of each",
        [
            hand,
            Row.held("vram.Ring, filled in place", ring, hand, at_least=1.1),
            queues,
            Row.held("vram.Ring, filled in place", ring, queues, at_least=15),
        ],
        [
            f"{_SLOTS} slots, both; the producer writes each frame where consumers read it. {pairs} rings of each "
            f"kind, each in memory of its own, {rounds} times in turn"
        ],
    )


def _fill(array: Any, number: int) -> None:
    array[...] = number & 0xFF


def _look(array: Any) -> int:
    return int(array.max())  # every byte


# -- ours ------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _ring(frames: int) -> Iterator[Callable[[], float]]:
    with contextlib.ExitStack() as stage:
        keeper = stage.enter_context(own_keeper())
        ring = stage.enter_context(vram.Ring.create("camera", shape=_SHAPE, dtype="uint8", slots=_SLOTS, keeper=keeper))
        consumers = [stage.enter_context(child(_consume, keeper)) for _ in range(_CONSUMERS)]
        for one in consumers:
            one.hear()

        def run() -> float:
            for one in consumers:
                one.tell(frames)
            begin = time.perf_counter()
            for number in range(frames):
                with ring.next(timeout=DEADLINE) as frame:
                    _fill(frame.array, number)
            for one in consumers:
                one.hear()
            return frames / (time.perf_counter() - begin)

        yield run


def _consume(pipe: Connection, keeper: str) -> None:
    with vram.Ring.attach("camera", timeout=DEADLINE, keeper=keeper) as ring:
        pipe.send("ready")
        while True:
            (frames,) = pipe.recv()
            for _ in range(frames):
                frame = ring.next(timeout=DEADLINE)
                _look(frame.array)
            frame.close()
            pipe.send("done")


# -- by hand ---------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _by_hand(frames: int) -> Iterator[Callable[[], float]]:
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stage:
        nbytes = _SLOTS * int(np.prod(_SHAPE))
        memory = shared_memory.SharedMemory(create=True, size=nbytes)
        stage.callback(memory.unlink)
        stage.callback(memory.close)
        pairs = [(context.Semaphore(0), context.Semaphore(_SLOTS)) for _ in range(_CONSUMERS)]
        consumers = [stage.enter_context(child(_consume_by_hand, memory.name, *pair)) for pair in pairs]
        for one in consumers:
            one.hear()
        written = 0

        def run() -> float:
            nonlocal written
            ring = np.ndarray((_SLOTS, *_SHAPE), np.uint8, memory.buf)  # one that stayed would keep the block open
            for one in consumers:
                one.tell(frames)
            begin = time.perf_counter()
            for number in range(frames):
                for _, free in pairs:
                    free.acquire()
                _fill(ring[written % _SLOTS], number)
                for filled, _ in pairs:
                    filled.release()
                written += 1
            for one in consumers:
                one.hear()
            return frames / (time.perf_counter() - begin)

        yield run


def _consume_by_hand(pipe: Connection, name: str, filled: Any, free: Any) -> None:
    memory = shared_memory.SharedMemory(name)
    with contextlib.closing(memory):
        pipe.send("ready")
        read = 0
        while True:
            (frames,) = pipe.recv()
            ring = np.ndarray((_SLOTS, *_SHAPE), np.uint8, memory.buf)
            for _ in range(frames):
                filled.acquire()
                _look(ring[read % _SLOTS])
                free.release()
                read += 1
            del ring
            pipe.send("done")


# -- queues ----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _queues(frames: int) -> Iterator[Callable[[], float]]:
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stage:
        queues = [context.Queue(_SLOTS) for _ in range(_CONSUMERS)]
        for queue in queues:
            stage.callback(queue.join_thread)
            stage.callback(queue.close)
        consumers = [stage.enter_context(child(_consume_queue, queue)) for queue in queues]
        for one in consumers:
            one.hear()

        def run() -> float:
            for one in consumers:
                one.tell(frames)
            begin = time.perf_counter()
            for number in range(frames):
                frame = np.empty(_SHAPE, np.uint8)  # pickled later, by the queue's thread
                _fill(frame, number)
                for queue in queues:
                    queue.put(frame)
            for one in consumers:
                one.hear()
            return frames / (time.perf_counter() - begin)

        yield run


def _consume_queue(pipe: Connection, queue: Any) -> None:
    pipe.send("ready")
    while True:
        (frames,) = pipe.recv()
        for _ in range(frames):
            _look(queue.get(timeout=DEADLINE))
        pipe.send("done")
