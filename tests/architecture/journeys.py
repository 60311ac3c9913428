"""How far one operation walks: the Python calls of a journey, the files that it enters, the answers it waits for.

``make journeys`` prints the table; ``test_journeys.py`` holds each number under its ceiling. With ``--instructions`` it
prints how many instructions of Python's bytecode each takes in this process, by file: on a busy machine that says more
of the time than a clock does, and it says the same twice.

What is counted, in the processes that take part (but for the keeper) and with everything warm: the operation ran
before, and the collector is off.

calls
    The "call" events of :func:`sys.setprofile` whose code lies in the package, in all threads. A generator counts
    once, however often it is resumed. Comprehensions do not count, since Python 3.12 has no frame for them; neither
    does what Python generates (the methods of dataclasses and named tuples) or has in C.
files
    Those of the package that the calls enter.
hops
    The calls that lead from one file of the package into another, over other packages where it goes through them.
sent, asked
    Messages put on a socket, and how often an answer was waited for after one: round trips.

A journey is walked several times and the least walk counts: what happens to run beside it only adds. All of them are
walked in an interpreter of their own, since a profile function slows down whatever it sees.
"""

from __future__ import annotations

import gc
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "vram"
SECONDS = 120  # for a hang
_WARM = 2  # walks that are not looked at
_WALKS = 5
_QUEUE_WALKS = 100  # of two processes and their threads: on a busy machine most have somebody wait who need not
_INLINED = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>"})


class Walk(NamedTuple):
    """What one journey took."""

    calls: int
    files: int
    hops: int
    sent: int
    asked: int


class Counted(NamedTuple):
    """A walk, and what was called on it."""

    walk: Walk
    names: Counter[str]


class Ceiling(NamedTuple):
    """The most that a journey may take."""

    calls: int
    files: int
    asked: int


# Lowered with every shortening. Whoever raises one says in the commit what is worth the detour.
CEILINGS = {
    "empty and close of one host array": Ceiling(79, 17, 0),
    "publish one array": Ceiling(159, 27, 2),
    "publish one array, writable": Ceiling(121, 23, 1),
    "attach one array, to the numpy view": Ceiling(81, 28, 1),
    "close of a lease, nobody looks": Ceiling(45, 12, 0),
    "queue: put and get, first time": Ceiling(206, 28, 2),
    "queue: put and get, again": Ceiling(39, 11, 0),
}
ATTACH_LOADS = 50  # modules of the package, by the first use of `vram.attach` in a process


class Steps:
    """Counts the calls into one package: a profile function.

    Parameters
    ----------
    package : Path
        The directory of the package.
    send, receive : code
        The functions that put a message on a socket, and take one off.
    """

    def __init__(self, package: Path, send: CodeType | None = None, receive: CodeType | None = None) -> None:
        self._prefix = f"{package}{os.sep}"
        self._send, self._receive = send, receive
        self._is_on = self._is_waiting = False
        self.names: Counter[str] = Counter()
        self.hops = self.sent = self.asked = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Take note of one event."""
        if event != "call" or not self._is_on:
            return
        code = frame.f_code
        file = code.co_filename
        if not file.startswith(self._prefix) or code.co_name in _INLINED or _is_resumed(frame):
            return
        self.names[f"{file.removeprefix(self._prefix)}:{code.co_qualname}"] += 1
        self.hops += self._caller(frame) not in (None, file)
        if code is self._send:
            self.sent += 1
            self._is_waiting = True
        elif code is self._receive and self._is_waiting:
            self.asked += 1
            self._is_waiting = False

    def _caller(self, frame: FrameType) -> str | None:
        """Return the file of the package that a call comes from; None for the first."""
        back = frame.f_back
        while back is not None and not back.f_code.co_filename.startswith(self._prefix):
            back = back.f_back
        return None if back is None else back.f_code.co_filename

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count, from nothing, what is called in this block."""
        self.names.clear()
        self.hops = self.sent = self.asked = 0
        self._is_waiting = False
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def walk(self) -> Walk:
        """Return what was counted."""
        files = {name.partition(":")[0] for name in self.names}
        return Walk(self.names.total(), len(files), self.hops, self.sent, self.asked)

    def take_in(self, other: Counted) -> None:
        """Add what was counted in another process."""
        self.names += other.names
        self.hops += other.walk.hops
        self.sent += other.walk.sent
        self.asked += other.walk.asked


