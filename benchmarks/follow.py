"""A new version, seen by a hundred followers in twenty processes: how long after it was published.

The clock is ``CLOCK_MONOTONIC``, which all processes of a machine share: it is read before the publication begins, and
in the callback of each follower, which looks at the bytes. A bare notice is what nobody can do without: a byte over a
socket to each of as many processes, where a thread waits for it. A process that hears it has no memory to look at.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import vram
from vram.bench.children import DEADLINE, Child, child, own_keeper, socket_pair
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.errors import InternalError
from vram.keeper.client import KeeperClient

_NAME = "policy"
_PROCESSES, _FOLLOWERS = 20, 5  # the latter in each of them
_NBYTES = 2 << 20
_WITHIN = 50.0  # ms


def on_host(quick: bool) -> Result:
    """Measure how long it takes until all of them have seen a version, publication by publication."""
    rounds, processes = (2, 3) if quick else (20, _PROCESSES)
    everybody = processes * _FOLLOWERS
    with contextlib.ExitStack() as stage:
        path = stage.enter_context(own_keeper())
        notices = stage.enter_context(_notices(processes))
        publish, halves, asked = stage.enter_context(_followers(path, processes))
        last = in_turns({"notice": notices, "follow": publish}, rounds, warm=2)
    notice = Row(f"a bare notice, the last of {processes} threads, one in each process", _ms(last["notice"]))
    said = f"the last of {everybody} followers in {processes} processes has seen a version"
    within = Row.limited(said, _ms(last["follow"]), at_most=_WITHIN)
    return Result(
        "follow",
        f"A version of {_NBYTES >> 20} MiB, published until it is seen",
        [
            notice,
            Row.held(said, _ms(last["follow"]), notice),
            within,
            Row("half of them have seen it", _ms(halves[-rounds:])),
            Row("requests to the keeper for a publication", Figure.of(asked[-rounds:], "requests")),
        ],
        ["from before the publication until callbacks have looked at the bytes, by CLOCK_MONOTONIC"],
    )


def _ms(values: list[float]) -> Figure:
    return Figure.of(values, "ms", scale=1e3)


@contextlib.contextmanager
def _followers(path: str, processes: int) -> Iterator[tuple[Callable[[], float], list[float], list[float]]]:
    halves: list[float] = []
    asked: list[float] = []
    value = 1
    with vram.zeros(_NBYTES, "uint8", device="host") as array, contextlib.ExitStack() as stage:
        array.numpy()[...] = value
        vram.publish(_NAME, {"w": array}, keeper=path)
        children = [stage.enter_context(child(_follow, path)) for _ in range(processes)]
        for one in children:
            one.hear()
        counting = stage.enter_context(KeeperClient.connect(path))

        def run() -> float:
            nonlocal value
            value = value % 255 + 1
            with vram.zeros(_NBYTES, "uint8", device="host") as newer:
                newer.numpy()[...] = value
                for one in children:
                    one.tell(value)
                _all_ready(children)
                before = _requests(counting)
                begin = time.monotonic()
                vram.publish(_NAME, {"w": newer}, keeper=path)
                seen: list[float] = sorted(moment - begin for one in children for moment in one.hear())
            asked.append(_requests(counting) - before)
            halves.append(seen[len(seen) // 2])
            return seen[-1]

        yield run, halves, asked


def _requests(client: KeeperClient) -> int:
    return sum([row.count for row in client.measure().requests])


def _all_ready(children: list[Child]) -> None:
    for one in children:
        if one.hear() != "ready":
            raise InternalError("a follower is out of step")


def _follow(pipe: Connection, path: str) -> None:
    seen: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()

    def see(lease: vram.Lease) -> None:
        seen.put((int(lease["w"].numpy()[-1]), time.monotonic()))

    with contextlib.ExitStack() as stage:
        for _ in range(_FOLLOWERS):
            stage.enter_context(vram.follow(_NAME, on_version=see, timeout=DEADLINE, keeper=path))
        for _ in range(_FOLLOWERS):
            seen.get(timeout=DEADLINE)
        pipe.send("ready")
        while True:
            (value,) = pipe.recv()
            pipe.send("ready")
            moments: list[float] = []
            while len(moments) < _FOLLOWERS:
                found, moment = seen.get(timeout=DEADLINE)
                if found == value:
                    moments.append(moment)
            pipe.send(moments)


# -- a bare notice ---------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _notices(processes: int) -> Iterator[Callable[[], float]]:
    with contextlib.ExitStack() as stage:
        pairs = [stage.enter_context(socket_pair(socket.SOCK_SEQPACKET)) for _ in range(processes)]
        children = [stage.enter_context(child(_hear, theirs)) for _, theirs in pairs]
        for one in children:
            one.hear()

        def run() -> float:
            for one in children:
                one.tell("go")
            _all_ready(children)
            begin = time.monotonic()
            for ours, _ in pairs:
                ours.send(b"!")
            heard: list[float] = [one.hear() for one in children]
            return max(heard) - begin

        yield run


def _hear(pipe: Connection, notices: socket.socket) -> None:
    seen: queue.SimpleQueue[float] = queue.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(OSError):
            while notices.recv(1):
                seen.put(time.monotonic())

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    pipe.send("ready")
    with notices:
        while True:
            pipe.recv()
            pipe.send("ready")
            pipe.send(seen.get(timeout=DEADLINE))
