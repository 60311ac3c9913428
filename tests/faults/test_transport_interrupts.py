"""Ctrl-C at every point of the transports and exchanges where it can come: nothing is lost, left or locked (I12)."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.deadlines import AT_ONCE, SOON
from tests.support.interrupts import chosen, interrupt, points
from tests.support.places import short_directory
from tests.support.samples import least, some

import vram
from vram import driver, lifetime
from vram.errors import VramError
from vram.spec import HOST
from vram.transports import (
    PipeExchange,
    SharedMemoryExchange,
    ShmTransport,
    SocketExchange,
    StagedTransport,
    VmmTransport,
)

EXCHANGES = {"socket": SocketExchange, "pipes": PipeExchange, "memory": SharedMemoryExchange}
MOST = 150  # points of each, the different ones first


@dataclass(slots=True)
class Scene:
    """What is worked on: two ends of something, and what one of them has."""

    directory: str
    kind: Any = None
    one: Any = None
    two: Any = None
    array: Any = None
    thread: threading.Thread | None = None
    was_interrupted: bool = False

    @property
    def path(self) -> str:
        return os.path.join(self.directory, "x")

    def books(self) -> dict[str, object]:
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "memory": driver.get(HOST).live(),
            "handles": len(lifetime.live()),
            "paths": os.listdir(self.directory),
        }

    def close(self) -> None:
        for each in (self.one, self.two, self.array):
            if each is not None:
                each.close()
        self.one = self.two = self.array = self.thread = None


@pytest.fixture
def scene() -> Iterator[Scene]:
    with short_directory() as directory:
        made = Scene(directory)
        yield made
        made.close()


Step = Callable[[Scene], object]


# -- exchanges ---------------------------------------------------------------------------------------------------------
def other_end(s: Scene, act: str, seconds: float = 1.0) -> None:
    """In another thread, one end connects to the other; it may find that this was interrupted."""

    def run() -> None:
        with contextlib.suppress(VramError):
            s.two = getattr(s.kind, act)(s.path, seconds)

    s.thread = threading.Thread(target=run)
    s.thread.start()


def listen(s: Scene) -> None:
    s.one = s.kind.listen(s.path, SOON)


def connect(s: Scene) -> None:
    s.one = s.kind.connect(s.path, SOON)


def is_met(s: Scene) -> None:
    """Nothing is left at the path, and the next two ends meet there."""
    s.thread.join(SOON)
    s.close()
    assert os.listdir(s.directory) == []
    connected(s)
    s.close()


def connected(s: Scene) -> None:
    other_end(s, "listen", SOON)
    s.one = s.kind.connect(s.path, SOON)
    s.thread.join(SOON)


def with_a_message(s: Scene) -> None:
    connected(s)
    s.two.send(b"first", timeout=SOON)


def talks(s: Scene, *before: bytes) -> None:
    """All that was sent comes, once and in order; what an interrupted send was to send may have been sent or not."""
    for sender, receiver in ((s.one, s.two), (s.two, s.one)):
        sender.send(b"last", timeout=SOON)
        found = list(iter(lambda receiver=receiver: receiver.recv(timeout=SOON)[0], b"last"))
        expected = list(before) if receiver is s.two else []
        assert found == expected or (s.was_interrupted and not found)
    s.close()


def is_sent(s: Scene) -> None:
    talks(s, b"message")


def is_received(s: Scene) -> None:
    if s.was_interrupted:
        assert s.one.recv(timeout=AT_ONCE)[0] == b"first", "a message was lost"
    talks(s)


EXCHANGING: dict[str, tuple[Step, Step, Step]] = {
    "listen": (lambda s: other_end(s, "connect"), listen, is_met),
    "connect": (lambda s: other_end(s, "listen"), connect, is_met),
    "send": (connected, lambda s: s.one.send(b"message", timeout=SOON), is_sent),
    "recv": (with_a_message, lambda s: s.one.recv(timeout=SOON), is_received),
    "close": (connected, lambda s: s.one.close(), lambda s: s.close()),
}


# -- transports --------------------------------------------------------------------------------------------------------
def ends(s: Scene) -> None:
    one, two = SocketExchange.pair()
    s.one, s.two = VmmTransport(HOST, HOST, one, timeout=SOON), VmmTransport(HOST, HOST, two, timeout=SOON)
    s.array = vram.zeros(1000, "uint8", device="host")


def ends_used(s: Scene) -> None:
    """The other end is told of memory that is gone, and has not heard that it was received."""
    ends(s)
    with vram.zeros(10, "uint8", device="host") as before:
        send(s, before)
        s.two.recv(timeout=SOON).close()
    s.two.send(s.array)


def both(s: Scene) -> None:
    s.one = s.two = StagedTransport(HOST, HOST)
    s.array = vram.zeros(1000, "uint8", device="host")


def send(s: Scene, array: Any = None) -> None:
    s.one.send(s.array if array is None else array)


def sent_by(prepare: Step) -> Step:
    def act(s: Scene) -> None:
        prepare(s)
        send(s)

    return act


def sent_parts(s: Scene) -> None:
    """More descriptors than one message has."""
    ends(s)
    s.array.close()
    s.array = vram.empty((254, 2 << 20), "uint8", device="host", chunk=2 << 20)
    s.thread = threading.Thread(target=send, args=(s,))
    s.thread.start()


def shm(s: Scene) -> None:
    """A ring that is long enough for the whole of it."""
    one, two = SocketExchange.pair()
    s.one, s.two = (ShmTransport(HOST, HOST, end, timeout=SOON, slots=4, slot=512) for end in (one, two))
    s.array = vram.zeros(1000, "uint8", device="host")


def sent_chunks(s: Scene) -> None:
    """More bytes than the ring has."""
    shm(s)
    s.array.close()
    s.array = vram.zeros(5000, "uint8", device="host")
    s.thread = threading.Thread(target=send, args=(s,))
    s.thread.start()


def goes_on(s: Scene) -> None:
    """An interrupted send has sent or not; in any case what is sent next comes, and both know it."""
    hand_over(s, 0, 1)


def comes_again(s: Scene) -> None:
    """An interrupted recv took nothing."""
    hand_over(s, int(s.was_interrupted), int(s.was_interrupted))


def parts_come(s: Scene) -> None:
    """Their sender waits until all of them were taken."""
    if s.was_interrupted:
        s.two.recv(timeout=SOON).close()
    s.thread.join(SOON)
    hand_over(s, 0, 0)


def hand_over(s: Scene, least: int, most: int) -> None:
    with vram.zeros(7, "uint8", device="host") as last:
        send(s, last)
        came = 0
        while True:
            with s.two.recv(timeout=SOON) as found:
                if found.shape == (7,):
                    break
                assert found.shape == s.array.shape
                came += 1
        assert least <= came <= most, f"{came} messages came"
        s.one.synchronize(timeout=AT_ONCE)
    s.close()


MOVING: dict[str, tuple[Step, Step, Step]] = {
    "vmm send": (ends, send, goes_on),
    "vmm send and hear": (ends_used, send, goes_on),
    "vmm recv": (sent_by(ends), lambda s: s.two.recv(timeout=SOON), comes_again),
    "vmm recv parts": (sent_parts, lambda s: s.two.recv(timeout=SOON), parts_come),
    "vmm close": (sent_by(ends), lambda s: s.two.close(), lambda s: s.close()),
    "shm send": (shm, send, goes_on),
    "shm recv": (sent_by(shm), lambda s: s.two.recv(timeout=SOON), comes_again),
    "shm recv chunks": (sent_chunks, lambda s: s.two.recv(timeout=SOON), parts_come),
    "shm close": (sent_by(shm), lambda s: s.two.close(), lambda s: s.close()),
    "staged send": (both, send, goes_on),
    "staged recv": (sent_by(both), lambda s: s.two.recv(timeout=SOON), comes_again),
    "staged close": (sent_by(both), lambda s: s.two.close(), lambda s: s.close()),
}


@pytest.mark.parametrize("what", some([*EXCHANGING], 5))
@pytest.mark.parametrize("kind", EXCHANGES)
def test_an_interrupt_leaves_no_descriptor_path_lock_or_half_a_message_i12(scene: Scene, kind: str, what: str) -> None:
    scene.kind = EXCHANGES[kind]
    check(scene, EXCHANGING[what])


@pytest.mark.parametrize("what", MOVING)
def test_an_interrupt_costs_no_message_i12(scene: Scene, what: str) -> None:
    check(scene, MOVING[what], 20 if what == "vmm recv parts" else MOST)


def check(s: Scene, steps: tuple[Step, Step, Step], most: int = MOST) -> None:
    """Interrupt the second step at `most` of its points, the different ones first, and look what is left."""
    prepare, act, go_on = steps
    for _ in range(2):
        once(s, steps, 1 << 30)
    gc.collect()
    before = settled(s)
    prepare(s)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = points(lambda: act(s))
        s.was_interrupted = False
        go_on(s)
    came = 0
    # The first comes in any case. A late one may not: the wait that it is in may be shorter this time.
    for nth in [1, *chosen(found, min(most, len(set(found))), seed=1)]:
        where = found[nth - 1]
        try:
            came += once(s, steps, nth)
        except BaseException as error:
            error.add_note(f"interrupted at {where}, point {nth}")
            raise
        deadline = time.monotonic() + AT_ONCE
        while (now := s.books()) != before:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gc.collect()  # what an interrupt left in a cycle of frames
            left = {what: (before[what], now[what]) for what in now if now[what] != before[what]}
            assert time.monotonic() < deadline, f"left behind by an interrupt at {where}, point {nth}: {left}"
    # Where another thread takes part, it may go another way. A send over a socket has few points: all of them.
    assert came >= least(min(8, len(set(found)))) > 0


def settled(s: Scene) -> dict[str, object]:
    """The books, once two looks at them agree."""
    before: dict[str, object] = {}
    while before != (before := s.books()):
        time.sleep(0.01)
    return before


def once(s: Scene, steps: tuple[Step, Step, Step], nth: int) -> bool:
    prepare, act, go_on = steps
    prepare(s)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what was made and never handed out is dropped, as anything may be
        came, returned = interrupt(nth, lambda: act(s))
        s.was_interrupted = not returned
        go_on(s)
    return came