class Instructions(Steps):
    """Counts instructions of bytecode in place of calls: a trace function."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        """Look into a function of the package; those of others are C, or few."""
        if not self._is_on or not frame.f_code.co_filename.startswith(self._prefix):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            code = frame.f_code
            self.names[f"{code.co_filename.removeprefix(self._prefix)}:{code.co_qualname}"] += 1
        return self._step


def _is_resumed(frame: FrameType) -> bool:
    """Whether a frame is a generator's that goes on: the argument of RESUME says whether it is at its beginning."""
    code = frame.f_code
    return bool(code.co_flags & inspect.CO_GENERATOR) and bool(code.co_code[frame.f_lasti + 1] & 3)


def over(walks: dict[str, Walk], ceilings: dict[str, Ceiling]) -> list[str]:
    """Name what takes more than it may, what has no ceiling, and what nobody walked."""
    found = [f"{name}: it has no ceiling" for name in sorted(walks.keys() - ceilings.keys())]
    found += [f"{name}: nobody walked it" for name in sorted(ceilings.keys() - walks.keys())]
    for name in walks.keys() & ceilings.keys():
        for what, most in ceilings[name]._asdict().items():
            if (value := getattr(walks[name], what)) > most:
                found.append(f"{name}: {value} {what}, at most {most}")
    return found


# -- the journeys ---------------------------------------------------------------------------------------------------
def _nothing(_: object = None) -> None:
    """What comes before a journey that needs nothing, or after it."""


def _walk(
    steps: Steps,
    act: Callable[[Any], Any],
    before: Callable[[], Any] = _nothing,
    after: Callable[[Any], object] = _nothing,
) -> Counted:
    """Walk a journey several times: `act` is counted, with what `before` returns; `after` gets what it returns."""
    walked: list[Counted] = []
    for number in range(_WARM + _WALKS):
        given = before()
        with steps.counting():
            result = act(given)
        if number >= _WARM:
            walked.append(Counted(steps.walk(), steps.names.copy()))
        after(result)
        del given, result  # what they hold goes now, not in the middle of the next walk
    return min(walked, key=lambda one: one.walk)


def walk_all(steps: Steps, directory: str) -> dict[str, Counted]:
    """Walk every journey, in this process and, for what a queue carries, in another one."""
    found = {"empty and close of one host array": _walk(steps, lambda _: _array().close())}
    found |= _by_name(steps, os.path.join(directory, "keeper.sock"))
    return found | _by_queue(steps)


def _array() -> Any:
    import vram

    return vram.empty((1024, 64), "float32", device="host")


def _by_name(steps: Steps, path: str) -> dict[str, Counted]:
    import vram
    from vram.keeper.client import close_client
    from vram.keeper.private import KeeperProcess

    keeper = KeeperProcess(path)
    try:

        def publish(array: vram.Array) -> vram.Array:
            vram.publish("read", {"a": array}, keeper=path)
            return array

        def publish_writable(array: vram.Array) -> vram.Array:
            vram.publish("written", {"a": array}, writable=True, keeper=path)
            return array

        def attach(_: object = None) -> tuple[vram.Lease, Any]:
            lease = vram.attach("read", keeper=path)
            return lease, lease["a"].numpy()

        return {
            "publish one array": _walk(steps, publish, _array, lambda array: array.close()),
            "publish one array, writable": _walk(steps, publish_writable, _array, lambda array: array.close()),
            "attach one array, to the numpy view": _walk(steps, attach, after=lambda got: got[0].close()),
            "close of a lease, nobody looks": _walk(steps, lambda lease: lease.close(), lambda: attach()[0]),
        }
    finally:
        close_client(path)
        keeper.stop()


def _by_queue(steps: Steps) -> dict[str, Counted]:
    """What both processes do, their threads included, until what was put has landed."""
    from vram.handover.pickling import endpoint, shut_down

    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    pipe, theirs = context.Pipe()
    other = context.Process(target=_get_all, args=(queue, theirs), daemon=True)
    other.start()
    theirs.close()
    thread = endpoint()._thread
    assert thread is not None
    flights = endpoint().flights._flights

    def put(array: Any) -> Counted:
        pipe.send("get")
        with steps.counting():
            queue.put(array)
            assert pipe.poll(SECONDS)
            there = pipe.recv()
            _until(lambda: not flights and _waits(thread))
        steps.take_in(there)
        return Counted(steps.walk(), steps.names.copy())

    first, again = [], []
    try:
        for number in range(_WARM + _QUEUE_WALKS):
            array = _array()
            new, known = put(array), put(array)
            if number >= _WARM:
                first.append(new)
                again.append(known)
            array.close()
    finally:
        pipe.send(None)
        other.join(SECONDS)
        pipe.close()
        queue.close()
        queue.join_thread()
        shut_down()
    return {
        "queue: put and get, first time": min(first, key=lambda one: one.walk),
        "queue: put and get, again": min(again, key=lambda one: one.walk),
    }


def _get_all(queue: Any, pipe: Connection) -> None:
    """The other end of the queue: gets what it is told to, and says what that took."""
    steps = start()
    from vram.handover.pickling import TELL_SECONDS, shut_down

    held = None  # as somebody does who goes on to use it
    while pipe.recv() is not None:
        time.sleep(3 * TELL_SECONDS)  # after that a thread would tell the sender that it came, for several at once
        with steps.counting():
            got = queue.get(timeout=SECONDS)
        pipe.send(Counted(steps.walk(), steps.names))
        held = got
    del held
    shut_down()


def _until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _waits(thread: threading.Thread) -> bool:
    """Whether a thread that serves sockets has nothing to do."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename.endswith("selectors.py")


def start() -> Steps:
    """Begin to look on in this interpreter: at this thread, and at all that it starts."""
    from vram.sharing import channel

    gc.disable()
    steps = Steps(PACKAGE, channel.Channel.send.__code__, channel._receive.__code__)
    threading.setprofile(steps)
    sys.setprofile(steps)
    return steps


def measure() -> dict[str, Walk]:
    """Walk all journeys in an interpreter of their own."""
    said = _run([sys.executable, __file__, "--json"])
    return {name: Walk(*values) for name, values in json.loads(said).items()}


def loaded_by(code: str) -> set[str]:
    """Return the modules of the package that an interpreter has loaded after some code."""
    said = _run([sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"])
    return {name for name in said.split() if name.partition(".")[0] == PACKAGE.name}


def _run(command: list[str]) -> str:
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=3 * SECONDS, check=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    return done.stdout


def print_instructions() -> None:
    """Print how many instructions each journey takes, in all and by file; what a queue does in threads is left out."""
    gc.disable()
    steps = Instructions(PACKAGE)
    sys.settrace(steps)
    with tempfile.TemporaryDirectory() as directory:
        counted = {"empty and close of one host array": _walk(steps, lambda _: _array().close())}
        counted |= _by_name(steps, os.path.join(directory, "keeper.sock"))
    sys.settrace(None)
    for name, one in counted.items():
        files: Counter[str] = Counter()
        for called, times in one.names.items():
            files[called.partition(":")[0]] += times
        print(f"{one.walk.calls:6} {name}", *(f"{n:12} {file}" for file, n in files.most_common(12)), sep="\n")


def main() -> int:
    """Print the table, with --calls all that is called too; the status is 1 if anything takes more than it may."""
    if "--instructions" in sys.argv:
        print_instructions()
        return 0
    with tempfile.TemporaryDirectory() as directory:
        counted = walk_all(start(), directory)
    sys.setprofile(None)
    threading.setprofile(None)
    walks = {name: one.walk for name, one in counted.items()}
    if "--json" in sys.argv:
        print(json.dumps(walks))
        return 0
    print(f"{'':36}{'calls':>6} (most){'files':>7} (most){'hops':>7}{'sent':>6}{'asked':>7} (most)")
    for name, walk in walks.items():
        most = CEILINGS.get(name, Ceiling(0, 0, 0))
        print(
            f"{name:36}{walk.calls:6} {f'({most.calls})':>6}{walk.files:7} {f'({most.files})':>6}{walk.hops:7}"
            f"{walk.sent:6}{walk.asked:7} {f'({most.asked})':>6}"
        )
    if "--calls" in sys.argv:
        for name, one in counted.items():
            print(f"\n{name}")
            for called, times in sorted(one.names.items()):
                print(f"{times:6} {called}")
    wrong = over(walks, CEILINGS)
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
